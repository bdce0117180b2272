"""Rules of ops that reduce dimensions, and of scans."""

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
    is_one,
    rule,
    wide_kind,
)

Dims = int | Sequence[int] | None


def _dims(x: Value, dim: Dims) -> list[int]:
    """The dimensions to reduce, counted from the first; all if none are named."""
    n = x.meta.ndim
    named = [dim] if isinstance(dim, int) else list(dim or range(n))
    return sorted({d % n for d in named}) if n else []


def _reduced(t: Translator, name: str, x: V, dims: list[int], keepdim: bool, kind: str) -> V:
    if not dims:
        return x  # a 0-dim tensor
    made: V = t.op(name, x, kind=kind, dims=dims, keepdim=keepdim)
    return made


def _accumulated(
    t: Translator, meta: torch.Tensor, name: str, x: Value, dim: Dims, keepdim: bool
) -> Value:
    kind = wide_kind(meta.dtype)
    sums = kind if kind in ("Float", "Double") else "Int"
    total = Value(_reduced(t, name, t.held_as(x, sums), _dims(x, dim), keepdim, sums), sums, meta)
    return Value(t.held_as(total, kind), kind, meta)


@rule("prims.sum")
def _prims_sum(t: Translator, meta: torch.Tensor, x: Value, dims: Dims, **_: Any) -> Value:
    return _accumulated(t, meta, "sum", x, dims, False)


@rule("sum")
def _sum(
    t: Translator, meta: torch.Tensor, x: Value, dim: Dims = None, keepdim: bool = False, **_: Any
) -> Value:
    return _accumulated(t, meta, "sum", x, dim, keepdim)


@rule("prod")
def _prod(
    t: Translator, meta: torch.Tensor, x: Value, dim: Dims = None, keepdim: bool = False, **_: Any
) -> Value:
    return _accumulated(t, meta, "prod", x, dim, keepdim)


@rule("mean")
def _mean(
    t: Translator, meta: torch.Tensor, x: Value, dim: Dims = None, keepdim: bool = False, **_: Any
) -> Value:
    total = _accumulated(t, meta, "sum", x, dim, keepdim)
    o = Emitter(t, total.kind)
    return Value(o("div", total.at, _count(t, x, _dims(x, dim), total.kind)), total.kind, meta)


def _count(t: Translator, x: Value, dims: list[int], kind: str) -> Any:
    """The number of elements in `dims`, as a number of `kind`."""
    count = t.product([x.meta.shape[d] for d in dims])
    return t.op("cast", count, kind=kind, dtype=kind) if isinstance(count, V) else float(count)


def _extreme(
    t: Translator, meta: torch.Tensor, name: str, x: Value, dim: Dims, keepdim: bool
) -> Value:
    kind = wide_kind(x.meta.dtype)
    if kind == "Bool":
        numbers = _reduced(t, name, t.held_as(x, "Int"), _dims(x, dim), keepdim, "Int")
        return Value(t.held_as(Value(numbers, "Int", meta), "Bool"), "Bool", meta)
    return Value(_reduced(t, name, t.wide(x), _dims(x, dim), keepdim, kind), kind, meta)


@rule("amax")
def _amax(
    t: Translator, meta: torch.Tensor, x: Value, dim: Dims = None, keepdim: bool = False
) -> Value:
    return _extreme(t, meta, "max", x, dim, keepdim)


@rule("amin")
def _amin(
    t: Translator, meta: torch.Tensor, x: Value, dim: Dims = None, keepdim: bool = False
) -> Value:
    return _extreme(t, meta, "min", x, dim, keepdim)


@rule("max.default")
def _max(t: Translator, meta: torch.Tensor, x: Value) -> Value:
    return _extreme(t, meta, "max", x, None, False)


@rule("min.default")
def _min(t: Translator, meta: torch.Tensor, x: Value) -> Value:
    return _extreme(t, meta, "min", x, None, False)


