"""What the demo shows: progress bar and table by `rich`, the image by `plot.py`.

Imported late, because both libraries come with the `demo` extra only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lazy_tensor.cli import plot
from lazy_tensor.cli.race import History
from lazy_tensor.cli.summary import Row


class Screen:
    """The terminal and the image at `out`. Raises CommandError if `out` can't be written."""

    def __init__(self, out: Path) -> None:
        plot.check_path(out)
        self._console = Console(highlight=False)

    def headline(self, text: str) -> None:
        self._console.print(text, style="bold", soft_wrap=True)

    def waiting(self, text: str) -> AbstractContextManager[object]:
        return self._console.status(text)

    def step_bar(self, n_steps: int, tokens_per_step: int) -> StepBar:
        return StepBar(self._console, n_steps, tokens_per_step)

    def table(self, sides: Sequence[str], rows: Sequence[Row], counters: Sequence[Row]) -> None:
        """`rows` have a cell for each side; `counters` are the lazy side's, below them."""
        table = Table("", *sides, caption="warm: the last half of the run")
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        table.add_section()
        before_lazy = [""] * list(sides).index("lazy")
        for label, value in counters:
            table.add_row(label, *before_lazy, value)
        self._console.print(table)

    def save_plot(self, histories: Mapping[str, History], out: Path, title: str) -> None:
        plot.save(histories, out, title)
        self._console.print(f"losses and step times: {out}", soft_wrap=True)


class StepBar:
    """A progress bar over the steps; a line of losses stays behind every tenth of the way."""

    def __init__(self, console: Console, n_steps: int, tokens_per_step: int) -> None:
        self._n_steps = n_steps
        self._tokens_per_step = tokens_per_step
        self._progress = Progress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=n_steps)

    def __enter__(self) -> StepBar:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def advance(self, histories: Mapping[str, History]) -> None:
        """Show the step that every side has just done."""
        state = "; ".join(self._state(name, history) for name, history in histories.items())
        self._progress.update(self._task, advance=1, description=state)
        n_done = len(next(iter(histories.values())).losses)
        if n_done % max(1, self._n_steps // 10) == 0:
            step = f"step {n_done:>{len(str(self._n_steps))}}"
            self._progress.console.print(f"{step}: {state}", soft_wrap=True)

    def _state(self, name: str, history: History) -> str:
        speed = self._tokens_per_step / history.seconds[-1]
        return f"{name} {history.losses[-1]:.4f}, {speed:,.0f} tok/s"
