"""Lets the tensors of a call enter a trace: each gets a slot, computed ones as leaves.

In: a call that is no hit. Out: each of its tensors has a slot, or the reason to run the call now.
Called by `recorder` and by the calls of sharded tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.metadata.infer import Meta, is_marked, is_recordable, meta_of
from lazy_tensor.dispatch.ops.request import Request
from lazy_tensor.dispatch.run import flush, input_snapshots
from lazy_tensor.dispatch.run.failure import without_frames
from lazy_tensor.dispatch.trie import memory_sharing, tensor_types, trace as traces
from lazy_tensor.dispatch.trie.trace import Leaf, Slot, State, Trace, Value, claimed
from lazy_tensor.dispatch.wording import with_article
from lazy_tensor.kernels.segment import TensorSpec

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def is_plain(tensor: Any) -> bool:
    return type(tensor) in PLAIN


def slot_of(trace: Trace, tensor: torch.Tensor) -> Slot | None:
    """The tensor's slot in `trace`; None if it has none yet, or if traces don't hold its class.

    A value that is pending in another thread's trace is computed first.
    """
    if is_plain(tensor):
        return trace.leaf_slots.get(id(tensor)) or trace.snapshot_slots.get(id(tensor))
    if not isinstance(tensor, tensor_types.ValueTensor):
        return None
    slot = tensor_types.value_in(tensor).slot
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
    """Flush another thread's trace, while that thread is kept out of it."""
    with claimed(other, trace):
        flush.flush(other, "used by another thread")


def is_tiny(trace: Trace, args: tuple[Any, ...]) -> bool:
    """Whether `args` hold a tensor, and only plain 0-dim CPU ones that nothing pending uses.

    The short way for what optimizers do to the step count of every parameter. `_admit` finds the
    other calls that are as small.
    """
    found = False
    for argument in args:
        if type(argument) is torch.Tensor:
            if argument.dim() or not argument.is_cpu or not is_recordable(argument):
                return False
            if trace.storages and torch_private.storage_id(argument) in trace.storages:
                return False
            found = True
        elif type(argument) not in _NUMBERS:
            return False
    return found


_NUMBERS = frozenset({int, float, bool})


def _leaf_key(meta: Meta, shares: int | None) -> tuple[Any, ...]:
    """The key of the state for a new leaf; `shares` is the slot of its storage's first leaf."""
    # An offset may vary from run to run, so only whether there is one counts. Views of the leaf are
    # moved by `State.offset_fixup`.
    size, stride, offset, dtype, device = meta
    return ("leaf", size, stride, bool(offset), dtype, device, shares)


def admit(trace: Trace, request: Request) -> str | None:
    """Give each tensor of the call a slot; or change nothing and say why the call must run now."""
    # Waiting for another thread releases this thread's trace, which may be flushed meanwhile. Or
    # the other thread makes a value a leaf of its own trace first. Then try again.
    while True:
        reason = _admit(trace, request)
        if reason is not None or all(is_in(trace, tensor) for tensor in request.tensors):
            return reason


def is_in(trace: Trace, tensor: torch.Tensor) -> bool:
    """Whether the tensor has a slot in `trace`."""
    if is_plain(tensor):
        return id(tensor) in trace.leaf_slots or id(tensor) in trace.snapshot_slots
    slot = tensor_types.value_in(tensor).slot
    return slot is not None and slot.trace is trace


def _admit(trace: Trace, request: Request) -> str | None:
    """One attempt of `admit`; a slot may be missing afterwards if another thread came between."""
    # All tensors are looked at before the first one enters: a refused call must change nothing.
    newcomers: dict[int, torch.Tensor] = {}  # by id(): the call may name a tensor twice
    all_tiny = bool(request.tensors)
    written = {id(t) for t in request.written()}
    for tensor in request.tensors:
        may_copy = id(tensor) not in written and input_snapshots.serve(request.facts, tensor)
        if type(tensor) is tensor_types.tensor_class:
            slot = tensor._value.slot
            if slot is not None and slot.trace is trace:
                all_tiny = False
                continue
            # Ops on plain tensors outside the mode aren't seen. Such an op would miss a pending
            # write to shared memory, and a recorded view would miss what the op writes.
            aliases = request.facts.is_view or id(tensor) in written
            aliases = aliases and not request.in_mode
            reason = _reason_against_lazy(trace, tensor, aliases, may_copy)
        elif id(tensor) in trace.leaf_slots:
            all_tiny = False
            continue
        else:
            reason = _reason_against_plain(trace, tensor, request.in_mode, may_copy)
        if reason is not None:
            return reason
        newcomers[id(tensor)] = tensor
        all_tiny = all_tiny and not tensor.dim() and tensor.is_cpu
    if all_tiny and trace.tape is None:
        return ALL_TINY
    if not request.in_mode and any(is_plain(t) for t in request.written()):
        return "a plain tensor is written outside lazy_mode"
    if not request.in_mode and request.facts.is_view and is_plain(request.tensors[0]):
        return "a plain tensor is viewed outside lazy_mode"
    # A plain tensor outside the mode enters anew for each call: it may have been written, unseen,
    # since its last snapshot. Two lazy ones may have one value, which enters once.
    for tensor in newcomers.values():
        if slot_of(trace, tensor) is None or (is_plain(tensor) and not request.in_mode):
            enter(trace, tensor, request.in_mode)
    return None