def _place(t: Translator, x: Value, name: str, dim: int, keepdim: bool) -> V:
    """The first index at which the extreme of `dim` stands; a NaN counts as the extreme."""
    n = t.size(x.meta.shape[dim])
    kind = wide_kind(x.meta.dtype)
    at = t.held_as(x, "Int") if kind == "Bool" else t.wide(x)
    o = Emitter(t, "Int" if kind == "Bool" else kind)
    best = _reduced(t, name, at, [dim], True, o.kind)
    hit = o("eq", at, best, kind="Bool")
    if o.is_float:
        hit = o("logical_or", hit, o("isnan", at, kind="Bool"), kind="Bool")
    index = t.along(t.op("iota", n, kind="Int", dtype="Int"), x, dim)
    last = n if isinstance(n, V) else t.op("constant", n, kind="Int")
    candidates = t.op("where", hit, index, last, kind="Int")
    return _reduced(t, "min", candidates, [dim], keepdim, "Int")


def _with_place(
    t: Translator, meta: Any, name: str, x: Value, dim: int, keepdim: bool
) -> tuple[Value, Value]:
    values, indices = meta
    if not x.meta.ndim:
        return Value(x.at, x.kind, values), _zeros(t, indices)
    dim %= x.meta.ndim
    index = Value(_place(t, x, name, dim, keepdim), "Int", indices)
    return _extreme(t, values, name, x, dim, keepdim), index


def _zeros(t: Translator, meta: torch.Tensor) -> Value:
    return Value(
        t.op("full", [], t.op("constant", 0, kind="Int"), kind="Int", dtype="Int"), "Int", meta
    )


@rule("max.dim")
def _max_dim(t: Translator, meta: Any, x: Value, dim: int, keepdim: bool = False) -> Any:
    return _with_place(t, meta, "max", x, dim, keepdim)


@rule("min.dim")
def _min_dim(t: Translator, meta: Any, x: Value, dim: int, keepdim: bool = False) -> Any:
    return _with_place(t, meta, "min", x, dim, keepdim)


def _arg(
    t: Translator, meta: torch.Tensor, name: str, x: Value, dim: int | None, keepdim: bool
) -> Value:
    if not x.meta.ndim:
        return _zeros(t, meta)
    if dim is not None:
        return Value(_place(t, x, name, dim % x.meta.ndim, keepdim), "Int", meta)
    flat = Value(t.reshaped(x, [x.meta.numel()]), x.kind, x.meta.new_empty([x.meta.numel()]))
    place = _place(t, flat, name, 0, False)
    if keepdim:
        place = t.op("broadcast", place, [True] * x.meta.ndim, kind="Int")
    return Value(place, "Int", meta)


@rule("argmax")
def _argmax(
    t: Translator, meta: torch.Tensor, x: Value, dim: int | None = None, keepdim: bool = False
) -> Value:
    return _arg(t, meta, "max", x, dim, keepdim)


@rule("argmin")
def _argmin(
    t: Translator, meta: torch.Tensor, x: Value, dim: int | None = None, keepdim: bool = False
) -> Value:
    return _arg(t, meta, "min", x, dim, keepdim)


def _counted(t: Translator, x: Value, dim: Dims, keepdim: bool, *, of_false: bool) -> V:
    """How many elements are true, or false."""
    truth = t.held_as(x, "Bool")
    if of_false:
        truth = t.op("logical_not", truth, kind="Bool")
    ones = t.op("cast", truth, kind="Int", dtype="Int")
    return _reduced(t, "sum", ones, _dims(x, dim), keepdim, "Int")


@rule("any")
def _any(
    t: Translator, meta: torch.Tensor, x: Value, dim: Dims = None, keepdim: bool = False
) -> Value:
    n = _counted(t, x, dim, keepdim, of_false=False)
    return Value(Emitter(t, "Int")("ne", n, 0, kind="Bool"), "Bool", meta)


@rule("all")
def _all(
    t: Translator, meta: torch.Tensor, x: Value, dim: Dims = None, keepdim: bool = False
) -> Value:
    n = _counted(t, x, dim, keepdim, of_false=True)
    return Value(Emitter(t, "Int")("eq", n, 0, kind="Bool"), "Bool", meta)


def _correction(correction: float | None) -> int:
    if correction is None:
        return 1
    if correction != int(correction):
        raise Unsupported(f"a correction of {correction}")
    return int(correction)


