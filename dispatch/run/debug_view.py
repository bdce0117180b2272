"""A value looked at from a debugger: computed op by op, aside, with the trace left as it was.

In: a value that waits. Out: its tensor, or None where it can't be had without effects. Nothing is
planned or compiled, and what is pending stays pending.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.run.aside import Aside
from lazy_tensor.dispatch.trie.trace import Trace, Value, local

LOOKERS = ("pdb", "bdb", "pydevd", "_pydevd_bundle", "debugpy", "IPython.core.displayhook",
           "IPython.core.formatters")  # fmt: skip
PRINTERS = ("pprint", "reprlib", "IPython.lib.pretty", "torch", "lazy_tensor", "contextlib")
"""Modules that stand between who looks and what is looked at."""


def is_looked_at() -> bool:
    """Whether a debugger or a notebook's display asks, rather than the program."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if _is_of(name, LOOKERS):
            return True
        if not _is_of(name, PRINTERS):
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False


@lru_cache(1024)  # a program that prints many numbers asks again and again
def _is_of(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def shown(tensor: torch.Tensor) -> str:
    """The text of a tensor whose value is there, for whom nothing is flushed."""
    with _unseen_by(local.trace), torch_private.below_autograd():
        return repr(tensor)


@contextmanager
def _unseen_by(trace: Trace) -> Iterator[None]:
    """Nothing is recorded, and reading memory flushes nothing."""
    was_busy = trace.busy
    try:
        trace.busy = True
        with torch_private.no_dispatch():
            yield
    finally:
        trace.busy = was_busy


def peek(trace: Trace, value: Value) -> torch.Tensor | None:
    """What the value would be if all were run now.

    None if another thread has it, or other ranks would have to take part. Raises what the calls
    that it depends on raise.
    """
    slot = value.slot
    if slot is None:
        return value.data
    return _computed(trace, slot.index) if slot.trace is trace else None


def peek_memory(trace: Trace, tensor: torch.Tensor) -> torch.Tensor | None:
    """The same for a plain tensor: with what pending calls write to its memory."""
    first = trace.storages.get(torch_private.storage_id(tensor))
    if first is None:
        return tensor
    found = _computed(trace, first)
    if found is None:
        return None
    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
    with _unseen_by(trace):
        return tensor.new_empty(0).set_(found.untyped_storage(), *place)


def _computed(trace: Trace, index: int) -> torch.Tensor | None:
    aside = Aside(trace.state, index)
    if aside.communicates:
        return None
    with _unseen_by(trace):
        return aside(trace.leaves, trace.scalars)
