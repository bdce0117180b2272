"""The adapter to Inductor's C++ compiler: one shared library for the kernels of several graphs.

In: the C++ that Inductor generates for each kernel, which it hands over within a `Unit`. Out: the
library's bytes. Checked with torch 2.13, as `torch_inductor` is.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from lazy_tensor.kernels.backends.torch_inductor import private, settings
from lazy_tensor.kernels.extension.cpp import built_for, compiler_identity


class Unit:
    """Collects the C++ of graphs, to compile it as one file, whose headers are read once.

    While it is entered (`with unit:`), Inductor's kernels are added to it instead of being
    compiled.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []

    def __enter__(self) -> None:
        self._codecache.load_async = self._put

    def __exit__(self, *_: object) -> None:
        # torch's own method is in the base class, and is found again
        del self._codecache.load_async

    @property
    def _codecache(self) -> Any:
        return private("torch._inductor.codecache", "CppPythonBindingsCodeCache")

    def _put(self, text: str, *_: Any, **__: Any) -> Callable[[], ModuleType]:
        """Keep the C++ text of an extension module, and return a stand-in for the module.

        In place of the kernel it has the name under which `compile` will compile it.
        """
        module = ModuleType("kernel")
        module.kernel = f"kernel_{len(self._texts)}"  # type: ignore[attr-defined]
        self._texts.append(text)
        return lambda: module

    def compile(self) -> bytes:
        """Compile all kernels that were added; the bytes of the shared library, none without a
        kernel."""
        if not self._texts:
            return b""
        with private("torch._inductor.config", "patch")(settings()):
            return self._compiled()

    def _compiled(self) -> bytes:
        header, options = PrecompiledHeader(), _options()
        with TemporaryDirectory(dir=_folder("cache_dir")) as path:
            if header.is_there():
                options.precompiled_header = str(header.path)
            source = Path(path) / "unit.cpp"
            source.write_text(unit_of(self._texts))
            builder = _builder("unit", source, options, path)
            builder.build()
            header.make()
            return Path(builder.get_target_file_path()).read_bytes()


def _options(*, precompiling: bool = False) -> Any:
    """The options of the C++ compiler for Inductor's kernels, as `CppCodeCache.load_async` has
    them."""
    return private("torch._inductor.cpp_builder", "CppTorchDeviceOptions")(
        vec_isa=private("torch._inductor.cpu_vec_isa", "pick_vec_isa")(),
        device_type="cpu",
        include_pytorch=False,  # kernels don't need libtorch
        precompiling=precompiling,
    )


def _folder(name: str) -> str:
    """One of Inductor's folders: `cache_dir`, which may be set, or `default_cache_dir`."""
    found: str = private("torch._inductor.runtime.cache_dir_utils", name)()
    return found


def _builder(name: str, source: Path, options: Any, folder: str = "") -> Any:
    builder = private("torch._inductor.cpp_builder", "CppBuilder")
    return builder(name=name, sources=str(source), BuildOption=options, output_dir=folder)


class PrecompiledHeader:
    """Inductor's header for kernels, as the compiler has read it: a file of 150 MB.

    To read the header takes three seconds of each compilation, and to make the file nine. So the
    first kernel on a machine doesn't wait for it. (torch makes it first, and has the preprocessor
    read the header each time to find its name.) It is in the temporary folder of this user that
    torch has its own in, for all programs.
    """

    BEHIND_BUILDS = 5
    """How much nicer than builds of kernels the process is. Much more, and it would get hardly
    anything of busy cores."""
    MAKING_LASTS_S = 600.0
    """Seconds after which a file that is being made is taken for given up."""

    def __init__(self) -> None:
        self._text = private("torch._inductor.codecache", "_get_cpp_prefix_header")("cpu")
        self._options = _options(precompiling=True)
        command = _builder("", Path(), self._options).get_command_line()
        parts = self._text, command, compiler_identity(), *built_for()
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        self._folder = Path(_folder("default_cache_dir"), "lazy_tensor_headers")
        self.path = self._folder / f"{key[:32]}.h"
        self._file = Path(self._maker(str(self.path)).get_target_file_path())

    def _maker(self, name: str) -> Any:
        return _builder(name, self.path, self._options)

    def is_there(self) -> bool:
        """Whether it is there, in a folder that nobody but this user can write."""
        try:
            status = self._folder.stat()
            return (
                self._file.exists() and status.st_uid == os.getuid() and not status.st_mode & 0o77
            )
        except OSError:
            return False

    def make(self) -> None:
        """Have it made, if it isn't there, by a process of less priority, which may outlive this
        one."""
        made = self.path.with_suffix(".making")
        with suppress(OSError):
            if self._file.exists() or time.time() - made.stat().st_mtime < self.MAKING_LASTS_S:
                return
        # Inductor's command has paths without quotes
        if any(map(str.isspace, str(self.path))):
            return
        maker = self._maker(str(made))
        ending = f"mv {maker.get_target_file_path()} {self._file} && rm {made}"
        steps = shlex.quote(f"{maker.get_command_line()} && {ending}")
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.write_text(f"#include <{self._text}>\n")
            made.touch()
            subprocess.run(
                ["sh", "-c", f"nice -n {self.BEHIND_BUILDS} sh -c {steps} &"],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip


def unit_of(texts: Sequence[str]) -> str:
    """One C++ text out of those of several extension modules, all of which define `kernel`.

    Macros rename them to `kernel_0` and so on, and namespaces keep their other names apart. What
    lets Python load a module is left out.
    """
    lines = [text.partition(_BINDINGS)[0].splitlines() for text in texts]
    includes = dict.fromkeys(one for text in lines for one in text if _is_include(one))
    unit = [*includes]
    for i, text in enumerate(lines):
        unit += [
            f"#define kernel kernel_{i}",
            f"namespace unit_{i} {{",
            *(line for line in text if not _is_include(line)),
            "}",
            "#undef kernel",
        ]
    return "\n".join(unit)


_BINDINGS = "// Python bindings to call kernel():"
"""Begins the part of an extension module that is for Python."""


def _is_include(line: str) -> bool:
    return line.lstrip().startswith("#include")
