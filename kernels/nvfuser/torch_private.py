"""The private names of torch that nvFuser's kernels need. Checked with torch 2.10 and 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._ops import OpOverload


def decompositions(is_kept: Callable[[Any], bool]) -> dict[Any, Callable[..., Any]]:
    """torch's table of decompositions, without the ops for which `is_kept` is true."""
    return {
        op: function
        for op, function in decomposition_table.items()
        if isinstance(op, OpOverload) and not is_kept(op)
    }


def assert_in_range(is_good: torch.Tensor) -> None:
    """Have the device raise if an index was out of range. The host doesn't wait for it."""
    torch._assert_async(is_good, "index out of range in a compiled segment")
