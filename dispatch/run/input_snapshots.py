"""Copies of memory that others may write at any time: NumPy arrays, files, other processes.

In: a tensor on such memory that an op reads. Out: the slot of its copy, which the pending op reads
later in its place. A later read compares memory and copy bit by bit and takes the same slot if they
agree, so no read is stale. Called by `record.inputs`; C++ does the same for hits.
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
from lazy_tensor.kernels.extension.pool import empty_like

MOST_BYTES = 256 << 20
"""Bytes that all copies of a trace may take. An op that would need more runs at once instead."""
SMALL_BYTES = 1 << 20
"""Bytes that any op may have copied, in 0.1 ms. An op that runs at once takes 0.2 ms of Python and
cuts the trace in two. Such bytes are a batch from NumPy in a training step."""
PRODUCT_BYTES = 4 << 20
"""The same for matrix products, which compute longer for each byte than a copy does. A convolution
computes so much longer that memory of any size is copied for it."""
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})


def serve(facts: OpFacts, tensor: torch.Tensor) -> bool:
    """Whether the op may read a copy of the tensor.

    A view may not: it must show later writes to its base. A large tensor is copied only for ops
    that take long themselves: pointwise ops, whose results are as large, and products. An op that
    picks parts or sums up may take less time than the copy.
    """
    if facts.is_view:
        return False
    name = facts.op.overloadpacket.__name__
    if torch.Tag.pointwise in facts.op.tags or name in CONVOLUTIONS:
        return True
    most = PRODUCT_BYTES if name in PRODUCTS else SMALL_BYTES
    return tensor.numel() * tensor.dtype.itemsize <= most


def known(trace: Trace, tensor: torch.Tensor) -> Slot | None:
    """The slot of the tensor's latest copy, if the trace has one and it still agrees.

    None if the memory is a leaf, too: a parameter's, which a pending op may write.
    """
    if torch_private.storage_id(tensor) in trace.storages:
        return None
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
    if known(trace, tensor) is not None:
        return True
    size, stride, _, dtype, device = meta_of(tensor)
    taken = sum(copy.data.nbytes for copies in trace.copies.values() for copy in copies)
    return (
        device.type == "cpu"
        # memory that is a leaf already may be written by a pending op: a copy taken now lacks that
        and torch_private.storage_id(tensor) not in trace.storages
        and _is_compact(size, stride)
        and taken + size.numel() * dtype.itemsize <= MOST_BYTES
    )


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, so that ops give results of the same layout. The caller adds it
    to the trace by `keep`."""
    with torch_private.no_dispatch(), torch_private.below_autograd():
        return empty_like(tensor).copy_(tensor)


def keep(trace: Trace, tensor: torch.Tensor, data: torch.Tensor, slot: Slot) -> None:
    """Note in the trace that `data`, the value of `slot`, is a copy of `tensor`.

    The trace keeps `tensor` alive, else its storage's number could name another storage later.
    """
    of_memory = trace.copies.setdefault(torch_private.storage_id(tensor), [])
    of_memory.append(Copy(tensor, meta_of(tensor)[2], data, slot))


def _is_compact(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether no two elements share memory, and at most half of the memory spanned lies in gaps.

    A copy has the same strides, so it takes the gaps, too.
    """
    end = 1
    for step, n in sorted(zip(stride, size, strict=True)):
        if n > 1:
            if step < end:
                return False
            end += step * (n - 1)
    return end <= 2 * math.prod(size)


def _agree(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether the bits are the same. Comparing numbers would not do: 0.0 == -0.0, nan != nan."""
    n_bytes = tensor.numel() * tensor.element_size()
    if is_dense(tensor.shape, tensor.stride()):
        return not _memcmp(tensor.data_ptr(), copy.data_ptr(), n_bytes)
    with torch_private.no_dispatch(), torch_private.below_autograd():
        return torch.equal(_bits(tensor), _bits(copy))


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers, which `torch.equal` compares exactly."""
    if tensor.dtype is torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
