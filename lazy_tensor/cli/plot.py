"""The demo's picture: losses and step times of all sides. In: histories. Out: an image file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from lazy_tensor.cli.errors import CommandError
from lazy_tensor.cli.race import History

# The first side is drawn broad and pale, so that one that lies on it bit for bit still shows both.
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "tab:blue", "linewidth": 5.0, "alpha": 0.35},
    {"color": "tab:red", "linewidth": 1.3},
    {"color": "tab:green", "linewidth": 1.3, "linestyle": "--"},
)


def check_path(path: Path) -> None:
    """Raise CommandError if no image can be written to `path`: better before the run than after."""
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        raise CommandError(
            f"--out {path}: the name must end in one of .{', .'.join(sorted(kinds))}"
        )
    folder_or_file = path if path.exists() else path.parent
    if path.is_dir() or not os.access(folder_or_file, os.W_OK):
        raise CommandError(f"--out {path}: can't be written")


def save(histories: Mapping[str, History], path: Path, title: str) -> None:
    """Draw losses over steps on the left, milliseconds a step on the right; overwrite `path`."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_losses(left, histories)
    draw_times(right, histories)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def draw_losses(axes: Axes, histories: Mapping[str, History]) -> None:
    for (name, history), style in zip(histories.items(), STYLES, strict=False):
        axes.plot(range(1, len(history.losses) + 1), history.losses, label=name, **style)
    axes.set(title="Loss", ylabel="nats a byte")
    finish(axes)


def draw_times(axes: Axes, histories: Mapping[str, History]) -> None:
    for (name, history), style in zip(histories.items(), STYLES, strict=False):
        times_ms = [seconds * 1e3 for seconds in history.seconds]
        label = f"{name}, median of last half {history.warm().median_s * 1e3:.1f} ms"
        axes.plot(range(1, len(times_ms) + 1), times_ms, label=label, **style)
    # Logarithmic: a first step that compiles is many times longer than the rest.
    axes.set(title="Step time", ylabel="ms", yscale="log")
    lowest, highest = axes.get_ylim()
    axes.set_ylim(lowest / 2, highest * 2)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    finish(axes)


def finish(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    axes.grid(alpha=0.3)
