"""Decompositions of the floor division of floating-point numbers, and of its remainder.

Inductor computes `a - b * floor(a / b)`, which rounds `a / b`: for float32 `1e6 % 0.7` it gives
0.3125 instead of 0.3170, and NaN where `b` is infinite. Eager takes the exact remainder of C's
`fmod`, and so do these. Integers are left to Inductor. In: an op's arguments while `lower` traces
it. Out: its result, or NotImplemented.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def remainder(a: Any, b: Any) -> Any:
    dtype = torch.result_type(a, b)
    if not dtype.is_floating_point:
        return NotImplemented
    return _remainders(*_tensors(a, b, dtype))[1]


def div(a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    dtype = torch.result_type(a, b)
    if rounding_mode != "floor" or not dtype.is_floating_point:
        return NotImplemented
    a, b = _tensors(a, b, dtype)
    left, moved = _remainders(a, b)
    # a whole number, but for the rounding of this division
    whole = (a - left) / b
    whole = torch.where(left != moved, whole - 1, whole)
    floor = torch.floor(whole)
    floor = torch.where(whole - floor > 0.5, floor + 1, floor)
    quotient = a / b
    # of two negative numbers `whole` would be -0.0
    floor = torch.where(whole == 0, quotient * 0, floor)
    return torch.where(b == 0, quotient, floor)


def _tensors(a: Any, b: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    return [x if isinstance(x, torch.Tensor) else torch.full((), x, dtype=dtype) for x in (a, b)]


def _remainders(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The remainder with the sign of `a`, as `fmod` gives it, and the one with the sign of `b`."""
    left = torch.fmod(a, b)
    has_other_sign = (left < 0) & (b > 0) | (left > 0) & (b < 0)
    return left, torch.where(has_other_sign, left + b, left)


TABLE: dict[Any, Callable[..., Any]] = {
    aten.remainder.Tensor: remainder, aten.remainder.Scalar: remainder,
    aten.remainder.Scalar_Tensor: remainder, aten.div.Tensor_mode: div, aten.div.Scalar_mode: div,
}  # fmt: skip
"""Also for `floor_divide`, which Inductor decomposes to `div`."""
