"""The demo's picture: step times over the time of the run, and images that programs computed.

In: results. Out: an image file. Needs matplotlib, which the `demo` extra installs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from lazy_tensor.cli.errors import CommandError
from lazy_tensor.examples.race.scenes import SCENES

if TYPE_CHECKING:
    from lazy_tensor.examples.race.turn import Results, Turn

COLORS = {"eager": "0.45", "lazy": "tab:red", "replay": "tab:orange", "torch.compile": "tab:blue"}
SMOOTHED = 9
"""Width of the running median that is drawn, in steps."""


def check_path(path: Path) -> None:
    """Raise CommandError if no image can be written to `path`, before minutes of work are lost."""
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in kinds:
        raise CommandError(
            f"--out {path}: the name must end in one of .{', .'.join(sorted(kinds))}"
        )
    folder_or_file = path if path.exists() else path.parent
    if path.is_dir() or not os.access(folder_or_file, os.W_OK):
        raise CommandError(f"--out {path}: can't be written")


def save(results: Results, path: Path) -> None:
    """Draw the step times of each scene, and below them the last image of each side, to `path`."""
    # a run that Ctrl-C cut short has sides, and whole scenes, without a step
    done = {
        name: {side: turn for side, turn in turns.items() if turn.ends_s}
        for name, turns in results.items()
    }
    done = {name: turns for name, turns in done.items() if turns}
    images = [
        (side, turn)
        for name, turns in done.items()
        for side, turn in turns.items()
        if SCENES[name].is_picture and turn.last is not None
    ]
    figure = Figure(figsize=(13, 8.6 if images else 4.2), layout="constrained")
    above, *below = figure.subfigures(1 + bool(images), 1, squeeze=False)[:, 0]
    curves = above.subplots(1, len(done), squeeze=False)[0]
    for axes, (name, turns) in zip(curves, done.items(), strict=True):
        draw_times(axes, turns, SCENES[name].title)
    if images:
        panels = below[0].subplots(1, len(images), squeeze=False)[0]
        for axes, (side, turn) in zip(panels, images, strict=True):
            draw_pattern(axes, side, turn)
    figure.savefig(path, dpi=110)


def draw_times(axes: Axes, turns: dict[str, Turn], title: str) -> None:
    """A line for each side: milliseconds of each step, over the seconds since its first one."""
    for side, turn in turns.items():
        times_ms = smoothed(np.array(turn.times_s) * 1e3)
        ends_s = np.array([0.0, *turn.ends_s])
        label = f"{side}: {turn.settled_s() * 1e3:.3g} ms"
        axes.step(ends_s, [times_ms[0], *times_ms], color=COLORS[side], label=label, linewidth=1.6)
    # logarithmic, because a first step that compiles is many times longer than the rest
    axes.set(title=title, xlabel="seconds since the start", ylabel="ms a step", yscale="log")
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.5, high * 1.5)
    axes.set_xlim(0)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(title="settled step")
    axes.grid(alpha=0.3)


def smoothed(times: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float]:
    """Running medians. The first steps stay as they are: they show what compiling costs."""
    half = SMOOTHED // 2
    return [
        float(time) if i < half else float(np.median(times[i - half : i + half + 1]))
        for i, time in enumerate(times)
    ]


def draw_pattern(axes: Axes, side: str, turn: Turn) -> None:
    """The last image that a side computed."""
    assert turn.last is not None
    axes.imshow(turn.last, cmap="magma")
    axes.set(xticks=[], yticks=[])
    axes.set_title(f"{side}: {len(turn.ends_s):,} steps in {turn.ends_s[-1]:.0f} s")
