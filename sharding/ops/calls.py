"""Records a call on sharded tensors that no state of the trie knows.

In: a call with sharded tensors among its arguments. Out: its result. The local ops and collectives
of the call are recorded as steps of the trace. A state behind them gets the call's own key: next
time one look-up leads from the state before the call past all these steps.
`dispatch.record.recorder` reaches `call` through `tensor_types.call_sharded`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.metadata.infer import meta_of
from lazy_tensor.dispatch.ops.request import Request, is_observed
from lazy_tensor.dispatch.ops.rules import Rule, rule_of
from lazy_tensor.dispatch.record import inputs
from lazy_tensor.dispatch.record.extend_trie import link, wrapper_arguments
from lazy_tensor.dispatch.record.sync_points import close_segment
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.torch_private import count_writes
from lazy_tensor.dispatch.trie import memory_sharing, tensor_types
from lazy_tensor.dispatch.trie.keys import exact_key, generic_key
from lazy_tensor.dispatch.trie.trace import MANY, NOTHING, ONE, SELF, Leaf, State, Trace, begin
from lazy_tensor.sharding.ops import compute
from lazy_tensor.sharding.tensor import DTensor, local_of


def call(trace: Trace, request: Request) -> Any:
    """The call's result; installed as `tensor_types.call_sharded`."""
    if rule_of(request.op) is Rule.ALIAS:
        # another tensor on the same value, which is no step of the trace
        tensor = request.args[0]
        return tensor_types.new_sharded(tensor._value, tensor._layout, tensor)
    request.is_called = True
    # from here on no measured time decides in this thread: ranks must decide alike
    trace.policy.span_ranks()
    # numbers that no step has taken are dropped: later steps would take them for theirs
    del trace.scalars[trace.state.n_scalars :]
    start = None if is_observed(request.owner) else _start(trace, request)
    similar = None if start is None else trace.similar_to(start)
    ran, n_numbers = trace.ran, len(trace.scalars)
    layouts = _layouts(request) if request.facts.writes else None
    # the call's own ops are recorded like others: they must find the trace free, and no flush may
    # come between them, or the state behind them would not follow `start`
    trace.busy = False
    outer, trace.defers_close = trace.defers_close, False
    try:
        # torch leaves a mode while its `__torch_dispatch__` runs; inside it sees the local ops
        with request.owner if request.in_mode else nullcontext():
            result = compute.run(request)
        if request.facts.writes_list:
            count_writes(request.args[0])
    finally:
        begin(trace)
        closes = trace.defers_close
        # a sharded call within another one leaves the flush to the outer one
        trace.defers_close = None if outer is None else outer or closes
        inputs.leave(trace)
    # learnt only if a hit can do all that the call did: it ran no op at once, and it changed no
    # argument's layout, which a hit leaves as it is
    if start is not None and trace.ran is ran and (layouts is None or layouts == _layouts(request)):
        state = _learnt(trace, request, start, similar, trace.scalars[n_numbers:], result)
        if state is not None:
            state.closes = closes
            if hits.learn is not None:
                hits.learn(trace, request.op, state)
    if closes:
        close_segment(trace)
    return result


def _layouts(request: Request) -> list[tensor_types.Layout]:
    return [tensor._layout for tensor in request.tensors if isinstance(tensor, DTensor)]


def _start(trace: Trace, request: Request) -> State | None:
    """The state of the trace once all tensors of the call have slots; None if one can't have any.

    Local tensors enter as leaves here, before the call's steps: a call whose steps include a new
    leaf can't be learnt.
    """
    if trace.is_outdated or trace.policy.cold or settings.current().debug:
        return None
    # a call with a key was looked up, so that its sharded tensors have slots already
    if request.key is not None and {tensor_types.sharded_class}.issuperset(
        map(type, request.tensors)
    ):
        return trace.state
    aliases = not request.in_mode and (request.facts.is_view or request.facts.writes)
    local = Request(request.owner, request.op, (), {})
    written = {id(tensor) for tensor in request.written()}
    for tensor in request.tensors:
        is_written = id(tensor) in written
        if type(tensor) is tensor_types.sharded_class:
            tensor = local_of(tensor)
            if type(tensor) is not tensor_types.tensor_class:
                return None  # a tensor that traces can't hold, like one on the meta device
            data = tensor_types.value_in(tensor).data
            if aliases and data is not None and memory_sharing.is_shared(data):
                return None  # a plain tensor has this memory: the local op runs at once
            if is_written and data is not None and memory_sharing.is_externally_writable(data):
                return None  # an array has it: it would enter as a copy
        local.tensors.append(tensor)
    return None if inputs.admit(trace, local) is not None else trace.state


