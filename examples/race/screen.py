"""What the demo shows: a table by rich, and the image by `plot`.

On a terminal the table grows while the demo runs. Elsewhere each turn has a line, and the table
comes last. `__main__` imports this late, because rich and matplotlib come with the `demo` extra.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from lazy_tensor.examples.race import plot
from lazy_tensor.examples.race.scenes import SCENES
from lazy_tensor.examples.race.turn import Results, Turn, difference

LEGEND = (
    "first: the first step; settled: the median of the last fifth; by 5 s: steps done by then; "
    "differs: by how much at most from eager's values. Most kernels come within a second or two"
)


class Screen:
    """The terminal and the image at `out`. Raises CommandError if `out` can't be written."""

    def __init__(self, out: Path) -> None:
        plot.check_path(out)
        self._console = Console(highlight=False)
        self._live: Live | None = None  # the table that grows, on a terminal, while `live` runs
        self._results: Results = {}
        self._running = ("", "")  # scene and side whose turn it is, which the table marks

    @contextmanager
    def live(self, results: Results) -> Iterator[None]:
        """Context manager: show `results` as they grow."""
        self._results = results
        self._console.print(
            "Each side in turn, alone in a process of one thread, from empty caches.",
            soft_wrap=True,
        )
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, get_renderable=self._tables, transient=True) as self._live:
            yield

    def begin(self, scene: str, side: str) -> None:
        self._running = scene, side

    def update(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def done(self, scene: str, side: str) -> None:
        self._running = ("", "")
        if self._live is None:
            turn = self._results[scene][side]
            said = turn.error or (
                f"{len(turn.ends_s):,} steps in {turn.ends_s[-1]:.1f} s; first "
                f"{duration(turn.times_s[0])}, settled {duration(turn.settled_s())}"
            )
            self._console.print(f"{scene}, {side}: {said}", soft_wrap=True)

    def end(self, results: Results, out: Path) -> None:
        """Print the table and why programs got faster, and write the image."""
        if not any(turn.ends_s for turns in results.values() for turn in turns.values()):
            return
        self._console.print(self._tables())
        self._console.print(LEGEND)
        for scene, turns in results.items():
            for side, turn in turns.items():
                if turn.why:
                    self._console.print(f"Why {scene} is faster, by {side}: {turn.why}.")
                if turn.error and self._live is not None:
                    self._console.print(f"{scene}, {side}: {turn.error}")
        plot.save(results, out)
        self._console.print(f"Step times and patterns: {out}", soft_wrap=True)

    def _tables(self) -> Group:
        return Group(*(self._table(name) for name in self._results))

    def _table(self, scene: str) -> Table:
        marks = SCENES[scene].marks_s
        table = Table(
            box=SIMPLE_HEAD,
            title=SCENES[scene].title,
            title_justify="left",
            pad_edge=False,  # all of it fits into 80 columns
            padding=(0, 1, 0, 0),
        )
        table.add_column("", min_width=13, no_wrap=True)
        for title in ("first", "settled", "× eager"):
            table.add_column(title, justify="right", no_wrap=True)
        for mark in marks:
            table.add_column(f"by {mark:g} s", justify="right", no_wrap=True)
        table.add_column("differs", justify="right", no_wrap=True)
        for side in self._results[scene]:
            table.add_row(*self._cells(scene, side))
        return table

    def _cells(self, scene: str, side: str) -> list[str]:
        """The row of a side; cells that can't be filled yet are empty."""
        turns = self._results[scene]
        turn, eager = turns[side], turns.get("eager")
        label = side + (" …" if self._running == (scene, side) else "")
        if turn.error or not turn.ends_s:
            return [label, "failed" if turn.error else ""]
        is_compared = turn is not eager and eager is not None and bool(eager.ends_s)
        return [
            label,
            duration(turn.times_s[0]),
            duration(turn.settled_s()),
            f"{turn.settled_s() / eager.settled_s():.2f}" if eager and is_compared else "",
            *(
                f"{turn.steps_by(mark):,}" if turn.ends_s[-1] >= mark else ""
                for mark in SCENES[scene].marks_s
            ),
            equality(eager, turn) if eager and is_compared else "",
        ]


def equality(eager: Turn, turn: Turn) -> str:
    """The cell "differs": the largest difference from eager's values; "" if none is known."""
    largest = difference(eager, turn)
    if largest is None:
        return ""
    return "none" if largest == 0 else f"{largest:.0e}"


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
