"""Memory that plans use again: large blocks, kept by an allocator of torch's for the CPU.

In: the wish to use it. Out: inside `using()` a thread's allocations come from blocks that were
freed before, and go back to them. `pool.cpp` says how much is kept; it is compiled at first use, in
about a second, and kept on disk as kernels are.
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
"""Bytes: twice the least that the pool keeps, so that it and the C library keep all sizes."""
QUIET_S = 1.0
"""Time without a run after which the system may take the pages of kept blocks if it needs them."""


class _Using:
    """`with` it: this thread's allocations are pooled."""

    def __init__(self, library: Any) -> None:
        self._enter = library.lazy_tensor_pool_enter
        self._leave = library.lazy_tensor_pool_leave

    def __enter__(self) -> None:
        self._enter()

    def __exit__(self, *exception: object) -> None:
        self._leave()


class Pool:
    """The process's pool. Nothing is pooled until `ask_for` has brought it in."""

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
        """Load or compile it: in a thread, or at once if `wait`. The first call counts."""
        self._extension.ask_for(disk, wait=wait)

    def ask_disk(self, disk: Disk | None) -> None:
        """Load it now if it was compiled before; the first call counts."""
        self._extension.ask_disk(disk)

    def using(self) -> AbstractContextManager[None]:
        """A context in which this thread's large allocations are pooled, if the pool is there."""
        return self._using

    def clear(self) -> None:
        """Give what is kept back to the system."""
        if self._library is not None:
            self._library.lazy_tensor_pool_clear()

    def info(self) -> CacheInfo:
        """Blocks served from what was kept and not, bytes held at most, and bytes kept now."""
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

    glibc gives freed memory at the end of its heap back beyond a threshold: twice the size of the
    largest block that it ever mapped apart and got back (mallopt(3), M_MMAP_THRESHOLD). A step of
    many small tensors then touches fresh pages each time, 20,000 of them where 64 ops compute
    2 MiB each, three quarters of the step, unless the program once freed a large block. So one is
    freed here; nobody touches its pages. Thresholds that the user has set stay.
    """
    library = ctypes.CDLL(None)
    library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
    library.free(library.malloc(LARGEST_LEARNT))


def _offer(library: Any) -> None:
    while True:
        time.sleep(QUIET_S)
        library.lazy_tensor_pool_offer_if_quiet()
