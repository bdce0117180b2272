"""The backend that fuses with Inductor: C++ kernels on the CPU, Triton kernels on CUDA.

In: segments. Out: on the CPU, artifacts that any process on the same kind of machine can load. On
CUDA, kernels that Triton compiles in this process; this path has never run on a GPU.
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lazy_tensor.kernels import fusible
from lazy_tensor.kernels.backend import Declined, Kernel
from lazy_tensor.kernels.backends.artifact import (
    for_own_sizes,
    holds_for,
    kernel_of,
    packed,
    unpacked,
)
from lazy_tensor.kernels.backends.torch_cpp import Unit
from lazy_tensor.kernels.backends.torch_inductor import (
    Compiled,
    compile_graph,
    compile_in_process,
    decompositions,
)
from lazy_tensor.kernels.extension import program
from lazy_tensor.kernels.extension.cpp import built_for, compiler_identity, found_compiler
from lazy_tensor.kernels.loops.cpp import library_of
from lazy_tensor.kernels.loops.write import NAME, written
from lazy_tensor.kernels.segment import Call, Segment, TensorSpec


class PortableInductor:
    """Inductor's kernels for the CPU as artifacts: what the backends `inductor` and `whole` share.

    `taken` are the names of the ops that the kernels can hold.
    """

    taken = fusible.FUSIBLE

    def refuses(self, call: Call, inputs: Sequence[TensorSpec] = ()) -> str | None:
        return fusible.refuses(call, self.taken) or fusible.refuses_dtypes(call, inputs)

    def compile(self, segment: Segment) -> Kernel:
        return for_own_sizes(self.load(segment, self.build(segment)), segment)

    def can_build(self, segment: Segment) -> bool:
        return segment.device.type == "cpu"

    def fingerprint(self) -> str:
        # the number of threads is compiled into kernels
        return f"{_fingerprint()} threads={torch.get_num_threads()}"

    def build(self, segment: Segment) -> bytes:
        unit, lowered = Unit(), _lowered(segment)
        with unit:
            compiled = compile_graph(lowered.graph, lowered.inputs, lowered.symbols)
        lowered.check_strides(compiled.strides)
        return packed(compiled, unit.compile(), has_check=lowered.has_check)

    def load(self, segment: Segment, artifact: bytes) -> Kernel:
        return unpacked(artifact, segment.scalars, is_long=program.touches_much(segment))


class InductorBackend(PortableInductor):
    """Fuses pointwise ops, reductions, norms and moves of data; see `fusible` for which.

    Simple segments get kernels of `kernels.loops`, for which Inductor isn't needed.
    """

    name = "inductor"

    def unavailable(self, device_type: str) -> str | None:
        if device_type == "cpu":
            no_compiler = "no C++ compiler was found (set CXX, or install g++)"
            return None if found_compiler() else no_compiler
        if device_type == "cuda":
            has_triton = importlib.util.find_spec("triton")
            return None if has_triton else "triton, which it needs on CUDA, is not installed"
        return f"it runs on cpu and cuda, not on {device_type}"

    def compile(self, segment: Segment) -> Kernel:
        if self.can_build(segment):
            return super().compile(segment)
        lowered = _lowered(segment)
        call = compile_in_process(lowered.graph, lowered.inputs)
        return kernel_of(call, segment.scalars)

    def build_soon(self, segment: Segment) -> bytes | None:
        try:
            kernel = written(segment, torch.get_num_threads())
            library = library_of(kernel.text)
        except Declined:
            return None
        compiled = Compiled(kernel.steps, (NAME,), (), kernel.symbols, kernel.conditions)
        return packed(compiled, library, has_check=kernel.has_check)

    def fits(self, artifact: bytes, values: Sequence[int]) -> bool:
        return holds_for(artifact, values)


def _lowered(segment: Segment) -> Any:
    for call in segment.calls:
        if _is_floor_division(call, segment):
            raise Declined(f"{call.op}: Inductor rounds quotients of floats down in its own way")
    # imported late, as it imports torch's tracing
    from lazy_tensor.kernels.backends.lower import lower, read_before_written

    with default_dtype(segment.default_dtype):
        lowered = lower(segment, decompositions())
        read_before_written(lowered.graph.graph)
        return lowered


def _is_floor_division(call: Call, segment: Segment) -> bool:
    """Whether a call is a floor division of floating-point numbers, or the remainder of one.

    Inductor computes `a - b * floor(a / b)`, which rounds `a / b`: for float32 `1e6 % 0.7` it gives
    0.3125 instead of 0.3170, and NaN where `b` is infinite. Eager takes the exact remainder of C's
    `fmod`, and so do kernels of `kernels.loops` (torch 2.13).
    """
    name, arguments = fusible.base_name(call.op), dict(call.arguments())
    if name not in ("floor_divide", "remainder") and arguments.get("rounding_mode") != "floor":
        return False
    # an in-place op has no output of its own
    spec = call.outputs[0] if call.outputs else segment.specs[arguments["self"].index]
    return spec is not None and spec.dtype.is_floating_point


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A context with torch's default dtype set to that under which a segment was recorded.

    A worker process has a default dtype of its own, on which the results' dtypes could depend.
    """
    before = torch.get_default_dtype()
    if dtype is before:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SOURCES = (
    "backends/artifact", "backends/index_checks", "backends/inductor", "backends/lower",
    "backends/torch_cpp", "backends/torch_inductor", "backends/whole", "fusible",
    "generic", "scalar_rules", "segment", "symbolic",
    *(f"loops/{path.stem}" for path in sorted((Path(__file__).parents[1] / "loops").glob("*.py"))),
)  # fmt: skip
"""The modules that make artifacts. After a change in one of these files no artifact on disk is
used."""


@cache
def _fingerprint() -> str:
    """The state of this package, torch, Python's binary interface, the C++ compiler and the CPU.

    An artifact depends on these, on its segment, and on the number of threads.
    """
    sources = hashlib.sha256()
    for module in SOURCES:
        sources.update((Path(__file__).parents[1] / f"{module}.py").read_bytes())
    parts = (
        sources.hexdigest()[:16],
        *built_for(),
        platform.system(),
        compiler_identity(),
        torch.backends.cpu.get_cpu_capability(),
        _cpu_flags(),
    )
    return " ".join(parts)


def _cpu_flags() -> str:
    """A digest of this CPU's instruction sets.

    Kernels may use all of them, and another machine with the same `cache_dir` may lack some.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(flags.encode()).hexdigest()[:16]
