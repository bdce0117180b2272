"""Output metadata in closed form, for most of a program's ops.

In: an op and its inputs' metadata. Out: `Outcome`, or None where only the op's meta function knows.
A meta function takes 20-2000 us for inputs that are new. That would be most of the time of a
program's first step, and of each step whose shapes are new. Called by `record.extend_trie` for
every miss, before the schema cache. A wrong answer would give the program a wrong shape, so a form
that isn't sure returns None.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch.metadata.infer import Meta, Outcome, dense_stride, is_dense
from lazy_tensor.dispatch.metadata.other_formulas import OTHERS, broadcast
from lazy_tensor.dispatch.metadata.view_formulas import VIEWS
from lazy_tensor.dispatch.ops.schema import OpFacts

aten = torch.ops.aten

# fmt: off
KEEP_DTYPE = frozenset(
    """abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh ceil clamp clamp_max clamp_min
    cos cosh copysign digamma div elu empty_like erf erfc erfinv exp exp2 expm1 fill floor
    fmax fmin fmod frac gelu gelu_backward hardsigmoid hardswish hardtanh hypot leaky_relu
    leaky_relu_backward lerp lgamma log log10 log1p log2 logaddexp logit maximum minimum mish mul
    neg nextafter ones_like pow reciprocal relu remainder round rsqrt rsub sgn sigmoid
    sigmoid_backward sign silu silu_backward sin sinc sinh softplus sqrt square sub tan tanh
    tanh_backward threshold threshold_backward trunc xlogy zeros_like""".split()  # noqa: SIM905
)
# fmt: on
"""Ops, and their in-place forms, whose result has the floating inputs' common dtype and the shape
that they broadcast to."""

_FLOATING = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


def closed_form(
    facts: OpFacts, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], metas: list[Meta]
) -> Outcome | None:
    """The outcome of a call, if a form knows it.

    None if a tensor is empty, or if the first one isn't floating, unless the op is a view. `args`
    and `kwargs` name tensors as `Ref(i)` of `metas`.
    """
    form = _form_of(facts.op)
    if form is None or not metas:
        return None
    for size, *_ in metas:
        if 0 in size:
            return None
    if form is _view:
        return _view(facts, args, kwargs, metas)
    return form(facts, args, kwargs, metas) if metas[0][3] in _FLOATING else None


@cache
def _form_of(op: OpOverload) -> Callable[..., Outcome | None] | None:
    if op in VIEWS:
        return _view
    if op in OTHERS:
        return _of_other
    keeps_dtype = op.overloadpacket.__name__.removesuffix("_") in KEEP_DTYPE
    return _elementwise if op.namespace == "aten" and keeps_dtype else None


def _view(
    facts: OpFacts, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], metas: list[Meta]
) -> Outcome | None:
    viewed = None if kwargs else VIEWS[facts.op](args, metas[0])
    return None if viewed is None else Outcome(outs=(viewed,))


def _of_other(
    facts: OpFacts, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], metas: list[Meta]
) -> Outcome | None:
    """The outcome by `OTHERS`, whose forms take arguments by name."""
    result = OTHERS[facts.op](facts.named(args, kwargs), metas)
    if result is None:
        return None
    if isinstance(result, list):
        return Outcome(outs=tuple(result), is_single=False)
    return Outcome(outs=(result,))


def _elementwise(
    facts: OpFacts, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], metas: list[Meta]
) -> Outcome | None:
    """The outcome of an op in `KEEP_DTYPE`: the broadcast shape, laid out as by TensorIterator."""
    if len(args) == 1 and facts.op.overloadpacket in (aten.clamp, aten.clamp_):
        return None  # clamp without a bound raises
    for label, argument in (*enumerate(args), *kwargs):
        kind = type(argument)
        if kind in _CHANGES_RESULT or (kind is bool and label in facts.number_args):
            return None  # some of these ops raise for a bool, such as `sub`
    # mostly all operands are alike; else their sizes broadcast, but dtype and device must agree
    first, *others = metas
    if all(meta[:2] == first[:2] and meta[3:] == first[3:] for meta in others):
        shape = tuple(first[0])
    else:
        if any(meta[3:] != first[3:] for meta in others):
            return None
        shared = broadcast([tuple(meta[0]) for meta in metas])
        if shared is None:
            return None
        shape = shared
    if len(metas) > 1 and metas[1][0] and facts.op.overloadpacket in (aten.fill, aten.fill_):
        return None  # unlike other operands, the value must be a number or 0-dim
    # in place: no output, and the argument can't be broadcast to another shape
    if facts.returns_arg == 0:
        return Outcome() if shape == first[0] else None
    formats = [a for _, a in kwargs if isinstance(a, torch.memory_format)]
    if facts.writes or not _USUAL_FORMATS.issuperset(formats):
        return None
    stride = result_stride(facts.op, shape, metas)
    return None if stride is None else Outcome(outs=((shape, stride, 0, *first[3:]),))


_CHANGES_RESULT = frozenset({torch.dtype, torch.layout, torch.device, complex, str})
"""Types of arguments that may change dtype, layout or device of the result."""
_USUAL_FORMATS = frozenset({torch.preserve_format, torch.contiguous_format})


def result_stride(
    op: OpOverload, shape: tuple[int, ...], metas: list[Meta]
) -> tuple[int, ...] | None:
    """The strides of an elementwise result; None if only torch can tell.

    Contiguous inputs give a contiguous result. Otherwise TensorIterator orders the dimensions by
    the strides of its operands, or keeps the layout of inputs that are dense and alike.
    """
    for size, stride, *_ in metas:
        if stride != dense_stride(size):
            break
    else:
        return dense_stride(shape)
    if op.overloadpacket.__name__ in NOT_ITERATED:
        return None
    by_order = iterated_stride(shape, [_broadcast_stride(shape, meta) for meta in metas])
    n_tensors, n_others = _n_arguments(op)
    if len(metas) < n_tensors:
        # A number in a tensor's place is an operand of no dimensions, so the sizes differ. Then
        # torch always orders the dimensions, but not on "meta".
        return by_order
    if len(shape) > 3 and 1 in shape:
        # with a dim of size 1, one layout can count as contiguous and as "channels last"
        return None
    sizes, strides = zip(*((tuple(meta[0]), tuple(meta[1])) for meta in metas), strict=True)
    if set(sizes) != {shape}:
        return by_order
    if all(_is_contiguous(shape, stride) for stride in strides):
        # the result is contiguous also in dims of size 1, unless a number is an operand
        return None if n_others else dense_stride(shape)
    if len(set(strides)) == 1 and is_dense(shape, strides[0]):
        # Torch keeps such a layout, or orders the dimensions. Numbers among the operands decide
        # which, so the answer is sure only where both agree.
        return by_order if by_order == strides[0] else None
    return by_order


@cache
def _n_arguments(op: OpOverload) -> tuple[int, int]:
    """How many arguments the op takes: tensors, and others."""
    is_tensor = [str(argument.type) == "Tensor" for argument in op._schema.arguments]
    return is_tensor.count(True), is_tensor.count(False)


def _is_contiguous(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether torch counts the layout as contiguous, whatever the strides of dims of size 1."""
    return all(
        n == 1 or step == expected
        for n, step, expected in zip(size, stride, dense_stride(size), strict=True)
    )


