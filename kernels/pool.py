"""Memory that plans use again: large blocks, kept by an allocator of torch's for the CPU.

In: the wish to use it. Out: inside `using()` a thread's allocations come from blocks that were
freed before, and go back to them. `pool.cpp` says how much is kept; it is compiled at first use, in
about a second, and kept on disk as kernels are.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from functools import _CacheInfo as CacheInfo
from pathlib import Path
from typing import Any

import torch

from lazy_tensor.kernels.artifact import loaded
from lazy_tensor.kernels.disk import Disk, key_of

SOURCE = Path(__file__).with_name("pool.cpp")
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
    """The process's pool. Nothing is pooled until `ask_for` has brought it in.

    `status` is "not asked for", "compiling", "in use", or why there is none.
    """

    def __init__(self) -> None:
        self.status = "not asked for"
        self._lock = threading.Lock()
        self._library: Any = None
        self._using: AbstractContextManager[None] = nullcontext()

    @property
    def is_asked_for(self) -> bool:
        return self.status != "not asked for"

    def ask_for(self, disk: Disk | None, *, wait: bool) -> None:
        """Load or compile it: in a thread, or at once if `wait`. The first call counts."""
        if self.is_asked_for and not (wait and self.status == "compiling"):
            return
        if wait:
            self._obtain(disk)
        else:
            self.status = "compiling"
            name = "lazy_tensor-pool"
            threading.Thread(target=self._obtain, args=(disk,), daemon=True, name=name).start()

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

    def _obtain(self, disk: Disk | None) -> None:
        with self._lock:
            if self._library is not None:
                return
            try:
                library = loaded(_binary(disk), lambda path, _: ctypes.PyDLL(path))
            except Exception as error:
                self.status = f"it can't be compiled: {error}"
                return
            library.lazy_tensor_pool_install()
            self._library, self._using, self.status = library, _Using(library), "in use"
        watch = threading.Thread(target=_offer, args=(library,), daemon=True)
        watch.start()


POOL = Pool()


def _offer(library: Any) -> None:
    while True:
        time.sleep(QUIET_S)
        library.lazy_tensor_pool_offer_if_quiet()


def _binary(disk: Disk | None) -> bytes:
    """`pool.cpp` compiled: from disk, or now."""
    source, compiler = SOURCE.read_text(), _compiler()
    key = key_of("pool", source, torch.__version__, platform.machine())
    library = disk.get(key) if disk is not None else None
    if library is None:
        library = _compiled(compiler)
        if disk is not None:
            disk.put(key, library)
    return library


def _compiler() -> str:
    if sys.platform != "linux":
        raise RuntimeError("it is for Linux only")
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise RuntimeError("there is no C++ compiler")


def _gently() -> list[str]:
    """Run the command that follows behind the program, as compile workers do."""
    nice = shutil.which("nice")
    return [nice, "-n", "3"] if nice else []


def _compiled(compiler: str) -> bytes:
    """The shared library; RuntimeError with what the compiler said."""
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(prefix="lazy_tensor_") as directory:
        target = Path(directory) / "pool.so"
        answer = subprocess.run(
            [*_gently(), compiler, "-std=c++20", "-O2", "-shared", "-fPIC", f"-I{root / 'include'}",
             str(SOURCE), "-o", str(target), f"-L{root / 'lib'}", "-lc10"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if answer.returncode:
            raise RuntimeError(answer.stderr.strip())
        return target.read_bytes()
