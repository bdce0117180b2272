"""Calls for which torch's sharding rules would give another result than one process.

In: an op and its arguments. Out: arguments that mean the same and that the rules understand, or
what the call must avoid. Pure functions: `compute` runs the calls.
"""

from __future__ import annotations

import math
from typing import Any

import torch

aten = torch.ops.aten

# The place of `dim` among the arguments, and that of the tensor or the size that it counts in.
# torch's rules compare it with the sharded dimension as it is, and a negative one is never equal.
_DIMS = {
    aten.cumsum.default: (1, 0),
    aten.cumprod.default: (1, 0),
    aten.logcumsumexp.default: (1, 0),
    aten.select_backward.default: (2, 1),
    aten.slice_backward.default: (2, 1),
}
# The place of the list of dimensions in reductions for which an empty list means all. torch's rules
# reduce none then, or raise.
_BY_DIMS = {
    **dict.fromkeys(
        (
            aten.sum.dim_IntList, aten.nansum.default, aten.mean.dim, aten.amax.default,
            aten.amin.default, aten.var.correction, aten.std.correction, aten.var_mean.correction,
            aten.std_mean.correction,
        ),
        1,
    ),
    aten.linalg_vector_norm.default: 2,
}  # fmt: skip

MEAN_GRADIENTS = {
    op: next(i for i, a in enumerate(op._schema.arguments) if a.name == "reduction")
    for op in (
        aten.binary_cross_entropy_backward.default, aten.huber_loss_backward.default,
        aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default,
        aten.soft_margin_loss_backward.default,
    )
}  # fmt: skip
"""Gradients of losses, and the place of `reduction`. For a mean the kernels divide by the number of
elements that they get: those of this rank."""

# Ops with an index: the places of tensors that must be split alike, and of the dimension in which
# they may differ. torch's rules split them alike even where the sizes differ.
_BY_INDEX = {
    aten.gather.default: ((0, 2), 1),
    aten.scatter_add.default: ((0, 2, 3), 1),
    aten.scatter_add_.default: ((0, 2, 3), 1),
}
# Ops that mean another thing on a sum, or on a maximum, than on its parts. torch's rules take them
# for linear, or for monotonic.
_OF_WHOLE_VALUES = frozenset({
    aten._fft_c2c.default, aten._fft_c2r.default, aten._fft_r2c.default, aten.nansum.default,
    aten.threshold.default, aten.view.dtype,
})  # fmt: skip

# Ops that use absolute values, and the reductions over ranks that must come before. torch's rules
# take a maximum norm for a maximum, and a sum of powers for a sum.
_OF_ABSOLUTE_VALUES = {
    **dict.fromkeys(
        (aten.linalg_vector_norm.default, aten.norm.Scalar, aten._foreach_norm.Scalar),
        ("max", "min"),
    ),
    **dict.fromkeys((aten.linalg__powsum.default, aten._foreach_powsum.Scalar), ("sum",)),
}

_INTEGERS = frozenset({
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64,
})  # fmt: skip

_PRODUCTS = frozenset({aten.prod.default, aten.prod.dim_int})
_SUMS = frozenset({"sum", "mean", "any", "all"})


def understood(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments that mean the same, in the form that torch's rules expect; `args` itself if they
    have it."""
    if op in _DIMS:
        place, counted = _DIMS[op]
        n_dims = args[counted].dim() if place == 1 else len(args[counted])
        if -n_dims <= args[place] < 0:
            return (*args[:place], args[place] + n_dims, *args[place + 1 :])
    elif op in _BY_DIMS and args[0].dim():
        place = _BY_DIMS[op]
        if len(args) > place and args[place] == []:
            return (*args[:place], list(range(args[0].dim())), *args[place + 1 :])
    return args


def with_sum(op: Any, args: tuple[Any, ...], mean: int, total: int) -> tuple[Any, ...] | None:
    """The arguments of an op of `MEAN_GRADIENTS` with the reduction `total` in place of `mean`.

    None if the reduction is another one.
    """
    place = MEAN_GRADIENTS[op]
    # the mean is the default, and a weight before it may be left out
    args = (*args, *[None] * (place - len(args)), *[mean] * (place >= len(args)))
    return (*args[:place], total, *args[place + 1 :]) if args[place] == mean else None


def needs_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], specs: list[Any]) -> bool:
    """Whether the op must run on gathered arguments, given the specs of its sharded ones."""
    placements = [placement for spec in specs for placement in spec.placements]
    if op.overloadpacket.__name__ in _SUMS:
        # squares of partial norms may be added, the norms may not
        return any(hasattr(placement, "norm_type") for placement in placements)
    if op in _OF_WHOLE_VALUES and any(placement.is_partial() for placement in placements):
        return True
    if op in _OF_ABSOLUTE_VALUES:
        return _has_reduction(placements, _OF_ABSOLUTE_VALUES[op])
    if op is aten._to_copy.default and kwargs.get("dtype") in _INTEGERS:
        # a large integer may become a negative one: the maximum isn't that of the parts
        return _has_reduction(placements, ("max", "min"))
    if op is aten.view.dtype:
        return _cuts_elements(args[0], args[1], specs[0])
    if op in _BY_INDEX and not all(placement.is_replicate() for placement in placements):
        # a partial tensor too may be cut by the rule
        places, dim = _BY_INDEX[op]
        n_dims = max(1, args[0].dim())
        sizes = {
            tuple(n for i, n in enumerate(args[place].shape) if i != args[dim] % n_dims)
            for place in places
        }
        return len(sizes) > 1
    if not any(placement.is_shard() for placement in placements):
        return False
    if op in _PRODUCTS:
        return bool(args[0].is_complex())  # no process group multiplies complex numbers
    # With equal limits the range is that of all values. A decision doesn't depend on the limits,
    # which may be equal in a later call.
    if op is aten.histc.default:
        return True
    # the counts are of all indices
    return op is aten.embedding_dense_backward.default and args[4]


def _has_reduction(placements: list[Any], reductions: tuple[str, ...]) -> bool:
    return any(getattr(placement, "reduce_op", None) in reductions for placement in placements)


def _cuts_elements(tensor: Any, dtype: torch.dtype, spec: Any) -> bool:
    """Whether ranks split the last dimension so that their parts, as `dtype`, aren't equal parts of
    the whole."""
    last = tensor.ndim - 1
    ways = [
        spec.mesh.size(i) for i, p in enumerate(spec.placements) if p.is_shard() and p.dim == last
    ]
    n_together = max(1, dtype.itemsize // tensor.dtype.itemsize)
    return bool(ways) and tensor.shape[last] % (math.prod(ways) * n_together) != 0
