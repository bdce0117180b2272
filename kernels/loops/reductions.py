"""The rules of `rules` for reductions, losses, norms, and ops that take an index tensor.

The formulas are those of eager's kernels (`aten/src/ATen/native`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.loops.builder import Builder, broadcast_size, clamped, squeezed
from lazy_tensor.kernels.loops.values import Gathered, Place, Reshaped, Value

Arguments = dict[str, Any]
Rule = Callable[[Builder, Arguments], "Value | list[Value | None]"]

_INTEGERS, _DOUBLES = Builder(torch.int64), Builder(torch.float64)


def _reduced_loss(b: Builder, losses: Value, reduction: int) -> Value:
    """The loss by PyTorch's `Reduction`: one for each element (0), the mean (1) or the sum (2)."""
    if reduction == 0:
        return losses
    total = b.reduced("sum", losses, None, keepdim=False)
    return b.of("{0} / {1}", total, math.prod(losses.size)) if reduction == 1 else total


def _mse_backward(b: Builder, a: Arguments) -> Value:
    n = math.prod(broadcast_size([a["self"].size, a["target"].size]))
    factor = 2 / n if a["reduction"] == 1 else 2
    return b.of("{3} * ({1} - {2}) * {0}", a["grad_output"], a["self"], a["target"], factor)


def _reduce(kind: str) -> Callable[[Builder, Arguments], Value]:
    def rule(b: Builder, a: Arguments) -> Value:
        x, dims, keepdim = a["self"], a.get("dim"), a.get("keepdim", False)
        if kind != "mean":
            return b.reduced(kind, x, dims, keepdim=keepdim)
        total = b.reduced("sum", x, dims, keepdim=keepdim)
        n = math.prod(x.size) // max(math.prod(total.size), 1)
        return b.of("{0} / {1}", total, n)

    return rule


def _place(b: Builder, kind: str, x: Value, dim: int, *, keepdim: bool) -> Value:
    """The first index, along a dimension, of the greatest or least number, or of a NaN."""
    dim %= len(x.size)
    is_most = b.test("({0} == {1}) | ({0} != {0})", x, b.reduced(kind, x, dim))
    places = Builder(torch.int32)
    index = Place(x.size, torch.int32, dim)
    place = places.of("{0} ? {1} : {2}", is_most, index, x.size[dim])
    return places.cast(places.reduced("min", place, dim, keepdim=keepdim), torch.int64)


def _place_of(kind: str) -> Callable[[Builder, Arguments], Value]:
    def rule(b: Builder, a: Arguments) -> Value:
        x, dim, keepdim = a["self"], a.get("dim"), a.get("keepdim", False)
        if dim is not None and x.size:
            return _place(b, kind, x, dim, keepdim=keepdim)
        place = _place(b, kind, Reshaped((math.prod(x.size),), x.dtype, x), 0, keepdim=False)
        return Reshaped((1,) * len(x.size), place.dtype, place) if keepdim else place

    return rule


def _most(kind: str) -> Rule:
    """`max` and `min`: of all elements, or along a dimension, then with the indices."""

    def rule(b: Builder, a: Arguments) -> Value | list[Value | None]:
        result = _reduce(kind)(b, a)
        return [result, _place_of(kind)(b, a)] if "dim" in a else result

    return rule


def _variance(b: Builder, a: Arguments, text: str = "{0} / {1}") -> Value:
    """A variance or, by another `text`, a deviation. It is computed in doubles, as eager's: squares
    of floats may overflow where the deviation doesn't."""
    x, dims = _DOUBLES.cast(a["self"], torch.float64), a.get("dim")
    correction = a["unbiased"] if "unbiased" in a else a.get("correction")
    correction = 1 if correction is None else correction
    if isinstance(correction, float) and correction.is_integer():
        correction = int(correction)
    mean, squares = _moments(_DOUBLES, x, dims)
    n = math.prod(x.size) // math.prod(mean.size)
    if not isinstance(correction, (int, float)) or n <= correction:
        raise Declined("too few numbers for a variance")
    result = b.cast(_DOUBLES.of(text, squares, n - correction), b.dtype)
    return result if a.get("keepdim", False) else squeezed(result, dims)