@rule("var.correction")
def _var(
    t: Translator,
    meta: torch.Tensor,
    x: Value,
    dim: Dims = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Value:
    dims, kind = _dims(x, dim), wide_kind(x.meta.dtype)
    if not dims:
        raise Unsupported("the variance of a 0-dim tensor")
    n = _correction(correction)
    at = t.op("var", t.wide(x), kind=kind, dims=dims, correction=n, keepdim=keepdim)
    return Value(at, kind, meta)


@rule("prims.var")
def _prims_var(
    t: Translator, meta: torch.Tensor, x: Value, dims: Dims, correction: float = 1
) -> Value:
    return _var(t, meta, x, dims, correction=correction)


@rule("var_mean.correction")
def _var_mean(
    t: Translator,
    meta: Any,
    x: Value,
    dim: Dims = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Value, Value]:
    dims, kind = _dims(x, dim), wide_kind(x.meta.dtype)
    if not dims:
        raise Unsupported("the variance of a 0-dim tensor")
    n = _correction(correction)
    var, mean = t.op(
        "var_mean", t.wide(x), kind=kind, n=2, dims=dims, correction=n, keepdim=keepdim
    )
    return Value(var, kind, meta[0]), Value(mean, kind, meta[1])


def _scanned(t: Translator, meta: torch.Tensor, name: str, x: Value, dim: int) -> Value:
    kind = wide_kind(meta.dtype)
    at = t.held_as(x, kind)
    # nvFuser refuses to scan a dimension of one element
    if x.meta.ndim and not is_one(x.meta.shape[dim]):
        at = t.op(name, at, dim % x.meta.ndim, kind=kind)
    return Value(at, kind, meta)


@rule("cumsum")
def _cumsum(t: Translator, meta: torch.Tensor, x: Value, dim: int, **_: Any) -> Value:
    return _scanned(t, meta, "cumsum", x, dim)


@rule("cumprod")
def _cumprod(t: Translator, meta: torch.Tensor, x: Value, dim: int, **_: Any) -> Value:
    return _scanned(t, meta, "cumprod", x, dim)


@rule("native_layer_norm")
def _layer_norm(
    t: Translator,
    meta: Any,
    x: Value,
    shape: Sequence[int],
    weight: Value | None,
    bias: Value | None,
    eps: float,
) -> tuple[Value, ...]:
    n = x.meta.ndim
    o, normal, statistics = _normalized(t, meta, x, list(range(n - len(shape), n)), eps)
    if weight is not None:
        normal = o("mul", normal, t.held_as(weight, o.kind))
    if bias is not None:
        normal = o("add", normal, t.held_as(bias, o.kind))
    return Value(normal, o.kind, meta[0]), *statistics


@rule("native_group_norm")
def _group_norm(
    t: Translator,
    meta: Any,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    n: Any,
    n_channels: Any,
    n_elements: Any,
    n_groups: int,
    eps: float,
) -> tuple[Value, ...]:
    grouped = [n, n_groups, (n_channels // n_groups) * n_elements]
    flat = Value(t.reshaped(x, grouped), x.kind, x.meta.new_empty(grouped))
    o, normal, (mean, rstd) = _normalized(t, meta, flat, [2], eps)
    at = t.reshaped(Value(normal, o.kind, flat.meta), x.meta.shape)
    for name, factors in (("mul", weight), ("add", bias)):
        if factors is not None:
            at = o(name, at, t.along(t.held_as(factors, o.kind), x, 1))
    statistics = [
        Value(t.op("squeeze", s.at, [2], kind=s.kind), s.kind, s.meta) for s in (mean, rstd)
    ]
    return Value(at, o.kind, meta[0]), *statistics


def _normalized(
    t: Translator, meta: Any, x: Value, dims: list[int], eps: float
) -> tuple[Emitter, V, list[Value]]:
    """`x` less its mean over its deviation; mean and 1 / deviation, their dimensions kept."""
    o = Emitter(t, wide_kind(x.meta.dtype))
    at = t.wide(x)
    var, mean = t.op("var_mean", at, kind=o.kind, n=2, dims=dims, correction=0, keepdim=True)
    rstd = o("rsqrt", o("add", var, eps))
    normal = o("mul", o("sub", at, mean), rstd)
    return o, normal, [Value(mean, o.kind, meta[1]), Value(rstd, o.kind, meta[2])]
