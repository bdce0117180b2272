"""What a forked child must not inherit: locks that threads held, threads, pipes to workers."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    def after_fork_in_child(self) -> None:
        """Make this object usable in the child; its locks may be held by threads that are gone."""


_known: WeakSet[Forkable] = WeakSet()


def in_child(forkable: Forkable) -> None:
    """Call `forkable.after_fork_in_child()` in every child forked from now on, while it lives."""
    _known.add(forkable)


def _after_fork_in_child() -> None:
    for forkable in list(_known):
        forkable.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