def _learnt(
    trace: Trace, request: Request, start: State, similar: State | None, scalars: list[complex],
    result: Any,
) -> State | None:  # fmt: skip
    """The state behind the steps that the call recorded, to which its key now leads from `start`.

    None if a hit can't do the same. `similar` is the place similar to `start`; `scalars` are the
    numbers that the steps take as run-time inputs.
    """
    end = trace.state
    if end is start or not _is_recorded(start, end):
        return None
    slots = trace.leaf_slots if request.in_mode else trace.snapshot_slots
    call = (slots, request.op, request.args, request.kwargs)
    key = exact_key(*call) if request.key is None else request.key
    generic, numbers = generic_key(*call, key)
    if scalars and scalars != numbers:
        return None  # a hit gives the call's numbers, in their order, and can give no others
    known = (start.generic or {}).get(generic) if scalars else start.get(key)
    # known already, but something kept the call from being a hit: no second state is made for it
    if known is not None and known.parent is end:
        trace.state = known
        return known
    # No step of its own: it stands behind the call's last step. Its path to the root goes through
    # the steps, while `call_start` tells where the call was made.
    state = State(end, generic if scalars else key, None)
    state.call_start = start
    if not _describe(trace, request, state, result):
        return None
    link(trace, start, similar, state, key, generic)
    trace.state = state
    return state


def _is_recorded(start: State, end: State) -> bool:
    """Whether `end` follows `start` without a leaf between: a hit brings no tensors but those of
    the call."""
    state: State | None = end
    while state is not None and state is not start:
        if isinstance(state.step, Leaf):
            return False
        state = state.parent
    return state is start


def _describe(trace: Trace, request: Request, state: State, result: Any) -> bool:
    """Note in `state` what the call returns, so that a hit can make it; False if it can't be."""
    if result is None:
        state.kind, state.meta, state.slot = NOTHING, request.facts.writes_list, None
        return True
    if isinstance(result, torch.Tensor):
        if request.args and result is request.args[0]:
            state.kind, state.meta, state.slot = SELF, None, None
            return True
        if not _is_new(trace, state, result):
            return False
        state.kind = ONE
        state.layout, state.meta, state.slot = _described(result)
        return True
    if not isinstance(result, (list, tuple)) or not result:
        return False
    if not all(item is None or _is_new(trace, state, item) for item in result):
        return False
    state.kind = MANY
    parts = [(None, None, None) if item is None else _described(item) for item in result]
    state.layout, metas, state.slot = zip(*parts, strict=True)
    state.meta = (type(result), metas)
    return True


def _described(result: Any) -> tuple[Any, Any, Any]:
    """Layout, metadata and slot of a new tensor; a plain one has no layout."""
    slot = tensor_types.value_in(result).slot
    if type(result) is DTensor:
        return result._layout, result._layout.meta, slot
    return None, wrapper_arguments(meta_of(result)), slot


def _is_new(trace: Trace, state: State, result: Any) -> bool:
    """Whether a result is a pending tensor that the call itself has made.

    False too for a view of a leaf with a storage offset, as that leaf may begin elsewhere next
    time.
    """
    if type(result) not in (DTensor, tensor_types.tensor_class):
        return False
    slot = result._value.slot
    if result._value.leaf is not None:
        return False
    assert state.call_start is not None, "it is a sharded call's"
    return slot is not None and slot.trace is trace and slot.index >= state.call_start.n_slots
