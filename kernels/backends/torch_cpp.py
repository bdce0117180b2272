"""The adapter to Inductor's C++ compiler: one shared library for all kernels of a graph.

In: the C++ that Inductor generates for each kernel, which it hands over within a `Unit`. Out: the
library's bytes. Checked with torch 2.13, as `torch_inductor` is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from lazy_tensor.kernels.backends.torch_inductor import private, settings


class Unit:
    """Collects the C++ of kernels, to compile it as one file, whose headers are read once.

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
        # as `CppCodeCache.load_async` has them
        options = private("torch._inductor.cpp_builder", "CppTorchDeviceOptions")(
            vec_isa=private("torch._inductor.cpu_vec_isa", "pick_vec_isa")(),
            device_type="cpu",
            include_pytorch=False,  # kernels don't need libtorch
        )
        folder = private("torch._inductor.runtime.cache_dir_utils", "cache_dir")()
        with TemporaryDirectory(dir=folder) as path:
            source = Path(path) / "unit.cpp"
            source.write_text(unit_of(self._texts))
            builder = private("torch._inductor.cpp_builder", "CppBuilder")(
                name="unit", sources=str(source), BuildOption=options, output_dir=path
            )
            builder.build()
            return Path(builder.get_target_file_path()).read_bytes()


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
