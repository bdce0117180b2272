"""A progress bar on the terminal while a flush waits for kernels (`compile="blocking"`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FEWEST = 4
"""The least number of kernels for which a bar is shown."""


@contextmanager
def shown(n_kernels: int) -> Iterator[Callable[[], None]]:
    """A context with a function to call after each kernel.

    The bar needs the package rich, and a terminal on stderr; else nothing is shown.
    """
    if n_kernels < FEWEST or not sys.stderr.isatty():
        yield _nothing
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError:
        yield _nothing
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("lazy-tensor compiles", total=n_kernels)
        yield lambda: bar.advance(task)


def _nothing() -> None:
    """Advances no bar."""
