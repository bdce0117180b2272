"""One aten op into the trace: a known one that C++ doesn't take, or one that is new.

In: what `__torch_dispatch__` gives. Out: new lazy tensors. The op is looked up; else its rule
handles it, or its inputs are let in and the trie is extended. What can't wait runs at once.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.ops.request import Request, is_shown
from lazy_tensor.dispatch.ops.rules import Rule, is_question, needs_care, reads_values, rule_of
from lazy_tensor.dispatch.ops.schema import facts_of
from lazy_tensor.dispatch.record import (
    eager_fallback,
    extend_trie,
    inputs,
    memory_overlap,
    moving_index,
    op_handlers,
    sync_points,
)
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.torch_private import count_writes, mark
from lazy_tensor.dispatch.trie import tensor_types, trace as traces
from lazy_tensor.dispatch.trie.keys import (
    PlainSlots,
    exact_key,
    generic_key,
    lacks_slots,
)
from lazy_tensor.dispatch.trie.trace import (
    ALIAS,
    KIND_MASK,
    MARKED,
    NOTHING,
    ONE,
    SELF,
    State,
    Trace,
    Value,
)

Tensor, Parameter = torch.Tensor, torch.nn.Parameter
_local = traces.local
KNOWN = frozenset({Rule.RECORD, Rule.IF_NO_DROPOUT})
"""Rules of ops that may be recorded as they were before: their keys say how much they drop out."""
_MOVED = object()
"""Stands for a result where the trace has moved on while that was made: a signal's handler, or a
finalizer, has called ops. The call is looked up again."""

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Numbers = list[complex]


def record(owner: Any, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
    """`__torch_dispatch__` of lazy tensors and of the mode; `owner` is the class or the mode."""
    trace, kwargs = _local.trace, kwargs or {}
    # in the middle of another call a finalizer may call this one: that goes on behind it
    was_busy = trace.busy
    try:
        trace.busy = True
        if trace.claimed and not was_busy:
            traces.begin(trace)
        if trace.policy.cold:
            return _cold(owner, trace, func, types, args, kwargs)
        place = trace.state
        key, state, numbers = _looked_up(trace, func, args, kwargs)
        if state is None or (state.call_site is not None and is_shown(owner)):
            return _miss(owner, trace, func, args, kwargs, key)
        result = _follow(trace, place, func, state, numbers, args)
        return result if result is not _MOVED else record(owner, func, types, args, kwargs)
    finally:
        trace.busy = was_busy


def _cold(owner: Any, trace: Trace, func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """A call while nothing is recorded."""
    in_mode = not isinstance(owner, type)
    all_plain = in_mode and inputs.PLAIN.issuperset(types) and isinstance(func, OpOverload)
    if all_plain and not (needs_care(func) or reads_values(func)):
        # nothing is pending and no argument lazy: run it, at the price of the mode
        sync_points.run_at_once(trace, func, args, kwargs)
        return func(*args, **kwargs) if kwargs else func(*args)
    if tensor_types.call_at_once is not None and tensor_types.sharded_class in types:
        known = tensor_types.call_at_once(trace, owner, func, args, kwargs)
        if known is not NotImplemented:
            return known
    return _miss(owner, trace, func, args, kwargs, None)


def _looked_up(
    trace: Trace, func: Any, args: Args, kwargs: Kwargs
) -> tuple[tuple[Any, ...] | None, State | None, Numbers]:
    """The call's exact key, the state that it leads to, if any knows it, and its numbers there."""
    if not isinstance(func, OpOverload):
        return None, None, []
    key = exact_key(trace.leaf_slots, func, args, kwargs)
    return key, *_child(trace, key, func, args, kwargs)


def _child(
    trace: Trace, key: tuple[Any, ...], func: Any, args: Args, kwargs: Kwargs
) -> tuple[State | None, Numbers]:
    """The next state by this key, or by the generic one with the call's numbers; None if none."""
    state = trace.state.get(key)
    if state is not None:
        return state, []
    return _generic_child(trace.state, trace.leaf_slots, func, args, kwargs)


