"""Decomposes random ops whose chances, means or deviations are tensors, so that they are recorded.

In: the op's arguments. Out: the values of ATen's CPU kernels, from the same numbers of the same
generator (Distributions.cpp, DistributionTemplates.h). The numbers are drawn now, in program order,
and the ops on them are recorded. A wrong argument raises where the values are computed. Called by
`op_handlers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from lazy_tensor.dispatch.metadata.infer import is_dense

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float64)


def can_be_recorded(tensors: list[Tensor]) -> bool:
    """Whether these functions give what the op gives, for arguments that eager accepts."""
    return (
        all(t.device.type == "cpu" and t.dtype in DTYPES and t.numel() > 0 for t in tensors)
        and len({t.dtype for t in tensors}) == 1
    )


def _checked(tensor: Tensor, holds: Tensor, message: str) -> Tensor:
    """`tensor` behind a check; computing it raises RuntimeError if `holds` is false."""
    # The check returns a clone, whose strides torch's meta function has wrong if the tensor is not
    # dense.
    if not is_dense(tensor.shape, tensor.stride()):
        tensor = tensor.clone()
    # the check is an op that returns the tensor, so nothing computes the result without it
    checked: Tensor = aten._functional_assert_async.msg(holds, message, tensor)
    return checked


def bernoulli(chances: Tensor, *, generator: Generator | None = None) -> Tensor:
    holds = ((chances >= 0) & (chances <= 1)).all()
    chances = _checked(chances, holds, "Expected p_in >= 0 && p_in <= 1 to be true, but got false.")
    # contiguous whatever the strides of `chances`: numbers are drawn in the order of the memory
    drawn = torch.empty_like(chances, memory_format=torch.contiguous_format)
    return (drawn.uniform_(generator=generator) < chances).to(chances.dtype)


def multinomial(
    chances: Tensor, n_samples: int, replacement: bool = False, *,
    generator: Generator | None = None,
) -> Tensor:  # fmt: skip
    """One sample a row, by an exponential race; NotImplemented for more samples.

    Each class draws a time at the rate of its chance. The first one to arrive is the sample.
    """
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
"""The function for each op. It may return NotImplemented, but only before it draws."""
