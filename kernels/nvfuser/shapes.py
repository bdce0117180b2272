"""Rules of ops that move elements: views, joins, paddings, look-ups by index, and factories.

Aten's views are ordinary ops here. A definition has no aliases: `lower` says which outputs of the
kernel share memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lazy_tensor.kernels.nvfuser.definition import V
from lazy_tensor.kernels.nvfuser.pointwise import Emitter
from lazy_tensor.kernels.nvfuser.translate import (
    Translator,
    Unsupported,
    Value,
    kind_of,
    number_of,
    rule,
    same_sizes,
    wide_kind,
)

# Views


@rule("view.default", "_unsafe_view", "reshape", "view_copy.default", "_reshape_alias",
      "unsqueeze", "unsqueeze_copy", "squeeze", "squeeze_copy")  # fmt: skip
def _reshaped(t: Translator, meta: torch.Tensor, x: Value, *_: Any) -> Value:
    return Value(t.reshaped(x, meta.shape), x.kind, meta)


@rule("permute", "permute_copy")
def _permute(t: Translator, meta: torch.Tensor, x: Value, dims: Sequence[int]) -> Value:
    order = [d % meta.ndim for d in dims]
    at = x.at if order == list(range(meta.ndim)) else t.op("permute", x.at, order, kind=x.kind)
    return Value(at, x.kind, meta)


@rule("transpose.int")
def _transpose(t: Translator, meta: torch.Tensor, x: Value, one: int, other: int) -> Value:
    order = list(range(meta.ndim))
    if order:
        order[one], order[other] = order[other], order[one]
    return _permute(t, meta, x, order)


@rule("t")
def _t(t: Translator, meta: torch.Tensor, x: Value) -> Value:
    return _permute(t, meta, x, list(reversed(range(meta.ndim))))


@rule("expand", "expand_copy", "broadcast_to")
def _expand(t: Translator, meta: torch.Tensor, x: Value, size: Any, **_: Any) -> Value:
    return Value(t.expanded(x, meta.shape), x.kind, meta)


@rule("prims.broadcast_in_dim")
def _broadcast_in_dim(
    t: Translator, meta: torch.Tensor, x: Value, shape: Any, dims: Sequence[int]
) -> Value:
    at = t.op("broadcast_in_dim", t.tensor(x), t.sizes(meta.shape), list(dims), kind=x.kind)
    return Value(at, x.kind, meta)


@rule("select.int", "select_copy.int")
def _select(t: Translator, meta: torch.Tensor, x: Value, dim: int, index: int) -> Value:
    if isinstance(index, torch.SymInt):
        raise Unsupported("a symbolic index")
    dim %= x.meta.ndim
    at = _select_at(t, x, dim, index if index >= 0 else index + x.meta.shape[dim])
    return Value(at, x.kind, meta)


def _select_at(t: Translator, x: Value, dim: int, index: Any) -> V:
    place = t.size(index)
    if not isinstance(place, V):
        place = t.op("constant", place, kind="Int")
    return t.op("select", x.at, place, dim, kind=x.kind)


@rule("slice", "slice_copy")
def _slice(
    t: Translator,
    meta: torch.Tensor,
    x: Value,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Value:
    if step != 1:
        raise Unsupported("a slice with a step")
    dim %= x.meta.ndim
    first = _bound(start, 0, x.meta.shape[dim])
    return Value(_cut(t, x, dim, first, meta.shape[dim]), x.kind, meta)


def _bound(given: Any, default: Any, n: Any) -> Any:
    """A slice's start or end as a position from 0 to `n`, the number of elements."""
    place = default if given is None else given
    if isinstance(place, torch.SymInt):
        return place
    place = place + n if place < 0 else place
    return place if isinstance(n, torch.SymInt) else min(max(place, 0), n)


