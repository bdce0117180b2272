"""Loads a shared library from bytes, by way of a temporary file.

In: the library's bytes, and a function that loads a path. Out: that function's result. Used for
kernels, for the package's C++, and for nvFuser's helper.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from typing import TypeVar

T = TypeVar("T")


def loaded(library: bytes, load: Callable[[str], T]) -> T:
    """Write `library` to a new file, return `load(path)`, and delete the file."""
    # dlopen needs a file. For a path that it knows it would return the library loaded before, so
    # each path is new. Once the library is mapped, the file can be deleted.
    with tempfile.NamedTemporaryFile(dir=own_folder(), suffix=".so") as file:
        file.write(library)
        file.flush()
        return load(file.name)


@cache
def own_folder() -> str:
    """A directory that only this user can read or write; removed when the process ends."""
    directory = tempfile.mkdtemp(prefix="lazy_tensor_")
    owner = os.getpid()

    def remove() -> None:
        # a forked child inherits the exit handler, but its parent still uses the directory
        if os.getpid() == owner:
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    return directory
