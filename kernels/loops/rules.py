"""How each op computes its results: expressions in C, and rules that make several values.

`read` calls them. The formulas are those of eager's kernels (`aten/src/ATen/native/cpu`). An op
that isn't here is Inductor's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.loops.cpp import FUNCTIONS
from lazy_tensor.kernels.loops.values import Builder, Rolled, Value, broadcast_size


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TEXTS = {
    "neg": "-{0}", "abs": "absolute({0})", "reciprocal": "1 / {0}", "sqrt": "square_root({0})",
    "rsqrt": "1 / square_root({0})", "square": "{0} * {0}", "floor": "floor_of({0})",
    "ceil": "ceil_of({0})", "trunc": "trunc_of({0})", "frac": "{0} - trunc_of({0})",
    "sigmoid": "1 / (1 + exp(-{0}))", "silu": "{0} / (1 + exp(-{0}))",
    "relu": "maximum({0}, 0)",
    "maximum": "maximum({0}, {1})", "minimum": "minimum({0}, {1})",
    "mul": "{0} * {1}", "atan2": "atan2({0}, {1})",
    "sigmoid_backward": "{0} * (1 - {1}) * {1}", "tanh_backward": "{0} * (1 - {1} * {1})",
    "bitwise_and": "{0} & {1}", "bitwise_or": "{0} | {1}", "bitwise_xor": "{0} ^ {1}",
    "__and__": "{0} & {1}", "__or__": "{0} | {1}", "__xor__": "{0} ^ {1}",
}  # fmt: skip
"""The expressions of ops whose arguments are all values, in the schema's order."""
UNARY_FUNCTIONS = frozenset(FUNCTIONS) - {"pow", "atan2", "quick_erf"}
TESTS = {
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}",
    "gt": "{0} > {1}", "ge": "{0} >= {1}", "logical_and": "{0} && {1}",
    "logical_or": "{0} || {1}", "logical_not": "!{0}", "isnan": "{0} != {0}",
    "isinf": "absolute({0}) == __builtin_inf()", "isfinite": "absolute({0}) < __builtin_inf()",
}  # fmt: skip
"""The expressions of ops that give bools."""
FOR_INTEGERS = names(
    """abs add amax amin bitwise_and bitwise_not bitwise_or bitwise_xor __and__ __or__ __xor__ clamp
    clamp_max clamp_min clone copy eq fill full full_like ge gt le logical_and logical_not
    logical_or lt masked_fill max maximum min minimum mul ne neg new_full new_ones new_zeros ones
    ones_like relu roll rsub scalar_tensor square sub sum where zero zeros zeros_like _to_copy"""
)
FOR_BOOLS = FOR_INTEGERS - names(
    """abs add amax amin clamp clamp_max clamp_min max maximum min minimum neg relu rsub square sub
    sum"""
)
FACTORIES = {"zeros": 0, "ones": 1, "zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}
MASKS = ("mask", "condition")
"""Arguments that stay bool."""

Arguments = dict[str, Any]


def _scaled(b: Builder, a: Arguments, name: str) -> Any:
    alpha = a.get("alpha", 1)
    return a[name] if type(alpha) is int and alpha == 1 else b.of("{0} * {1}", alpha, a[name])


def _div(b: Builder, a: Arguments) -> Value:
    if a.get("rounding_mode") is not None:
        raise Declined("division that rounds")
    return b.of("{0} / {1}", a["self"], a["other"])


_SPECIAL_POWERS = {
    0.5: "square_root({0})", 2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", 1.0: "{0}",
    -0.5: "1 / square_root({0})", -1.0: "1 / {0}", -2.0: "1 / ({0} * {0})",
}  # fmt: skip


def _pow(b: Builder, a: Arguments) -> Value:
    exponent = a["exponent"]
    text = None if isinstance(exponent, Value) else _SPECIAL_POWERS.get(exponent)
    if text is not None:
        return b.of(text, a["self"])
    power = b.of("pow({0}, {1})", a["self"], exponent)
    if isinstance(a["self"], Value) and isinstance(exponent, Value) and exponent.size == ():
        return b.of(
            "{1} == 0.5 ? square_root({0}) : {1} == -0.5 ? 1 / square_root({0}) : {1} == 1 ? {0} "
            ": {1} == 3 ? {0} * {0} * {0} : {1} == -1 ? 1 / {0} : {2}",
            a["self"], exponent, power,
        )  # fmt: skip
    return power


def _clamp(b: Builder, a: Arguments) -> Value:
    found: Value = a["self"]
    if a.get("min") is not None:
        found = b.of("maximum({0}, {1})", found, a["min"])
    if a.get("max") is not None:
        found = b.of("minimum({0}, {1})", found, a["max"])
    return found


def _gelu(b: Builder, a: Arguments) -> Value:
    x = a["self"]
    if a.get("approximate", "none") == "none":
        return b.of("{0} * {1} * (1 + quick_erf({0} * {2}))", x, 0.5, math.sqrt(0.5))
    inner = b.of("{1} * ({0} + {2} * ({0} * {0} * {0}))", x, math.sqrt(2 / math.pi), 0.044715)
    return b.of("{2} * {0} * (1 + tanh({1}))", x, inner, 0.5)


def _gelu_backward(b: Builder, a: Arguments) -> Value:
    x, grad = a["self"], a["grad_output"]
    if a.get("approximate", "none") == "none":
        cdf = b.of("{1} * (1 + quick_erf({0} * {2}))", x, 0.5, math.sqrt(0.5))
        pdf = b.of("exp({0} * {0} * {1}) * {2}", x, -0.5, 1 / math.sqrt(2 * math.pi))
        return b.of("{0} * ({1} + {2} * {3})", grad, cdf, x, pdf)
    beta, kappa = math.sqrt(2 / math.pi), 0.044715
    t = b.of("tanh({1} * ({0} + {2} * ({0} * {0} * {0})))", x, beta, kappa)
    right = b.of("{3} * {0} * (1 - {1} * {1}) * {2}", x, t, beta, 0.5)
    inner = b.of("1 + {1} * {0} * {0}", x, 3 * kappa)
    return b.of("{0} * ({3} * (1 + {1}) + {2} * {4})", grad, t, right, 0.5, inner)


def _lerp(b: Builder, a: Arguments) -> Value:
    return b.of(
        "absolute({2}) < {3} ? {0} + {2} * ({1} - {0}) : {1} - ({1} - {0}) * (1 - {2})",
        a["self"], a["end"], a["weight"], 0.5,
    )  # fmt: skip


def _mse(b: Builder, a: Arguments) -> Value:
    error = b.of("({0} - {1}) * ({0} - {1})", a["self"], a["target"])
    return _as_asked(b, error, a.get("reduction", 1))


def _as_asked(b: Builder, losses: Value, reduction: int) -> Value:
    """Losses as they are (0), their mean (1) or their sum (2)."""
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
        value = a["self"]
        if "other" in a:
            raise Declined("the greater one of two tensors by `max`")
        found = b.reduced(
            "sum" if kind == "mean" else kind, value, a.get("dim"), keepdim=a.get("keepdim", False)
        )
        if kind != "mean":
            return found
        n = math.prod(value.size) // max(math.prod(found.size), 1)
        return b.of("{0} / {1}", found, n)

    return rule


def _variance(b: Builder, a: Arguments) -> Value:
    x, dims = a["self"], a.get("dim")
    correction = a["unbiased"] if "unbiased" in a else a.get("correction")
    correction = 1 if correction is None else correction
    total = b.reduced("sum", x, dims)
    n = math.prod(x.size) // math.prod(total.size)
    if not isinstance(correction, (int, float)) or n <= correction:
        raise Declined("too few numbers for a variance")
    mean = b.of("{0} / {1}", total, n)
    squares = b.of("({0} - {1}) * ({0} - {1})", x, mean)
    return b.of(
        "{0} / {1}",
        b.reduced("sum", squares, dims, keepdim=a.get("keepdim", False)),
        n - correction,
    )


def _layer_norm(b: Builder, a: Arguments) -> list[Value]:
    x, n_dims = a["input"], len(a["normalized_shape"])
    dims = tuple(range(len(x.size) - n_dims, len(x.size)))
    n = math.prod(x.size[-n_dims:])
    mean = b.of("{0} / {1}", b.reduced("sum", x, dims), n)
    squares = b.of("({0} - {1}) * ({0} - {1})", x, mean)
    variance = b.of("{0} / {1}", b.reduced("sum", squares, dims), n)
    rstd = b.of("1 / square_root({0} + {1})", variance, a["eps"])
    found = b.of("({0} - {1}) * {2}", x, mean, rstd)
    if a.get("weight") is not None:
        found = b.of("{0} * {1}", found, a["weight"])
    if a.get("bias") is not None:
        found = b.of("{0} + {1}", found, a["bias"])
    return [found, mean, rstd]


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


def _roll(b: Builder, a: Arguments) -> Value:
    value, dims = a["self"], a.get("dims", ())
    if not dims:
        raise Declined("a roll of the flattened tensor")
    for shift, dim in zip(a["shifts"], dims, strict=True):
        dim = dim % len(value.size)
        shift = shift % value.size[dim]
        if shift:
            value = Rolled(value.size, value.dtype, value, dim, shift)
    # a roll by nothing is a copy, too
    return b.of("{0}", value)


def _full(b: Builder, a: Arguments) -> Value:
    return b.of("{0}", a["fill_value"] if "fill_value" in a else a["s"])


RULES: dict[str, Callable[[Builder, Arguments], Value | list[Value]]] = {
    "add": lambda b, a: b.of("{0} + {1}", a["self"], _scaled(b, a, "other")),
    "sub": lambda b, a: b.of("{0} - {1}", a["self"], _scaled(b, a, "other")),
    "rsub": lambda b, a: b.of("{1} - {0}", _scaled(b, a, "self"), a["other"]),
    "div": _div,
    "pow": _pow,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    "hardtanh": lambda b, a: _clamp(
        b, {"self": a["self"], "min": a.get("min_val", -1), "max": a.get("max_val", 1)}
    ),
    "gelu": _gelu,
    "gelu_backward": _gelu_backward,
    "silu_backward": lambda b, a: b.of(
        "{0} * {2} * (1 + {1} * (1 - {2}))",
        a["grad_output"], a["self"], b.of("1 / (1 + exp(-{0}))", a["self"]),
    ),
    "threshold_backward": lambda b, a: b.of(
        "{1} <= {2} ? 0 : {0}", a["grad_output"], a["self"], a["threshold"]
    ),
    "leaky_relu": lambda b, a: b.of(
        "{0} > 0 ? {0} : {0} * {1}", a["self"], a.get("negative_slope", 0.01)
    ),
    "leaky_relu_backward": lambda b, a: b.of(
        "{1} > 0 ? {0} : {0} * {2}", a["grad_output"], a["self"], a["negative_slope"]
    ),
    "softplus": lambda b, a: b.of(
        "{0} * {1} > {2} ? {0} : log1p(exp({0} * {1})) / {1}",
        a["self"], a.get("beta", 1), a.get("threshold", 20),
    ),
    "lerp": _lerp,
    "addcmul": lambda b, a: b.of(
        "{0} + {3} * {1} * {2}", a["self"], a["tensor1"], a["tensor2"], a.get("value", 1)
    ),
    "addcdiv": lambda b, a: b.of(
        "{0} + {3} * {1} / {2}", a["self"], a["tensor1"], a["tensor2"], a.get("value", 1)
    ),
    "bitwise_not": lambda b, a: b.of(
        "!{0}" if b.dtype is torch.bool else "~{0}", a["self"]
    ),
    "where": lambda b, a: b.of("{0} ? {1} : {2}", a["condition"], a["self"], a["other"]),
    "masked_fill": lambda b, a: b.of("{1} ? {2} : {0}", a["self"], a["mask"], a["value"]),
    "native_dropout_backward": lambda b, a: b.of(
        "{0} * {1} * {2}", a["grad_output"], b.cast(a["mask"], b.dtype), a["scale"]
    ),
    "mse_loss": _mse,
    "mse_loss_backward": _mse_backward,
    "clone": lambda b, a: b.of("{0}", a["self"]),
    "_to_copy": lambda b, a: b.of("{0}", a["self"]),
    "copy": lambda b, a: b.of("{0}", a["src"]),
    "fill": lambda b, a: b.of("{0}", a["value"]),
    "zero": lambda b, a: b.of("{0}", 0),
    "full": _full,
    "full_like": _full,
    "new_full": _full,
    "scalar_tensor": _full,
    "sum": _reduce("sum"),
    "mean": _reduce("mean"),
    "amax": _reduce("max"),
    "amin": _reduce("min"),
    "max": _reduce("max"),
    "min": _reduce("min"),
    "var": _variance,
    "std": lambda b, a: b.of("square_root({0})", _variance(b, a)),
    "native_layer_norm": _layer_norm,
    "_softmax": _softmax,
    "_log_softmax": _log_softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _log_softmax_backward,
    "roll": _roll,
}  # fmt: skip
