"""Records one aten op: a known one that C++ didn't take, or one that the trie doesn't have.

In: the arguments of `__torch_dispatch__`. Out: new lazy tensors. On a hit the trace takes a step in
the trie. On a miss the op's rule handles the call, or the call's tensors enter the trace and
`extend_trie` adds a state. A call that can't be recorded runs at once (`eager_fallback`).
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.metadata.infer import meta_of
from lazy_tensor.dispatch.ops.request import Request, is_observed
from lazy_tensor.dispatch.ops.rules import (
    Rule,
    is_metadata_query,
    needs_care,
    reads_values,
    rule_of,
)
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
    fit_kernels,
    generic_key,
    lacks_slots,
)
from lazy_tensor.dispatch.trie.trace import ALIAS, MARKED, NOTHING, ONE, SELF, State, Trace, Value

Tensor, Parameter = torch.Tensor, torch.nn.Parameter
_local = traces.local
_MOVED = object()
"""Returned in place of a result if a signal handler or a finalizer has called ops meanwhile.

The trace has moved on then, and the call must be looked up again.
"""

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Numbers = list[complex]


def record(owner: Any, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
    """`__torch_dispatch__` of lazy tensors and of the mode; `owner` is the class or the mode."""
    trace, kwargs = _local.trace, kwargs or {}
    # A finalizer may call an op in the middle of another call. `busy` is put back afterwards, not
    # cleared, because the outer call goes on.
    was_busy = trace.busy
    try:
        trace.busy = True
        # Only the outermost call waits for a thread that has claimed the trace. `begin` clears
        # `busy` while it waits, so the other thread would flush half of an outer call.
        if trace.claimed and not was_busy:
            traces.begin(trace)
        if trace.policy.cold:
            return _cold(owner, trace, func, types, args, kwargs)
        place = trace.state
        key, state, numbers = _looked_up(trace, func, args, kwargs)
        # A hit on a sharded call makes its collectives without dispatching them. A mode that wants
        # to see them gets the call op by op.
        if state is None or (state.call_start is not None and is_observed(owner)):
            return _miss(owner, trace, func, args, kwargs, key)
        result = _follow(trace, place, func, state, numbers, args, kwargs)
        return result if result is not _MOVED else record(owner, func, types, args, kwargs)
    finally:
        trace.busy = was_busy


def _cold(owner: Any, trace: Trace, func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Handle a call while the trace is cold: nothing is recorded."""
    in_mode = not isinstance(owner, type)
    all_plain = in_mode and inputs.PLAIN.issuperset(types) and isinstance(func, OpOverload)
    if all_plain and not (needs_care(func) or reads_values(func)):
        # Nothing is pending and no argument is lazy: the mode's dispatch is the only extra cost.
        sync_points.run_at_once(trace, func)
        return func(*args, **kwargs) if kwargs else func(*args)
    return _miss(owner, trace, func, args, kwargs, None)


def _looked_up(
    trace: Trace, func: Any, args: Args, kwargs: Kwargs
) -> tuple[tuple[Any, ...] | None, State | None, Numbers]:
    """The call's exact key, the next state (None on a miss), and the call's run-time numbers."""
    if not isinstance(func, OpOverload):
        return None, None, []
    key = exact_key(trace.leaf_slots, func, args, kwargs)
    return key, *_child(trace.state, key, trace.leaf_slots, func, args, kwargs)


def _child(
    place: State, key: tuple[Any, ...], slots: PlainSlots, func: Any, args: Args, kwargs: Kwargs
) -> tuple[State | None, Numbers]:
    """The next state by the exact key, else by the generic one; and the call's run-time numbers."""
    state = place.get(key)
    if state is not None or not place.generic:
        return state, []
    generic, numbers = generic_key(slots, func, args, kwargs)
    return place.generic.get(generic) if fit_kernels(numbers) else None, numbers


def _miss(owner: Any, trace: Trace, *call: Any) -> Any:
    """Handle a call by `_missed`, between the begin and the end of an entry in the call history.

    Afterwards the trace holds nothing that entered it for this call alone.
    """
    # A call within another one (a decomposed op, say) is no call of the program: the history counts
    # only the outer one. Nor does it count a question.
    is_part = trace.call is not None or is_metadata_query(call[0])
    if not is_part:
        sync_points.begin(trace, call[0])
    try:
        func, args, kwargs, key = call
        while (result := _missed(owner, trace, func, args, kwargs, key)) is _MOVED:
            key = None  # its slots may be of a trace that was flushed
        if not is_part:
            sync_points.look_for_turn(trace)
        return result
    finally:
        # drop the numbers of a call that was not recorded after all
        del trace.scalars[trace.state.n_scalars :]
        if trace.one_call_inputs:
            inputs.leave(trace)
        if not is_part:
            sync_points.end(trace)


