"""Writes to overlapping memory, which kernels refuse and meta functions let pass.

In: a call whose tensors have slots. Out: whether eager should have the word at once, so that its
error comes at the user's line.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch.admit import slot_of
from lazy_tensor.dispatch.meta import meta_of
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
            root = trace.root_of(_index(trace, written))
            if any(
                trace.root_of(_index(trace, t)) == root and _collide(written, t, request.op)
                for t in others
            ):
                return True
    return False


def copies_onto_itself(trace: Trace, request: Request) -> bool:
    """Whether a call that no meta function takes copies memory onto itself in another shape.

    `matmul(out=)` does, where it does not see, for wrappers hide it, that the result is in `out`.
    """
    if request.op is not COPY or len(request.tensors) != 2:
        return False
    to, source = request.tensors
    return (
        to.numel() == source.numel()
        and to.dtype == source.dtype
        and to.storage_offset() == source.storage_offset()
        and to.is_contiguous()
        and source.is_contiguous()
        and trace.root_of(_index(trace, to)) == trace.root_of(_index(trace, source))
    )


def _index(trace: Trace, tensor: torch.Tensor) -> int:
    slot = slot_of(trace, tensor)
    assert slot is not None, "tensors are admitted before the trie grows"
    return slot.index


def _collide(written: torch.Tensor, other: torch.Tensor, op: OpOverload) -> bool:
    """Whether two tensors on one storage overlap in a way that kernels refuse."""
    if not all(is_dense(t.shape, t.stride()) for t in (written, other)):
        return False  # "too hard" to tell, says torch, and goes on
    first, last = written.storage_offset(), written.storage_offset() + written.numel()
    its_first, its_last = other.storage_offset(), other.storage_offset() + other.numel()
    if (first, last) == (its_first, its_last) and written.stride() == other.stride():
        return op is not COPY and torch.Tag.pointwise not in op.tags
    return first < its_last and its_first < last


def is_dense(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill a stretch of memory, each place once."""
    expected = 1
    for step, n in sorted(zip(stride, size, strict=True)):
        if n != 1:
            if step != expected:
                return False
            expected *= n
    return True
