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

from lazy_tensor.kernels.disk import Disk
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


class Pool:
    """The process's pool. Nothing is pooled before `ask_for` or `ask_disk` has loaded the C++."""

    def __init__(self) -> None:
        self._extension = Extension(cpp.POOL.path, cpp.POOL.libraries, self._use)
        self._library: Any = None
        self._using: AbstractContextManager[None] = nullcontext()

    @property
    def status(self) -> str:
        """As `Extension.status`."""
        return self._extension.status

    @property
    def is_asked_for(self) -> bool:
        return self._extension.is_asked_for

    def ask_for(self, disk: Disk | None, *, wait: bool) -> None:
        """Load or compile it: in a thread, or at once if `wait`. See `Extension.ask_for`."""
        self._extension.ask_for(disk, wait=wait)

    def ask_disk(self, disk: Disk | None) -> None:
        """Load it now if it was compiled before. See `Extension.ask_disk`."""
        self._extension.ask_disk(disk)

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

    def _use(self, compiled: bytes) -> None:
        library = loaded(compiled, lambda path, _: ctypes.PyDLL(path))
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
    library = ctypes.CDLL(None)
    library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
    library.free(library.malloc(LARGEST_LEARNT))


def _offer(library: Any) -> None:
    """Offer kept pages to the system while no plan runs, for as long as the process lives."""
    while True:
        time.sleep(QUIET_S)
        library.lazy_tensor_pool_offer_if_quiet()
