"""The nvFuser backend. Its artifacts are definitions as JSON, its kernels run nvFuser fusions.

In: segments on CUDA. Out: artifacts, which any process can load, and kernels. nvFuser compiles when
a kernel first runs on new sizes. Called by `service.compile`, and by `dispatch.plan.partition` for
`refuses` and `paths`.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from lazy_tensor.kernels import fusible
from lazy_tensor.kernels.backend import Busy, Kernel
from lazy_tensor.kernels.backends.artifact import hold
from lazy_tensor.kernels.backends.inductor import default_dtype
from lazy_tensor.kernels.backends.torch_inductor import SymbolicSizes
from lazy_tensor.kernels.extension.cpp import built_for
from lazy_tensor.kernels.nvfuser import library
from lazy_tensor.kernels.nvfuser.definition import KINDS, MAX_PATHS, MAX_RANK, loaded
from lazy_tensor.kernels.segment import Call, Segment, TensorSpec, extent, n_bytes

Run = Callable[[Sequence[Any]], Sequence[torch.Tensor]]
"""Runs a definition: takes tensors, then numbers; returns all outputs but those written in place
to inputs."""

WITHOUT = frozenset(["diagonal", "unfold"])
"""Ops that Inductor fuses, but that nvFuser has no op for."""
TAKEN = fusible.FUSIBLE - WITHOUT

COMPOSED = frozenset(
    name
    for name in fusible.POINTWISE
    if name.endswith("_backward") or name.startswith(("gelu", "log_", "logadd", "mish", "softplus"))
)
"""Pointwise ops whose rules use an operand several times, for the count of paths."""
SLICES = frozenset(("slice", "slice_backward"))


class NvfuserBackend:
    """Fuses pointwise ops, reductions, norms and moves of data on CUDA."""

    name = "nvfuser"
    # a tenth of the limit, as `paths` is a rough count
    max_paths = MAX_PATHS // 10

    def unavailable(self, device_type: str) -> str | None:
        if device_type != "cuda":
            return f"it runs on cuda, not on {device_type}"
        return library.problem() or (None if torch.cuda.is_available() else "there is no CUDA GPU")

    def refuses(self, call: Call, inputs: Sequence[TensorSpec] = ()) -> str | None:
        reason = fusible.refuses(call, TAKEN)
        if reason is not None:
            return reason
        for spec in (*inputs, *call.outputs):
            if spec is not None and spec.dtype not in KINDS:
                return f"{call.op}: nvFuser has no {spec.dtype}"
            if spec is not None and len(spec.size) > MAX_RANK:
                return f"{call.op}: a tensor of more than {MAX_RANK} dimensions"
        # nvFuser would run a gather as a kernel of ATen's, in the middle of its own
        if fusible.base_name(call.op) == "gather" and not _picks_one(call):
            return f"{call.op}: nvFuser leaves it to ATen"
        if fusible.base_name(call.op) in SLICES and _argument(call, "step", 1) != 1:
            return f"{call.op}: nvFuser has no slice with a step"
        return None

    def paths(self, call: Call) -> int:
        """The number of paths in the call's rule, roughly; `Definition.add` counts exactly."""
        name = fusible.base_name(call.op)
        is_plain = name in fusible.VIEWS or (name in fusible.POINTWISE and name not in COMPOSED)
        return 1 if is_plain else 4

    def declines(self, segment: Segment) -> str | None:
        """Declines small segments: the host takes longer to call nvFuser than to call their ops."""
        if segment.device.type != "cuda":
            return None
        kernel_s, aten_s = _estimates_s(segment)
        if kernel_s < aten_s:
            return None
        return f"too small: about {aten_s * 1e6:.0f} us op by op, {kernel_s * 1e6:.0f} as a kernel"

    def compile(self, segment: Segment) -> Kernel:
        return self.load(segment, self.build(segment))

    def can_build(self, segment: Segment) -> bool:
        return True

    def fingerprint(self) -> str:
        return _fingerprint()

    def build(self, segment: Segment) -> bytes:
        """The definition of `segment` as JSON.

        Where nvFuser is installed, it also compiles the definition once. A definition that crashes
        nvFuser then ends a worker, and not the program.
        """
        artifact = definition_of(segment)
        if library.problem() is None:
            _fused(segment, artifact).prepare(segment)
            # a worker keeps no tensors; the program needs the device's memory
            torch.cuda.empty_cache()
        return artifact

    def load(self, segment: Segment, artifact: bytes) -> FusedKernel:
        return _fused(segment, artifact)

    def fits(self, artifact: bytes, values: Sequence[int]) -> bool:
        header = json.loads(artifact)
        return hold(header["conditions"], header["symbols"], values)