_deviation = partial(_variance, text="square_root({0} / {1})")


def _layer_norm(b: Builder, a: Arguments) -> list[Value | None]:
    x, n_dims = a["input"], len(a["normalized_shape"])
    dims = tuple(range(len(x.size) - n_dims, len(x.size)))
    n = math.prod(x.size[-n_dims:])
    mean, squares = _moments(b, x, dims)
    variance = b.of("{0} / {1}", squares, n)
    rstd = b.of("1 / square_root({0} + {1})", variance, a["eps"])
    normed = b.of("({0} - {1}) * {2}", x, mean, rstd)
    return [_affine(b, normed, a.get("weight"), a.get("bias")), mean, rstd]


def _affine(b: Builder, value: Value, weight: Value | None, bias: Value | None = None) -> Value:
    """A value times `weight`, plus `bias`; None stands for 1 and 0."""
    if weight is not None:
        value = b.of("{0} * {1}", value, weight)
    return value if bias is None else b.of("{0} + {1}", value, bias)


def _softmax(b: Builder, a: Arguments) -> Value:
    x, dim = a["self"], a["dim"]
    powers = b.of("exp({0} - {1})", x, b.reduced("max", x, dim))
    return b.of("{0} / {1}", powers, b.reduced("sum", powers, dim))


def _log_softmax(b: Builder, a: Arguments) -> Value:
    x, dim = a["self"], a["dim"]
    most = b.reduced("max", x, dim)
    total = b.reduced("sum", b.of("exp({0} - {1})", x, most), dim)
    return b.of("{0} - {1} - log({2})", x, most, total)


def _softmax_backward(b: Builder, a: Arguments) -> Value:
    grad, output = a["grad_output"], a["output"]
    total = b.reduced("sum", b.of("{0} * {1}", grad, output), a["dim"])
    return b.of("({0} - {1}) * {2}", grad, total, output)


def _log_softmax_backward(b: Builder, a: Arguments) -> Value:
    grad, output = a["grad_output"], a["output"]
    return b.of("{0} - exp({1}) * {2}", grad, output, b.reduced("sum", grad, a["dim"]))


def _all_or_any(kind: str) -> Rule:
    def rule(b: Builder, a: Arguments) -> Value:
        are_true = b.test("{0} != 0", a["self"])
        if a.get("dim") == ():
            return are_true  # other reductions reduce all dimensions for `()`
        numbers = b.cast(are_true, torch.int32)
        result = b.reduced(kind, numbers, a.get("dim"), keepdim=a.get("keepdim", False))
        return b.test("{0} != 0", result)

    return rule


