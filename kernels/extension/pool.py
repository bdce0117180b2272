"""Memory that plans use again: large CPU blocks, kept when they are freed.

`POOL` is the process's pool. Inside `POOL.using()` a thread's large allocations come from blocks
that were freed before, instead of from the system. `pool.cpp` says how much is kept. It is
compiled at first use, in about a second. Flushes and captured calls run plans inside `using()`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from functools import _CacheInfo as CacheInfo
from typing import Any

import torch

from lazy_tensor.kernels.extension import cpp
from lazy_tensor.kernels.extension.extension import Extension
from lazy_tensor.kernels.library import loaded

LARGEST_LEARNT = (8 << 20) - (64 << 10)
"""Bytes of the block that `keep_freed_heap` frees: the C library then keeps the memory of smaller
blocks. It is twice the least that the pool keeps, so that no size is left out."""
QUIET_S = 1.0
"""Time without a run after which the system may take the pages of kept blocks if it needs them."""


class _Using:
    """A context in which this thread's allocations are pooled. May be nested."""

    def __init__(self, library: Any) -> None:
        self._enter = library.lazy_tensor_pool_enter
        self._leave = library.lazy_tensor_pool_leave

    def __enter__(self) -> None:
        self._enter()

    def __exit__(self, *exception: object) -> None:
        self._leave()


class Pool(Extension):
    """The process's pool. Nothing is pooled before the C++ is loaded."""

    def __init__(self) -> None:
        super().__init__(cpp.POOL, self._install)
        self._library: Any = None
        self._using: AbstractContextManager[None] = nullcontext()

    def using(self) -> AbstractContextManager[None]:
        """A context in which this thread's large allocations are pooled, if the C++ is loaded."""
        return self._using

    def clear(self) -> None:
        """Return all memory that is kept to the system."""
        if self._library is not None:
            self._library.lazy_tensor_pool_clear()

    def info(self) -> CacheInfo:
        """Allocations from kept blocks (hits) and from fresh pages (misses), the bytes that may be
        kept and in use together at most (maxsize), and the bytes kept now (currsize)."""
        if self._library is None:
            return CacheInfo(0, 0, 0, 0)
        counts = (ctypes.c_uint64 * 4)()
        self._library.lazy_tensor_pool_counts(counts)
        return CacheInfo(*counts)

    def _install(self, compiled: bytes) -> None:
        library = loaded(compiled, ctypes.PyDLL)
        library.lazy_tensor_pool_install()
        self._library, self._using = library, _Using(library)
        threading.Thread(target=_offer, args=(library,), daemon=True).start()


POOL = Pool()


def keep_freed_heap() -> None:
    """Have the C library keep some of the heap that is freed.

    glibc returns freed memory at the end of its heap to the system, beyond a threshold. That is
    twice the size of the largest block that it mapped on its own and that was freed (mallopt(3),
    M_MMAP_THRESHOLD). Without such a block, a step of many small tensors touches fresh pages each
    time: 20,000 of them where 64 ops compute 2 MiB each, which takes three quarters of the step. So
    one block is freed here; nobody touches its pages. Thresholds that the user has set stay.
    """
    torch.UntypedStorage(LARGEST_LEARNT, device="cpu")


def _offer(library: Any) -> None:
    """Offer kept pages to the system while no plan runs, for as long as the process lives."""
    while True:
        time.sleep(QUIET_S)
        library.lazy_tensor_pool_offer_if_quiet()
