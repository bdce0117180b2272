"""Memory that others may write at any time, arrays and files, as it was when a trace read it.

In: a tensor on such memory that an op reads. Out: the slot of its copy, which the trace keeps for
as long as nobody has written: each read compares, bit by bit, so none is stale.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.metadata.infer import is_dense, meta_of
from lazy_tensor.dispatch.ops.schema import OpFacts
from lazy_tensor.dispatch.trie.trace import Copy, Slot, Trace
from lazy_tensor.kernels.extension.pool import POOL

MOST_BYTES = 256 << 20
"""That a trace's copies may take; an op that wants more runs at once, where its memory lies."""
SMALL_BYTES = 1 << 20
"""That any op may have copied, which takes 0.1 ms: an op that runs at once parts what comes before
it from what comes after, and takes 0.2 ms of Python (a training step on a batch from NumPy)."""
PRODUCT_BYTES = 4 << 20
"""The same for matrix products, which take longer for each byte; a convolution takes so much longer
that it may have any memory copied."""
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})


def serve_op(facts: OpFacts) -> bool:
    """Whether the op may read copies: views share what they are of."""
    return not facts.is_view


def serve(facts: OpFacts, tensor: torch.Tensor) -> bool:
    """Whether the op may read a copy of the tensor: if that is large, only if eager takes as long
    for the op, as its results are as large. Others, which pick parts or sum up, run where the
    memory lies."""
    if not serve_op(facts):
        return False
    name = facts.op.overloadpacket.__name__
    if torch.Tag.pointwise in facts.op.tags or name in CONVOLUTIONS:
        return True
    most = PRODUCT_BYTES if name in PRODUCTS else SMALL_BYTES
    return tensor.numel() * tensor.dtype.itemsize <= most


def known(trace: Trace, tensor: torch.Tensor) -> Slot | None:
    """The slot of the tensor's latest copy, if the trace has one and it still agrees."""
    for copy in reversed(trace.copies.get(torch_private.storage_id(tensor), ())):
        if (
            copy.offset == tensor.storage_offset()
            and copy.data.dtype == tensor.dtype
            and copy.data.shape == tensor.shape
            and copy.data.stride() == tensor.stride()
        ):
            return copy.slot if _agree(tensor, copy.data) else None
    return None


def can_serve(trace: Trace, tensor: torch.Tensor) -> bool:
    """Whether the trace has a copy of the tensor, or can take one."""
    return known(trace, tensor) is not None or can_take(trace, tensor)


def can_take(trace: Trace, tensor: torch.Tensor) -> bool:
    """Whether the trace can take a copy of the tensor, or another one."""
    size, stride, _, dtype, device = meta_of(tensor)
    taken = sum(copy.data.nbytes for copies in trace.copies.values() for copy in copies)
    return (
        device.type == "cpu"
        and torch_private.storage_id(tensor) not in trace.storages  # a pending op may write it
        and _is_compact(size, stride)
        and taken + size.numel() * dtype.itemsize <= MOST_BYTES
    )


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the same strides, which `keep` is to be told of."""
    with torch_private.no_dispatch(), torch_private.below_autograd(), POOL.using():
        data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return data.copy_(tensor)


def keep(trace: Trace, tensor: torch.Tensor, data: torch.Tensor, slot: Slot) -> None:
    """Note that `slot` is that of `data`, a copy of `tensor`."""
    of_memory = trace.copies.setdefault(torch_private.storage_id(tensor), [])
    of_memory.append(Copy(tensor, meta_of(tensor)[2], data, slot))


def _is_compact(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether no two elements share memory, of which at most half is none of theirs."""
    end = 1
    for step, n in sorted(zip(stride, size, strict=True)):
        if n > 1:
            if step < end:
                return False
            end += step * (n - 1)
    return end <= 2 * math.prod(size)


def _agree(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether the bits are the same, which those of equal numbers need not be."""
    n_bytes = tensor.numel() * tensor.element_size()
    if is_dense(tensor.shape, tensor.stride()):
        return not _memcmp(tensor.data_ptr(), copy.data_ptr(), n_bytes)
    with torch_private.no_dispatch(), torch_private.below_autograd():
        return torch.equal(_bits(tensor), _bits(copy))


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers."""
    if tensor.dtype is torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