CALL_S, ATEN_CALL_S = 12e-6, 6e-6
"""Host time of a call of nvFuser whose kernel is compiled, and of an aten op in a plan. The first
is 10 to 13 us on a machine with an H100, where eager takes 17 us for tanh and a sum."""
BYTES_PER_S = 2e12
"""Memory bandwidth of a large GPU, for a rough comparison only."""


def _estimates_s(segment: Segment) -> tuple[float, float]:
    """Estimated seconds of one kernel, and of op-by-op execution.

    Each is the larger of the host's time for the calls, and the device's time for the memory.
    """
    # op by op, each call reads its inputs from memory and writes its outputs; views are free
    aten_s = 0.0
    for call, inputs in zip(segment.calls, segment.inputs_of_calls, strict=True):
        if fusible.base_name(call.op) not in fusible.VIEWS:
            outputs = [spec for spec in call.outputs if spec is not None]
            aten_s += max(ATEN_CALL_S, sum(map(n_bytes, (*inputs, *outputs))) / BYTES_PER_S)
    # fused, only the segment's own inputs and outputs go through memory
    values = [*segment.inputs, *(spec for call in segment.calls for spec in call.outputs)]
    outputs = [spec for number in segment.outputs if (spec := values[number]) is not None]
    written = [segment.inputs[number] for number in segment.written]
    moved = sum(map(n_bytes, (*segment.inputs, *outputs, *written)))
    return max(CALL_S, moved / BYTES_PER_S), aten_s


MOST_PREPARED_BYTES = 1 << 28
"""The most device memory that `FusedKernel.prepare` may take for its example inputs."""