def _generic_child(
    place: State, slots: PlainSlots, func: Any, args: Args, kwargs: Kwargs
) -> tuple[State | None, Numbers]:
    """The next state at a place that takes numbers at run time, and the call's numbers."""
    if not place.generic:
        return None, []
    key, numbers = generic_key(slots, func, args, kwargs)
    return place.generic.get(key), numbers


def _known(
    owner: Any, trace: Trace, func: Any, args: Args, kwargs: Kwargs
) -> tuple[State, State | None, Numbers]:
    """The place, once the call's leaves have come in; the next state if one knows the call, and
    its numbers there."""
    if trace.is_outdated or not isinstance(func, OpOverload):
        return trace.state, None, []
    if rule_of(func) not in KNOWN or settings.current().debug:
        return trace.state, None, []
    key = inputs.retrace(trace, func, args, kwargs, not isinstance(owner, type))
    place = trace.state
    if key is None:
        return place, None, []
    return place, *_child(trace, tuple(key), func, args, kwargs)


def _miss(owner: Any, trace: Trace, *call: Any) -> Any:
    """`_missed`, after which the trace holds nothing that entered for this call alone, and the call
    is part of the past."""
    is_part = trace.call is not None or is_question(call[0])
    if (
        call[0] is eager_fallback.ITEM
        and type(call[1][0]) is tensor_types.tensor_class
        and not (is_part or trace.policy.cold or trace.tape)
    ):
        return eager_fallback.item(trace, call[1][0])
    if not is_part:
        sync_points.begin(trace, *call[:3])
    try:
        func, args, kwargs, key = call
        while (result := _missed(owner, trace, func, args, kwargs, key)) is _MOVED:
            key = None
        return result
    finally:
        del trace.scalars[trace.state.n_scalars :]  # of a call that was not recorded after all
        if trace.one_call_inputs:
            inputs.leave(trace)
        if not is_part:
            sync_points.end(trace)


def _missed(
    owner: Any,
    trace: Trace,
    func: Any,
    args: Args,
    kwargs: Kwargs,
    key: tuple[Any, ...] | None,
) -> Any:
    """The call that no state knows: handle it by its rule, record it, or run it now."""
    if is_question(func):
        return func(*args, **kwargs)
    is_cold = trace.policy.cold
    may_be_tiny = isinstance(func, OpOverload) and not (is_cold or kwargs or trace.tape)
    if may_be_tiny and inputs.is_tiny(trace, args):
        return func._op(*args)
    if key is not None and lacks_slots(trace, key):
        key = None
        place, state, numbers = _known(owner, trace, func, args, kwargs)
        if state is not None and not (state.call_site and is_shown(owner)):
            return _follow(trace, place, func, state, numbers, args)
    request = Request(owner, func, args, kwargs)
    is_sharded = tensor_types.sharded_class in map(type, request.tensors)
    if is_sharded and tensor_types.call_sharded is not None:
        request.key = key
        return tensor_types.call_sharded(trace, request)
    if not isinstance(func, OpOverload):
        return eager_fallback.run_higher_order(trace, request)
    if func is memory_overlap.COPY and memory_overlap.is_there_already(trace, request):
        return args[0]
    place = trace.state
    if not (is_cold or reads_values(func)):
        extend_trie.cut_if_full(trace)
        if trace.state is not place:
            request.began_s = perf_counter()  # it ran what was pending
    if trace.policy.cold:
        return eager_fallback.run_cold(trace, request)
    if request.facts.is_view and not request.tensors:
        return op_handlers.view_of_number(request)
    rule = rule_of(func)
    if settings.current().debug and rule is not Rule.ZEROS:
        return eager_fallback.run(trace, request, "debug")
    moved = moving_index.view(trace, request)
    if moved is not None:
        return moved
    if rule is not Rule.RECORD:
        handled, result = op_handlers.HANDLERS[rule](trace, request)
        if handled:
            return result
    return _recorded(trace, request, key if trace.state is place else None)


