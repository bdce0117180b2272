"""A stand-in for a GPU: torch and nvFuser run on a machine that has none, all but their kernels.

    python tests/device/stand_in.py COMMAND...

runs a command with `cuda.cpp` preloaded: torch then finds one device like an H200, nvFuser compiles
kernels for it, and `asked()` tells what it was asked to do. Values computed on it mean nothing;
kernels, copies, waits, memory and errors do.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).with_name("cuda.cpp")
NAME = "libcuda.so.1"
"""Also what torch and Triton load as CUDA's driver."""
KINDS = {b"k": "kernel", b"c": "copy", b"f": "fill", b"s": "wait", b"l": "load"}


class Entry(NamedTuple):
    """What the device was asked for: one of `KINDS`, a kernel's mangled name, on which stream."""

    kind: str
    name: str
    stream: int


def is_loaded() -> bool:
    """Whether this process runs with the stand-in."""
    return hasattr(_loaded(), "stand_in_count")


@cache
def _loaded() -> Any:
    library = ctypes.CDLL(None)
    if hasattr(library, "stand_in_count"):
        library.stand_in_count.restype = ctypes.c_size_t
        library.stand_in_entry.restype = ctypes.c_char_p
        library.stand_in_entry.argtypes = [ctypes.c_size_t, ctypes.c_char_p, ctypes.c_void_p]
    return library


@contextmanager
def asked() -> Iterator[list[Entry]]:
    """Filled at the end of the block with what the device was asked for within, in order."""
    found: list[Entry] = []
    first = _loaded().stand_in_count()
    yield found
    kind, stream = ctypes.create_string_buffer(1), ctypes.c_size_t()
    for i in range(first, _loaded().stand_in_count()):
        name = _loaded().stand_in_entry(i, kind, ctypes.byref(stream))
        found.append(Entry(KINDS[kind.raw], name.decode(), stream.value))


def kernels(entries: list[Entry]) -> list[str]:
    """The names of the kernels among them."""
    return [entry.name for entry in entries if entry.kind == "kernel"]


def is_of_nvfuser(kernel: str) -> bool:
    return "nvfuser_" in kernel


def headers() -> Path:
    """The folder of CUDA's headers; FileNotFoundError where no build of torch for CUDA is."""
    triton = find_spec("triton")
    if triton is None or triton.origin is None:
        raise FileNotFoundError("CUDA's headers come with Triton, which is not installed")
    return Path(triton.origin).parent / "backends" / "nvidia" / "include"


def environment() -> dict[str, str]:
    """This process's environment with the stand-in preloaded; it is compiled if need be."""
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"lazy_tensor-stand-in-{os.getuid()}-{key}"
    library = folder / NAME
    if not library.exists():
        folder.mkdir(exist_ok=True)
        made = folder / f"{NAME}.{os.getpid()}"
        command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O2", "-Wall", "-shared", "-fPIC"]
        command += [f"-Wl,-soname,{NAME}", "-isystem", str(headers())]
        command += [str(SOURCE), "-o", str(made)]
        subprocess.run(command, check=True)
        made.rename(library)
    paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**os.environ, "LD_PRELOAD": str(library), "LD_LIBRARY_PATH": ":".join(paths)}


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python tests/device/stand_in.py COMMAND...")
    os.execvpe(sys.argv[1], sys.argv[1:], environment())
