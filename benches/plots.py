"""Plots of results. In: numbers by group and side. Out: a PNG file beside the page of results."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

COLORS = {
    "eager": "0.55", "lazy": "tab:red", "lazy, blocking": "tab:pink", "replay": "tab:orange",
    "compile": "tab:blue", "thunder": "tab:green", "plain": "0.55", "ours": "tab:red",
    "torch": "tab:blue", "sharded": "tab:red", "torch's": "tab:blue",
    "loop": "tab:red", "step": "tab:orange", "wrap": "tab:purple",
}  # fmt: skip
"""The colours of sides, the same in all plots."""

Table = Mapping[str, Mapping[str, float]]
"""Values by group, then by side. A side that a group lacks has no bar in it."""


def bars(path: Path, title: str, panels: Mapping[str, Table]) -> None:
    """A panel of grouped horizontal bars for each table, whose name is the axis label."""
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
    """A panel of lines for each table, whose groups are numbers on the x axis. Both axes are
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


def over_time(path: Path, title: str, panels: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """A panel for each program: the times of steps over the time of the run, a line for each side.

    A line has at most `N_POINTS` points: each is the median of several steps in a row.
    """
    n_columns = 3
    n_rows = -(-len(panels) // n_columns)
    figure = Figure(figsize=(5 * n_columns, 2.6 * n_rows), layout="constrained")
    grid = list(figure.subplots(n_rows, n_columns, squeeze=False).flat)
    # the grid may have more places than there are panels
    for axes in grid:
        axes.set_visible(False)
    for axes, (label, sides) in zip(grid, panels.items(), strict=False):
        axes.set_visible(True)
        for side, seconds in sides.items():
            ends = list(itertools.accumulate(seconds))
            n = -(-len(seconds) // N_POINTS)
            middle = [median(seconds[i : i + n]) * 1e3 for i in range(0, len(seconds), n)]
            axes.plot(ends[::n], middle, color=COLORS.get(side), label=side, linewidth=0.8)
        axes.set(title=label, xlabel="seconds", ylabel="ms a step", yscale="log")
        axes.grid(alpha=0.3)
        _legend(axes)
    figure.suptitle(title)
    figure.savefig(path, dpi=80)


N_POINTS = 300


def _row(figure: Figure, n: int) -> Sequence[Axes]:
    found: Sequence[Axes] = figure.subplots(1, n, squeeze=False)[0]
    return found


def _legend(axes: Axes) -> None:
    # each bar has a label, and a side has a bar in each group: one entry for a side is enough
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), fontsize=8)
