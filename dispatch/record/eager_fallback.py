"""Runs a call at once, on computed values: one that can't be recorded, or isn't worth it.

In: a call and the reason. Out: eager's result, with new tensors as lazy ones. Flushes first if the
call could see or change anything that is pending. Called by `recorder` and `op_handlers`; `compute`
also by whoever needs a value.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from lazy_tensor.dispatch import settings, torch_private
from lazy_tensor.dispatch.metadata.infer import (
    LEARNED,
    OUT_DIFFERS,
    Outcome,
    is_recordable,
    learn,
    meta_of,
    outcome_of,
)
from lazy_tensor.dispatch.ops.request import Request
from lazy_tensor.dispatch.ops.rules import READS_VALUES, Rule, needs_care, rule_of
from lazy_tensor.dispatch.record import sync_points
from lazy_tensor.dispatch.record.inputs import (
    ALL_TINY,
    SHARES_MEMORY,
    admit,
    flush_foreign,
    is_plain,
    slot_of,
)
from lazy_tensor.dispatch.run import profiling, watch
from lazy_tensor.dispatch.run.failure import without_frames
from lazy_tensor.dispatch.run.flush import flush
from lazy_tensor.dispatch.run.tape import Draw, Read, drawn
from lazy_tensor.dispatch.stats import STATS
from lazy_tensor.dispatch.torch_private import storage_id
from lazy_tensor.dispatch.trie import memory_sharing, tensor_types
from lazy_tensor.dispatch.trie.trace import Trace, Value, local
from lazy_tensor.dispatch.user_frame import user_line
from lazy_tensor.dispatch.wording import call_name, op_name
from lazy_tensor.kernels.logs import FALLBACKS

PLAIN_RESULT = frozenset({ALL_TINY, SHARES_MEMORY})
"""Reasons for which a call on plain tensors gives plain tensors, as in eager."""

RESIZES = frozenset({torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default})
"""Ops that may give a tensor larger memory, as calls with `out=` may. If a snapshot shares the
memory, torch raises an internal error at the next write."""

EXPECTED = frozenset({ALL_TINY, "debug", LEARNED, OUT_DIFFERS})
"""Reasons that don't count as fallbacks, because the call had best run at once.

The reasons of `rules.why_eager` don't count either: `run` gets these with `by_rule`.
"""


def run(trace: Trace, request: Request, reason: str, *, by_rule: bool = False) -> Any:
    """Run the call now and return its result.

    `reason` is counted and shown. `by_rule`: the op is never recorded, so this is no fallback.
    RuntimeError for a fallback that the option `forbid` excludes.
    """
    STATS.fallbacks[request.op, reason] += 1
    is_fallback = not by_rule and reason not in EXPECTED
    if is_fallback and "fallback" in settings.current().forbid:
        raise RuntimeError(
            f"{op_name(request.op)} at {user_line()} can't be recorded ({reason}), and forbid has "
            "'fallback'; move it out of the block"
        )
    if trace.tape is not None:
        # A replay can repeat a draw and some reads. Most other calls stop the tape.
        if request.facts.is_random and not request.tensors:
            return _returned(drawn(trace, Draw(request)), {}, True)
        if request.op is ITEM and (known := _read_on_tape(trace, request)) is not None:
            return known.number
        # a view of shared memory reads nothing: the call that reads the view stops the tape
        if not (reason == SHARES_MEMORY and request.facts.is_view):
            trace.tape.ran_at_once(request, reason)
    # The region ends before the flush, which sees by `trace.begun` that it runs a whole region.
    if sync_points.is_sync_point(request):
        sync_points.at_op(trace)
    # When a collective ends, a hook of DistributedDataParallel may continue in another thread. It
    # must find no tensor whose value is pending in this one.
    may_go_on_elsewhere = request.op.namespace == "c10d" and trace.state is not trace.root
    if may_go_on_elsewhere or sees_pending(trace, request.tensors):
        flush(trace, call_name(request.op))
    trace.ran = request.op, trace.state
    start = perf_counter()
    if not all(is_plain(tensor) for tensor in request.tensors):
        result = _run(request, wraps=True)
    else:
        result = _careful(request, request.args, request.kwargs)
        if reason not in PLAIN_RESULT and not request.facts.is_view:
            result = _result_of(request, result, {}, True)
    if is_fallback:
        call, times_s = f"{op_name(request.op)} at {user_line()} ({reason})", STATS.ran_at_once_s
        times_s[call] = times_s.get(call, 0.0) + perf_counter() - start
        FALLBACKS.info("%s ran at once", call)
    if request.op in torch_private.RANGE_OPS:
        profiling.note_range(trace, request)
    return result


def _read_on_tape(trace: Trace, request: Request) -> Read | None:
    """The number that the tape reads in a tensor, without a flush; None if it can't."""
    (tensor,) = request.tensors
    if tensor_types.layout_of(tensor) is not None or admit(trace, request) is not None:
        return None
    slot = slot_of(trace, tensor)
    found: Read | None = None if slot is None else trace.tape.read(slot.index)
    return found


