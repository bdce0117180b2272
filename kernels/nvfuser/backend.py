"""The nvFuser backend: definitions as artifacts, fusions as kernels.

In: segments on CUDA. Out: artifacts, which are definitions that any process can load, and kernels.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from lazy_tensor.kernels import fusible
from lazy_tensor.kernels.backend import Busy, Kernel
from lazy_tensor.kernels.backends.artifact import Outputs, View, hold
from lazy_tensor.kernels.backends.inductor import default_dtype
from lazy_tensor.kernels.backends.torch_inductor import SymbolicSizes
from lazy_tensor.kernels.extension.cpp import built_for
from lazy_tensor.kernels.nvfuser import library
from lazy_tensor.kernels.nvfuser.definition import KINDS, MAX_PATHS, MAX_RANK, loaded
from lazy_tensor.kernels.segment import Call, Segment, TensorSpec, extent, n_bytes

Run = Callable[[Sequence[Any]], Sequence[torch.Tensor]]
"""Runs a definition: takes tensors, then numbers, returns the outputs that aren't written."""

SCANS = frozenset(("cumsum", "cumprod"))
WITHOUT = frozenset(["diagonal", "unfold"])
"""What Inductor fuses and nvFuser has no op for."""
TAKEN = (fusible.FUSIBLE | SCANS) - WITHOUT

COMPOSED = frozenset(
    name
    for name in fusible.POINTWISE
    if name.endswith("_backward") or name.startswith(("gelu", "log_", "logadd", "mish", "softplus"))
)
"""Pointwise ops whose rules use an operand several times."""
SLICES = frozenset(("slice", "slice_backward", "slice_scatter"))


class NvfuserBackend:
    """Fuses pointwise ops, reductions, norms, scans and moves of data on CUDA."""

    name = "nvfuser"
    max_paths = MAX_PATHS // 10

    def unavailable(self, device_type: str) -> str | None:
        if device_type != "cuda":
            return f"it runs on cuda, not on {device_type}"
        return library.problem() or (None if torch.cuda.is_available() else "there is no CUDA GPU")

    def refuses(self, call: Call, inputs: Sequence[TensorSpec] = ()) -> str | None:
        reason = fusible.refuses(call, TAKEN)
        if reason is not None:
            return reason
        if fusible.base_name(call.op) in SCANS and (reason := library.scan_problem()) is not None:
            return f"{call.op}: nvFuser can't compile a scan here ({reason})"
        for spec in (*inputs, *call.outputs):
            if spec is not None and spec.dtype not in KINDS:
                return f"{call.op}: nvFuser has no {spec.dtype}"
            if spec is not None and len(spec.size) > MAX_RANK:
                return f"{call.op}: a tensor of more than {MAX_RANK} dimensions"
        if fusible.base_name(call.op) == "gather" and not _picks_one(call):
            return f"{call.op}: nvFuser leaves it to ATen"
        if fusible.base_name(call.op) in SLICES and _argument(call, "step", 1) != 1:
            return f"{call.op}: nvFuser has no slice with a step"
        return None

    def paths(self, call: Call) -> int:
        """As many as its rule takes, by a rough count: translating counts them exactly."""
        name = fusible.base_name(call.op)
        is_plain = name in fusible.VIEWS or (name in fusible.POINTWISE and name not in COMPOSED)
        return 1 if is_plain else 4

    def declines(self, segment: Segment) -> str | None:
        """Small segments stay with aten: a call of nvFuser takes the host longer than their ops."""
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
        """The definition of `segment`. Where nvFuser is, it has taken the definition, so that one
        which would end the process ends a worker."""
        artifact = definition_of(segment)
        if library.problem() is None:
            _fused(segment, artifact).prepare(segment)
            torch.cuda.empty_cache()  # this is a worker, which has no use for the memory
        return artifact

    def load(self, segment: Segment, artifact: bytes) -> FusedKernel:
        return _fused(segment, artifact)

    def fits(self, artifact: bytes, values: Sequence[int]) -> bool:
        header = json.loads(artifact)
        return hold(header["conditions"], header["symbols"], values)


CALL_S, ATEN_CALL_S = 12e-6, 6e-6
"""Host time of a call of nvFuser whose kernel is known (10 to 13 us on an H100 machine, where tanh
and a sum took eager 17), and of an aten op in a plan."""
BYTES_PER_S = 2e12
"""Memory bandwidth of a large GPU, for a rough comparison only."""


def _estimates_s(segment: Segment) -> tuple[float, float]:
    """Times of one kernel and of op-by-op execution: the longer of the host's and the memory's."""
    aten_s = 0.0
    for call, inputs in zip(segment.calls, segment.inputs_of_calls, strict=True):
        if fusible.base_name(call.op) not in fusible.VIEWS:
            outputs = [spec for spec in call.outputs if spec is not None]
            aten_s += max(ATEN_CALL_S, sum(map(n_bytes, (*inputs, *outputs))) / BYTES_PER_S)
    values = [*segment.inputs, *(spec for call in segment.calls for spec in call.outputs)]
    outputs = [spec for number in segment.outputs if (spec := values[number]) is not None]
    written = [segment.inputs[number] for number in segment.written]
    moved = sum(map(n_bytes, (*segment.inputs, *outputs, *written)))
    return max(CALL_S, moved / BYTES_PER_S), aten_s


