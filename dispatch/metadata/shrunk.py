"""Tiny inputs on which a kernel can be tried in place of the program's.

In: a call's arguments and its tensors' metadata. Out: metadata of at most two elements a dimension.
The kernels of some ops trust numbers among the arguments (`N`, `C`, `groups`). For those also
arguments that fit the tiny sizes, or None if the program's don't fit. Called by `kernel_probe`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lazy_tensor.dispatch.metadata.infer import Meta, dense_stride
from lazy_tensor.kernels.segment import Ref

Args = tuple[Any, ...]
Size = tuple[int, ...]


def tiny(meta: Meta) -> Meta:
    """The metadata of a tiny tensor of the same kind of layout.

    It keeps what kernels may choose the layout of a result by: strides of 0, the order of strides,
    equal strides, and whether there are gaps.
    """
    size, stride, _, dtype, device = meta
    small = _small(size)
    if tuple(stride) == dense_stride(size):
        return (small, dense_stride(small), 0, dtype, device)
    steps, step, extent = [0] * len(size), 1, 1
    # From the smallest on, each different stride becomes the least tiny one that leaves no overlap.
    # It is doubled if there is a gap below it: `extent` is the end of what lies below.
    for given in sorted({n for n in stride if n}):
        dims = [d for d in range(len(size)) if stride[d] == given]
        step *= 2 if given > extent else 1
        for d in dims:
            steps[d] = step
        step, extent = step * max(small[d] for d in dims), given * max(size[d] for d in dims)
    return (small, tuple(steps), 0, dtype, device)


def _small(size: Size) -> Size:
    return tuple(min(n, 2) for n in size)


def _group_norm(args: Args, metas: list[Meta]) -> Args | None:
    """`input, weight, bias, N, C, HxW, group, eps`."""
    return _with_groups(args, 3, metas, lambda whole, _, channels: [whole, channels, channels])


def _group_norm_backward(args: Args, metas: list[Meta]) -> Args | None:
    """`gradient, input, mean, rstd, weight, N, C, HxW, group, mask`."""
    return _with_groups(
        args, 5, metas, lambda whole, groups, channels: [whole, whole, groups, groups, channels]
    )


def _with_groups(
    args: Args, at: int, metas: list[Meta], expected: Callable[[Size, Size, Size], list[Size]]
) -> Args | None:
    """Arguments for tiny tensors: `N, C, HxW, group` stand from position `at` on.

    `expected(whole, groups, channels)` gives the size that each tensor before must have.
    """
    if len(args) <= at + 4 or type(args[0]) is not Ref:
        return None
    whole = tuple(metas[args[0].index][0])
    n, c, inner, groups = args[at : at + 4]
    if whole[:2] != (n, c) or math.prod(whole[2:]) != inner or groups < 1 or c % groups:
        return None
    sizes = expected(whole, (n, groups), (c,))
    if not _have_sizes(args[:at], sizes, metas):
        return None
    n, c, *rest = _small(whole)
    return (*args[:at], n, c, math.prod(rest), min(groups, 2), *args[at + 4 :])


def _weight_norm(args: Args, metas: list[Meta]) -> Args | None:
    """`v, g, dim`, which fit tiny tensors, too, if they fit the program's."""
    dim = args[2] if len(args) > 2 else 0
    whole = tuple(metas[0][0])
    if dim not in (0, len(whole) - 1):
        return None
    kept = tuple(n if d == dim else 1 for d, n in enumerate(whole))
    return args if _have_sizes(args[:2], [whole, kept], metas) else None


def _roll(args: Args, metas: list[Meta]) -> Args | None:
    """`self, shifts, dims`. A roll that moves nothing moves nothing of a tiny tensor either."""
    if len(args) < 3 or not args[2]:
        return None
    size = metas[0][0]
    moves = tuple(min(by % max(size[d], 1), 1) for by, d in zip(args[1], args[2], strict=False))
    return (args[0], moves, args[2])


def _have_sizes(tensors: Args, sizes: list[Size], metas: list[Meta]) -> bool:
    """Whether each argument is None or a tensor of its size."""
    return all(
        tensor is None or (type(tensor) is Ref and tuple(metas[tensor.index][0]) == size)
        for tensor, size in zip(tensors, sizes, strict=True)
    )


SHRUNK: dict[str, Callable[[Args, list[Meta]], Args | None]] = {
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "_weight_norm_interface": _weight_norm,
    "roll": _roll,
}
"""Ops whose numbers must fit their tensors' sizes, by name: what makes arguments for tiny ones."""