def _recorded(trace: Trace, request: Request, key: tuple[Any, ...] | None) -> Any:
    """Record the call: let its tensors in, and add a state to the trie unless there is one."""
    call = request.op, request.args, request.kwargs
    slots = trace.leaf_slots if request.in_mode else trace.snapshot_slots
    kinds = {tensor_types.tensor_class, *((Tensor, Parameter) if request.in_mode else ())}
    numbers: Numbers = []
    place, state = trace.state, None
    if key is None or not kinds.issuperset(map(type, request.tensors)):
        reason = inputs.admit(trace, request)
        if reason is not None:
            return eager_fallback.run(trace, request, reason)
        place = trace.state
        key = exact_key(slots, *call)
        state, numbers = _generic_child(place, slots, *call)
        if state is None:
            state, numbers = place.get(key), []
    if state is None:
        generic, numbers = generic_key(slots, *call, key)
        grown = extend_trie.grow(trace, request, key, generic, numbers)
        if grown is None:
            return _MOVED
        if isinstance(grown, str):
            return eager_fallback.run(trace, request, grown)
        assert grown.parent is not None, "it is no root"
        place, state = grown.parent, grown
        if state.n_scalars == place.n_scalars:
            numbers = []  # its key has them
    return _follow(trace, place, request.op, state, numbers, request.args)


def _follow(
    trace: Trace, place: State, func: OpOverload, state: State, numbers: Numbers, args: Args
) -> Any:
    """Take the step from `place` to `state`, which is given these numbers, and let it be a hit from
    now on; flush if it closes a segment."""
    if hits.learn is not None:
        hits.learn(trace, func, state)
    made: list[Value] = []
    like = args[0] if args and facts_of(func).is_view else None
    result = _outputs(trace, state, args, like, made)
    if trace.state is not place:
        return _MOVED
    # an alias is no step: any number of them leaves the trace as it is
    if state.kind & KIND_MASK != ALIAS:
        # Python looks for no signal until the step is taken
        trace.scalars[place.n_scalars :] = numbers
        trace.state = state
        trace.values += made
    if state.kind & KIND_MASK == NOTHING and state.meta:
        count_writes(args[0])
    if state.closes:
        sync_points.arrived(trace)
        sync_points.close_segment(trace)
    return result


def _outputs(
    trace: Trace, state: State, args: Args, like: torch.Tensor | None, made: list[Value]
) -> Any:
    """What the call gives, which shares the memory of `like`; its new values go into `made`."""
    kind = state.kind & KIND_MASK
    if kind == ONE:
        return _fresh(trace, state.meta, state.slot, like, state.offset_fixup, made, state.layout)
    if kind == SELF:
        return args[0]
    if kind == ALIAS:
        return tensor_types.new_tensor(inputs.value_of(trace, args[0]), state.meta, args[0])
    if kind == NOTHING:
        return None
    if kind == MARKED:
        meta, marks = state.meta
        return mark(_fresh(trace, meta, state.slot, like, state.offset_fixup, made), *marks)
    container, metas = state.meta
    layouts = state.layout or (None,) * len(metas)
    return container(
        None if slot is None else _fresh(trace, meta, slot, like, state.offset_fixup, made, layout)
        for meta, slot, layout in zip(metas, state.slot, layouts, strict=True)
    )


def _fresh(
    trace: Trace,
    meta: tuple[Any, ...],
    slot: Any,
    like: torch.Tensor | None,
    offset_fixup: tuple[int, int] | None,
    made: list[Value],
    layout: tensor_types.Layout | None = None,
) -> Any:
    """A tensor on a new value at `slot`."""
    value = Value()
    value.slot = slot
    made.append(value)
    if layout is not None:
        return tensor_types.new_sharded(value, layout, like)
    if offset_fixup is not None:
        leaf, recorded_offset = offset_fixup
        value.leaf = leaf
        offset = meta[2] or 0
        moved = offset + trace.leaf_offsets[leaf] - recorded_offset
        meta = (meta[0], meta[1], moved, *meta[3:])
    return tensor_types.new_tensor(value, meta, like)
