"""Makes indices that come from data safe: clamped inside the kernel, reported after it.

An exception in a parallel region of a CPU kernel ends the process, and an index out of range reads
memory of others. So the kernel clamps its indices, and returns one more value: whether one was out
of range. Then the caller raises. In: an op's arguments while `lower` traces it. Out: the arguments
with a clamped index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.kernels.segment import Segment

aten = torch.ops.aten
Args = list[Any]


@dataclass(frozen=True, slots=True)
class _Index:
    """Argument `position` is an index into dimension `dim(args)` of argument `source`.

    Elements equal to `ignored(args)` index nothing, such as a loss's `ignore_index`.
    """

    position: int
    source: int
    dim: Callable[[Args], int]
    ignored: Callable[[Args], int | None] = lambda args: None


_INDICES = {
    aten.embedding.default: _Index(1, 0, lambda args: 0),
    aten.gather.default: _Index(2, 0, lambda args: args[1]),
    aten.index_select.default: _Index(2, 0, lambda args: args[1]),
    # the scores are (n_classes,) or (n, n_classes), so classes are the last dimension
    aten.nll_loss_forward.default: _Index(
        1, 0, lambda args: args[0].ndim - 1, lambda args: args[4]
    ),
    aten.nll_loss_backward.default: _Index(
        2, 1, lambda args: args[1].ndim - 1, lambda args: args[5]
    ),
}


def has_any(segment: Segment) -> bool:
    """Whether a call of `segment` has an index that comes from data."""
    return any(call.op in _INDICES for call in segment.calls)


def clamped(op: OpOverload, args: Args, bad: list[torch.Tensor]) -> Args:
    """`args` with the index clamped; appends to `bad` a 0-dim bool, true if it was out of range."""
    rule = _INDICES.get(op)
    if rule is None:
        return args
    index, source = args[rule.position], args[rule.source]
    # a 0-dim tensor is indexed as one of one element
    n = source.size(rule.dim(args)) if source.ndim else 1
    outside = (index < 0) | (index >= n)
    safe = index.clamp(0, max(n - 1, 0))
    ignored = rule.ignored(args)
    # clamping would turn the ignored index, often -100, into a class that counts
    if ignored is not None:
        outside = outside & (index != ignored)
        safe = torch.where(index == ignored, index, safe)
    bad.append(outside.any())
    return [*args[: rule.position], safe, *args[rule.position + 1 :]]
