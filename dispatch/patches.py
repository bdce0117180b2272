"""Replaces attributes of modules and classes, torch's and Python's, and puts them back.

In: `Patch`es. Out: while somebody wants it, each named attribute does something first, or
something else. `lazy_tensor.interop.patch_table` has the patches, and says why each is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from lazy_tensor.dispatch import torch_private


class Patch(NamedTuple):
    """Puts `replaced(own)` in place of `own`, the attribute `owner.name`."""

    owner: Any
    name: str
    replaced: Callable[[Any], Any]


_ABSENT = object()


class Patches:
    """Patches that are in place while at least one user wants them, in any thread.

    To put one in place takes a microsecond, which a block in a loop would pay for each patch. So
    from the second time on the patches stay for good. What they put in place must ask whether it is
    wanted.
    """

    def __init__(self, patches: Iterable[Patch]) -> None:
        self._patches = list(patches)
        self._lock = threading.Lock()
        self._n_users = self._n_times = 0
        self._stay = False
        # Patches in place, by number, each with what its owner had there, `_ABSENT` if it had
        # nothing of its own and inherits the attribute. Empty while none is in place.
        self._before: list[tuple[int, Any]] = []
        # Patches on top of which somebody else has put one. They stay, so none is put again.
        self._buried: set[int] = set()
        # By number, what the owner had there, and what was made of that. It is put in place again
        # if the owner still has the same.
        self._made: list[tuple[Any, Any]] = [(_ABSENT, None)] * len(self._patches)

    def put(self) -> None:
        """Put the patches in place. Each call is to be followed by one of `take_back`."""
        if self._stay:  # without the lock: it never becomes False again
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
        """Add patches. They are put in place now if the others are."""
        with self._lock:
            for patch in patches:
                self._patches.append(patch)
                self._made.append((_ABSENT, None))
                if self._before:
                    self._put(len(self._patches) - 1)

    def _put(self, i: int) -> None:
        """Put patch `i` in place."""
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
        """Count a user less. When the last one of the first time goes, all is as it was before.

        If somebody else has put a patch on top of ours, both stay: theirs may call ours.
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
                    # to set what was inherited would hide later changes of the base class
                    delattr(owner, name)
                else:
                    setattr(owner, name, own)
