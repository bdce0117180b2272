"""The adapter to Inductor's C++ compiler: one shared library for all kernels of a graph.

In: the C++ that Inductor generates for each kernel while a `Unit` is entered. Out: the library's
bytes. Checked with torch 2.13, as `torch_inductor` is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from lazy_tensor.kernels.backends.torch_inductor import private, settings


class Unit:
    """Collects the C++ of kernels to compile it as one file, which reads the headers once.

    Within `with unit:`, Inductor adds its kernels to the unit instead of compiling them.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []

    def __enter__(self) -> None:
        self._codecache.load_async = self._add_text

    def __exit__(self, *_: object) -> None:
        # torch's own method, in the base class, is visible again
        del self._codecache.load_async

    @property
    def _codecache(self) -> Any:
        return private("torch._inductor.codecache", "CppPythonBindingsCodeCache")

    def _add_text(self, text: str, *_: Any, **__: Any) -> Callable[[], ModuleType]:
        """Keep the C++ text of an extension module, and return a stand-in for the module.

        In place of the kernel the stand-in has the kernel's name in the library.
        """
        module = ModuleType("kernel")
        module.kernel = f"kernel_{len(self._texts)}"  # type: ignore[attr-defined]
        self._texts.append(text)
        return lambda: module

    def compile(self) -> bytes:
        """The bytes of the shared library of all kernels that were added; no bytes without any."""
        if not self._texts:
            return b""
        with private("torch._inductor.config", "patch")(settings()):
            return self._compile()

    def _compile(self) -> bytes:
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
    """One C++ text from those of several extension modules, each of which defines `kernel`.

    Macros rename these to `kernel_0` and so on, and namespaces separate the other names. The
    modules' Python bindings are left out.
    """
    lines = [text.partition(_BINDINGS)[0].splitlines() for text in texts]
    includes = dict.fromkeys(line for text in lines for line in text if _is_include(line))
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
"""The first line of the Python bindings in the text of an extension module."""


def _is_include(line: str) -> bool:
    return line.lstrip().startswith("#include")
