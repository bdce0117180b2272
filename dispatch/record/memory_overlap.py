"""Writes to overlapping memory, which kernels refuse and meta functions let pass.

In: a call whose tensors have slots. Out: whether eager should have the word at once, so that its
error comes at the user's line.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.metadata.infer import is_dense, meta_of
from lazy_tensor.dispatch.ops.request import Request
from lazy_tensor.dispatch.record.inputs import index_of, is_plain, slot_of
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.dispatch.trie.trace import Trace

aten = torch.ops.aten
COPY = aten.copy_.default
PRODUCTS = frozenset({aten.mm.out, aten.mm.out._op, aten.mv.out, aten.mv.out._op})
"""What `matmul(out=)` calls with a view of `out`, see `Trace.last_op`."""


def overlaps(trace: Trace, request: Request) -> bool:
    """Whether eager may refuse the call for what its writes overlap.

    The rules of `at::assert_no_internal_overlap` and `at::assert_no_overlap`, see
    aten/src/ATen/MemoryOverlap.cpp.
    """
    by_root: dict[int, list[torch.Tensor]] = {}
    for tensor in request.tensors:
        by_root.setdefault(trace.root_of(index_of(trace, tensor)), []).append(tensor)
    for written in request.written():
        size, stride, *_ = meta_of(written)
        if any(n > 1 and step == 0 for n, step in zip(size, stride, strict=True)):
            return True
        others = list(by_root[trace.root_of(index_of(trace, written))])
        del others[next(i for i, t in enumerate(others) if t is written)]
        if written.numel() and any(_collide(written, t, request.op) for t in others):
            return True
    return False


def is_there_already(trace: Trace, request: Request) -> bool:
    """Whether a `copy_` copies a product that `matmul(out=)` already has where it belongs.

    It copies, in another shape, unless `Tensor.is_alias_of` says no: storages, which wrappers hide.
    """
    if trace.last_op() not in PRODUCTS or len(request.tensors) != 2:
        return False
    to, source = request.tensors
    return (
        to.shape != source.shape
        and to.numel() == source.numel()
        and _owner(trace, to) == _owner(trace, source)
    )


def _owner(trace: Trace, tensor: torch.Tensor) -> object:
    """What tells whose memory a tensor has: a slot of the trace, or the storage."""
    slot = slot_of(trace, tensor)
    if slot is not None:
        return trace.root_of(slot.index)
    if not (is_plain(tensor) or isinstance(tensor, tensor_types.ValueTensor)):
        return id(tensor)  # of a class that traces don't hold
    data = tensor if is_plain(tensor) else tensor_types.value_in(tensor).data
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
        is_pointwise = torch.Tag.pointwise in op.tags or "_foreach_" in op._schema.name
        return op is not COPY and not is_pointwise
    return first < its_last and its_first < last


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Where in its storage a dense tensor begins and ends."""
    first = int(tensor.storage_offset()) * tensor.itemsize
    return first, first + tensor.numel() * tensor.itemsize