class FusedKernel:
    """An nvFuser fusion as a kernel. It is a `Prepared`: it compiles for each new set of sizes."""

    def __init__(self, segment: Segment, artifact: bytes, fused: Runnable) -> None:
        self._fused = fused
        self._run = kernel_of(artifact, segment.scalars, fused.run)
        # nvFuser's maps of compiled kernels are not safe under threads
        self._lock = threading.Lock()

    def __call__(
        self, tensors: Sequence[torch.Tensor], scalars: Sequence[float]
    ) -> Sequence[torch.Tensor]:
        if not self._lock.acquire(blocking=False):
            raise Busy
        try:
            return self._run(tensors, scalars)
        finally:
            self._lock.release()

    def prepare(self, segment: Segment) -> None:
        """Compile for the sizes of `segment`, by a run on zeros, if there is memory for them.

        Else the first run compiles.
        """
        device = segment.device
        if device.type != "cuda" or not torch.cuda.is_available():
            return
        n_needed = 2 * sum(
            extent(spec.size, spec.stride) * spec.dtype.itemsize for spec in segment.inputs
        )
        if n_needed > min(MOST_PREPARED_BYTES, torch.cuda.mem_get_info(device)[0] // 2):
            return
        try:
            zeros = [_zeros(spec) for spec in segment.inputs]
            numbers = [float(1) if kind is float else 1 for kind in segment.scalars]
            with self._lock:
                self._fused.prepare([*zeros, *numbers])
        except torch.OutOfMemoryError:
            return  # other work has taken the memory meanwhile


class Runnable(Protocol):
    """A definition that can be run; `library.Fused`, or an interpreter in tests."""

    run: Run

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Compile for inputs of these sizes and dtypes."""


def _zeros(spec: TensorSpec) -> torch.Tensor:
    """A tensor of zeros with exactly the strides of `spec`, gaps and repeated elements included."""
    n_elements = extent(spec.size, spec.stride)
    flat = torch.zeros(n_elements, dtype=spec.dtype, device=spec.device)
    return flat.as_strided(spec.size, spec.stride)


def _fused(segment: Segment, artifact: bytes) -> FusedKernel:
    lines = loaded(json.loads(artifact)["lines"])
    return FusedKernel(segment, artifact, library.Fused(lines, segment.device))


def _picks_one(call: Call) -> bool:
    """Whether a `gather` takes one element of each row: its rule computes that as a sum."""
    found = call.outputs[0]
    return found is not None and (not found.size or found.size[_argument(call, "dim")] == 1)


def _argument(call: Call, wanted: str, default: Any = None) -> Any:
    return next((value for name, value in call.arguments() if name == wanted), default)


def definition_of(segment: Segment) -> bytes:
    """The artifact: JSON of the definition's lines, and of what the kernel does with results.

    Raises Unsupported if nvFuser can't compute the segment, and TooManyPaths if it might not finish
    compiling.
    """
    # imported late: tracing costs half a second to import
    from lazy_tensor.kernels.backends import lower
    from lazy_tensor.kernels.nvfuser.rules import rule_of
    from lazy_tensor.kernels.nvfuser.torch_private import decompositions
    from lazy_tensor.kernels.nvfuser.translate import translated

    with default_dtype(segment.default_dtype):
        # an op with a rule stays whole, any other is decomposed
        table = decompositions(lambda op: rule_of(op) is not None)
        lowered = lower.lower(segment, table, checks_index=True)
        definition = translated(lowered, segment)
    symbols: SymbolicSizes | None = lowered.symbols
    header = {
        "lines": definition.dumped(),
        # results are the outputs, then the check, then what is copied to inputs
        "n_outputs": len(segment.outputs),
        "has_check": lowered.has_check,
        "copies": definition.copies,
        "symbols": [] if symbols is None else list(symbols.own),
        "conditions": [] if symbols is None else symbols.conditions(),
    }
    return json.dumps(header).encode()


def kernel_of(artifact: bytes, scalars: Sequence[type], run: Run) -> Kernel:
    """A kernel around `run`, which executes the artifact's definition.

    It passes scalars as numbers, and copies results to written inputs where the fusion can't write
    them. An index out of range is reported by an assertion on the device, as in eager execution on
    CUDA. The kernel itself has clamped it, so it reads no foreign memory.
    """
    header = json.loads(artifact)
    n_outputs = header["n_outputs"]
    # imported late: it imports torch's decompositions
    from lazy_tensor.kernels.nvfuser.torch_private import assert_in_range

    names: dict[str, Any] = {"run": run, "assert_in_range": assert_in_range}
    # `lower` declares run-time scalars of type bool as int64
    numbers = "".join(
        f"int(scalars[{i}]), " if kind is bool else f"scalars[{i}], "
        for i, kind in enumerate(scalars)
    )
    lines = ["def kernel(tensors, scalars):", f" results = run([*tensors, {numbers}])"]
    lines += [f" tensors[{i}].copy_(results[{j}])" for i, j in header["copies"]]
    if header["has_check"]:
        lines.append(f" assert_in_range(results[{n_outputs}])")
    lines.append(f" return results[:{n_outputs}]")
    exec(compile("\n".join(lines), "<nvfuser kernel>", "exec"), names)
    kernel: Kernel = names["kernel"]
    return kernel


SOURCES = (
    "../backends/index_checks", "../backends/lower", "../generic", "../scalar_rules", "backend",
    "definition", "library", "pointwise", "reductions", "shapes", "translate",
)  # fmt: skip
"""The modules whose code decides what an artifact holds. Any change of a file here makes all
artifacts on disk stale."""


@cache
def _fingerprint() -> str:
    sources = hashlib.sha256()
    for module in SOURCES:
        sources.update((Path(__file__).parent / f"{module}.py").read_bytes())
    return " ".join((sources.hexdigest()[:16], *built_for(), library.installed()))