def _cut(t: Translator, x: Value, dim: int, first: Any, length: Any) -> V:
    """`length` elements of `dim` from `first` on.

    A single element is selected instead of sliced. A kernel of nvFuser that begins with a slice of
    one element reads element 0, wherever the slice begins.
    """
    shape = x.meta.shape
    if not isinstance(length, torch.SymInt) and length == 1 and shape[dim] != 1:
        row = _select_at(t, x, dim, first)
        return t.op("broadcast", row, [i == dim for i in range(len(shape))], kind=x.kind)
    starts: list[Any] = [0] * len(shape)
    ends = t.sizes(shape)
    starts[dim], ends[dim] = t.size(first), t.size(first + length)
    return t.op("slice", x.at, starts, ends, kind=x.kind)


@rule("slice_backward")
def _slice_backward(
    t: Translator,
    meta: torch.Tensor,
    gradient: Value,
    size: Any,
    dim: int,
    start: Any,
    end: Any,
    step: int,
) -> Value:
    if step != 1:
        raise Unsupported("a slice with a step")
    # the gradient of a slice is the slice's gradient, padded with zeros
    dim %= meta.ndim
    first = _bound(start, 0, meta.shape[dim])
    rest = meta.shape[dim] - first - gradient.meta.shape[dim]
    widths: list[Any] = [0, 0] * (meta.ndim - dim - 1) + [first, rest]
    return _pad(t, meta, gradient, widths, 0)


