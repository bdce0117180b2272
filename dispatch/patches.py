"""Replaces attributes of modules and classes, torch's and Python's.

In: `Patch`es. Out: each named attribute does something first, or something else.
`lazy_tensor.interop.patch_table` has the patches, and says why each is needed.
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


class Patches:
    """Patches that are put in place together, at first use, and stay for good.

    So what they put in place must ask whether it is wanted. To take them back after each block
    would cost a loop a microsecond for each, and somebody else may have put a patch on top.
    """

    def __init__(self, patches: Iterable[Patch]) -> None:
        self._waiting = list(patches)
        self._lock = threading.Lock()
        self._are_put = False

    def put(self) -> None:
        """Put the patches in place, if they aren't yet."""
        if self._are_put:  # without the lock: it never becomes False again
            return
        with self._lock:
            while self._waiting:
                _put(self._waiting.pop(0))
            self._are_put = True

    def add(self, patches: Iterable[Patch]) -> None:
        """Add patches. They are put in place now if the others are."""
        with self._lock:
            for patch in patches:
                if self._are_put:
                    _put(patch)
                else:
                    self._waiting.append(patch)


def _put(patch: Patch) -> None:
    owner, name, replaced = patch
    own = getattr(owner, name)
    own = vars(owner).get(name, own)  # a static method as such
    made = replaced(own)
    torch_private.script_as(made, own)
    setattr(owner, name, made)


class PutWhileUsed:
    """A context manager: attributes of modules and classes have other values while any thread is
    inside. They are put when the first enters, and taken off when the last leaves."""

    def __init__(self, values: Iterable[tuple[Any, str, Any]]) -> None:
        """`values` are the owner of each attribute, its name, and the value."""
        self._values = list(values)
        self._lock = threading.Lock()
        self._n_users = 0
        self._had: list[tuple[Any, str, Any]] = []  # what the owners themselves had there

    def __enter__(self) -> None:
        with self._lock:
            self._n_users += 1
            if self._n_users == 1:
                self._had = [
                    (own, name, vars(own).get(name, _NONE)) for own, name, _ in self._values
                ]
                for own, name, value in self._values:
                    setattr(own, name, value)

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._n_users -= 1
            for own, name, value in self._had if self._n_users == 0 else ():
                if value is _NONE:
                    delattr(own, name)  # it is inherited again
                else:
                    setattr(own, name, value)


_NONE: Any = object()
