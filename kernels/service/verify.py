"""Compares a kernel's outputs and written inputs with those of op-by-op execution.

`service.fusion` wraps a kernel in `Verified` if `configure(verify_every=...)` is set. The scripts
of `service.repro` and `dispatch.plan.second_tier` use the comparison alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lazy_tensor.kernels.backend import Kernel
from lazy_tensor.kernels.counters import Counters
from lazy_tensor.kernels.segment import Segment

# relative tolerances: fused kernels round intermediate values less often, and sum in another order
_RELATIVE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_MAX_DIFFERING_SHARE = 1e-3
"""The share of integers and booleans that may differ: they may come from comparisons of floats,
whose results can change with rounding."""

Tensors = Sequence[torch.Tensor]
Disagreed = Callable[[str, Tensors, Sequence[float]], None]
"""Called with the reason and the inputs as they were before the run, and the scalars."""


@dataclass(eq=False)
class Verified:
    """A kernel whose first run, and then one run in `every`, is compared with op-by-op execution.

    If they differ, `disagreed` is called, and the caller gets the outputs and written inputs of
    `aten`.
    """

    kernel: Kernel
    aten: Kernel
    segment: Segment
    every: int
    disagreed: Disagreed
    counters: Counters
    _runs_to_check: int = 1

    def __call__(self, tensors: Tensors, scalars: Sequence[float]) -> Tensors:
        self._runs_to_check -= 1
        if self._runs_to_check > 0:
            results = self.kernel(tensors, scalars)
            return results  # noqa: RET504
        self._runs_to_check = self.every
        self.counters.add("verified")
        segment = self.segment
        # two copies of the written inputs: one stays unchanged for the report, `aten` writes one
        before, copies = _with_copies(tensors, segment), _with_copies(tensors, segment)
        results = self.kernel(tensors, scalars)
        expected = self.aten(copies, scalars)
        reason = _disagreement(segment, before, (tensors, results), (copies, expected))
        if reason is None:
            return results
        # before `disagreed`, which may raise its warning: the program must have the right values
        for i in segment.written:
            tensors[i].copy_(copies[i])
        self.disagreed(reason, before, scalars)
        return expected


def difference_of(
    kernel: Kernel, aten: Kernel, segment: Segment, tensors: Tensors, scalars: Sequence[float]
) -> str | None:
    """How `kernel` and `aten` differ on these inputs, which are not written; None if they agree."""
    inputs, copies = _with_copies(tensors, segment), _with_copies(tensors, segment)
    sides = (inputs, kernel(inputs, scalars)), (copies, aten(copies, scalars))
    return _disagreement(segment, tensors, *sides)


def _with_copies(tensors: Tensors, segment: Segment) -> list[torch.Tensor]:
    """The inputs, with a copy in place of each that the segment writes."""
    written = segment.written
    return [copy_of(tensor) if i in written else tensor for i, tensor in enumerate(tensors)]


def _disagreement(
    segment: Segment,
    before: Tensors,
    actual: tuple[Tensors, Tensors],
    expected: tuple[Tensors, Tensors],
) -> str | None:
    """How two pairs of (inputs, outputs) differ, both after a run on the inputs `before`."""
    actual_results, expected_results = (
        [*outputs, *(inputs[i] for i in segment.written)] for inputs, outputs in (actual, expected)
    )
    magnitude = max(map(largest, before), default=0.0)
    return difference(actual_results, expected_results, magnitude)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides: a kernel is compiled for these."""
    copy = torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor)


def difference(actual: Tensors, expected: Tensors, magnitude: float = 0.0) -> str | None:
    """The first difference between `actual` and `expected` that rounding can't explain, or None.

    `magnitude` is the largest absolute value of the operands. Where large operands cancel, their
    rounding errors are all that is left of the result.
    """
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        reason = _metadata_difference(a, e) or _value_difference(a, e, magnitude)
        if reason is not None:
            return f"result {i}: {reason}"
    return None


def largest(tensor: torch.Tensor) -> float:
    """The largest finite absolute value; 0 for a dtype that isn't floating point."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    # infinities and NaN become 0: selecting the finite elements instead would copy twice as much
    return float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().max())


def _metadata_difference(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    for name in ("dtype", "device", "shape"):
        if getattr(actual, name) != getattr(expected, name):
            return f"{name} {getattr(actual, name)} instead of {getattr(expected, name)}"
    # the stride of a dimension of one element addresses nothing, and may differ
    moving = [dim for dim in range(expected.ndim) if expected.size(dim) > 1]
    if expected.numel() and any(actual.stride(d) != expected.stride(d) for d in moving):
        return f"stride {actual.stride()} instead of {expected.stride()}"
    return None


def _value_difference(actual: torch.Tensor, expected: torch.Tensor, magnitude: float) -> str | None:
    if not expected.numel():
        return None
    if not expected.is_floating_point():
        n_differing = int((actual != expected).sum())
        if n_differing > max(1, int(_MAX_DIFFERING_SHARE * expected.numel())):
            return f"{n_differing} of {expected.numel()} elements differ"
        return None
    # the default is for 8-bit floats
    relative = _RELATIVE.get(expected.dtype, 0.5)
    scale = largest(expected)
    absolute = max(relative * scale, 16 * torch.finfo(expected.dtype).eps * magnitude)
    close = torch.isclose(actual, expected, rtol=relative, atol=absolute, equal_nan=True)
    if bool(close.all()):
        return None
    worst = float((actual.double() - expected.double()).abs().nan_to_num(torch.inf).max())
    return f"differs by up to {worst:.3g} where the largest value is {scale:.3g}"
