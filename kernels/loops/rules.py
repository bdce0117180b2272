"""How each op computes its results: by an expression in C, or a rule, which is a function.

`read` applies them. The formulas are those of eager's kernels (`aten/src/ATen/native/cpu`). A
segment with an op that isn't here is left to Inductor.
"""

from __future__ import annotations

import math
import operator
from functools import partial
from typing import Any

import torch

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.loops.builder import Builder, expanded, first_of, halves
from lazy_tensor.kernels.loops.cpp import BINARY_FUNCTIONS, FUNCTIONS
from lazy_tensor.kernels.loops.index import Index, Indices
from lazy_tensor.kernels.loops.reductions import REDUCTIONS, Arguments, Rule
from lazy_tensor.kernels.loops.values import Joined, Number, Place, Reshaped, Rolled, Value, View


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TEXTS = {
    "neg": "-{0}", "abs": "absolute({0})", "reciprocal": "1 / {0}", "sqrt": "square_root({0})",
    "rsqrt": "1 / square_root({0})", "square": "{0} * {0}", "floor": "floor_of({0})",
    "ceil": "ceil_of({0})", "trunc": "trunc_of({0})", "frac": "{0} - trunc_of({0})",
    "sigmoid": "1 / (1 + exp(-{0}))", "silu": "{0} / (1 + exp(-{0}))",
    "relu": "at_least({0}, 0)",
    "hardsigmoid": "at_most(at_least({0} + 3, 0), 6) / 6",
    "hardswish": "{0} * at_most(at_least({0} + 3, 0), 6) / 6",
    "round": "nearest({0})",
    "maximum": "maximum({0}, {1})", "minimum": "minimum({0}, {1})",
    "mul": "{0} * {1}", "atan2": "atan2({0}, {1})", "hypot": "hypot({0}, {1})",
    "copysign": "with_sign({0}, {1})",
    "sigmoid_backward": "{0} * (1 - {1}) * {1}", "tanh_backward": "{0} * (1 - {1} * {1})",
    "bitwise_and": "{0} & {1}", "bitwise_or": "{0} | {1}", "bitwise_xor": "{0} ^ {1}",
    "__and__": "{0} & {1}", "__or__": "{0} | {1}", "__xor__": "{0} ^ {1}",
}  # fmt: skip
"""The expressions of ops whose arguments are all values, in the schema's order."""
UNARY_FUNCTIONS = frozenset(FUNCTIONS) - {*BINARY_FUNCTIONS, "quick_erf"}
TESTS = {
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}",
    "gt": "{0} > {1}", "ge": "{0} >= {1}", "logical_and": "!!{0} & !!{1}",
    "logical_or": "!!{0} | !!{1}", "logical_xor": "!{0} != !{1}", "logical_not": "!{0}",
    "isnan": "{0} != {0}", "signbit": "with_sign(1, {0}) < 0",
    "isinf": "absolute({0}) == __builtin_inf()", "isfinite": "absolute({0}) < __builtin_inf()",
}  # fmt: skip
"""The expressions of ops whose results are bools."""
FOR_INTEGERS = names(
    """abs add all amax amin any arange argmax argmin bitwise_and bitwise_not bitwise_or bitwise_xor
    __and__ __or__ __xor__ cat clamp clamp_max clamp_min clone constant_pad_nd copy eq expand_copy
    fill flip full full_like gather ge gt index_select le logical_and logical_not logical_or
    logical_xor lt masked_fill max maximum min minimum mul ne neg new_full new_ones new_zeros
    ones ones_like prod relu repeat roll rsub scalar_tensor select_backward slice_backward square
    stack sub sum tril triu where zero zeros zeros_like _to_copy"""
)
FOR_BOOLS = FOR_INTEGERS - names(
    """abs add amax amin arange argmax argmin clamp clamp_max clamp_min max maximum min minimum neg
    prod relu rsub square sub sum"""
)
TAKES_UNROUNDED = names("mul div floor_divide")
"""Ops that use a 0-dim `other` as it is. If results have 16 bits, any other op rounds it first."""
GIVES_PLACES = names("argmax argmin max min")
"""Ops that compute in the dtype of `self`, even where their results are indices."""
FACTORIES = {"zeros": 0, "ones": 1, "zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}


def _scaled(b: Builder, a: Arguments, name: str) -> Any:
    alpha, value = a.get("alpha", 1), b.round_number(a[name])
    if type(alpha) is int and alpha == 1:
        return value
    return b.of("{0} * {1}", b.round_number(alpha), value)


def _div(b: Builder, a: Arguments) -> Value:
    quotient = b.of("{0} / {1}", a["self"], a["other"])
    if a.get("rounding_mode") == "trunc":
        return b.of("trunc_of({0})", b.round_step(quotient, a["other"]))
    return quotient if a.get("rounding_mode") is None else _floor_divide(b, a)


def _remainders(b: Builder, a: Arguments) -> tuple[Value, Value]:
    """The remainder of a division, with the sign of `self`; and whether `other` has another."""
    remainder = b.of("fmod({0}, {1})", a["self"], a["other"])
    return remainder, b.test("({0} != 0) & (({0} < 0) != ({1} < 0))", remainder, a["other"])


def _remainder(b: Builder, a: Arguments) -> Value:
    a = {name: b.round_number(operand) for name, operand in a.items()}
    remainder, has_other_sign = _remainders(b, a)
    return b.of("{1} ? {0} + {2} : {0}", remainder, has_other_sign, a["other"])


def _floor_divide(b: Builder, a: Arguments) -> Value:
    remainder, has_other_sign = _remainders(b, a)
    step = partial(b.round_step, other=a["other"])
    quotient = step(b.of("{0} / {1}", a["self"], a["other"]))
    # where the quotient overflows, `fmod` gives NaN
    overflows = b.test(
        "(absolute({0}) == {1}) & (absolute({2}) != {1})", quotient, math.inf, a["self"]
    )
    divided = b.of(
        "{0} ? {1} : {2}", overflows, a["self"], b.of("{0} - {1}", a["self"], step(remainder))
    )
    # an integer, except for the rounding of this division
    whole = b.of("{0} / {1}", step(divided), a["other"])
    whole = step(b.of("{1} ? {0} - 1 : {0}", step(whole), has_other_sign))
    floor = b.of("floor_of({0})", whole)
    floor = b.of("{0} - {1} > {2} ? {1} + 1 : {1}", whole, floor, 0.5)
    floor = b.of("{0} != 0 ? {1} : with_sign(0, {2})", whole, floor, quotient)
    return b.of("{0} == 0 ? {1} : {2}", a["other"], quotient, floor)


def _inverse_hyperbolic(name: str) -> Rule:
    """`log(2 * x)` for large `x`: SLEEF squares them, which gives infinity from 1.8e19 on."""

    def rule(b: Builder, a: Arguments) -> Value:
        x = a["self"]
        near = b.of(name + "({0})", x)
        if name == "acosh":  # of numbers below 1 it is NaN
            near = b.of("{0} < 1 ? {1} : {2}", x, math.nan, near)
            far = b.of("log({0}) + {1}", x, math.log(2))
            return b.of("{0} > {2} ? {1} : {3}", x, far, 1e9, near)
        far = b.of("with_sign(log(absolute({0})) + {1}, {0})", x, math.log(2))
        return b.of("absolute({0}) > {2} ? {1} : {3}", x, far, 1e9, near)

    return rule


def _logit(b: Builder, a: Arguments) -> Value:
    def rest(value: Any) -> Value:
        return b.cast(b.of("1 - {0}", value), b.stored_dtype)

    x, eps = a["self"], b.round_number(a.get("eps")) if a.get("eps") is not None else None
    if eps is not None:
        x = b.of("at_most(at_least({0}, {1}), {2})", x, eps, rest(eps))
    return b.of("log({0})", b.cast(b.of("{0} / {1}", x, rest(x)), b.stored_dtype))


def _log_add_exp(b: Builder, a: Arguments) -> Value:
    x, other = a["self"], a["other"]
    most = b.of("maximum({0}, {1})", x, other)
    total = b.of("{2} + log1p(exp(-absolute({0} - {1})))", x, other, most)
    are_equal_infinities = b.test("({0} == {1}) & (absolute({0}) == __builtin_inf())", x, other)
    return b.of("{0} ? {1} : {2}", are_equal_infinities, x, total)


def _x_log_y(b: Builder, a: Arguments) -> Value:
    x, other = b.round_number(a["self"]), b.round_number(a["other"])
    product = b.of("{0} * {1}", x, b.cast(b.of("log({0})", other), b.stored_dtype))
    product = b.of("{0} == 0 ? 0 : {1}", x, product)
    return b.of("{0} != {0} ? {0} : {1}", other, product)


def _sinc(b: Builder, a: Arguments) -> Value:
    angle = b.of("{0} * {1}", a["self"], math.pi)
    return b.of("{0} == 0 ? 1 : {1}", a["self"], b.of("sin({0}) / {0}", angle))


def _number_of(sign: str) -> Rule:
    """The greater or smaller of two numbers. If one of them is NaN, the other one."""

    def rule(b: Builder, a: Arguments) -> Value:
        chosen = b.of("{0} " + sign + " {1} ? {1} : {0}", a["self"], a["other"])
        return b.of("{0} != {0} ? {1} : {2}", a["self"], a["other"], chosen)

    return rule


def _nan_to_num(b: Builder, a: Arguments) -> Value:
    info, x = torch.finfo(b.stored_dtype), a["self"]
    nan, most, least = (a.get(name) for name in ("nan", "posinf", "neginf"))
    result = b.of("{0} == __builtin_inf() ? {1} : {0}", x, info.max if most is None else most)
    least = info.min if least is None else least
    result = b.of("{0} == -__builtin_inf() ? {1} : {2}", x, least, result)
    return b.of("{0} != {0} ? {1} : {2}", x, 0 if nan is None else nan, result)


def _prelu_backward(b: Builder, a: Arguments) -> list[Value | None]:
    grad, x, weight = a["grad_output"], a["self"], a["weight"]
    over = b.of("{0} > 0 ? 0 : {0} * {1}", x, grad)
    return [b.of("{0} > 0 ? {1} : {2} * {1}", x, grad, weight), over]


def _hardswish_backward(b: Builder, a: Arguments) -> Value:
    grad, x = a["grad_output"], a["self"]
    result = b.of("{1} >= 3 ? {0} : {0} * ({1} / 3 + {2})", grad, x, 0.5)
    return b.of("{0} <= -3 ? 0 : {1}", x, result)


def _tanh_of_softplus(b: Builder, x: Value) -> Value:
    """`tanh(log1p(exp(x)))` by one function instead of three. From 20 on it is 1."""
    power = b.of("exp(at_most({0}, {1}))", x, 20)
    product = b.of("{0} * ({0} + 2)", power)
    return b.of("{0} / ({0} + 2)", product)


def _mish_backward(b: Builder, a: Arguments) -> Value:
    x = a["self"]
    sigmoid, curve = b.of("1 / (1 + exp(-{0}))", x), _tanh_of_softplus(b, x)
    return b.of("{0} * ({1} + {2} * {3} * (1 - {1} * {1}))", a["grad_output"], curve, x, sigmoid)


SPECIAL_POWERS = {
    0.5: "square_root({0})", 2.0: "{1}", 3.0: "{1} * {0}", 1.0: "{0}",
    -0.5: "1 / square_root({0})", -1.0: "1 / {0}", -2.0: "1 / {1}",
}  # fmt: skip
"""Exponents with an expression of their own: {0} is the base, and {1} its square."""


def _special_power(b: Builder, base: Value, exponent: float) -> Value:
    square = b.cast(b.of("{0} * {0}", base), b.stored_dtype)
    return b.of(SPECIAL_POWERS[exponent], base, square)


def _pow(b: Builder, a: Arguments) -> Value:
    number, base, exponent = a["exponent"], b.round_number(a["self"]), b.round_number(a["exponent"])
    # eager has no special cases for float16
    has_special = b.stored_dtype is not torch.float16 and isinstance(base, Value)
    if has_special and not isinstance(number, Value) and number in SPECIAL_POWERS:
        return _special_power(b, base, number)
    power = b.of("pow({0}, {1})", base, exponent)
    if has_special and isinstance(number, Number):
        for special in SPECIAL_POWERS:
            if special not in (2, -2):
                result = _special_power(b, base, special)
                power = b.of("{0} == {1} ? {2} : {3}", exponent, special, result, power)
    return power


def _clamp(b: Builder, a: Arguments) -> Value:
    result: Value = a["self"]
    if a.get("min") is not None:
        result = b.of("at_least({0}, {1})", result, a["min"])
    if a.get("max") is not None:
        result = b.of("at_most({0}, {1})", result, a["max"])
    return result


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


def _roll(b: Builder, a: Arguments) -> Value:
    value, dims = a["self"], a.get("dims", ())
    if not dims:
        raise Declined("a roll of the flattened tensor")
    for shift, dim in zip(a["shifts"], dims, strict=True):
        dim = dim % len(value.size)
        shift = shift % value.size[dim]
        if shift:
            value = Rolled(value.size, value.dtype, value, dim, shift)
    # `roll` returns a copy even if no shift is left
    return b.of("{0}", value)


def _cat(b: Builder, a: Arguments) -> Value:
    parts = a["tensors"]
    dim = a.get("dim", 0) % len(parts[0].size)
    size = [*parts[0].size]
    size[dim] = sum(part.size[dim] for part in parts)
    return Joined(tuple(size), b.dtype, tuple(parts), dim)


def _stack(b: Builder, a: Arguments) -> Value:
    size = a["tensors"][0].size
    dim = a.get("dim", 0) % (len(size) + 1)
    unsqueezed = (*size[:dim], 1, *size[dim:])
    parts = [Reshaped(unsqueezed, b.dtype, part) for part in a["tensors"]]
    return _cat(b, {"tensors": parts, "dim": dim})


def _padded(b: Builder, value: Value, dim: int, before: int, after: int, fill: Any = 0) -> Value:
    """The value padded along `dim`, by `before` and `after` elements with the value `fill`."""
    if before < 0 or after < 0:
        raise Declined("negative padding")
    sizes = [(*value.size[:dim], n, *value.size[dim + 1 :]) for n in (before, after)]
    first, last = (expanded(b.value(fill), size) for size in sizes)
    parts = [part for part in (first, value, last) if part.size[dim]]
    return _cat(b, {"tensors": parts, "dim": dim})


def _select_backward(b: Builder, a: Arguments) -> Value:
    size, grad = a["input_sizes"], a["grad_output"]
    dim = a["dim"] % len(size)
    at = a["index"] % size[dim]
    unsqueezed = Reshaped((*grad.size[:dim], 1, *grad.size[dim:]), b.dtype, grad)
    return _padded(b, unsqueezed, dim, at, size[dim] - at - 1)


def _slice_backward(b: Builder, a: Arguments) -> Value:
    size, grad = a["input_sizes"], a["grad_output"]
    dim = a["dim"] % len(size)
    if a["step"] != 1:
        raise Declined("the gradient of a slice with steps")
    at = first_of(size[dim], a["start"])
    return _padded(b, grad, dim, at, size[dim] - at - grad.size[dim])


def _constant_pad(b: Builder, a: Arguments) -> Value:
    result, pad = a["self"], a["pad"]
    for i in range(0, len(pad), 2):
        dim = len(result.size) - 1 - i // 2
        result = _padded(b, result, dim, pad[i], pad[i + 1], a.get("value", 0))
    return b.of("{0}", result)


def _flip(b: Builder, a: Arguments) -> Value:
    size = a["self"].size
    dims = {d % len(size) for d in a["dims"]}

    def place(index: Indices) -> Indices:
        backwards = [i.times(-1) + Index((), n - 1) for i, n in zip(index, size, strict=True)]
        return tuple(backwards[d] if d in dims else i for d, i in enumerate(index))

    return b.of("{0}", View(size, b.dtype, a["self"], place))


def _repeat(b: Builder, a: Arguments) -> Value:
    base, times = a["self"], a["repeats"]
    aligned = (*[1] * (len(times) - len(base.size)), *base.size)
    size = tuple(map(operator.mul, aligned, times))

    def place(index: Indices) -> Indices:
        inner = [i.divided(n)[1] for i, n in zip(index, aligned, strict=True)]
        return tuple(inner[len(aligned) - len(base.size) :])

    return b.of("{0}", View(size, b.dtype, base, place))


def _triangle(sign: str) -> Rule:
    def rule(b: Builder, a: Arguments) -> Value:
        size, diagonal = a["self"].size, a.get("diagonal", 0)
        row, column = (Place(size, torch.int64, len(size) + d) for d in (-2, -1))
        inside = Builder(torch.int64).test("{1} - {0} " + sign + " {2}", row, column, diagonal)
        return b.of("{0} ? {1} : 0", inside, a["self"])

    return rule


def _arange(b: Builder, a: Arguments) -> Value:
    start, end, step = a.get("start", 0), a["end"], a.get("step", 1)
    if b.dtype.is_floating_point or not all(type(n) is int for n in (start, end, step)):
        raise Declined("a range of floats")
    n = -((start - end) // step)
    return b.of("{0} * {1} + {2}", Place((n,), torch.int64, 0), step, start)


def _sign(b: Builder, a: Arguments) -> Value:
    below = b.of("{0} < 0 ? {1} : {2}", a["self"], -1, 0)
    return b.of("{0} > 0 ? {1} : {2}", a["self"], 1, below)


def _elu(b: Builder, a: Arguments) -> Value:
    x, scale = a["self"], a.get("scale", 1)
    factor = a.get("alpha", 1) * scale
    below = b.of("expm1({0} * {1}) * {2}", x, a.get("input_scale", 1), factor)
    return b.of("{0} <= 0 ? {1} : {0} * {2}", x, below, scale)


def _elu_backward(b: Builder, a: Arguments) -> Value:
    grad, x, scale = a["grad_output"], a["self_or_result"], a["scale"]
    factor = a["alpha"] * scale
    text = "{0} * {2} * ({1} + {3})" if a["is_result"] else "{0} * {2} * {3} * exp({1} * {2})"
    below = b.of(text, grad, x, a["input_scale"], factor)
    return b.of("{1} > 0 ? {0} * {2} : {3}", grad, x, scale, below)


def _softplus(b: Builder, a: Arguments) -> Value:
    x, beta = a["self"], a.get("beta", 1)
    curve = b.of("log1p(exp({0} * {1})) / {1}", x, beta)
    return b.of("{0} * {1} > {2} ? {0} : {3}", x, beta, a.get("threshold", 20), curve)


def _softplus_backward(b: Builder, a: Arguments) -> Value:
    grad, x, beta = a["grad_output"], a["self"], a["beta"]
    curve = b.of("{0} * {1} / ({1} + 1)", grad, b.of("exp({0} * {1})", x, beta))
    return b.of("{1} * {2} > {3} ? {0} : {4}", grad, x, beta, a["threshold"], curve)


def _glu(b: Builder, a: Arguments) -> Value:
    left, right = halves(a["self"], a.get("dim", -1))
    return b.of("{0} / (1 + exp(-{1}))", left, right)


def _glu_backward(b: Builder, a: Arguments) -> Value:
    grad, dim = a["grad_output"], a["dim"] % len(a["self"].size)
    left, right = halves(a["self"], dim)
    sigmoid = b.of("1 / (1 + exp(-{0}))", right)
    left_grad = b.of("{0} * {1}", grad, sigmoid)
    right_grad = b.of("{0} * {1} * {2} * (1 - {1})", grad, sigmoid, left)
    return _cat(b, {"tensors": (left_grad, right_grad), "dim": dim})


def _log_sigmoid(b: Builder, a: Arguments) -> list[Value | None]:
    x = a["self"]
    buffer = b.of("exp(-absolute({0}))", x)
    return [b.of("minimum({0}, 0) - log1p({1})", x, buffer), buffer]


def _full(b: Builder, a: Arguments) -> Value:
    return b.of("{0}", a["fill_value"] if "fill_value" in a else a["s"])


RULES: dict[str, Rule] = {
    **REDUCTIONS,
    "cat": _cat,
    "stack": _stack,
    "select_backward": _select_backward,
    "slice_backward": _slice_backward,
    "constant_pad_nd": _constant_pad,
    "flip": _flip,
    "repeat": _repeat,
    "tril": _triangle("<="),
    "triu": _triangle(">="),
    "arange": _arange,
    "log_sigmoid_forward": _log_sigmoid,
    "log_sigmoid_backward": lambda b, a: b.of(
        "{1} < 0 ? {0} * (1 - {2} / (1 + {2})) : {0} * ({2} / (1 + {2}))",
        a["grad_output"], a["self"], a["buffer"],
    ),
    "softplus_backward": _softplus_backward,
    "asinh": _inverse_hyperbolic("asinh"),
    "acosh": _inverse_hyperbolic("acosh"),
    "remainder": _remainder,
    "fmod": lambda b, a: b.of("fmod({0}, {1})", a["self"], b.round_number(a["other"])),
    "floor_divide": _floor_divide,
    "logit": _logit,
    "logaddexp": _log_add_exp,
    "xlogy": _x_log_y,
    "sinc": _sinc,
    "fmax": _number_of("<"),
    "fmin": _number_of(">"),
    "nan_to_num": _nan_to_num,
    "deg2rad": lambda b, a: b.of("{0} * {1}", a["self"], math.pi / 180),
    "rad2deg": lambda b, a: b.of("{0} * {1}", a["self"], 180 / math.pi),
    "heaviside": lambda b, a: b.of(
        "{0} == 0 ? {1} : {2}", a["self"], a["values"], b.of("{0} > 0 ? {1} : {2}", a["self"], 1, 0)
    ),
    "_prelu_kernel": lambda b, a: b.of("{0} > 0 ? {0} : {1} * {0}", a["self"], a["weight"]),
    "_prelu_kernel_backward": _prelu_backward,
    "hardswish_backward": _hardswish_backward,
    "mish": lambda b, a: b.of("{0} * {1}", a["self"], _tanh_of_softplus(b, a["self"])),
    "mish_backward": _mish_backward,
    "hardtanh_backward": lambda b, a: b.of(
        "{1} ? {0} : 0", a["grad_output"],
        b.test("({0} > {1}) & ({0} < {2})", a["self"], a["min_val"], a["max_val"]),
    ),
    "hardsigmoid_backward": lambda b, a: b.of(
        "absolute({1}) < 3 ? {0} / 6 : 0", a["grad_output"], a["self"]
    ),
    "threshold": lambda b, a: b.of(
        "{0} <= {1} ? {2} : {0}", a["self"], a["threshold"], a["value"]
    ),
    "sign": _sign,
    "sgn": _sign,
    "elu": _elu,
    "celu": lambda b, a: _elu(
        b, {"self": a["self"], "alpha": a.get("alpha", 1), "input_scale": 1 / a.get("alpha", 1)}
    ),
    "elu_backward": _elu_backward,
    "glu": _glu,
    "glu_backward": _glu_backward,
    "expand_copy": lambda b, a: b.of("{0}", a["self"]),
    "add": lambda b, a: b.of("{0} + {1}", a["self"], _scaled(b, a, "other")),
    "sub": lambda b, a: b.of("{0} - {1}", a["self"], _scaled(b, a, "other")),
    "rsub": lambda b, a: b.of("{1} - {0}", _scaled(b, a, "self"), b.round_number(a["other"])),
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
    "softplus": _softplus,
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
    "clone": lambda b, a: b.of("{0}", a["self"]),
    "_to_copy": lambda b, a: b.of("{0}", a["self"]),
    "copy": lambda b, a: b.of("{0}", a["src"]),
    "fill": lambda b, a: b.of("{0}", a["value"]),
    "zero": lambda b, a: b.of("{0}", 0),
    "full": _full,
    "full_like": _full,
    "new_full": _full,
    "scalar_tensor": _full,
    "roll": _roll,
}  # fmt: skip
