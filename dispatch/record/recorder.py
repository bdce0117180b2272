"""One aten op into the trace: the hot path on a hit, growth of the trie on a miss.

In: what `__torch_dispatch__` gives. Out: new tensors of the class that `recorder` was made for.
Calls `eager_fallback` for what can't wait and `flush` when a bound is reached.
"""

from __future__ import annotations

from collections.abc import Callable
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
from lazy_tensor.dispatch.torch_private import (
    count_writes,
    make_wrapper,
    mark,
    new_wrapper,
    no_memory,
)
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.dispatch.trie import trace as traces
from lazy_tensor.dispatch.trie.keys import (
    PlainSlots,
    exact_key,
    generic_key,
    key_part,
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


def recorder(tensor_class: type[Any]) -> Callable[..., Any]:
    """The `__torch_dispatch__` that records, for a class and for modes alike.

    Its body is spelled out rather than shared with `key_part` and `follow`: on the hit of a
    two-tensor op each Python call would add 2% (45 ns of 2.9 us).
    """

    kinds_of_class = frozenset({tensor_class})
    kinds_in_mode = frozenset({tensor_class, Tensor, Parameter})

    def record(
        owner: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        trace = _local.trace
        # in the middle of another call a finalizer may call this one: that goes on behind it
        was_busy, trace.busy = trace.busy, True
        if trace.claimed and not was_busy:
            traces.begin(trace)
        try:
            cold = trace.policy.cold
            if cold:
                in_mode = not isinstance(owner, type)
                all_plain = (
                    in_mode and inputs.PLAIN.issuperset(types) and isinstance(func, OpOverload)
                )
                if all_plain and not (needs_care(func) or reads_values(func)):
                    # nothing is pending and no argument lazy: run it, at the price of the mode
                    sync_points.run_at_once(trace, func, args, kwargs or {})
                    return func(*args, **kwargs) if kwargs else func(*args)
                if tensor_types.call_at_once is not None and tensor_types.sharded_class in types:
                    known = tensor_types.call_at_once(trace, owner, func, args, kwargs or {})
                    if known is not NotImplemented:
                        return known
                return miss(owner, trace, func, args, kwargs or {}, None)
            place, number = trace.state, None
            key: Any
            if len(args) == 2 and not kwargs:
                first, second = args
                if type(first) is tensor_class:
                    first = first._value.slot
                else:
                    first = key_part(trace.leaf_slots, tensor_class, first)
                if type(second) is tensor_class:
                    second = second._value.slot
                else:
                    second = key_part(trace.leaf_slots, tensor_class, second)
                key = (func._op, first, second)
                state = place.get(key)
                if state is None and place.generic and type(args[1]) is float:
                    state = place.generic.get((func._op, first, float))
                    number = args[1]
            else:
                key = [func._op]
                for argument in args:
                    if type(argument) is tensor_class:
                        key.append(argument._value.slot)
                    else:
                        key.append(key_part(trace.leaf_slots, tensor_class, argument))
                if kwargs:
                    for name, argument in kwargs.items():
                        key.append(name)
                        key.append(key_part(trace.leaf_slots, tensor_class, argument))
                key = tuple(key)
                state = place.get(key)
            if state is None:
                return miss(owner, trace, func, args, kwargs or {}, key)
            if hits.learn is not None:
                hits.learn(trace, func, state)
            kind = state.kind
            if kind == ONE:
                out: Any = make_wrapper(tensor_class, *state.meta)
                no_memory(out)
                out._value = value = Value()
                value.slot = state.slot
                if trace.state is not place:
                    # a signal's handler, or a finalizer, has called ops since
                    return record(owner, func, types, args, kwargs)
                # from here on Python looks for no signal until all is done
                if number is not None:
                    trace.scalars[place.n_scalars :] = (number,)
                trace.state = state
                trace.values.append(value)
                return out
            if number is not None:
                trace.scalars[place.n_scalars :] = (number,)
            if kind == SELF:
                trace.state = state
                return args[0]
            if kind == ALIAS and type(args[0]) is tensor_class:
                out = make_wrapper(tensor_class, *state.meta)
                no_memory(out)
                out._value = args[0]._value
                return out
            if state.origin is not None and is_shown(owner):
                return miss(owner, trace, func, args, kwargs or {}, key)
            return step(trace, state, func, args)
        finally:
            trace.busy = was_busy

    def wrapper(meta: tuple[Any, ...], value: Value, like: torch.Tensor | None) -> Any:
        out: Any = new_wrapper(tensor_class, meta, like)
        out._value = value
        return out

    def follow(trace: Trace, func: Any, state: State, args: tuple[Any, ...]) -> Any:
        """Take the step to `state`, and let it be a hit from now on."""
        if hits.learn is not None:
            hits.learn(trace, func, state)
        return step(trace, state, func, args)

    def step(trace: Trace, state: State, func: Any, args: tuple[Any, ...]) -> Any:
        """Take the step to `state`, whatever its kind; flush if it closes a segment."""
        made: list[Value] = []
        result = outputs(trace, state, args, viewed(func, args), made)
        # an alias is no step: any number of them leaves the trace as it is
        if state.kind & KIND_MASK != ALIAS:
            trace.state = state
            trace.values += made
        if state.closes:
            sync_points.arrived(trace)
            sync_points.close_segment(trace)
        return result

    def viewed(func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
        """Whose memory the results share."""
        return args[0] if args and facts_of(func).is_view else None

    def outputs(
        trace: Trace,
        state: State,
        args: tuple[Any, ...],
        like: torch.Tensor | None,
        made: list[Value],
    ) -> Any:
        """What the call gives; its new values go into `made`."""
        kind = state.kind & KIND_MASK
        if kind == ONE:
            return fresh(trace, state.meta, state.slot, like, state.rebase, made, state.layout)
        if kind == SELF:
            return args[0]
        if kind == ALIAS:
            return wrapper(state.meta, inputs.value_of(trace, args[0]), args[0])
        if kind == NOTHING:
            if state.meta:
                count_writes(args[0])
            return None
        if kind == MARKED:
            meta, marks = state.meta
            return mark(fresh(trace, meta, state.slot, like, state.rebase, made), *marks)
        container, metas = state.meta
        layouts = state.layout or (None,) * len(metas)
        return container(
            None if slot is None else fresh(trace, meta, slot, like, state.rebase, made, layout)
            for meta, slot, layout in zip(metas, state.slot, layouts, strict=True)
        )

    def fresh(
        trace: Trace,
        meta: tuple[Any, ...],
        slot: Any,
        like: torch.Tensor | None,
        rebase: tuple[int, int] | None,
        made: list[Value],
        layout: tensor_types.Layout | None = None,
    ) -> Any:
        value = Value()
        value.slot = slot
        made.append(value)
        if layout is not None:
            return tensor_types.new_sharded(value, layout, like)
        if rebase is not None:
            leaf, recorded_offset = rebase
            value.leaf = leaf
            offset = meta[2] or 0
            moved = offset + trace.leaf_offsets[leaf] - recorded_offset
            meta = (meta[0], meta[1], moved, *meta[3:])
        return wrapper(meta, value, like)

    def generic_child(
        trace: Trace, slots: PlainSlots, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> State | None:
        """The next state at a place that takes numbers at run time; notes the call's numbers."""
        generic = trace.state.generic
        if not generic:
            return None
        key, numbers = generic_key(slots, tensor_class, func, args, kwargs)
        state = generic.get(key)
        if state is not None:
            trace.scalars[trace.state.n_scalars :] = numbers
        return state

    def known(
        owner: Any, trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> State | None:
        """The next state if the call was seen here before, on leaves that have to come in."""
        if trace.is_outdated or not isinstance(func, OpOverload):
            return None
        if rule_of(func) not in KNOWN or settings.current().debug:
            return None
        key = inputs.retrace(trace, func, args, kwargs, not isinstance(owner, type))
        if key is None:
            return None
        state = trace.state.get(tuple(key))
        if state is None:
            state = generic_child(trace, trace.leaf_slots, func, args, kwargs)
        return state

    def miss(owner: Any, trace: Trace, *call: Any) -> Any:
        """`missed`, after which the trace holds nothing that entered for this call alone, and the
        call is part of the past."""
        is_part = trace.call is not None or is_question(call[0])
        if (
            call[0] is eager_fallback.ITEM
            and type(call[1][0]) is tensor_class
            and not (is_part or trace.policy.cold or trace.tape)
        ):
            return eager_fallback.item(trace, call[1][0])
        if not is_part:
            sync_points.begin(trace, *call[:3])
        try:
            return missed(owner, trace, *call)
        finally:
            del trace.scalars[trace.state.n_scalars :]  # of a call that was not recorded after all
            if trace.passing:
                inputs.leave(trace)
            if not is_part:
                sync_points.end(trace)

    def missed(
        owner: Any,
        trace: Trace,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: tuple[Any, ...] | None,
    ) -> Any:
        """The call that no state knows: let its tensors in, then grow the trie, or run it now."""
        if is_question(func):
            return func(*args, **kwargs)
        is_cold = trace.policy.cold
        if not (is_cold or kwargs or trace.tape) and inputs.is_tiny(trace, args):
            return func._op(*args)
        state = generic_child(trace, trace.leaf_slots, func, args, kwargs)
        if key is not None and lacks_slots(trace, key):
            key = None
            if state is None:
                state = known(owner, trace, func, args, kwargs)
        if state is not None and not (state.origin and is_shown(owner)):
            return follow(trace, func, state, args)
        request = Request(owner, func, args, kwargs)
        if tensor_types.call_sharded is not None and tensor_types.sharded_class in map(
            type, request.tensors
        ):
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
        slots = trace.leaf_slots if request.in_mode else trace.snapshot_slots
        kinds = kinds_in_mode if request.in_mode else kinds_of_class
        is_admitted = trace.state is place and kinds.issuperset(map(type, request.tensors))
        if key is None or not is_admitted:
            reason = inputs.admit(trace, request)
            if reason is not None:
                return eager_fallback.run(trace, request, reason)
            key = exact_key(slots, tensor_class, func, args, kwargs)
            state = generic_child(trace, slots, func, args, kwargs)
            if state is None:
                state = trace.state.get(key)
        if state is None:
            generic, numbers = generic_key(slots, tensor_class, func, args, kwargs, key)
            grown = extend_trie.grow(trace, request, key, generic, numbers)
            if grown is None:
                return missed(owner, trace, func, args, kwargs, None)
            if isinstance(grown, str):
                return eager_fallback.run(trace, request, grown)
            state = grown
        return follow(trace, func, state, args)

    return record