def _moments(b: Builder, x: Value, dims: Any) -> tuple[Value, Value]:
    """The mean over dimensions, and the sum of squared differences from it."""
    total = b.reduced("sum", x, dims)
    mean = b.of("{0} / {1}", total, math.prod(x.size) // math.prod(total.size))
    return mean, b.reduced("sum", b.of("({0} - {1}) * ({0} - {1})", x, mean), dims)


def _norm(b: Builder, a: Arguments) -> Value:
    order, x = a.get("ord", a.get("p", 2)), a["self"]
    order = 2 if order is None else order
    if isinstance(order, Value) or order not in (1, 2, math.inf):
        raise Declined("a norm of another order than 1, 2 and infinity")
    dims, keepdim = a.get("dim"), a.get("keepdim", False)
    kind = "max" if order == math.inf else "sum"
    norm = b.reduced(kind, b.of("absolute({0})", x), dims, keepdim=keepdim)
    if order != 2 or math.prod(norm.size) == math.prod(x.size):
        return norm
    return b.of("square_root({0})", b.reduced("sum", b.of("{0} * {0}", x), dims, keepdim=keepdim))


def _logsumexp(b: Builder, a: Arguments) -> Value:
    x, dims = a["self"], a["dim"]
    most = b.reduced("max", x, dims)
    most = b.of("absolute({0}) == __builtin_inf() ? 0 : {0}", most)
    total = b.reduced("sum", b.of("exp({0} - {1})", x, most), dims)
    result = b.of("log({0}) + {1}", total, most)
    return result if a.get("keepdim", False) else squeezed(result, dims)


def _layer_norm_backward(b: Builder, a: Arguments) -> list[Value | None]:
    grad, x, n_dims = a["grad_out"], a["input"], len(a["normalized_shape"])
    outer, inner = (*range(len(x.size) - n_dims),), (*range(len(x.size) - n_dims, len(x.size)),)
    normed = b.of("({0} - {1}) * {2}", x, a["mean"], a["rstd"])
    products = b.of("{0} * {1}", grad, normed)
    normed_grad = _affine(b, grad, a.get("weight"))
    n = math.prod(a["normalized_shape"])
    x_grad = b.of(
        "{3} * ({0} - ({1} + {2} * {4}) / {5})",
        normed_grad, b.reduced("sum", normed_grad, inner), normed, a["rstd"],
        b.reduced("sum", b.of("{0} * {1}", normed_grad, normed), inner), n,
    )  # fmt: skip
    if not outer:
        return [x_grad, products, grad]
    over_rows = [b.reduced("sum", terms, outer, keepdim=False) for terms in (products, grad)]
    return [x_grad, *over_rows]


def _group_norm(b: Builder, a: Arguments) -> list[Value | None]:
    x, n, n_groups = a["input"], a["N"], a["group"]
    rows = Reshaped((n, n_groups, math.prod(x.size) // (n * n_groups)), x.dtype, x)
    mean, squares = _moments(b, rows, 2)
    variance = b.of("{0} / {1}", squares, rows.size[2])
    scale = b.of("1 / square_root({0} + {1})", variance, a["eps"])
    normed = b.of("({0} - {1}) * {2}", rows, mean, scale)
    weight, bias = (_channels(a.get(name), len(x.size)) for name in ("weight", "bias"))
    result = _affine(b, Reshaped(x.size, x.dtype, normed), weight, bias)
    return [result, squeezed(mean, 2), squeezed(scale, 2)]


def _rms_norm(b: Builder, a: Arguments) -> list[Value | None]:
    x, n_dims = a["input"], len(a["normalized_shape"])
    dims = tuple(range(len(x.size) - n_dims, len(x.size)))
    total = b.reduced("sum", b.of("{0} * {0}", x), dims)
    eps = torch.finfo(x.dtype).eps if a.get("eps") is None else a["eps"]
    mean = b.of("{0} / {1}", total, math.prod(a["normalized_shape"]))
    scale = b.of("1 / square_root({0} + {1})", mean, eps)
    return [_affine(b, b.of("{0} * {1}", x, scale), a.get("weight")), scale]


def _group_norm_backward(b: Builder, a: Arguments) -> list[Value | None]:
    n, n_channels, n_groups, size = a["N"], a["C"], a["group"], a["input"].size
    size_of_groups = (n, n_groups, n_channels // n_groups, math.prod(size) // (n * n_channels))
    x, grad = (Reshaped(size_of_groups, b.dtype, a[name]) for name in ("input", "grad_out"))
    mean, scale = (Reshaped((n, n_groups, 1, 1), a[s].dtype, a[s]) for s in ("mean", "rstd"))
    normed = b.of("({0} - {1}) * {2}", x, mean, scale)
    normed_grad: Value = grad
    if a.get("weight") is not None:
        weight = Reshaped((n_groups, size_of_groups[2], 1), b.dtype, a["weight"])
        normed_grad = b.of("{0} * {1}", grad, weight)
    products = b.of("{0} * {1}", normed_grad, normed)
    totals = [b.reduced("sum", terms, (2, 3)) for terms in (normed_grad, products)]
    x_grad = b.of(
        "{0} * ({1} - ({2} + {3} * {4}) / {5})", scale, normed_grad, totals[0], normed, totals[1],
        size_of_groups[2] * size_of_groups[3],
    )  # fmt: skip
    weight_and_bias_grads = [
        Reshaped((n_channels,), b.dtype, b.reduced("sum", terms, (0, 3), keepdim=False))
        for terms in (b.of("{0} * {1}", grad, normed), grad)
    ]
    return [Reshaped(size, b.dtype, x_grad), *weight_and_bias_grads]


def _safe_softmax(b: Builder, a: Arguments) -> Value:
    """A softmax that gives zeros for rows of `-inf` alone."""
    most = b.reduced("max", a["self"], a["dim"])
    return b.of("{0} == -__builtin_inf() ? 0 : {1}", most, _softmax(b, a))


def _binary_cross_entropy_backward(b: Builder, a: Arguments) -> Value:
    x, target = a["self"], a["target"]
    x_grad = b.of(
        "{0} * ({1} - {2}) / maximum((1 - {1}) * {1}, {3})", a["grad_output"], x, target, 1e-12
    )
    x_grad = _affine(b, x_grad, a.get("weight"))
    return b.of("{0} / {1}", x_grad, math.prod(x.size)) if a.get("reduction", 1) == 1 else x_grad


def _channels(value: Value | None, n_dims: int) -> Value | None:
    """A value with one element per channel, shaped to broadcast with tensors of `n_dims`."""
    if value is None:
        return None
    return Reshaped((*value.size, *[1] * (n_dims - 2)), value.dtype, value)


def _batch_norm(b: Builder, a: Arguments) -> list[Value | None]:
    x, n_dims = a["input"], len(a["input"].size)
    dims = (0, *range(2, n_dims))
    n = math.prod(x.size) // x.size[1]
    channels: dict[str, Any] = {
        name: _channels(a.get(name), n_dims)
        for name in ("weight", "bias", "running_mean", "running_var")
    }
    statistics: list[Value | None] = [None] * 4
    if a["training"]:
        mean, squares = _moments(b, x, dims)
        variance = b.of("{0} / {1}", squares, n)
    else:
        mean, variance = channels["running_mean"], channels["running_var"]
    scale = b.of("1 / square_root({0} + {1})", variance, a["eps"])
    if a["training"]:
        size = (x.size[1],)
        statistics[:2] = [Reshaped(size, value.dtype, value) for value in (mean, scale)]
        if channels["running_mean"] is not None:
            if n == 1:
                raise Declined("a variance of one number")
            moments = mean, b.of("{0} / {1}", squares, n - 1)
            statistics[2:] = [
                Reshaped(size, value.dtype, b.of(
                    "{2} * {1} + {3} * {0}", channels[name], value, a["momentum"], 1 - a["momentum"]
                ))
                for name, value in zip(("running_mean", "running_var"), moments, strict=True)
            ]  # fmt: skip
    normed = b.of("({0} - {1}) * {2}", x, mean, scale)
    return [_affine(b, normed, channels["weight"], channels["bias"]), *statistics]


def _batch_norm_backward(b: Builder, a: Arguments) -> list[Value | None]:
    grad, x, n_dims = a["grad_out"], a["input"], len(a["input"].size)
    dims = (0, *range(2, n_dims))
    n = math.prod(x.size) // x.size[1]
    if a["train"]:
        mean, scale = (_channels(a[name], n_dims) for name in ("save_mean", "save_invstd"))
    else:
        mean, variance = (_channels(a[name], n_dims) for name in ("running_mean", "running_var"))
        scale = b.of("1 / square_root({0} + {1})", variance, a["eps"])
    products = b.of("({0} - {1}) * {2}", x, mean, grad)
    product, total = (b.reduced("sum", terms, dims) for terms in (products, grad))
    x_grad = grad
    if a["train"]:
        factor = b.of("{0} * {1} * {1} / {2}", product, scale, n)
        x_grad = b.of("{0} - {1} / {2} - ({3} - {4}) * {5}", grad, total, n, x, mean, factor)
    weight = _channels(a.get("weight"), n_dims)
    x_grad = _affine(b, b.of("{0} * {1}", x_grad, scale), weight)
    grads = b.of("{0} * {1}", product, scale), total
    return [x_grad, *(Reshaped((x.size[1],), grad.dtype, grad) for grad in grads)]


def _loss(text: str, *names: str, **others: float) -> Rule:
    """A loss by the expression `text`: {0} is `self`, {1} `target`, and {2} on are the `names`.

    `others` are the values of names that the call doesn't give.
    """

    def rule(b: Builder, a: Arguments) -> Value:
        parameters = [a.get(name, others.get(name)) for name in names]
        losses = b.of(text, a["self"], a["target"], *parameters)
        return _reduced_loss(b, losses, a.get("reduction", 1))

    return rule


def _loss_backward(inside: str, outside: str, name: str) -> Rule:
    """The gradient of a loss that is quadratic near 0, and linear from the limit `a[name]` on.

    `inside` is its expression below the limit, and `outside` the one above; below the negative
    limit it is `-outside`. In them {0} is the loss's gradient, {1} `self - target`, and {2} the
    limit.
    """

    def rule(b: Builder, a: Arguments) -> Value:
        x, target = a["self"], a["target"]
        grad = a["grad_output"]
        if a["reduction"] == 1:
            n = math.prod(broadcast_size([x.size, target.size]))
            grad = b.of("{0} * {1}", grad, 1 / n)
        difference = b.of("{0} - {1}", x, target)
        # one condition per expression: GCC 12 vectorizes some nested conditions wrongly
        x_grad = b.of(f"{{1}} >= {{2}} ? {outside} : {inside}", grad, difference, a[name])
        return b.of(f"{{1}} <= -{{2}} ? -({outside}) : {{3}}", grad, difference, a[name], x_grad)

    return rule


def _cross_entropy_of_logits(b: Builder, a: Arguments) -> Value:
    x, target = a["self"], a["target"]
    log = b.of("minimum({0}, 0) - log1p(exp(-absolute({0})))", x)
    if a.get("pos_weight") is not None:
        log = b.of("(({1} - 1) * {2} + 1) * {0}", log, a["pos_weight"], target)
    losses = b.of("(1 - {0}) * {1} - {2}", target, x, log)
    return _reduced_loss(b, _affine(b, losses, a.get("weight")), a.get("reduction", 1))


def _at_index(b: Builder, source: Value, dim: int, index: Value, *, spread: bool) -> Value:
    """The elements at an index from data, which has the size of the result if `spread`."""
    b.check(index, source.size[dim])
    place = clamped(index, source.size[dim])
    size = index.size if spread else (*source.size[:dim], *index.size, *source.size[dim + 1 :])
    return Gathered(size, source.dtype, source, place, dim, is_spread=spread)


def _picked(b: Builder, a: Arguments, *, spread: bool) -> Value:
    """`gather` if `spread`, else `index_select`."""
    source, index = a["self"], a["index"]
    if not source.size or not index.size:
        raise Declined("a 0-dim tensor that is indexed")
    return _at_index(b, source, a["dim"] % len(source.size), index, spread=spread)


def _counts(b: Builder, a: Arguments) -> Value:
    """Which targets aren't `ignore_index`. Adds the check of these to the builder."""
    scores, target = a["self"], a["target"]
    if a["reduction"] == 0 or len(scores.size) != 2 or len(target.size) != 1:
        raise Declined("losses that are not reduced")
    counts = _INTEGERS.test("{0} != {1}", target, a["ignore_index"])
    b.check(target, scores.size[1], counts)
    return counts


def _nll(b: Builder, a: Arguments) -> list[Value | None]:
    scores, target, weight = a["self"], a["target"], a.get("weight")
    counts = _counts(b, a)
    place = clamped(target, scores.size[1])
    column = Reshaped((target.size[0], 1), place.dtype, place)
    column_scores = Gathered(column.size, scores.dtype, scores, column, 1, is_spread=True)
    score = Reshaped(target.size, scores.dtype, column_scores)
    class_weights: Any = 1
    if weight is not None:
        class_weights = Gathered(target.size, weight.dtype, weight, place, 0, is_spread=True)
    weights = b.of("{0} ? {1} : 0", counts, class_weights)
    losses = b.of("{0} ? -{1} * {2} : 0", counts, score, weights)
    loss, total = (b.reduced("sum", terms, None, keepdim=False) for terms in (losses, weights))
    return [b.of("{0} / {1}", loss, total) if a["reduction"] == 1 else loss, total]


def _nll_backward(b: Builder, a: Arguments) -> Value:
    scores, target, weight = a["self"], a["target"], a.get("weight")
    counts = _counts(b, a)
    column, column_counts = (Reshaped((target.size[0], 1), x.dtype, x) for x in (target, counts))
    classes = Place(scores.size, torch.int64, 1)
    is_target = _INTEGERS.test("({0} == {1}) & {2}", column, classes, column_counts)
    grad = a["grad_output"]
    if a["reduction"] == 1:
        grad = b.of("{0} / {1}", grad, a["total_weight"])
    return b.of("{0} ? -{1} : 0", is_target, _affine(b, grad, weight))


REDUCTIONS: dict[str, Rule] = {
    "sum": _reduce("sum"),
    "mean": _reduce("mean"),
    "amax": _reduce("max"),
    "amin": _reduce("min"),
    "max": _most("max"),
    "min": _most("min"),
    "argmax": _place_of("max"),
    "argmin": _place_of("min"),
    "prod": _reduce("product"),
    "var": _variance,
    "std": _deviation,
    "native_layer_norm": _layer_norm,
    "_softmax": _softmax,
    "_log_softmax": _log_softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _log_softmax_backward,
    "all": _all_or_any("min"),
    "any": _all_or_any("max"),
    "var_mean": lambda b, a: [_variance(b, a), _reduce("mean")(b, a)],
    "std_mean": lambda b, a: [_deviation(b, a), _reduce("mean")(b, a)],
    "linalg_vector_norm": _norm,
    "norm": _norm,
    "logsumexp": _logsumexp,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "mse_loss": _loss("({0} - {1}) * ({0} - {1})"),
    "l1_loss": _loss("absolute({0} - {1})"),
    "smooth_l1_loss": _loss(
        "absolute({0} - {1}) < {2} ? {3} * ({0} - {1}) * ({0} - {1}) / {2} "
        ": absolute({0} - {1}) - {3} * {2}",
        "beta", "half", beta=1.0, half=0.5,
    ),
    "smooth_l1_loss_backward": _loss_backward(
        "{1} * {0} / {2}", "{0}", "beta"
    ),
    "huber_loss": _loss(
        "absolute({0} - {1}) <= {2} ? {3} * ({0} - {1}) * ({0} - {1}) "
        ": {2} * (absolute({0} - {1}) - {3} * {2})",
        "delta", "half", delta=1.0, half=0.5,
    ),
    "huber_loss_backward": _loss_backward(
        "{1} * {0}", "{0} * {2}", "delta"
    ),
    "mse_loss_backward": _mse_backward,
    "binary_cross_entropy_with_logits": _cross_entropy_of_logits,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "_fused_rms_norm": _rms_norm,
    "_safe_softmax": _safe_softmax,
    "binary_cross_entropy_backward": _binary_cross_entropy_backward,
    "aminmax": lambda b, a: [_reduce("min")(b, a), _reduce("max")(b, a)],
    "embedding": lambda b, a: _at_index(b, a["weight"], 0, a["indices"], spread=False),
    "gather": partial(_picked, spread=True),
    "index_select": partial(_picked, spread=False),
    "nll_loss_forward": _nll,
    "nll_loss_backward": _nll_backward,
}  # fmt: skip