MOST_PREPARED_BYTES = 1 << 28
"""Inputs for which a kernel is compiled before they are there."""


class FusedKernel:
    """A fusion as a kernel."""

    def __init__(self, segment: Segment, artifact: bytes, fused: Runnable) -> None:
        self._fused = fused
        self._run = kernel_of(artifact, segment.scalars, fused.run)
        self._lock = threading.Lock()  # nvFuser's maps of compiled kernels have none

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
        """Compile for the sizes of `segment`, by a run on zeros, if they are no burden."""
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
            return  # this once: it compiles when it is first run


class Runnable(Protocol):
    """A definition that can be run."""

    run: Run

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Be quick with inputs like these from now on."""


def _zeros(spec: TensorSpec) -> torch.Tensor:
    """A tensor laid out as `spec` says, repeated elements and gaps included."""
    n_elements = extent(spec.size, spec.stride)
    flat = torch.zeros(n_elements, dtype=spec.dtype, device=spec.device)
    return flat.as_strided(spec.size, spec.stride)


def _fused(segment: Segment, artifact: bytes) -> FusedKernel:
    lines = loaded(json.loads(artifact)["lines"])
    return FusedKernel(segment, artifact, library.Fused(lines, segment.device))


def _picks_one(call: Call) -> bool:
    """Whether a `gather` takes one element of each row, which is a sum over the row."""
    found = call.outputs[0]
    return found is not None and (not found.size or found.size[_argument(call, "dim")] == 1)


def _argument(call: Call, wanted: str, default: Any = None) -> Any:
    return next((value for name, value in call.arguments() if name == wanted), default)


def definition_of(segment: Segment) -> bytes:
    """A JSON text: the definition's lines, and how its results make up the segment's outputs.

    Unsupported if nvFuser has no way to compute it, TooManyPaths if it might never be done.
    """
    # imported late: tracing costs half a second to import
    from lazy_tensor.kernels.backends import lower
    from lazy_tensor.kernels.nvfuser.rules import rule_of
    from lazy_tensor.kernels.nvfuser.torch_private import decompositions
    from lazy_tensor.kernels.nvfuser.translate import translated

    with default_dtype(segment.default_dtype):
        table = decompositions(lambda op: rule_of(op) is not None)
        lowered = lower.lower(segment, table, checks_index=True)
        definition = translated(lowered, segment)
    symbols: SymbolicSizes | None = lowered.symbols
    header = {
        "lines": definition.dumped(),
        "outputs": [astuple(o) if isinstance(o, View) else o for o in lowered.outputs.outputs],
        "has_check": lowered.outputs.has_check,
        "n_results": len(lowered.sizes),
        "copies": definition.copies,
        "symbols": [] if symbols is None else list(symbols.own),
        "conditions": [] if symbols is None else symbols.conditions(),
    }
    return json.dumps(header).encode()


def kernel_of(artifact: bytes, scalars: Sequence[type], run: Run) -> Kernel:
    """`run`, which executes the artifact's definition, as a kernel: views are made of results.

    Whether an index was out of range is told by the device, as in eager execution on CUDA: the
    kernel itself reads no foreign memory.
    """
    header = json.loads(artifact)
    outputs = Outputs(
        tuple(o if isinstance(o, int) else View(*o) for o in header["outputs"]),
        header["has_check"],
    )
    # imported late: it imports torch's decompositions
    from lazy_tensor.kernels.nvfuser.torch_private import assert_in_range

    names: dict[str, Any] = {"run": run, "assert_in_range": assert_in_range}
    numbers = "".join(
        f"int(scalars[{i}]), " if kind is bool else f"scalars[{i}], "
        for i, kind in enumerate(scalars)
    )
    lines = ["def kernel(tensors, scalars):", f" results = run([*tensors, {numbers}])"]
    lines += [f" tensors[{i}].copy_(results[{j}])" for i, j in header["copies"]]
    if outputs.has_check:
        lines.append(f" assert_in_range(results[{header['n_results'] - 1}])")
    lines.append(outputs.return_line(has_more=bool(header["copies"])))
    exec(compile("\n".join(lines), "<nvfuser kernel>", "exec"), names)
    kernel: Kernel = names["kernel"]
    return kernel


SOURCES = (
    "../backends/index_checks", "../backends/lower", "../generic", "../scalar_rules", "backend",
    "definition", "library", "pointwise", "reductions", "shapes", "translate",
)  # fmt: skip
"""The modules that decide what an artifact is."""


@cache
def _fingerprint() -> str:
    sources = hashlib.sha256()
    for module in SOURCES:
        sources.update((Path(__file__).parent / f"{module}.py").read_bytes())
    return " ".join((sources.hexdigest()[:16], *built_for(), library.installed()))
