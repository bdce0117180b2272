"""The C++ of this package: its sources, the commands that compile them, and their cache keys.

`python cpp.py` compiles all sources into `kernels/built`; `setup.py` runs it if torch and a
compiler are installed. So this file imports torch and the standard library alone: the package
can't be imported yet. `extension` uses `Source` to find what was compiled, or to compile it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-shared", "-fPIC")
BUILT = Path(__file__).parents[1] / "built"


@dataclass(frozen=True)
class Source:
    """A C++ file, the headers in its folder, and the libraries of torch that it is linked to."""

    path: Path
    libraries: Sequence[str]

    def key(self) -> str:
        """A name for the compiled library. It differs if the text of the file or of a header, the
        flags, torch, Python or the compiler does."""
        return self._key_but_for_the_compiler() + _digest(compiler_identity())[:16]

    def _key_but_for_the_compiler(self) -> str:
        texts = [path.read_text() for path in (self.path, *sorted(self.path.parent.glob("*.h")))]
        return _digest(*texts, *FLAGS, *built_for())[:48]

    def command(self) -> list[str]:
        """The command that compiles it, without the output's path.

        Raises RuntimeError if there is no compiler, or the system isn't Linux.
        """
        root = Path(torch.__file__).parent
        include = root / "include"
        includes = (include, include / "torch" / "csrc" / "api" / "include",
                    sysconfig.get_paths()["include"])  # fmt: skip
        return [
            _compiler(), *FLAGS,
            *(f"-I{path}" for path in includes), str(self.path),
            f"-L{root / 'lib'}", *(f"-l{library}" for library in self.libraries),
        ]  # fmt: skip

    def built(self) -> bytes | None:
        """The library that was compiled when the package was installed; None if there is none for
        this source, torch and Python.

        If a compiler is here, it must be the one that was used: another may have come since.
        Without one any will do, as nothing better can be made.
        """
        name = f"{self.key()}.so"
        if not compiler_identity():
            name = f"{self._key_but_for_the_compiler()}*.so"
        path = next(iter(sorted(BUILT.glob(name))), None)
        return None if path is None else path.read_bytes()

    def problem(self) -> str:
        """Why it can't be compiled on this machine, and what to do; "" if it can."""
        try:
            _compiler()
        except RuntimeError as error:
            return str(error)
        header = Path(sysconfig.get_paths()["include"]) / "Python.h"
        if not header.exists():
            return f"there is no {header} (install Python's headers: python3-dev, python3-devel)"
        return ""


HITS = Source(
    Path(__file__).parents[2] / "dispatch" / "native" / "module.cpp",
    ("c10", "torch_cpu", "torch_python"),
)
PROGRAM = Source(Path(__file__).with_name("program.cpp"), HITS.libraries)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def built_for() -> tuple[str, ...]:
    """The torch and the Python that compiled code is for: it runs with no others.

    torch's commit counts, because nightly and local builds may share a version. The suffix of
    extension modules names Python's binary interface.
    """
    return (
        torch.__version__,
        str(torch.version.git_version),
        sys.version,
        EXTENSION_SUFFIXES[0],
        platform.machine(),
    )


def compiler_identity() -> str:
    """The compiler's file, its size and when it was changed; "" without a compiler.

    ccache tells compilers apart in the same way. Asking the compiler for its version would start a
    process, which takes 16 ms at every start of a program.
    """
    path = found_compiler()
    if path is None:
        return ""
    path = os.path.realpath(path)
    status = os.stat(path)
    return f"{path} {status.st_size} {status.st_mtime_ns}"


def found_compiler() -> str | None:
    """The path of the compiler that the environment variable CXX names, or of an installed one."""
    names = filter(None, (os.environ.get("CXX"), "g++", "clang++"))
    return next(filter(None, map(shutil.which, names)), None)


def _compiler() -> str:
    if sys.platform != "linux":
        raise RuntimeError("the package's C++ is for Linux only")
    path = found_compiler()
    if path is None:
        raise RuntimeError("there is no C++ compiler (install g++, or name one in CXX)")
    return path


def build(directory: Path) -> None:
    """Compile all sources into `directory`, at once. What is there already for this torch, Python
    and compiler is kept; other libraries there are deleted.

    Raises CalledProcessError if a compiler fails, when all have ended.
    """
    directory.mkdir(parents=True, exist_ok=True)
    wanted = {directory / f"{source.key()}.so": source for source in (HITS, PROGRAM)}
    for path in set(directory.glob("*.so")) - set(wanted):
        path.unlink()
    running = []
    for path, source in wanted.items():
        if not path.exists():
            # under another name until it is complete: a program may look for it meanwhile
            made = path.with_suffix(f".{os.getpid()}")
            running.append((path, made, subprocess.Popen([*source.command(), "-o", str(made)])))
    for path, made, process in running:
        if process.wait() == 0:
            made.replace(path)
    for _, _, process in running:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else BUILT)
