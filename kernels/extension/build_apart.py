"""`python build_apart.py DIRECTORY KEY COMMAND...`: compile a library, keep it on disk under KEY.

`extension` starts this as a process of its own, which goes on when its parent ends. A library takes
ten seconds to compile, so without that a program that runs shorter would never have one. If several
processes want the same library, one compiles it and the others wait. This file imports the standard
library alone, because importing torch takes seconds.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(directory: str, key: str, *command: str) -> None:
    # A process group of its own, so that Ctrl-C in the program doesn't interrupt this. Not a
    # session of its own: Linux gives each session an equal share of the CPU, whatever the niceness
    # of its processes (sched(7), "The autogroup feature").
    os.setpgrp()
    # by its path: to import the package imports torch
    disk = module_at("disk", Path(__file__).parents[1] / "disk.py").Disk(Path(directory))
    with disk.alone_with(key):
        if disk.get(key) is None:
            disk.put(key, compiled(command), "C++ of lazy_tensor")


class CompileError(RuntimeError):
    """The compiler failed; the message is what it said."""


def compiled(command: Sequence[str]) -> bytes:
    """The library that the compiler `command` makes, to which `-o` and a path are added. Raises
    CompileError if it fails."""
    with tempfile.TemporaryDirectory(prefix="lazy_tensor_") as folder:
        target = Path(folder) / "extension.so"
        answer = subprocess.run(
            [*command, "-o", str(target)], capture_output=True, text=True, check=False
        )
        if answer.returncode:
            raise CompileError(answer.stderr.strip())
        return target.read_bytes()


def module_at(name: str, path: str | Path) -> Any:
    """The module `name`, loaded from a file."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "it is a file of Python's or an extension"
    assert spec.loader is not None, "it is a file of Python's or an extension"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(*sys.argv[1:])
