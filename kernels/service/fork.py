"""Resets objects in forked children.

A child inherits locks that other threads held, pipes to workers that belong to its parent, and none
of its parent's threads. `Compiler` registers itself here.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    def after_fork_in_child(self) -> None:
        """Make this object usable in the child. Threads that hold its locks don't exist there."""


# weak, as `os.register_at_fork` can't be undone and would keep every object alive
_known: WeakSet[Forkable] = WeakSet()


def in_child(forkable: Forkable) -> None:
    """Call `forkable.after_fork_in_child()` in each child forked while the object is alive."""
    _known.add(forkable)


def _after_fork_in_child() -> None:
    for forkable in list(_known):
        forkable.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
