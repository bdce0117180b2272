"""Memory that plans use again: large CPU blocks, kept when they are freed.

`pool.h` says how much is kept. It is part of the C++ that runs programs: a program whose results
are large allocates from blocks that were freed before, instead of from the system.
"""

from __future__ import annotations

from functools import _CacheInfo as CacheInfo

import torch

from lazy_tensor.kernels.extension import program

LARGEST_LEARNT = (8 << 20) - (64 << 10)
"""Bytes of the block that `keep_freed_heap` frees: the C library then keeps the memory of smaller
blocks. It is twice the least that the pool keeps, so that no size is left out."""


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same strides on the CPU, not initialized, in memory of the pool."""
    if program.native is None:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    made: torch.Tensor = program.native.empty_like(tensor)
    return made


def clear() -> None:
    """Return all memory that is kept to the system."""
    if program.native is not None:
        program.native.clear_memory()


def info() -> CacheInfo:
    """Allocations from kept blocks (hits) and from fresh pages (misses), the bytes that may be kept
    and in use together at most (maxsize), and the bytes kept now (currsize)."""
    counts = (0, 0, 0, 0) if program.native is None else program.native.memory_counts()
    return CacheInfo(*counts)


def keep_freed_heap() -> None:
    """Have the C library keep some of the heap that is freed.

    glibc returns freed memory at the end of its heap to the system, beyond a threshold. That is
    twice the size of the largest block that it mapped on its own and that was freed (mallopt(3),
    M_MMAP_THRESHOLD). Without such a block, a step of many small tensors touches fresh pages each
    time: 20,000 of them where 64 ops compute 2 MiB each, which takes three quarters of the step. So
    one block is freed here; nobody touches its pages. Thresholds that the user has set stay.
    """
    torch.UntypedStorage(LARGEST_LEARNT, device="cpu")