@rule("slice_scatter")
def _slice_scatter(
    t: Translator,
    meta: torch.Tensor,
    x: Value,
    source: Value,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Value:
    if step != 1:
        raise Unsupported("a slice with a step")
    dim %= meta.ndim
    n = meta.shape[dim]
    if isinstance(n, torch.SymInt):
        raise Unsupported("slice_scatter into a symbolic size")
    # what lies before the slice, the source, and what lies behind the slice
    first, last = _bound(start, 0, n), _bound(end, n, n)
    parts = [source]
    if first:
        parts.insert(0, _part(t, x, dim, 0, first))
    if last < n:
        parts.append(_part(t, x, dim, last, n - last))
    kind = _shared_kind([x, source], meta)
    held = [t.held_as(part, kind) for part in parts]
    at = held[0] if len(held) == 1 else t.op("cat", held, dim, kind=kind)
    return Value(at, kind, meta)


def _part(t: Translator, x: Value, dim: int, first: int, length: int) -> Value:
    return Value(_cut(t, x, dim, first, length), x.kind, x.meta.narrow(dim, first, length))


@rule("split.Tensor", "split_with_sizes", "unsafe_split.Tensor", "split_with_sizes_copy")
def _split(t: Translator, meta: Any, x: Value, size: Any, dim: int = 0) -> tuple[Value, ...]:
    dim %= x.meta.ndim
    parts: list[Value] = []
    first: Any = 0
    for part in meta:
        parts.append(Value(_cut(t, x, dim, first, part.shape[dim]), x.kind, part))
        first = first + part.shape[dim]
    return tuple(parts)


@rule("unbind.int")
def _unbind(t: Translator, meta: Any, x: Value, dim: int = 0) -> tuple[Value, ...]:
    return tuple(_select(t, part, x, dim, i) for i, part in enumerate(meta))


@rule("as_strided")
def _as_strided(
    t: Translator, meta: torch.Tensor, x: Value, size: Any, stride: Any, offset: int | None = None
) -> Value:
    if not (x.meta.is_contiguous() and meta.is_contiguous() and x.meta.numel() == meta.numel()):
        raise Unsupported("as_strided, other than as a view of all elements")
    return _reshaped(t, meta, x)


# Joins and paddings


@rule("cat")
def _cat(t: Translator, meta: torch.Tensor, tensors: list[Value], dim: int = 0) -> Value:
    # torch lets an empty tensor of one dimension be joined with any others, and ignores it
    parts = [x for x in tensors if x.meta.ndim == meta.ndim]
    kind = _shared_kind(parts, meta)
    held = [t.held_as(x, kind) for x in parts]
    at = held[0] if len(held) == 1 else t.op("cat", held, dim % meta.ndim, kind=kind)
    return Value(at, kind, meta)


def _shared_kind(parts: Sequence[Value], meta: torch.Tensor) -> str:
    """The kind for tensors that are joined: the result's own if all parts have it, else wide."""
    narrow = kind_of(meta.dtype)
    return narrow if all(x.kind == narrow for x in parts) else wide_kind(meta.dtype)


@rule("constant_pad_nd")
def _pad(t: Translator, meta: torch.Tensor, x: Value, pad: Sequence[int], value: Any = 0) -> Value:
    if isinstance(value, Value):
        raise Unsupported("padding with a number that changes")
    # `pad` has two widths for each dimension, from the last on; negative ones cut
    for n, before in zip(reversed(meta.shape), pad[::2], strict=False):
        if not isinstance(before, torch.SymInt) and before < 0 and n == 1:
            # read wrongly for the same reason as in `_cut`
            raise Unsupported("padding that leaves one element")
    number = Emitter(t, x.kind).number(number_of(x.kind)(value))
    return Value(t.op("pad", x.at, t.sizes(pad), number, kind=x.kind), x.kind, meta)


@rule("flip", "prims.rev")
def _flip(t: Translator, meta: torch.Tensor, x: Value, dims: Sequence[int]) -> Value:
    at = x.at
    for dim in dims:
        dim %= meta.ndim
        n = t.size(meta.shape[dim])
        last = t.op("sub", n, 1, kind="") if isinstance(n, V) else n - 1
        backwards = t.op("iota", n, last, -1, kind="Int", dtype="Int")
        at = t.op("index_select", at, backwards, dim, kind=x.kind)
    return Value(at, x.kind, meta)


# Look-ups by index. Indices are in range, as `lower` has clamped them.


@rule("index_select")
def _index_select(t: Translator, meta: torch.Tensor, x: Value, dim: int, index: Value) -> Value:
    if not x.meta.ndim:
        raise Unsupported("index_select of a 0-dim tensor")
    place = index.at
    if not index.meta.ndim:
        place = t.op("broadcast", place, [True], kind=index.kind)
    return Value(t.op("index_select", x.at, place, dim % x.meta.ndim, kind=x.kind), x.kind, meta)


@rule("gather")
def _gather(t: Translator, meta: torch.Tensor, x: Value, dim: int, index: Value, **_: Any) -> Value:
    if not (x.meta.ndim and index.meta.ndim):
        raise Unsupported("gather of a 0-dim tensor")
    dim %= x.meta.ndim
    rows = [*x.meta.shape[:dim], 1, *x.meta.shape[dim + 1 :]]
    if same_sizes(rows, index.meta.shape) and x.kind != "Bool":
        # One element of each row is the sum over the row with all others set to 0. nvFuser fuses a
        # sum with the ops that compute the row, but leaves a gather to a kernel of ATen.
        kind = wide_kind(x.meta.dtype)
        picked = t.op(
            "where", _hits(t, x, dim, index), t.wide(x), Emitter(t, kind).number(0), kind=kind
        )
        total = t.op("sum", picked, kind=kind, dims=[dim], keepdim=True)
        return Value(total, kind, meta)
    return Value(t.op("gather", x.at, index.at, dim % x.meta.ndim, kind=x.kind), x.kind, meta)


@rule("scatter.value")
def _scatter_value(
    t: Translator, meta: torch.Tensor, x: Value, dim: int, index: Value, value: Any
) -> Value:
    # one place in each row, as in the backward of a loss: a comparison of indices
    dim %= meta.ndim
    shape = list(meta.shape)
    shape[dim] = 1
    if list(index.meta.shape) != shape or isinstance(value, Value):
        raise Unsupported("scatter, other than of a number to one place in each row")
    number = Emitter(t, x.kind).number(number_of(x.kind)(value))
    return Value(t.op("where", _hits(t, x, dim, index), number, x.at, kind=x.kind), x.kind, meta)


def _hits(t: Translator, x: Value, dim: int, index: Value) -> V:
    """For each element of `x`, whether its position along `dim` is the one in `index`."""
    places = t.along(t.op("iota", t.size(x.meta.shape[dim]), kind="Int", dtype="Int"), x, dim)
    return t.op("eq", places, t.held_as(index, "Int"), kind="Bool")


@rule("embedding")
def _embedding(t: Translator, meta: torch.Tensor, weight: Value, indices: Value, *_: Any) -> Value:
    flat = t.reshaped(indices, [indices.meta.numel()])
    rows = t.op("index_select", weight.at, flat, 0, kind=weight.kind)
    shape = [indices.meta.numel(), weight.meta.shape[1]]
    found = Value(rows, weight.kind, weight.meta.new_empty(shape))
    return Value(t.reshaped(found, meta.shape), weight.kind, meta)


# Factories. `empty` and its like give zeros, as their content may be anything.


@rule("new_full")
def _new_full(t: Translator, meta: torch.Tensor, _: Any, size: Any, value: Any, **__: Any) -> Value:
    return _filled(t, meta, value)


@rule("full", "full_like", "fill")
def _full(t: Translator, meta: torch.Tensor, _: Any, value: Any, **__: Any) -> Value:
    return _filled(t, meta, value)


@rule("scalar_tensor")
def _scalar_tensor(t: Translator, meta: torch.Tensor, value: Any, **_: Any) -> Value:
    return _filled(t, meta, value)


@rule("zeros", "zeros_like", "new_zeros", "empty", "empty_like", "empty_permuted", "empty_strided",
      "new_empty", "new_empty_strided", "zero")  # fmt: skip
def _zeros(t: Translator, meta: torch.Tensor, *_: Any, **__: Any) -> Value:
    return _filled(t, meta, 0)


@rule("ones", "ones_like", "new_ones")
def _ones(t: Translator, meta: torch.Tensor, *_: Any, **__: Any) -> Value:
    return _filled(t, meta, 1)


def _filled(t: Translator, meta: torch.Tensor, value: Any) -> Value:
    kind = kind_of(meta.dtype)
    if isinstance(value, Value):
        number = t.held_as(value, kind)
        if not value.is_number:
            return Value(t.expanded(Value(number, kind, value.meta), meta.shape), kind, meta)
    else:
        number = t.op("constant", number_of(kind)(value), kind=kind)
    return Value(t.op("full", t.sizes(meta.shape), number, kind=kind, dtype=kind), kind, meta)


@rule("copy")
def _copy(t: Translator, meta: torch.Tensor, _: Value, source: Value, *__: Any) -> Value:
    kind = kind_of(meta.dtype)
    held = Value(t.held_as(source, kind), kind, source.meta, source.is_number)
    return Value(t.expanded(held, meta.shape), kind, meta)


def _range(t: Translator, meta: torch.Tensor, start: Any, step: Any) -> Value:
    """A range of as many elements as `meta` has."""
    n, kind = t.size(meta.shape[0]), wide_kind(meta.dtype)
    # start and step may be symbolic sizes, which are int64
    if kind == "Int32":
        whole = t.op("iota", n, t.size(start), t.size(step), kind="Int", dtype="Int")
        return Value(t.op("cast", whole, kind=kind, dtype=kind), kind, meta)
    if kind == "Int":
        start, step = t.size(start), t.size(step)
    else:
        start, step = (t.op("constant", float(x), kind=kind) for x in (start, step))
    return Value(t.op("iota", n, start, step, kind=kind, dtype=kind), kind, meta)


@rule("arange.default")
def _arange(t: Translator, meta: torch.Tensor, end: Any, **_: Any) -> Value:
    return _range(t, meta, 0, 1)


@rule("arange.start")
def _arange_from(t: Translator, meta: torch.Tensor, start: Any, end: Any, **_: Any) -> Value:
    return _range(t, meta, start, 1)


@rule("arange.start_step")
def _arange_by(
    t: Translator, meta: torch.Tensor, start: Any, end: Any, step: Any = 1, **_: Any
) -> Value:
    return _range(t, meta, start, step)


@rule("prims.iota.default")
def _iota(
    t: Translator, meta: torch.Tensor, length: Any, *, start: Any, step: Any, **_: Any
) -> Value:
    return _range(t, meta, start, step)
