"""Whether a call's tensors can be part of a trace, and their entry into it.

In: a call that no state knew. Out: each of its tensors has a slot, or the reason to run the call
now.
"""

from __future__ import annotations

from typing import Any

import torch

from lazy_tensor.dispatch import flush, host, memory, torch_private
from lazy_tensor.dispatch.meta import Meta, is_marked, is_recordable, meta_of
from lazy_tensor.dispatch.request import Request
from lazy_tensor.dispatch.trace import Leaf, Slot, State, Trace, Value, claim
from lazy_tensor.kernels.segment import TensorSpec

LEAF_S = 5e-6
"""What a new state for a leaf takes."""

PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_plain(tensor: Any) -> bool:
    return type(tensor) in PLAIN


def slot_of(trace: Trace, tensor: torch.Tensor) -> Slot | None:
    """The tensor's place in `trace`; None if it has none yet."""
    if is_plain(tensor):
        return trace.leaf_slots.get(id(tensor)) or trace.snapshot_slots.get(id(tensor))
    slot = host.value_in(tensor).slot
    if slot is not None and slot.trace is not trace:
        flush_foreign(trace, slot.trace)
        return None
    return slot


def index_of(trace: Trace, tensor: torch.Tensor) -> int:
    """The slot number of a tensor that was admitted."""
    slot = slot_of(trace, tensor)
    assert slot is not None, "tensors are admitted before the trie grows"
    return slot.index


def flush_foreign(trace: Trace, other: Trace) -> None:
    """Compute what another thread has recorded, with that thread kept out of its trace."""
    claim(other, trace)
    try:
        flush.flush(other, "used by another thread")
    finally:
        other.claimed = False


def is_tiny(trace: Trace, args: tuple[Any, ...]) -> bool:
    """Whether `args` hold no tensors but plain 0-dim CPU ones that nothing pending uses.

    The short way for what optimizers do to every parameter's step count; `admit` covers all else.
    """
    if not args or type(args[0]) is not torch.Tensor or args[0].dim() or not args[0].is_cpu:
        return False
    return all(
        type(a) in _NUMBERS
        or (
            type(a) is torch.Tensor
            and not a.dim()
            and a.is_cpu
            and is_recordable(a)
            and (not trace.storages or torch_private.storage_id(a) not in trace.storages)
        )
        for a in args
    )


_NUMBERS = frozenset({int, float, bool})


def admit(trace: Trace, request: Request) -> str | None:
    """Give each tensor of the call a slot; or change nothing and say why the call must run now."""
    newcomers: list[torch.Tensor] = []
    all_tiny = bool(request.tensors)
    for tensor in request.tensors:
        if type(tensor) is host.tensor_class:
            slot = tensor._value.slot
            if slot is not None and slot.trace is trace:
                all_tiny = False
                continue
            reason = _reason_against_lazy(trace, tensor, request)
        elif id(tensor) in trace.leaf_slots:
            all_tiny = False
            continue
        else:
            reason = _reason_against_plain(tensor, request.in_mode)
        if reason is not None:
            return reason
        newcomers.append(tensor)
        all_tiny = all_tiny and not tensor.dim() and tensor.is_cpu
    if all_tiny:
        return "all arguments are computed 0-dim CPU tensors"
    if not request.in_mode and any(is_plain(t) for t in request.written()):
        return "a plain tensor is written outside lazy_mode"
    for tensor in newcomers:
        if slot_of(trace, tensor) is None or (is_plain(tensor) and not request.in_mode):
            enter(trace, tensor, request.in_mode)
    return None


def _reason_against_lazy(trace: Trace, tensor: torch.Tensor, request: Request) -> str | None:
    """Why a computed lazy tensor can't enter; raises what kept it from being computed."""
    slot_of(trace, tensor)  # if another thread's trace has it, it is computed now
    value = host.value_in(tensor)
    if value.failure is not None:
        raise value.failure
    assert value.data is not None, "what has no slot is computed"
    if is_marked(value.data):
        return "an argument is a conjugate or negative view of computed memory"
    if memory.is_exposed(value.data):
        return "memory of an argument was handed out"
    aliases = request.facts.is_view or any(t is tensor for t in request.written())
    if aliases and not request.in_mode and memory.is_shared(value.data):
        return "a plain tensor shares memory with an argument"
    return None


def _reason_against_plain(tensor: torch.Tensor, in_mode: bool) -> str | None:
    if not (is_plain(tensor) and is_recordable(tensor)) or is_marked(tensor):
        return f"an argument is a {type(tensor).__name__} that traces don't hold"
    if not _is_private(tensor, in_mode):
        return "an argument's memory belongs to somebody else"
    return None


def _is_private(tensor: torch.Tensor, in_mode: bool) -> bool:
    """Whether only torch writes the tensor's memory (an array or a file may share it otherwise).

    Parameters count as private: weights loaded from a mapped file are not written behind our back.
    """
    if not in_mode or type(tensor) is torch.nn.Parameter:
        return True
    return torch_private.is_resizable(tensor)


def enter(trace: Trace, tensor: torch.Tensor, in_mode: bool) -> Slot:
    """Make a concrete tensor a leaf of the trace.

    Outside the mode one that plain ops can write enters as it is now, for one call: later writes to
    it won't pass through here.
    """
    plain = is_plain(tensor)
    data = tensor if plain else host.value_in(tensor).data
    assert data is not None, "only computed values enter a trace"
    is_snapshot = not in_mode and (plain or memory.is_shared(data))
    if is_snapshot:
        data = torch_private.snapshot(data)
    slot = _new_leaf(trace, meta_of(tensor), torch_private.storage_id(data))
    if not plain:
        value = host.value_in(tensor)
        value.slot = slot
        trace.leaf_values.append(value)
        if is_snapshot:
            trace.passing.append(value)
    elif in_mode:
        trace.leaf_slots[id(tensor)] = slot
    else:
        trace.kept.append(tensor)
        trace.snapshot_slots[id(tensor)] = slot
    trace.leaves.append(data)
    return slot


def _new_leaf(trace: Trace, meta: Meta, storage: int) -> Slot:
    """The slot of one more leaf; the trace takes the step to the state for its metadata."""
    size, stride, offset, dtype, device = meta
    shares = trace.storages.get(storage)
    key = ("leaf", size, stride, bool(offset), dtype, device, shares)
    state = trace.state.get(key)
    if state is None:
        spec = TensorSpec(tuple(size), tuple(stride), dtype, device)
        state = State(trace.state, key, Leaf(trace.state.n_slots, spec, shares))
        state.n_slots += 1
        trace.state[key] = state
        trace.budget.pay(LEAF_S)
    slot = trace.slot_at(state.n_slots - 1)
    trace.state = state
    trace.storages.setdefault(storage, slot.index)
    if offset:
        trace.leaf_offsets[slot.index] = offset
    return slot


def leave(trace: Trace) -> None:
    """Take away the slots of lazy tensors that entered for one call."""
    for value in trace.passing:
        value.slot = None
    trace.passing.clear()


def value_of(trace: Trace, tensor: torch.Tensor) -> Value:
    """The tensor's value; for a plain leaf a new one that shares its place and its memory."""
    if not is_plain(tensor):
        return host.value_in(tensor)
    value = Value()
    value.slot = slot_of(trace, tensor)
    with torch_private.no_dispatch(), torch_private.below_autograd():
        value.data = tensor.detach()
    trace.leaf_values.append(value)
    return value
