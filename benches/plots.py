"""Pictures of results. In: numbers by group and side. Out: a PNG beside the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

COLORS = {
    "eager": "0.55", "lazy": "tab:red", "lazy, blocking": "tab:pink", "replay": "tab:orange",
    "compile": "tab:blue", "thunder": "tab:green", "plain": "0.55", "ours": "tab:red",
    "torch": "tab:blue", "sharded": "tab:red", "torch's": "tab:blue",
}  # fmt: skip
"""A side has one colour in all pictures."""

Table = Mapping[str, Mapping[str, float]]
"""Values by group, then by side; a side that a group lacks has no bar there."""


def bars(path: Path, title: str, panels: Mapping[str, Table]) -> None:
    """One panel of grouped horizontal bars for each table, its name as the axis' label."""
    n_bars = max(sum(len(sides) for sides in table.values()) for table in panels.values())
    figure = Figure(figsize=(5.5 * len(panels), 1.4 + 0.24 * n_bars), layout="constrained")
    for axes, (label, table) in zip(_row(figure, len(panels)), panels.items(), strict=True):
        place, ticks = 0.0, []
        for sides in table.values():
            ticks.append(place + (len(sides) - 1) / 2)
            for side, value in sides.items():
                axes.barh(place, value, color=COLORS.get(side, "tab:purple"), label=side)
                axes.annotate(f" {value:.3g}", (value, place), va="center", fontsize=7)
                place += 1
            place += 0.8
        axes.set_yticks(ticks, list(table))
        axes.invert_yaxis()
        axes.set_xlabel(label)
        axes.margins(x=0.15)
        _legend(axes)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def lines(path: Path, title: str, x_label: str, panels: Mapping[str, Table]) -> None:
    """One panel of lines for each table, whose groups are numbers on the x axis; both axes are
    logarithmic."""
    figure = Figure(figsize=(5.5 * len(panels), 4), layout="constrained")
    for axes, (label, table) in zip(_row(figure, len(panels)), panels.items(), strict=True):
        xs = [float(group) for group in table]
        for side in dict.fromkeys(side for sides in table.values() for side in sides):
            points = [(x, sides[side]) for x, sides in zip(xs, table.values(), strict=True)
                      if side in sides]  # fmt: skip
            axes.plot(*zip(*points, strict=True), "o-", color=COLORS.get(side), label=side)
        axes.set(xlabel=x_label, ylabel=label, xscale="log", yscale="log")
        axes.set_xticks(xs, list(table))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.grid(alpha=0.3)
        _legend(axes)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _row(figure: Figure, n: int) -> Sequence[Axes]:
    found: Sequence[Axes] = figure.subplots(1, n, squeeze=False)[0]
    return found


def _legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), fontsize=8)