def _reason_against_lazy(
    trace: Trace, tensor: torch.Tensor, aliases: bool, may_copy: bool
) -> str | None:
    """Why a computed lazy tensor can't enter, or None.

    `aliases`: outside the mode, the call writes the tensor or makes a view of it. `may_copy`: the
    call may read a copy. Raises the error that kept the value from being computed.
    """
    slot_of(trace, tensor)  # computes a value that another thread has recorded
    value = tensor_types.value_in(tensor)
    if value.failure is not None:
        raise without_frames(value.failure)
    assert value.data is not None, "what has no slot is computed"
    if is_marked(value.data):
        return "an argument is a conjugate or negative view of computed memory"
    if memory_sharing.is_externally_writable(value.data) and not (
        may_copy and input_snapshots.can_serve(trace, value.data)
    ):
        return "an argument's memory was handed out, to an array, say"
    if aliases and memory_sharing.is_shared(value.data):
        return "a plain tensor shares memory with an argument"
    return None


ALL_TINY = "all arguments are computed 0-dim CPU tensors"
SHARES_MEMORY = "an argument shares its memory with an array or a file"


def _reason_against_plain(
    trace: Trace, tensor: torch.Tensor, in_mode: bool, may_copy: bool
) -> str | None:
    """Why a tensor that isn't lazy can't enter, or None."""
    if not (is_plain(tensor) and is_recordable(tensor)) or is_marked(tensor):
        return f"an argument is {with_article(type(tensor).__name__)} that traces don't hold"
    if not _is_private(tensor, in_mode) and not (
        may_copy and input_snapshots.can_serve(trace, tensor)
    ):
        return SHARES_MEMORY
    return None


def _is_private(tensor: torch.Tensor, in_mode: bool) -> bool:
    """Whether the tensor may enter without a copy, as only torch writes its memory.

    Memory that an array or a file shares isn't private. Parameters count as private: nobody else
    writes weights that were loaded from a mapped file. Outside the mode all count: each plain
    tensor enters as a snapshot.
    """
    if not in_mode or type(tensor) is torch.nn.Parameter:
        return True
    return torch_private.is_resizable(tensor)


def enter(trace: Trace, tensor: torch.Tensor, in_mode: bool) -> None:
    """Make a computed tensor a leaf of the trace.

    If its memory can be written unseen, the tensor enters as it is now, for this call alone. Such
    writers are plain ops outside the mode, and whoever has an array on the memory.
    """
    plain = is_plain(tensor)
    data = tensor if plain else tensor_types.value_in(tensor).data
    assert data is not None, "only computed values enter a trace"
    is_foreign = (
        not _is_private(tensor, in_mode) if plain else memory_sharing.is_externally_writable(data)
    )
    passes = is_foreign or (not in_mode and (plain or memory_sharing.is_shared(data)))
    if is_foreign:
        slot = input_snapshots.known(trace, data) or _slot_of_new_copy(trace, data)
    else:
        data = torch_private.snapshot(data) if passes else data
        slot = _new_leaf(trace, data)
    if not plain:
        value = tensor_types.value_in(tensor)
        if traces.enter(value, slot) and passes:
            trace.one_call_inputs.append(value)
    elif in_mode:
        # `leaves`, or `copies`, keeps the tensor: no other one gets its id()
        trace.leaf_slots[id(tensor)] = slot
        if passes:
            trace.one_call_inputs.append(id(tensor))
    else:
        # the leaf is a snapshot, so the tensor itself must be kept: its id() is the key
        trace.kept.append(tensor)
        trace.snapshot_slots[id(tensor)] = slot


def _slot_of_new_copy(trace: Trace, tensor: torch.Tensor) -> Slot:
    """The slot of a new copy of memory that others may write."""
    copy = input_snapshots.copied(tensor)
    slot = _new_leaf(trace, copy)
    input_snapshots.keep(trace, tensor, copy, slot)
    return slot


def _new_leaf(trace: Trace, data: torch.Tensor) -> Slot:
    """The slot of a new leaf; the state for its metadata is made unless there is one."""
    meta, storage = meta_of(data), torch_private.storage_id(data)
    size, stride, offset, dtype, device = meta
    shares = trace.storages.get(storage)
    key = _leaf_key(meta, shares)
    state = trace.state.get(key)
    if state is None:
        spec = TensorSpec(tuple(size), tuple(stride), dtype, device)
        state = State(trace.state, key, Leaf(trace.state.n_slots, spec, shares))
        state.n_slots += 1
        similar = trace.similar_to(trace.state)
        found = None if similar is None else similar.get(key)
        trace.similar_path = None if found is None else (state, found)
        trace.state[key] = state
        trace.note_new(state)
    slot = trace.slot_at(state.n_slots - 1)
    trace.state = state
    trace.leaves.append(data)
    # the first leaf on a storage stands for it: `Trace.root_of` leads there
    trace.storages.setdefault(storage, slot.index)
    if offset:
        trace.leaf_offsets[slot.index] = offset * data.element_size()
    return slot


def leave(trace: Trace) -> None:
    """Take back the slots of tensors that entered for one call alone."""
    for one in trace.one_call_inputs:
        if isinstance(one, int):
            trace.leaf_slots.pop(one, None)
        else:
            one.slot = None
    trace.one_call_inputs.clear()


def value_of(trace: Trace, tensor: torch.Tensor) -> Value:
    """The tensor's value; a plain leaf gets a new one, on the leaf's slot and memory."""
    if not is_plain(tensor):
        return tensor_types.value_in(tensor)
    value = Value()
    value.slot = slot_of(trace, tensor)
    with torch_private.no_dispatch(), torch_private.below_autograd():
        value.data = tensor.detach()
    # the value shares memory with a plain tensor, whose ops outside the mode aren't seen
    memory_sharing.share(value.data)
    trace.leaf_values.append(value)
    return value
