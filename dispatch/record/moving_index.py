"""Makes views at an index that changes from run to run, such as `X[i]` or `X[a:b]`, at once.

In: a call of `select` or `slice` that no state knows. Out: the view, if the same call came at this
place with another index; None if the call is to be recorded. No state depends on the index then, so
the calls that follow are hits, and one plan serves all indices. Called by `recorder`.
"""

from __future__ import annotations

from typing import Any

import torch

from lazy_tensor.dispatch.metadata.infer import is_marked
from lazy_tensor.dispatch.ops.request import Request
from lazy_tensor.dispatch.record.inputs import admit, is_plain, slot_of
from lazy_tensor.dispatch.torch_private import kernels_only
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.dispatch.trie.trace import State, Trace

SELECT, SLICE = torch.ops.aten.select.int, torch.ops.aten.slice.Tensor
_MOVES = State(None, (), None)
"""Stands in `State.seen` for a call that came with several indices."""


def note(trace: Trace, parent: State, request: Request, state: State) -> None:
    """Note a recorded call, which leads from `parent` to `state`, for `view` to find."""
    call = _without_index(trace, request)
    if call is not None:
        parent.seen = parent.seen or {}
        parent.seen[call] = state


def view(trace: Trace, request: Request) -> torch.Tensor | None:
    """The view, if the same call came at this place with another index; else None.

    None also if the base is pending, or if a pending call writes it: the view must be recorded.
    """
    if request.op not in (SELECT, SLICE) or trace.tape is not None:
        return None
    # the base must have a slot, as the calls that `note` got had
    if admit(trace, request) is not None:
        return None
    place = trace.state
    if not place.seen:
        return None
    call = _without_index(trace, request)
    found = None if call is None else place.seen.get(call)
    if call is None or found is None:
        return None
    base, *others = request.args
    data = base if is_plain(base) else tensor_types.value_in(base).data
    # a view that is made now must not miss what is pending
    if data is None or is_marked(data) or trace.is_written(call[0].index):
        return None
    if found is not _MOVES:
        # The state with the first index leaves the trie, else that index would still be recorded.
        # C++ has edges to it.
        place.pop(found.key, None)
        place.edges = None
        place.seen[call] = _MOVES
    trace.ran = request.op, place
    with kernels_only(dispatches=True):
        made = request.op(data, *others)
    return made if is_plain(base) else tensor_types.concrete(made)


def _without_index(trace: Trace, request: Request) -> tuple[Any, ...] | None:
    """The parts of the call that don't depend on the index; None for any other call.

    They are the slot of the base, the dimension, and the length and the step of a slice.
    """
    if request.op not in (SELECT, SLICE) or request.kwargs:
        return None
    slot = slot_of(trace, request.args[0])
    if slot is None:
        return None
    _, *others = request.args
    if request.op is SELECT and len(others) > 1:
        return (slot, SELECT, others[0])
    if request.op is SLICE and len(others) > 2 and None not in others[1:3]:
        dim, begin, end, *step = others
        return (slot, SLICE, dim, end - begin, *step)
    return None
