"""Rules of ops that reduce dimensions, and of norms.

Reductions compute in the wide kind of their dtype (see `translate.wide_kind`). Norms are written
out as a variance, a mean and pointwise ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from lazy_tensor.kernels.nvfuser.definition import V
from lazy_tensor.kernels.nvfuser.pointwise import Emitter
from lazy_tensor.kernels.nvfuser.translate import Translator, Unsupported, Value, rule, wide_kind

Dims = int | Sequence[int] | None


def _dims(x: Value, dim: Dims) -> list[int]:
    """The dimensions to reduce, as sorted non-negative numbers; all of them if none are given."""
    n = x.meta.ndim
    named = [dim] if isinstance(dim, int) else list(dim or range(n))
    return sorted({d % n for d in named}) if n else []


def _reduced(t: Translator, name: str, x: V, dims: list[int], keepdim: bool, kind: str) -> V:
    # a 0-dim tensor has nothing to reduce
    if not dims:
        return x
    return t.op(name, x, kind=kind, dims=dims, keepdim=keepdim)


# A function that serves several aten ops takes nvFuser's op as its first argument. `partial` makes
# the rule of each aten op.


def _accumulated(
    name: str,
    t: Translator,
    meta: torch.Tensor,
    x: Value,
    dim: Dims = None,
    keepdim: bool = False,
    **_: Any,
) -> Value:
    kind = wide_kind(meta.dtype)
    # integers and booleans are summed in int64, as in torch
    sums = kind if kind in ("Float", "Double") else "Int"
    total = Value(_reduced(t, name, t.held_as(x, sums), _dims(x, dim), keepdim, sums), sums, meta)
    return Value(t.held_as(total, kind), kind, meta)


rule("sum", "prims.sum")(partial(_accumulated, "sum"))
rule("prod")(partial(_accumulated, "prod"))


@rule("mean")
def _mean(
    t: Translator, meta: torch.Tensor, x: Value, dim: Dims = None, keepdim: bool = False, **_: Any
) -> Value:
    total = _accumulated("sum", t, meta, x, dim, keepdim)
    o = Emitter(t, total.kind)
    return Value(o("div", total.at, _count(t, x, _dims(x, dim), total.kind)), total.kind, meta)


def _count(t: Translator, x: Value, dims: list[int], kind: str) -> Any:
    """The number of elements in `dims`, as a number of `kind`."""
    count = t.product([x.meta.shape[d] for d in dims])
    return t.op("cast", count, kind=kind, dtype=kind) if isinstance(count, V) else float(count)


def _extreme(
    name: str, t: Translator, meta: torch.Tensor, x: Value, dim: Dims = None, keepdim: bool = False
) -> Value:
    kind = wide_kind(x.meta.dtype)
    # booleans are reduced as 0 and 1
    if kind == "Bool":
        numbers = _reduced(t, name, t.held_as(x, "Int"), _dims(x, dim), keepdim, "Int")
        return Value(t.held_as(Value(numbers, "Int", meta), "Bool"), "Bool", meta)
    return Value(_reduced(t, name, t.wide(x), _dims(x, dim), keepdim, kind), kind, meta)


rule("amax", "max.default")(partial(_extreme, "max"))
rule("amin", "min.default")(partial(_extreme, "min"))


def _place(name: str, t: Translator, x: Value, dim: int, keepdim: bool) -> V:
    """The first index of the extreme along `dim`, as in `argmax`; a NaN counts as the extreme.

    It is the least index among the elements that equal the extreme, so it takes two reductions.
    """
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


def _zeros(t: Translator, meta: torch.Tensor) -> Value:
    return Value(
        t.op("full", [], t.op("constant", 0, kind="Int"), kind="Int", dtype="Int"), "Int", meta
    )


def _with_place(
    name: str, t: Translator, meta: Any, x: Value, dim: int, keepdim: bool = False
) -> tuple[Value, Value]:
    values, indices = meta
    if not x.meta.ndim:
        return Value(x.at, x.kind, values), _zeros(t, indices)
    dim %= x.meta.ndim
    index = Value(_place(name, t, x, dim, keepdim), "Int", indices)
    return _extreme(name, t, values, x, dim, keepdim), index


rule("max.dim")(partial(_with_place, "max"))
rule("min.dim")(partial(_with_place, "min"))


def _arg(
    name: str,
    t: Translator,
    meta: torch.Tensor,
    x: Value,
    dim: int | None = None,
    keepdim: bool = False,
) -> Value:
    if not x.meta.ndim:
        return _zeros(t, meta)
    if dim is not None:
        return Value(_place(name, t, x, dim % x.meta.ndim, keepdim), "Int", meta)
    # without `dim` torch returns an index into the flat tensor
    flat = Value(t.reshaped(x, [x.meta.numel()]), x.kind, x.meta.new_empty([x.meta.numel()]))
    place = _place(name, t, flat, 0, False)
    if keepdim:
        place = t.op("broadcast", place, [True] * x.meta.ndim, kind="Int")
    return Value(place, "Int", meta)


rule("argmax")(partial(_arg, "max"))
rule("argmin")(partial(_arg, "min"))


def _counted(
    name: str, t: Translator, meta: torch.Tensor, x: Value, dim: Dims = None, keepdim: bool = False
) -> Value:
    """`any` by "ne": whether the number of true elements isn't 0. `all` by "eq": whether the number
    of false ones is 0."""
    truth = t.held_as(x, "Bool")
    if name == "eq":
        truth = t.op("logical_not", truth, kind="Bool")
    ones = t.op("cast", truth, kind="Int", dtype="Int")
    # unlike other reductions these reduce nothing by an empty list
    is_empty = isinstance(dim, (list, tuple)) and not dim
    n = _reduced(t, "sum", ones, [] if is_empty else _dims(x, dim), keepdim, "Int")
    return Value(Emitter(t, "Int")(name, n, 0, kind="Bool"), "Bool", meta)


rule("any")(partial(_counted, "ne"))
rule("all")(partial(_counted, "eq"))


def _spread(
    name: str, t: Translator, x: Value, dim: Dims, correction: float | None, keepdim: bool, n: int
) -> Any:
    """The `n` values of nvFuser's op `name`, which is "var" or "var_mean"."""
    dims = _dims(x, dim)
    if not dims:
        raise Unsupported("the variance of a 0-dim tensor")
    less = 1 if correction is None else int(correction)
    if correction not in (None, less):
        raise Unsupported(f"a correction of {correction}")
    return t.definition.add(
        name, t.wide(x), kind=wide_kind(x.meta.dtype), n=n, dims=dims, correction=less,
        keepdim=keepdim,
    )  # fmt: skip


@rule("var.correction", "prims.var")
def _var(
    t: Translator,
    meta: torch.Tensor,
    x: Value,
    dim: Dims = None,
    correction: float | None = None,
    keepdim: bool = False,
) -> Value:
    return Value(_spread("var", t, x, dim, correction, keepdim, 1), wide_kind(x.meta.dtype), meta)


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
    var, mean = _spread("var_mean", t, x, dim, correction, keepdim, 2)
    kind = wide_kind(x.meta.dtype)
    return Value(var, kind, meta[0]), Value(mean, kind, meta[1])


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
    # all elements of a group in one dimension, which is then normalized
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
    """`(x - mean) * rstd` over `dims`, then mean and rstd, with `dims` kept as sizes of 1.

    rstd is `1 / sqrt(var + eps)`. The emitter that comes first computes in the same kind.
    """
    o = Emitter(t, wide_kind(x.meta.dtype))
    at = t.wide(x)
    var, mean = _spread("var_mean", t, x, dims, 0, True, 2)
    rstd = o("rsqrt", o("add", var, eps))
    normal = o("mul", o("sub", at, mean), rstd)
    return o, normal, [Value(mean, o.kind, meta[1]), Value(rstd, o.kind, meta[2])]
