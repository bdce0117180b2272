"""Shared libraries that lie in memory, loaded.

In: bytes. Out: what a loader makes of a path that nobody has seen before and that is gone again.
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from typing import TypeVar

T = TypeVar("T")

_serial = itertools.count()


def loaded(library: bytes, load: Callable[[str, str], T]) -> T:
    """What `load(path, name)` makes of a shared library that lies in memory."""
    # dlopen needs a file, and a path it has never seen; once it is mapped, the file may go
    name = f"lazy_tensor_kernel_{next(_serial)}"
    path = os.path.join(own_folder(), f"{os.getpid()}_{name}.so")
    with open(path, "xb") as file:
        file.write(library)
    try:
        return load(path, name)
    finally:
        os.unlink(path)


@cache
def own_folder() -> str:
    """A directory that only this user can read or write, removed at exit."""
    directory = tempfile.mkdtemp(prefix="lazy_tensor_")
    owner = os.getpid()

    def remove() -> None:
        # a forked child runs this too
        if os.getpid() == owner:
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    return directory
