"""The adapter to nvFuser, and the only module that uses its names.

In: the lines of a definition. Out: `Fused`, an nvFuser fusion that can be run. It also tells
whether nvFuser can be used here, and if not, what to install. Checked with nvfuser_direct 0.2.36.
Importing this module doesn't import nvFuser.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.extension.cpp import Source
from lazy_tensor.kernels.extension.extension import Extension
from lazy_tensor.kernels.library import loaded
from lazy_tensor.kernels.nvfuser.definition import Line, V

MODULE = "nvfuser_direct"


@functools.cache
def problem() -> str | None:
    """Why nvFuser can't be used in this process, with what to install; None if it can."""
    if importlib.util.find_spec(MODULE) is None:
        return f"nvFuser is not installed; {_advice()}"
    _compile_in_the_calling_thread()
    try:
        importlib.import_module(MODULE)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return (
            f"{installed()} can't be loaded with torch {torch.__version__} ({reason}); {_advice()}"
        )
    return None


def _compile_in_the_calling_thread() -> None:
    """Keep nvFuser from compiling in its own thread pool, by an option in the environment.

    When a `c10::ThreadPool` finishes its work, it wakes only one of the threads that wait for it.
    So if two threads compile a fusion of several kernels at the same time, one of them would wait
    forever. nvFuser reads the option when it is imported.
    """
    disabled = os.environ.get("NVFUSER_DISABLE", "")
    if "parallel_compile" not in disabled:
        os.environ["NVFUSER_DISABLE"] = ",".join(filter(None, (disabled, "parallel_compile")))


def installed() -> str:
    """nvFuser's wheel and its version. They are part of an artifact's fingerprint."""
    wheels = {f"{d.name} {d.version}" for d in distributions() if (d.name or "")[:7] == "nvfuser"}
    return ", ".join(sorted(wheels)) or MODULE


def _advice() -> str:
    """The command that installs a torch and an nvFuser that fit, or why none do here."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "there are wheels for Linux on x86_64 only"
    if sys.version_info[:2] != (3, 12):
        return (
            f"this is Python {platform.python_version()}: use 3.12, then "
            f"pip install torch==2.10.0 {_wheel()}"
        )
    return f"pip install torch==2.10.0 {_wheel()}"


def _wheel() -> str:
    """The name of nvFuser's wheel for the CUDA version of the installed torch."""
    cuda = (torch.version.cuda or "12.8").split(".")[0]
    return "nvfuser-cu130-torch210" if cuda == "13" else "nvfuser-cu128-torch210"


class Fused:
    """An nvFuser fusion. `run(inputs)` takes tensors, then numbers, and returns its outputs.

    `kinds` are the dtypes that nvFuser gives to the values. Raises Declined if nvFuser refuses a
    line.
    """

    def __init__(self, lines: Sequence[Line], device: torch.device | None = None) -> None:
        nvfuser = importlib.import_module(MODULE)
        fusion = nvfuser.Fusion()
        # while the guard exists, all calls of nvFuser's ops add to this fusion
        guard = nvfuser.FusionGuard(fusion)
        try:
            self.kinds = _built(nvfuser, fusion, lines)
        except RuntimeError as error:
            raise Declined(f"nvFuser refuses it: {_first_lines(error)}") from None
        finally:
            del guard
        executor: Any = nvfuser.FusionExecutorCache(fusion)
        self.run: Callable[[Sequence[Any]], Sequence[torch.Tensor]] = executor.execute
        if device is not None and all(line.op != "input" for line in lines):
            # without an input tensor nvFuser would run on device 0
            self.run = functools.partial(executor.execute, device=device.index or 0)

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Compile for inputs like these. Other threads of Python run meanwhile, if `compiling` can
        arrange that."""
        with compiling():
            self.run(inputs)


@contextmanager
def compiling() -> Iterator[None]:
    """A context in which nvFuser releases the interpreter's lock while it runs in this thread.

    nvFuser's bindings hold the lock while they compile, which takes seconds; `gil.cpp` changes
    that. If it can't be compiled, or doesn't fit this nvFuser, other threads wait.
    """
    GIL.ask(None, may_compile=True, wait=True)
    if _gil is None:
        yield
        return
    _gil.lazy_tensor_gil_want(1)
    try:
        yield
    finally:
        _gil.lazy_tensor_gil_want(0)


# the library compiled from `gil.cpp`, once it is in use
_gil: Any = None


def _use_gil(compiled: bytes) -> None:
    global _gil
    module = importlib.import_module(MODULE)
    # PyDLL calls functions without releasing the lock: `gil.cpp` does that itself
    library = loaded(compiled, ctypes.PyDLL)
    library.lazy_tensor_gil_count.restype = ctypes.c_uint64
    if not library.lazy_tensor_gil_install(module._C_DIRECT.__file__.encode()):
        raise RuntimeError("this nvFuser doesn't call its library as is expected")
    _gil = library


GIL = Extension(Source(Path(__file__).with_name("gil.cpp"), ()), _use_gil)


def n_released() -> int:
    """How often nvFuser ran with the interpreter's lock released; for tests."""
    return 0 if _gil is None else int(_gil.lazy_tensor_gil_count())


def _resolved(argument: Any, values: list[Any]) -> Any:
    """`argument` with nvFuser's own value in place of each `V`."""
    if isinstance(argument, V):
        return values[argument.index]
    if isinstance(argument, (list, tuple)):
        return [_resolved(item, values) for item in argument]
    return argument


def _built(nvfuser: Any, fusion: Any, lines: Sequence[Line]) -> list[str]:
    """Make the calls of `lines` inside the active guard; return the dtypes of their values."""
    values: list[Any] = []
    kind_of = nvfuser.DataType

    for line in lines:
        if line.op == "output":
            value, alias = (_resolved(arg, values) for arg in line.args)
            fusion.add_output(value) if alias is None else fusion.add_output(value, alias)
            continue
        if line.op == "input":
            shape, contiguity, order, is_cpu = line.args
            made = nvfuser.define_tensor(
                shape=shape, contiguity=contiguity, dtype=getattr(kind_of, line.kinds[0]),
                stride_order=order, is_cpu=is_cpu,
            )  # fmt: skip
            fusion.add_input(made)
        elif line.op == "scalar":
            made = nvfuser.define_scalar(None, getattr(kind_of, line.kinds[0]))
            fusion.add_input(made)
        elif line.op == "constant":
            made = nvfuser.define_scalar(line.args[0], getattr(kind_of, line.kinds[0]))
        elif line.op == "size":
            made = values[line.args[0].index].size(line.args[1])
        else:
            options = {
                name: getattr(kind_of, value) if name == "dtype" else _resolved(value, values)
                for name, value in line.options
            }
            made = getattr(nvfuser.ops, line.op)(
                *[_resolved(a, values) for a in line.args], **options
            )
        values += made if isinstance(made, (tuple, list)) else [made]
    return [_kind_name(value) for value in values]


def _first_lines(error: RuntimeError) -> str:
    """The message of an error of nvFuser, without the C++ stack that follows it."""
    said = str(error).partition("Exception raised from")[0]
    return " ".join(line.strip() for line in said.splitlines() if line.strip())


def _kind_name(value: Any) -> str:
    """The dtype of a tensor value; "" for numbers, whose dtype can't be asked for."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return ""
    found = dtype()
    return str(found).rpartition(".")[2] if "DataType" in str(found) else ""
