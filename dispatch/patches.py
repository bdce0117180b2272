"""Replaces attributes of torch's, and of Python's, modules and classes, and puts them back.

In: `Patch`es. Out: what they name does something first, or instead, for as long as somebody wants
it. All that the package replaces for a time goes through here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from lazy_tensor.dispatch import torch_private


class Patch(NamedTuple):
    """`owner.name` becomes `replaced(own)`, where `own` is what stands there."""

    owner: Any
    name: str
    replaced: Callable[[Any], Any]


_ABSENT = object()


class Patches:
    """Patches that are in place while at least one user wants them, in any thread.

    Users that come and go, blocks in a loop, would pay a microsecond a patch each time: from the
    second time on the patches stay, and what they put in place has to ask whether it is wanted.
    """

    def __init__(self, patches: Iterable[Patch]) -> None:
        self._patches = list(patches)
        self._lock = threading.Lock()
        self._n_users = self._n_times = 0
        self._stay = False
        self._before: list[tuple[int, Any]] = []  # numbers of patches, and what stood there
        self._buried: set[int] = set()  # those that others have put theirs on
        self._made: list[tuple[Any, Any]] = [(_ABSENT, None)] * len(self._patches)

    def put(self) -> None:
        """Put the patches in place; each call wants one of `take_back`."""
        if self._stay:
            return
        with self._lock:
            self._n_users += 1
            if self._before:
                return
            self._n_times += 1
            self._stay = self._n_times > 1
            for i in range(len(self._patches)):
                self._put(i)

    def add(self, patches: Iterable[Patch]) -> None:
        """Have more patches, in place if the others are."""
        with self._lock:
            for patch in patches:
                self._patches.append(patch)
                self._made.append((_ABSENT, None))
                if self._before:
                    self._put(len(self._patches) - 1)

    def _put(self, i: int) -> None:
        if i in self._buried:
            return
        owner, name, replaced = self._patches[i]
        own = vars(owner).get(name, _ABSENT)
        before, made = self._made[i]
        if own is _ABSENT or own is not before:
            found = getattr(owner, name) if own is _ABSENT else own
            made = replaced(found)
            self._made[i] = (own, made)
            torch_private.script_as(made, found)
        self._before.append((i, own))
        setattr(owner, name, made)

    def take_back(self) -> None:
        """One user less; after the last of the first time all is as it was, inherited or own.

        Where somebody has put a patch on top, it stays, and ours below it.
        """
        if self._stay:
            return
        with self._lock:
            self._n_users -= 1
            if self._n_users:
                return
            while self._before:
                i, own = self._before.pop()
                owner, name, _ = self._patches[i]
                if vars(owner).get(name, _ABSENT) is not self._made[i][1]:
                    self._buried.add(i)
                elif own is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, own)
