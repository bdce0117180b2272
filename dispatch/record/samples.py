"""Random ops that take chances, means or deviations as tensors: taken apart, so that they can be
recorded.

In: the op's arguments. Out: what ATen's kernels for the CPU give, by the same numbers of the same
generator (Distributions.cpp, DistributionTemplates.h). The numbers are drawn now, in the program's
order; what becomes of them is recorded. A wrong value raises where the values are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float64)


def can_be_recorded(tensors: list[Tensor]) -> bool:
    """Whether these functions do as the op, for arguments that eager accepts."""
    return (
        all(t.device.type == "cpu" and t.dtype in DTYPES and t.numel() > 0 for t in tensors)
        and len({t.dtype for t in tensors}) == 1
    )


def _checked(tensor: Tensor, holds: Tensor, message: str) -> Tensor:
    """`tensor`, of which `holds` is true; RuntimeError where it isn't."""
    checked: Tensor = aten._functional_assert_async.msg(holds, message, tensor)
    return checked


def bernoulli(chances: Tensor, *, generator: Generator | None = None) -> Tensor:
    holds = ((chances >= 0) & (chances <= 1)).all()
    chances = _checked(chances, holds, "Expected p_in >= 0 && p_in <= 1 to be true, but got false.")
    drawn = torch.empty_like(chances, memory_format=torch.contiguous_format)
    return (drawn.uniform_(generator=generator) < chances).to(chances.dtype)


def multinomial(
    chances: Tensor, n_samples: int, replacement: bool = False, *,
    generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """One sample: the least of exponential numbers at these rates is a race that each wins by its
    chance."""
    if n_samples != 1 or chances.dim() not in (1, 2):
        return NotImplemented  # type: ignore[no-any-return]
    holds = (chances.max() < math.inf) & (chances.min() >= 0)
    says = "probability tensor contains either `inf`, `nan` or element < 0"
    chances = _checked(chances, holds, says)
    holds = (chances.sum(-1) != 0).all()
    says = "invalid multinomial distribution (sum of probabilities <= 0)"
    chances = _checked(chances, holds, says)
    drawn = torch.empty_like(chances).exponential_(1, generator=generator)
    return (chances / drawn).argmax(-1, keepdim=True)


def normal(mean: Any, std: Any = 1.0, *, generator: Generator | None = None) -> Tensor:
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    drawn = torch.empty(shape, dtype=tensors[0].dtype, device=tensors[0].device)
    if not isinstance(std, Tensor):
        return drawn.normal_(0, std, generator=generator).add_(mean)
    std = _checked(std, std.min() >= 0, "normal expects all elements of std >= 0.0")
    return drawn.normal_(generator=generator).mul_(std).add_(mean)


SAMPLED: dict[Any, Callable[..., Any]] = {
    aten.bernoulli.default: bernoulli,
    aten.multinomial.default: multinomial,
    aten.normal.Tensor_Tensor: normal,
    aten.normal.Tensor_float: normal,
    aten.normal.float_Tensor: normal,
}
"""By the op; each may return NotImplemented where it doesn't do as the op."""
