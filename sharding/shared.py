"""Gathers a parameter that several layers redistribute once in forward, and once in backward.

In: a parameter and a function that gathers it. Out: the gathered tensor, or a copy of one that was
gathered before. `DTensor.redistribute` calls it. Copies are needed because a caller may write its
tensor; plans leave a copy out if nobody does.

All ranks must gather equally often. So the decision follows from the program's calls and writes
alone, never from flushes or from what is alive, which differ between ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from lazy_tensor.dispatch.run.watch import Watch
from lazy_tensor.dispatch.torch_private import in_backward
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.dispatch.trie.trace import local


class _Phases(threading.local):
    """This thread's phase: forwards and backwards are numbered as they alternate."""

    number = 0
    is_backward = False  # whether phase `number` is a backward


_phases = _Phases()


def note_phase() -> int:
    """The number of the phase, a forward or a backward, that runs now."""
    now = in_backward()
    if now != _phases.is_backward:
        _phases.is_backward = now
        _phases.number += 1
    return _phases.number


def shared(parameter: Any, how: Any, gather: Callable[[], Any]) -> Any:
    """The result of `gather()`, or a copy of its last result in the same phase.

    `how` names what `gather` does. A result is kept only for a parameter that was gathered twice in
    one phase before, so that others take no memory. It is dropped when the parameter is written,
    which training does in each step.
    """
    trace, value = local.trace, parameter._value
    watch = value.watch
    if watch is None:
        watch = value.watch = Watch()
    key = (note_phase(), how)
    # autograd's count also sees writes that ran at once; inference tensors have none
    n_writes = 0 if parameter.is_inference() else parameter._version
    is_repeat = watch.key == key and watch.is_current(trace, value, n_writes)
    if is_repeat and watch.kept is None:
        # the second gather of a phase: kept from the next phase on
        watch.repeats = True
        return gather()
    if not is_repeat:
        made = gather()
        kept = (made._value, made._layout) if watch.repeats else None
        watch.start(trace, value, n_writes, key, kept)
        if kept is None:
            return made
    return torch.clone(tensor_types.new_sharded(*watch.kept))