ITEM = sync_points.ITEM
_ITEM_NAME = call_name(ITEM)


def to_read(trace: Trace, tensor: torch.Tensor) -> torch.Tensor:
    """The computed tensor in which C++ reads the number that `.item()` gives."""
    STATS.fallbacks[ITEM, READS_VALUES] += 1
    if sees_pending(trace, [tensor]):
        flush(trace, _ITEM_NAME)
    trace.ran = ITEM, trace.state
    return _data(tensor)


def _careful(request: Request, args: Any, kwargs: Any) -> Any:
    """Run the op on these arguments, and account for its writes and for what it was run to tell.

    The result is the op's own. Modes and tensor classes still see ops that its kernel calls.
    """
    if request.facts.is_out or request.op in RESIZES:
        for tensor in request.written():
            if tensor.layout is torch.strided:
                torch_private.stop_sharing(_data(tensor))
    with torch_private.kernels_only(dispatches=True):
        result = request.op(*args, **kwargs)
    # below autograd nobody else counts the writes of an in-place foreach op
    if request.facts.writes_list:
        torch_private.count_writes(request.args[0])
    if request.facts.writes:
        watch.note_writes(request.written())
    if request.learns is not None:
        learn(request.learns, _told_by(request, result))
    return result


def _told_by(request: Request, result: Any) -> Outcome:
    """The outcome that the schema cache learns from the first result of a call.

    By its schema an op may give a new tensor, and yet give an argument back (`dequantize` of what
    isn't quantized). Such a call runs at once each time.
    """
    outcome = outcome_of(result, request.facts)
    if request.facts.is_view or not outcome.outs:
        return outcome
    given = {storage_id(_data(tensor)) for tensor in request.tensors if is_recordable(tensor)}
    results = [result] if outcome.is_single else result
    if any(one is not None and storage_id(one) in given for one in results):
        return Outcome(runs_now="gives an argument back")
    return outcome


def run_higher_order(trace: Trace, request: Request) -> Any:
    """A higher-order op's result (`torch.cond`, flex attention) on computed values."""
    if trace.tape is not None:
        trace.tape.ran_at_once(request, "a higher-order op")
    if sees_pending(trace, request.tensors):
        flush(trace, call_name(request.op))
    args, kwargs = pytree.tree_map_only(torch.Tensor, _data, (request.args, request.kwargs))
    return _returned(request.op(*args, **kwargs), {}, True)


def run_cold(trace: Trace, request: Request) -> Any:
    """The call's result while the trace is cold."""
    sync_points.count_cold()
    if sync_points.is_sync_point(request):
        sync_points.at_op(trace)
    if sees_pending(trace, request.tensors):
        flush(trace, call_name(request.op), quiet=True)
    trace.ran = request.op, trace.state
    if trace.policy.is_paused:
        # a mode or tensors of torch's own are at work, and must see the call on plain tensors
        args, kwargs, lazy_of = _real_arguments(request)
        return _returned(request.op(*args, **kwargs), lazy_of, False)
    if isinstance(request.op, OpOverload) and rule_of(request.op) is Rule.ALIAS:
        tensor = request.tensors[0]
        if type(tensor) is tensor_types.tensor_class:  # `detach` keeps the class
            return tensor_types.local_like(tensor)
    if request.in_mode and all(is_plain(tensor) for tensor in request.tensors):
        if needs_care(request.op):
            return _careful(request, request.args, request.kwargs)
        return request.op(*request.args, **request.kwargs)
    return _run(request, wraps=not request.in_mode)


def compute(value: Value, cause: str) -> None:
    """Run all that `value` waits for, whichever thread recorded it."""
    slot, trace = value.slot, local.trace
    if slot is None:
        # it is computed, but a pending call may write its memory
        data = value.data
        if trace.storages and data is not None and storage_id(data) in trace.storages:
            flush(trace, cause)
    elif slot.trace is trace:
        flush(trace, cause)
    else:
        flush_foreign(trace, slot.trace)


