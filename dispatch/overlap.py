"""Writes to overlapping memory, which kernels refuse and meta functions let pass.

In: a call whose tensors have slots. Out: whether eager should have the word at once, so that its
error comes at the user's line.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch import host, torch_private
from lazy_tensor.dispatch.admit import index_of, is_plain, slot_of
from lazy_tensor.dispatch.closed_others import broadcast
from lazy_tensor.dispatch.meta import is_dense, meta_of
from lazy_tensor.dispatch.request import Request
from lazy_tensor.dispatch.trace import Trace

COPY = torch.ops.aten.copy_.default


def overlaps(trace: Trace, request: Request) -> bool:
    """Whether eager may refuse the call for what its writes overlap.

    The rules of `at::assert_no_internal_overlap` and `at::assert_no_overlap`, see
    aten/src/ATen/MemoryOverlap.cpp.
    """
    for written in request.written():
        size, stride, *_ = meta_of(written)
        if any(n > 1 and step == 0 for n, step in zip(size, stride, strict=True)):
            return True
        others = list(request.tensors)
        del others[next(i for i, t in enumerate(others) if t is written)]
        if others and written.numel():
            root = trace.root_of(index_of(trace, written))
            if any(
                trace.root_of(index_of(trace, t)) == root and _collide(written, t, request.op)
                for t in others
            ):
                return True
    return False


def copies_onto_itself(trace: Trace, request: Request) -> bool:
    """Whether the call copies memory onto itself in a shape that nothing can be copied to.

    `matmul(out=)` does, where it does not see, for wrappers hide it, that the result is in `out`.
    """
    if len(request.tensors) != 2:
        return False
    to, source = request.tensors
    return (
        source.dim() < to.dim()
        and to.numel() == source.numel()
        and to.dtype == source.dtype
        and broadcast([tuple(to.shape), tuple(source.shape)]) != tuple(to.shape)
        and to.storage_offset() == source.storage_offset()
        and to.is_contiguous()
        and source.is_contiguous()
        and _owner(trace, to) == _owner(trace, source)
    )


def _owner(trace: Trace, tensor: torch.Tensor) -> object:
    """What tells whose memory a tensor has: a slot of the trace, or the storage."""
    slot = slot_of(trace, tensor)
    if slot is not None:
        return trace.root_of(slot.index)
    data = tensor if is_plain(tensor) else host.value_in(tensor).data
    assert data is not None, "what has no slot is computed"
    storage = torch_private.storage_id(data)
    first = trace.storages.get(storage)
    return ("storage", storage) if first is None else trace.root_of(first)


def _collide(written: torch.Tensor, other: torch.Tensor, op: OpOverload) -> bool:
    """Whether two tensors on one storage overlap in a way that kernels refuse."""
    if not all(is_dense(t.shape, t.stride()) for t in (written, other)):
        return False  # "too hard" to tell, says torch, and goes on
    (first, last), (its_first, its_last) = _bytes(written), _bytes(other)
    if (first, last) == (its_first, its_last) and written.stride() == other.stride():
        return op is not COPY and torch.Tag.pointwise not in op.tags
    return first < its_last and its_first < last


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Where in its storage a dense tensor begins and ends."""
    first = int(tensor.storage_offset()) * tensor.itemsize
    return first, first + tensor.numel() * tensor.itemsize
