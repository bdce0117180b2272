"""Output metadata of views in closed form: strides and offsets, as the ops' own code computes them.

A form takes 3 us, torch's C++ on meta tensors 13, and the first step of a model has hundreds.

In: an op's arguments and its tensor's metadata. Out: the view's metadata, or None where only torch
can tell, or would raise. Called by `shape_formulas`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch.metadata.infer import Meta, dense_stride

aten = torch.ops.aten
Form = Callable[[tuple[Any, ...], Meta], Meta | None]


def _place(dim: Any, n_dims: int) -> int | None:
    """A dimension's number, counted from the front; None if there is no such dimension."""
    if type(dim) is not int or not -n_dims <= dim < n_dims:
        return None
    return dim % n_dims


def _with(meta: Meta, size: Sequence[int], stride: Sequence[int], moved: int = 0) -> Meta:
    """The metadata of a view that begins `moved` elements behind the begin of its base."""
    return (tuple(size), tuple(stride), meta[2] + moved, *meta[3:])


def _permute(args: tuple[Any, ...], meta: Meta) -> Meta | None:
    size, stride = meta[:2]
    dims = [d for d in (_place(dim, len(size)) for dim in args[1]) if d is not None]
    if len(dims) != len(args[1]) or sorted(dims) != list(range(len(size))):
        return None
    return _with(meta, [size[d] for d in dims], [stride[d] for d in dims])


def _transpose(args: tuple[Any, ...], meta: Meta) -> Meta | None:
    n_dims = len(meta[0])
    one, two = _place(args[1], n_dims), _place(args[2], n_dims)
    if one is None or two is None:
        return None
    dims = list(range(n_dims))
    dims[one], dims[two] = two, one
    return _permute((None, dims), meta)


def _t(args: tuple[Any, ...], meta: Meta) -> Meta | None:
    n_dims = len(meta[0])
    return _permute((None, range(n_dims)[::-1]), meta) if n_dims <= 2 else None


def _unsqueeze(args: tuple[Any, ...], meta: Meta) -> Meta | None:
    size, stride = list(meta[0]), list(meta[1])
    dim = _place(args[1], len(size) + 1)
    if dim is None:
        return None
    # the stride of a dim of one element is never used, but it shows: it must be torch's
    step = size[dim] * stride[dim] if dim < len(size) else 1
    return _with(meta, [*size[:dim], 1, *size[dim:]], [*stride[:dim], step, *stride[dim:]])


def _squeeze(args: tuple[Any, ...], meta: Meta) -> Meta | None:
    size, stride = meta[:2]
    dim = _place(args[1], len(size))
    if dim is None:
        return None
    if size[dim] != 1:
        return _with(meta, size, stride)
    return _with(meta, size[:dim] + size[dim + 1 :], stride[:dim] + stride[dim + 1 :])


def _select(args: tuple[Any, ...], meta: Meta) -> Meta | None:
    size, stride = meta[:2]
    dim = _place(args[1], len(size))
    index = None if dim is None else _place(args[2], size[dim])
    if dim is None or index is None:
        return None
    rest = size[:dim] + size[dim + 1 :], stride[:dim] + stride[dim + 1 :]
    return _with(meta, *rest, moved=index * stride[dim])


def _slice(args: tuple[Any, ...], meta: Meta) -> Meta | None:
    size, stride = meta[:2]
    given = [*args[1:], *(0, None, None, 1)[len(args) - 1 :]]  # with the schema's defaults
    dim, (start, end, step) = _place(given[0], len(size)), given[1:]
    if dim is None or type(step) is not int or step < 1:
        return None
    if type(start) not in (int, type(None)) or type(end) not in (int, type(None)):
        return None
    # torch clamps start and end as Python does for a slice with a positive step
    n = size[dim]
    taken = range(n)[slice(start, end, step)]
    sizes, strides = list(size), list(stride)
    sizes[dim], strides[dim] = len(taken), stride[dim] * step
    return _with(meta, sizes, strides, moved=taken.start * stride[dim])


def _expand(args: tuple[Any, ...], meta: Meta) -> Meta | None:
    size, stride = meta[:2]
    wanted = args[1]
    n_new = len(wanted) - len(size)
    if n_new < 0:
        return None
    # a 0-dim tensor has no dim that -1 could keep
    if not size:
        return None if any(n < 0 for n in wanted) else _with(meta, wanted, [0] * len(wanted))
    sizes, strides = list(wanted), [0] * len(wanted)
    # From the last dim on, as `inferExpandGeometry` does: a new dim of size 1 takes the stride that
    # the dim behind it ends at. A dim that is repeated has stride 0.
    for i in reversed(range(len(wanted))):
        n, step = 1, 0
        if i >= n_new:
            n, step = size[i - n_new], stride[i - n_new]
        else:
            step = sizes[i + 1] * strides[i + 1]
        if wanted[i] == -1 and i >= n_new:
            sizes[i] = n
        elif wanted[i] != n:
            if n != 1 or wanted[i] < 0:
                return None
            step = 0
        strides[i] = step
    return _with(meta, sizes, strides)


def _view(args: tuple[Any, ...], meta: Meta) -> Meta | None:
    size, stride = meta[:2]
    # only views of contiguous tensors: else torch may find strides, or raise
    wanted, n = list(args[1]), math.prod(size)
    if tuple(stride) != dense_stride(size) or n == 0 or not all(type(w) is int for w in wanted):
        return None
    # one -1 stands for what is left; a second one fails the check below, as it does in torch
    if wanted.count(-1) == 1:
        known = math.prod(w for w in wanted if w != -1)
        if known < 1 or n % known:
            return None
        wanted[wanted.index(-1)] = n // known
    if any(w < 1 for w in wanted) or math.prod(wanted) != n:
        return None
    return _with(meta, wanted, dense_stride(tuple(wanted)))


VIEWS: dict[OpOverload, Form] = {
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.expand.default: _expand,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
}
