"""Output metadata of elementwise ops and matrix products in closed form: most of a program.

In: an op and its inputs' metadata. Out: `Outcome`, or None where only the op's meta function knows.
A meta function takes 50-500 us when first called, most of the time of a program's first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch.meta import Meta, Outcome, dense_stride
from lazy_tensor.dispatch.schema import OpFacts

aten = torch.ops.aten

# fmt: off
KEEP_DTYPE = frozenset(
    """abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh ceil clamp clamp_max clamp_min
    clone cos cosh copysign digamma div elu empty_like erf erfc erfinv exp exp2 expm1 fill floor
    fmax fmin fmod frac gelu gelu_backward hardsigmoid hardswish hardtanh hypot leaky_relu
    leaky_relu_backward lerp lgamma log log10 log1p log2 logaddexp logit maximum minimum mish mul
    neg nextafter ones_like pow reciprocal relu remainder round rsqrt rsub sgn sigmoid
    sigmoid_backward sign silu silu_backward sin sinc sinh softplus sqrt square sub tan tanh
    tanh_backward threshold threshold_backward trunc xlogy zeros_like""".split()  # noqa: SIM905
)
# fmt: on
"""Ops that give floating inputs' common dtype and broadcast shape; their in-place forms too."""

_FLOATING = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


def _keeps_dtype(op: OpOverload) -> bool:
    name = op.overloadpacket.__name__
    return op.namespace == "aten" and name.removesuffix("_") in KEEP_DTYPE


def _is_plain_argument(argument: Any) -> bool:
    """Whether an argument can't change dtype, layout or device of the result."""
    return not isinstance(argument, (torch.dtype, torch.layout, torch.device, complex, str))


def _asks_for_layout(argument: Any) -> bool:
    return isinstance(argument, torch.memory_format) and argument not in (
        torch.preserve_format,
        torch.contiguous_format,
    )


def _dense(shape: tuple[int, ...], like: Meta) -> Meta:
    return (shape, dense_stride(shape), 0, *like[3:])


def _matmul(args: tuple[Any, ...], metas: list[Meta]) -> Meta | None:
    left, right = metas[-2:]
    if len(left[0]) != len(right[0]) or len(left[0]) not in (2, 3):
        return None
    (*batch, n, k), (*its_batch, its_k, p) = left[0], right[0]
    if batch != its_batch or k != its_k or left[3:] != right[3:]:
        return None
    return _dense((*batch, n, p), left)


def _addmm(args: tuple[Any, ...], metas: list[Meta]) -> Meta | None:
    if len(metas) != 3 or metas[0][3:] != metas[1][3:]:
        return None
    result = _matmul(args, metas)
    fits = result is not None and broadcast([metas[0][0], result[0]]) == result[0]
    return result if fits else None


def _embedding(args: tuple[Any, ...], metas: list[Meta]) -> Meta | None:
    weight, indices = metas
    if len(weight[0]) != 2 or weight[4] != indices[4] or indices[3] is not torch.int64:
        return None
    return _dense((*indices[0], weight[0][1]), weight)


def _whole_norm(args: tuple[Any, ...], metas: list[Meta]) -> Meta | None:
    return _dense((), metas[0]) if len(args) <= 2 else None


def _softmax(args: tuple[Any, ...], metas: list[Meta]) -> Meta | None:
    same = all(meta == metas[0] for meta in metas)
    takes = same and -len(metas[0][0]) <= args[len(metas)] < len(metas[0][0])
    to_other_dtype = args[-1] is True or (len(metas) == 2 and args[-1] is not metas[0][3])
    return _dense(metas[0][0], metas[0]) if takes and not to_other_dtype else None


def _reduced_loss(args: tuple[Any, ...], metas: list[Meta]) -> list[Meta] | None:
    """`nll_loss_forward` with a reduction: the loss and the total weight, both 0-dim."""
    if args[3] == 0 or len(metas) != 2 or not _is_loss_of(*metas):
        return None
    return [_dense((), metas[0]), _dense((), metas[0])]


def _loss_backward(args: tuple[Any, ...], metas: list[Meta]) -> Meta | None:
    if args[4] == 0 or len(metas) != 4 or not _is_loss_of(*metas[1:3]):
        return None
    return _dense(metas[1][0], metas[1])


def _is_loss_of(scores: Meta, targets: Meta) -> bool:
    return (
        len(scores[0]) == 2
        and tuple(targets[0]) == tuple(scores[0][:1])
        and targets[3] is torch.int64
        and targets[4] == scores[4]
    )


OTHERS: dict[OpOverload, Callable[[tuple[Any, ...], list[Meta]], Meta | list[Meta] | None]] = {
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.addmm.default: _addmm,
    aten.embedding.default: _embedding,
    aten.linalg_vector_norm.default: _whole_norm,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax,
    aten._log_softmax_backward_data.default: _softmax,
    aten.nll_loss_forward.default: _reduced_loss,
    aten.nll_loss_backward.default: _loss_backward,
}
"""Ops of every model, not elementwise, whose result is dense if the inputs are."""


def broadcast(sizes: list[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The common shape; None if there is none."""
    ndim = max(len(size) for size in sizes)
    padded = [(1,) * (ndim - len(size)) + tuple(size) for size in sizes]
    result: list[int] = []
    for column in zip(*padded, strict=True):
        wide = {n for n in column if n != 1}
        if len(wide) > 1:
            return None
        result.append(wide.pop() if wide else 1)
    return tuple(result)


_MATMULS = (aten.mm.default, aten.bmm.default, aten.addmm.default)


def _of_other(op: OpOverload, args: tuple[Any, ...], metas: list[Meta]) -> Outcome | None:
    is_dense = all(tuple(stride) == dense_stride(size) for size, stride, *_ in metas)
    if not (is_dense or op in _MATMULS) or any(0 in meta[0] for meta in metas):
        return None
    result = OTHERS[op](args, metas)
    if result is None:
        return None
    return Outcome(
        outs=tuple(result) if isinstance(result, list) else (result,),
        is_single=not isinstance(result, list),
    )


def closed_form(
    facts: OpFacts, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], metas: list[Meta]
) -> Outcome | None:
    """The outcome of an elementwise op or a matrix product on floating tensors of one dtype.

    Dense inputs give a dense result: TensorIterator (aten/src/ATen/TensorIterator.cpp) reorders
    dimensions only where an input's strides ask for it.
    """
    if facts.op in OTHERS and not kwargs and metas[0][3] in _FLOATING:
        return _of_other(facts.op, args, metas)
    if not metas or not _keeps_dtype(facts.op):
        return None
    if len(args) == 1 and facts.op.overloadpacket is aten.clamp:
        return None  # it asks for a bound
    if not all(_is_plain_argument(a) for a in (*args, *(a for _, a in kwargs))):
        return None
    if any(type(a) is bool for i, a in enumerate(args) if i in facts.number_args):
        return None  # not all take one
    _, _, _, dtype, device = metas[0]
    sizes = []
    for size, stride, _, its_dtype, its_device in metas:
        if its_dtype != dtype or its_device != device or 0 in size:
            return None
        if tuple(stride) != dense_stride(size):
            return None
        sizes.append(tuple(size))
    shape = broadcast(sizes)
    if dtype not in _FLOATING or shape is None:
        return None
    if facts.returns_arg == 0:
        return Outcome() if shape == sizes[0] else None
    if facts.writes or any(_asks_for_layout(a) for _, a in kwargs):
        return None
    return Outcome(outs=((shape, dense_stride(shape), 0, dtype, device),))
