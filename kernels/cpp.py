"""The C++ of this package: what compiles a file, and where one lies that was compiled before.

`python cpp.py` compiles all of it into `built` beside this file, as installing the package does
where torch and a compiler are. It imports torch and the standard library alone: at that time the
package can't be imported.
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
from pathlib import Path

import torch

FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-shared", "-fPIC")
BUILT = Path(__file__).with_name("built")


class Source:
    """A file, the headers that lie beside it, and the libraries of torch that it is linked to."""

    def __init__(self, path: Path, libraries: Sequence[str]) -> None:
        self.path = path
        self.libraries = libraries

    def key(self) -> str:
        """A name for what it is compiled to, which no other text, torch or Python has."""
        parts = (
            *(path.read_text() for path in (self.path, *sorted(self.path.parent.glob("*.h")))),
            *FLAGS,
            torch.__version__,
            sys.version,
            platform.machine(),
        )
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def command(self) -> list[str]:
        """What compiles it, but for where to. RuntimeError if nothing here does."""
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
        """What was compiled with the package, if that was for this torch and this Python."""
        path = BUILT / f"{self.key()}.so"
        return path.read_bytes() if path.exists() else None


HITS = Source(
    Path(__file__).parents[1] / "dispatch" / "native" / "module.cpp",
    ("c10", "torch_cpu", "torch_python"),
)
POOL = Source(Path(__file__).with_name("pool.cpp"), ("c10",))


def _compiler() -> str:
    if sys.platform != "linux":
        raise RuntimeError("it is for Linux only")
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise RuntimeError("there is no C++ compiler")


def build(directory: Path) -> None:
    """Compile what lies in `directory` for no other torch or Python yet, and nothing else stays."""
    directory.mkdir(parents=True, exist_ok=True)
    wanted = {directory / f"{source.key()}.so": source for source in (HITS, POOL)}
    for path in set(directory.glob("*.so")) - set(wanted):
        path.unlink()
    for path, source in wanted.items():
        if not path.exists():
            made = path.with_suffix(f".{os.getpid()}")
            subprocess.run([*source.command(), "-o", str(made)], check=True)
            made.replace(path)


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else BUILT)