def _missed(
    owner: Any, trace: Trace, func: Any, args: Args, kwargs: Kwargs, key: tuple[Any, ...] | None
) -> Any:
    """Handle a call that is no hit: by its rule, by recording it, or by running it now.

    A state may know it all the same, if tensors of the call have no slots yet.
    """
    if is_metadata_query(func):
        return func(*args, **kwargs)
    is_cold = trace.policy.cold
    # Optimizers read `step.item()` for every parameter: a step count that was lazy would be flushed
    # each time. So ops on step counts run at once.
    may_be_tiny = isinstance(func, OpOverload) and not (is_cold or kwargs or trace.tape)
    if may_be_tiny and inputs.is_tiny(trace, args):
        return func._op(*args)
    if key is not None and lacks_slots(trace, key):
        key = None  # its tensors must enter the trace first
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
    # A call that reads values is never recorded, so it needs no room in the trace.
    if not (is_cold or reads_values(func)):
        extend_trie.cut_if_full(trace)
        if trace.state is not place:
            # the flush's time is not part of what recording this call takes
            request.began_s = perf_counter()
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
    # `cut_if_full` or a handler may have moved the trace: the key would name slots that are gone
    return _recorded(trace, request, key if trace.state is place else None)


def _recorded(trace: Trace, request: Request, key: tuple[Any, ...] | None) -> Any:
    """Record the call: let its tensors enter, and add a state to the trie unless there is one."""
    call = request.op, request.args, request.kwargs
    slots = trace.leaf_slots if request.in_mode else trace.snapshot_slots
    kinds = {tensor_types.tensor_class, *((Tensor, Parameter) if request.in_mode else ())}
    numbers: Numbers = []
    place, state = trace.state, None
    # The key vouches for tensors of these classes alone. A tensor of another class stands in the
    # key as itself. A plain tensor outside the mode needs a snapshot, whatever slot it has.
    if key is None or not kinds.issuperset(map(type, request.tensors)):
        reason = inputs.admit(trace, request)
        if reason is not None:
            return eager_fallback.run(trace, request, reason)
        place = trace.state
        key = exact_key(slots, *call)
        state, numbers = _child(place, key, slots, *call)
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
            numbers = []  # the state's exact key contains them
    return _follow(trace, place, request.op, state, numbers, request.args, request.kwargs)


def _follow(
    trace: Trace, place: State, func: OpOverload, state: State, numbers: Numbers,
    args: Args, kwargs: Kwargs,
) -> Any:  # fmt: skip
    """Take the step from `place` to `state` with these run-time numbers, and return its outputs.

    C++ learns the step, so that it is a hit from now on. Flushes if the state closes a segment.
    Returns `_MOVED`, and takes no step, if other ops have moved the trace meanwhile.
    """
    if hits.learn is not None:
        hits.learn(trace, func, state)
    made: list[Value] = []
    like = args[0] if args and facts_of(func).is_view else None
    # making objects may collect garbage, and finalizers may call ops
    result = _outputs(trace, state, args, kwargs, like, made)
    if trace.state is not place:
        return _MOVED
    # An alias is no step: any number of them leaves the trace where it is.
    if state.kind != ALIAS:
        # Nothing is called between these lines, so no signal handler finds half a step.
        trace.scalars[place.n_scalars :] = numbers
        trace.state = state
        trace.values += made
    # `meta` is `OpFacts.writes_list` here: below autograd nobody else counts these writes
    if state.kind == NOTHING and state.meta:
        count_writes(args[0])
    if state.closes:
        # the state gets its call number before the flush empties the trace
        sync_points.arrived(trace)
        sync_points.close_segment(trace)
    return result


def _outputs(
    trace: Trace, state: State, args: Args, kwargs: Kwargs,
    like: torch.Tensor | None, made: list[Value],
) -> Any:  # fmt: skip
    """The call's outputs; `made` gets their new values. `like` is the tensor that a view is of."""
    kind = state.kind
    if kind == ONE:
        return _fresh(trace, state.meta, state.slot, like, state.offset_fixup, made, state.layout)
    if kind == SELF:
        return args[0] if state.meta is None else kwargs[state.meta]
    if kind == ALIAS:
        # a leaf may begin elsewhere in its storage than when the state was made
        meta = extend_trie.wrapper_arguments(meta_of(args[0]))
        return tensor_types.new_tensor(inputs.value_of(trace, args[0]), meta, args[0])
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
    """A tensor on a new value at `slot`; `made` gets the value."""
    value = Value()
    value.slot = slot
    made.append(value)
    if layout is not None:
        return tensor_types.new_sharded(value, layout, like)
    if offset_fixup is not None:
        # the leaf may begin elsewhere in its storage than when the state was made
        leaf, recorded_offset = offset_fixup
        value.leaf = leaf
        offset = meta[2] or 0
        moved = offset + (trace.leaf_offsets[leaf] - recorded_offset) // meta[4].itemsize
        meta = (meta[0], meta[1], moved, *meta[3:])
    return tensor_types.new_tensor(value, meta, like)
