"""Parameters that several layers gather, under whatever names: once in forward, once in backward.

In: a parameter, and how it is to be placed. Out: the tensor placed so; a copy of what was gathered
before, from the second time on that training gathers a parameter twice without writing it. All
ranks decide alike: what counts is the program, not what was flushed when, nor what is alive.
Copies, for who wrote to one tensor would write to all; plans leave them out where nobody does.
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
    """Forwards and backwards, numbered as they alternate."""

    number = 0
    is_backward = False


_phases = _Phases()


def note_phase() -> int:
    """The number of the forward or backward that is under way."""
    now = in_backward()
    if now != _phases.is_backward:
        _phases.is_backward = now
        _phases.number += 1
    return _phases.number


def shared(parameter: Any, how: Any, gather: Callable[[], Any]) -> Any:
    """What `gather()` gives, or a copy of what it gave before in the same forward or backward.

    For parameters in training, which each step writes: nothing is kept for long; and only for one
    of which that was asked twice before: for others nothing is kept at all.
    """
    trace, value = local.trace, parameter._value
    watch = value.watch
    if watch is None:
        watch = value.watch = Watch()
    key = (note_phase(), how)
    n_writes = 0 if parameter.is_inference() else parameter._version
    is_repeat = watch.key == key and watch.is_current(trace, value, n_writes)
    if is_repeat and watch.kept is None:
        watch.repeats = True
        return gather()
    if not is_repeat:
        made = gather()
        kept = (made._value, made._layout) if watch.repeats else None
        watch.start(trace, value, n_writes, key, kept)
        if kept is None:
            return made
    return torch.clone(tensor_types.new_sharded(*watch.kept))
