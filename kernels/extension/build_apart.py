"""`python build_apart.py DIRECTORY KEY COMMAND...`: compile a library, keep it on disk under KEY.

A process of its own, which goes on when its parent ends: what takes ten seconds to compile would
else be begun anew by every program that ends before. It imports the standard library alone, as
torch takes seconds. Of several processes that want the same library one compiles it, the others
wait.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


def main(directory: str, key: str, *command: str) -> None:
    # what interrupts the program doesn't interrupt this. In a session of its own Linux would give
    # it as much as the program, nice or not (sched(7), "The autogroup feature")
    os.setpgrp()
    disk = _by_path("disk").Disk(Path(directory))
    with disk.alone_with([key]):
        if disk.get(key) is None:
            disk.put(key, compiled(command), "C++ of lazy_tensor")


class CompileError(RuntimeError):
    """What the compiler said."""


def compiled(command: Sequence[str]) -> bytes:
    """The library that `command` makes, which is told where with `-o`; or CompileError."""
    with tempfile.TemporaryDirectory(prefix="lazy_tensor_") as folder:
        target = Path(folder) / "extension.so"
        answer = subprocess.run(
            [*command, "-o", str(target)], capture_output=True, text=True, check=False
        )
        if answer.returncode:
            raise CompileError(answer.stderr.strip())
        return target.read_bytes()


def _by_path(name: str) -> ModuleType:
    """A module of `kernels`, without the package, which imports torch."""
    path = Path(__file__).parents[1] / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(*sys.argv[1:])
