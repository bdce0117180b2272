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
which rounding can turn over."""

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
    _left: int = 1

    def __call__(self, tensors: Tensors, scalars: Sequence[float]) -> Tensors:
        self._left -= 1
        if self._left > 0:
            results = self.kernel(tensors, scalars)
            return results  # noqa: RET504
        self._left = self.every
        self.counters.add("verified")
        segment = self.segment
        # two copies of the written inputs: one stays as it is for the report, `aten` writes one
        given, mine = _apart(tensors, segment), _apart(tensors, segment)
        results = self.kernel(tensors, scalars)
        expected = self.aten(mine, scalars)
        reason = _disagreement(segment, given, (tensors, results), (mine, expected))
        if reason is None:
            return results
        # before `disagreed`, which may raise its warning: the program must have the right values
        for i in segment.written:
            tensors[i].copy_(mine[i])
        self.disagreed(reason, given, scalars)
        return expected


def difference_of(
    kernel: Kernel, aten: Kernel, segment: Segment, tensors: Tensors, scalars: Sequence[float]
) -> str | None:
    """How `kernel` and `aten` differ on these inputs, which are not written; None if they agree."""
    one, other = _apart(tensors, segment), _apart(tensors, segment)
    sides = (one, kernel(one, scalars)), (other, aten(other, scalars))
    return _disagreement(segment, tensors, *sides)


def _apart(tensors: Tensors, segment: Segment) -> list[torch.Tensor]:
    """The inputs, with a copy in place of each that the segment writes."""
    written = segment.written
    return [copy_of(tensor) if i in written else tensor for i, tensor in enumerate(tensors)]


def _disagreement(
    segment: Segment,
    given: Tensors,
    actual: tuple[Tensors, Tensors],
    expected: tuple[Tensors, Tensors],
) -> str | None:
    """How two pairs of (inputs, outputs) differ, both after a run on `given`."""
    one, other = (
        [*outputs, *(inputs[i] for i in segment.written)] for inputs, outputs in (actual, expected)
    )
    return difference(one, other, max(map(largest, given), default=0.0))


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, for which a kernel was compiled."""
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
    # replaced by 0 and not selected: selecting the finite elements would copy twice as much
    return float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().max())


def _metadata_difference(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    for what in ("dtype", "device", "shape"):
        if getattr(actual, what) != getattr(expected, what):
            return f"{what} {getattr(actual, what)} instead of {getattr(expected, what)}"
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
    # 8-bit floats have the default
    relative = _RELATIVE.get(expected.dtype, 0.5)
    scale = largest(expected)
    absolute = max(relative * scale, 16 * torch.finfo(expected.dtype).eps * magnitude)
    close = torch.isclose(actual, expected, rtol=relative, atol=absolute, equal_nan=True)
    if bool(close.all()):
        return None
    worst = float((actual.double() - expected.double()).abs().nan_to_num(torch.inf).max())
    return f"differs by up to {worst:.3g} where the largest value is {scale:.3g}"
