"""A bar on the terminal while kernels are waited for (`compile="blocking"`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FEWEST = 4
"""Kernels waited for at once from which a bar is shown."""


@contextmanager
def shown(n_kernels: int) -> Iterator[Callable[[], None]]:
    """A function to call after each kernel. The bar needs rich, and a terminal on stderr."""
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
    """Nobody looks."""
