"""Shows pending values in a debugger or notebook without flushing the trace.

In: a pending value, or a plain tensor with pending writes. Out: a tensor computed aside, or None
where other ranks or another thread would have to take part. Nothing is planned or compiled: a look
in a debugger must not change what the program does. Called by `Tensor.__repr__` of this package.
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
"""Modules of debuggers and of notebooks' displays."""
PRINTERS = ("pprint", "reprlib", "IPython.lib.pretty", "torch", "lazy_tensor", "contextlib")
"""Modules whose frames may stand between a looker's frame and the tensor's `__repr__`."""


def is_looked_at() -> bool:
    """Whether a debugger or a notebook's display asks, rather than the program.

    The first frame of the stack that is no printer's decides. A program that runs under a debugger
    and prints a tensor itself is no look: its own frame comes first.
    """
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
    """The `repr` of a computed tensor, made without a flush."""
    with _unseen_by(local.trace), torch_private.below_autograd():
        return repr(tensor)


@contextmanager
def _unseen_by(trace: Trace) -> Iterator[None]:
    """While it is entered, ops aren't recorded and reads of memory flush nothing.

    A trace that is `busy` is one that handles an op already.
    """
    was_busy = trace.busy
    try:
        trace.busy = True
        with torch_private.no_dispatch():
            yield
    finally:
        trace.busy = was_busy


def peek(trace: Trace, value: Value) -> torch.Tensor | None:
    """The value that a flush would compute now.

    None if another thread's trace has it, or if it depends on a collective. Raises what the calls
    that it depends on raise.
    """
    slot = value.slot
    if slot is None:
        return value.data
    return _computed(trace, slot.index) if slot.trace is trace else None


def peek_memory(trace: Trace, tensor: torch.Tensor) -> torch.Tensor | None:
    """The same for a plain tensor: its value after the pending writes to its memory."""
    first = trace.storages.get(torch_private.storage_id(tensor))
    if first is None:
        return tensor
    found = _computed(trace, first)
    if found is None:
        return None
    # the trace knows the storage by its first leaf, which may be another view than `tensor`
    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
    with _unseen_by(trace):
        return tensor.new_empty(0).set_(found.untyped_storage(), *place)


def _computed(trace: Trace, index: int) -> torch.Tensor | None:
    aside = Aside(trace.state, index)
    if aside.communicates:
        return None
    with _unseen_by(trace):
        return aside(trace.leaves, trace.scalars)[0]