def sees_pending(trace: Trace, tensors: list[torch.Tensor]) -> bool:
    """Whether one of `tensors` waits for its value, or shares memory with what the trace uses.

    Values that another thread has recorded are computed.
    """
    for tensor in tensors:
        if type(tensor) is tensor_types.tensor_class:
            slot = tensor._value.slot
            if slot is not None:
                if slot.trace is trace:
                    return True
                flush_foreign(trace, slot.trace)
        elif not is_recordable(tensor):
            if trace.state is not trace.root:
                return True  # a sparse tensor's parts may be pending
            continue
        if trace.storages and storage_id(_data(tensor)) in trace.storages:
            return True
    return False


def _data(tensor: torch.Tensor) -> torch.Tensor:
    """The computed tensor behind a lazy one; any other tensor as it is."""
    if type(tensor) is not tensor_types.tensor_class:
        return tensor
    value = tensor._value
    if value.failure is not None:
        raise without_frames(value.failure)
    assert value.data is not None, "what is pending was flushed"
    return value.data


def _run(request: Request, *, wraps: bool) -> Any:
    """Run the call on the data of its lazy tensors, which then follow what it did to the data."""
    facts = request.facts
    # The op may give the data another shape, which other tensors on the same value must not get.
    if facts.changes_metadata or facts.is_out:
        for tensor in request.written():
            _leave_aliases(tensor)
    args, kwargs, lazy_of = _real_arguments(request)
    result = _careful(request, args, kwargs)
    shares = (facts.changes_metadata or facts.is_view) and any(map(is_plain, request.tensors))
    if shares or (facts.is_view and not wraps):
        # by `set_`, or by a view, a lazy and a plain tensor now have the same memory
        memory_sharing.share(_data(request.tensors[0]))
    for tensor in request.written():
        _follow_data(tensor)
    return _result_of(request, result, lazy_of, wraps)


def _real_arguments(request: Request) -> tuple[list[Any], dict[str, Any], dict[int, torch.Tensor]]:
    """The call's arguments with computed tensors for lazy ones; the lazy ones by the id() of
    their data."""
    lazy_of: dict[int, torch.Tensor] = {}
    args = [_real(argument, lazy_of) for argument in request.args]
    kwargs = {name: _real(argument, lazy_of) for name, argument in request.kwargs.items()}
    return args, kwargs, lazy_of


def _real(argument: Any, lazy_of: dict[int, torch.Tensor]) -> Any:
    """`argument` with computed tensors for lazy ones; `lazy_of` gets the lazy ones by the id() of
    their data."""
    if isinstance(argument, torch.Tensor):
        data = _data(argument)
        lazy_of[id(data)] = argument
        return data
    if isinstance(argument, (list, tuple)):
        return [_real(item, lazy_of) for item in argument]
    return argument


def _leave_aliases(tensor: torch.Tensor) -> None:
    """Give a lazy tensor a value of its own on the same memory: its aliases keep their shape."""
    if type(tensor) is tensor_types.tensor_class:
        value = Value()
        value.data = _data(tensor).detach()
        tensor._value = value


def share_with_parts(tensors: Iterable[torch.Tensor]) -> None:
    """Note that these may be parts of a sparse or nested tensor: plain ops on it reach them."""
    for tensor in tensors:
        if type(tensor) is tensor_types.tensor_class:
            memory_sharing.share(_data(tensor))
            _leave_aliases(tensor)  # a part may be the very tensor that was given


def _follow_data(tensor: torch.Tensor) -> None:
    """Give a lazy tensor the shape that an op (`resize_`, `t_`, `out=`) gave its data."""
    if type(tensor) is not tensor_types.tensor_class:
        return
    data = _data(tensor)
    if meta_of(tensor) == meta_of(data):
        return
    tensor_types.become(tensor, tensor_types.concrete(data))


PACK = torch.ops.aten._pack_padded_sequence.default


def _result_of(request: Request, result: Any, lazy_of: dict[int, torch.Tensor], wraps: bool) -> Any:
    """`_returned`, for the call of any op."""
    returned = _returned(result, lazy_of, wraps)
    # The C++ of its backward reads the sizes of batches before any mode is asked.
    return (returned[0], result[1]) if request.op is PACK else returned


def _returned(result: Any, lazy_of: dict[int, torch.Tensor], wraps: bool) -> Any:
    """`result` for the caller: arguments come back as the same objects, new tensors are lazy if
    `wraps`."""
    if isinstance(result, torch.Tensor):
        if id(result) in lazy_of:
            return lazy_of[id(result)]
        if not is_recordable(result):
            share_with_parts(lazy_of.values())
            return result
        return tensor_types.concrete(result) if wraps and is_plain(result) else result
    if isinstance(result, (list, tuple)):
        items = [_returned(item, lazy_of, wraps) for item in result]
        return items if isinstance(result, list) else tuple(items)
    return result