NOT_ITERATED = frozenset({
    "fill", "empty_like", "ones_like", "zeros_like", "pow",
    "threshold_backward", "leaky_relu_backward", "rsub",  # their second operand comes first
})  # fmt: skip
"""Ops whose results don't have the strides that `iterated_stride` computes from their operands."""


def _broadcast_stride(shape: tuple[int, ...], meta: Meta) -> tuple[int, ...]:
    """The strides of an operand that is expanded to `shape`: 0 where it is repeated."""
    size, stride = meta[:2]
    n_new = len(shape) - len(size)
    kept = (
        0 if n == 1 and wide != 1 else step
        for n, wide, step in zip(size, shape[n_new:], stride, strict=True)
    )
    return (0,) * n_new + tuple(kept)


def iterated_stride(shape: tuple[int, ...], operands: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The strides that TensorIterator gives a result (aten/src/ATen/TensorIterator.cpp).

    `reorder_dimensions` sorts the dimensions, innermost first, by the operands' strides. Some
    comparisons decide nothing, so the result depends on the algorithm: its insertion sort is
    followed here step by step.
    """
    order = list(range(len(shape)))[::-1]
    for i in range(1, len(order)):
        place = i
        for before in range(i - 1, -1, -1):
            compared = _compare(shape, operands, order[before], order[place])
            if compared > 0:
                order[before], order[place] = order[place], order[before]
                place = before
            elif compared < 0:
                break
    stride, step = [0] * len(shape), 1
    for dim in order:
        stride[dim] = step
        step *= shape[dim]
    return tuple(stride)


def _compare(shape: tuple[int, ...], operands: list[tuple[int, ...]], one: int, two: int) -> int:
    """Whether dimension `one` belongs outside `two` (1), inside (-1), or no operand decides (0).

    The first operand decides in which both strides aren't 0 and differ, or in which `one` is larger
    at equal strides.
    """
    for stride in operands:
        if stride[one] == 0 or stride[two] == 0:
            continue
        if stride[one] != stride[two]:
            return 1 if stride[one] > stride[two] else -1
        if shape[one] > shape[two]:
            return 1
    return 0
