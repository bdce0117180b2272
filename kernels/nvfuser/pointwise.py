"""Rules of ops that work element by element.

Before each op, all operands and Python numbers are converted to the dtype in which torch computes.
So nvFuser's own type promotion never applies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION, elementwise_dtypes

from lazy_tensor.kernels.nvfuser.definition import V
from lazy_tensor.kernels.nvfuser.translate import (
    RULES,
    Translator,
    Value,
    kind_of,
    number_of,
    rule,
    wide_kind,
)


class Emitter:
    """Writes lines whose operands and results are of one kind: `o("add", a, b)`."""

    def __init__(self, translator: Translator, kind: str) -> None:
        self._translator = translator
        self.kind = kind

    @property
    def is_float(self) -> bool:
        return self.kind in ("Float", "Double")

    def __call__(self, name: str, *operands: Any, kind: str | None = None) -> V:
        given = [o if isinstance(o, V) else self.number(o) for o in operands]
        return self._translator.op(name, *given, kind=self.kind if kind is None else kind)

    def number(self, number: float) -> V:
        """A constant of this kind. nvFuser would make a plain number a Double or an Int."""
        return self._translator.op("constant", number, kind=self.kind)


Compute = Callable[..., V]
"""`compute(emitter, *operands)`, operands of the emitter's kind or Python numbers."""


def elementwise(
    t: Translator,
    meta: torch.Tensor,
    compute: Compute,
    operands: list[Any],
    promotion: Any = PROMOTION.DEFAULT,
    *,
    bools_as_ints: bool = True,
    needs_float: bool = False,
) -> Value:
    """The value of a pointwise op that `compute` defines.

    `operands` are values and numbers, or None for an optional argument that is not given. With
    `bools_as_ints` booleans are computed as integers, with `needs_float` integers as floats.
    """
    weighed = [_weighed(o) for o in operands if o is not None]
    dtype, _ = elementwise_dtypes(*weighed, type_promotion_kind=promotion)
    kind = wide_kind(dtype)
    if kind == "Bool" and bools_as_ints:
        kind = "Int"
    if needs_float and kind not in ("Float", "Double"):
        kind = "Float"
    at = compute(Emitter(t, kind), *(_operand(t, o, kind) for o in operands))
    # a comparison makes a Bool, whatever kind it computes in
    made = t.definition.kinds[at.index]
    result = wide_kind(meta.dtype)
    is_number = all(o.is_number for o in operands if isinstance(o, Value))
    value = Value(at, made, meta, is_number=is_number)
    return value if made == result else Value(t.held_as(value, result), result, meta, is_number)


def _weighed(operand: Any) -> Any:
    """The form in which an operand takes part in torch's type promotion."""
    if isinstance(operand, Value):
        return operand.meta
    return 1 if isinstance(operand, torch.SymInt) else operand


def _operand(t: Translator, operand: Any, kind: str) -> Any:
    """An operand as a value or number of `kind`."""
    if operand is None:
        return None
    if isinstance(operand, torch.SymInt):
        size = t.size(operand)
        return t.op("cast", size, kind=kind, dtype=kind) if isinstance(size, V) else size
    if isinstance(operand, Value):
        return t.held_as(operand, kind)
    return number_of(kind)(operand)


def _unary(name: str) -> Compute:
    return lambda o, x: o(name, x)


def _binary(name: str) -> Compute:
    return lambda o, a, b: o(name, a, b)


def _compared(name: str) -> Compute:
    return lambda o, a, b: o(name, a, b, kind="Bool")


def _floats_only(name: str) -> Compute:
    return lambda o, x: o(name, x) if o.is_float else x


# Functions of one operand. `_COMPUTE` maps an op to its formula and its options for `elementwise`.

_FLOAT_UNARY = """exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh
    cosh tanh asinh acosh atanh erf erfc erfinv lgamma sigmoid reciprocal"""
_ROUNDING = "floor ceil round trunc"
_TESTS = "isnan isinf isfinite isneginf isposinf"

_COMPUTE: dict[str, tuple[Compute, dict[str, Any]]] = {}


def _def(names: str, make: Callable[[str], Compute], **how: Any) -> None:
    for name in names.split():
        _COMPUTE[name] = (make(name), how)


_def(_FLOAT_UNARY, _unary, promotion=PROMOTION.INT_TO_FLOAT)
_def(_ROUNDING, _floats_only)
_def(_TESTS, lambda n: lambda o, x: o(n, x, kind="Bool"), needs_float=True)
_def("abs sign", _unary)
_def("silu", _unary, needs_float=True)
_def("neg", lambda n: lambda o, x: o("neg", x))
_def("relu", lambda n: lambda o, x: o("maximum", x, 0.0 if o.is_float else 0))
_def("bitwise_not", _unary, bools_as_ints=False)
_def("logical_not", lambda n: lambda o, x: _not(o, x), bools_as_ints=False)
_def(
    "signbit",
    lambda n: (
        lambda o, x: o("signbit", x, kind="Bool") if o.is_float else o("lt", x, 0, kind="Bool")
    ),
)


def _truth(o: Emitter, x: V) -> V:
    return x if o.kind == "Bool" else o("ne", x, 0.0 if o.is_float else 0, kind="Bool")


def _not(o: Emitter, x: V) -> V:
    return o("logical_not", _truth(o, x), kind="Bool")


# Functions of two operands

_def("mul maximum minimum remainder fmod", _binary)
_def("atan2", _binary, promotion=PROMOTION.INT_TO_FLOAT)
_def("pow", _binary, promotion=PROMOTION.BOOL_TO_LONG)
_def("bitwise_and bitwise_or bitwise_xor", _binary, bools_as_ints=False)
_def("__and__", lambda n: _binary("bitwise_and"), bools_as_ints=False)
_def("__or__", lambda n: _binary("bitwise_or"), bools_as_ints=False)
_def("__xor__", lambda n: _binary("bitwise_xor"), bools_as_ints=False)
_def("bitwise_left_shift bitwise_right_shift", _binary)
_def("eq ne lt le gt ge", _compared)
_def(
    "logical_and logical_or",
    lambda n: lambda o, a, b: o(n, _truth(o, a), _truth(o, b), kind="Bool"),
    bools_as_ints=False,
)
_def(
    "logical_xor",
    lambda n: lambda o, a, b: o("ne", _truth(o, a), _truth(o, b), kind="Bool"),
    bools_as_ints=False,
)


def _quiet(name: str) -> Compute:
    """`maximum` or `minimum`, which of a NaN and a number gives the number."""

    def compute(o: Emitter, a: V, b: V) -> V:
        both = o(name, a, b)
        if not o.is_float:
            return both
        either = o("where", o("isnan", b, kind="Bool"), a, both)
        return o("where", o("isnan", a, kind="Bool"), b, either)

    return compute


_def("fmax", lambda n: _quiet("maximum"))
_def("fmin", lambda n: _quiet("minimum"))


# a function, as a loop's body would bind the last `compute` to all rules
def _register(name: str, compute: Compute, how: dict[str, Any]) -> None:
    def apply(t: Translator, meta: torch.Tensor, *operands: Any) -> Value:
        return elementwise(t, meta, compute, list(operands), **how)

    RULES[f"aten.{name}"] = apply


for _name, (_compute, _how) in _COMPUTE.items():
    _register(_name, _compute, _how)


def _is_one(number: Any) -> bool:
    return not isinstance(number, Value) and number == 1


def _added(t: Translator, meta: torch.Tensor, a: Any, b: Any, alpha: Any, name: str) -> Value:
    """`a + alpha * b` or `a - alpha * b`, without the product where alpha is 1."""
    scaled = None if _is_one(alpha) else alpha

    def compute(o: Emitter, x: V, y: V, factor: Any = None) -> V:
        return o(name, x, y if factor is None else o("mul", y, factor))

    return elementwise(t, meta, compute, [a, b, scaled])


@rule("add")
def _sum(t: Translator, meta: torch.Tensor, a: Any, b: Any, *, alpha: Any = 1) -> Value:
    return _added(t, meta, a, b, alpha, "add")


@rule("sub")
def _difference(t: Translator, meta: torch.Tensor, a: Any, b: Any, *, alpha: Any = 1) -> Value:
    return _added(t, meta, a, b, alpha, "sub")


@rule("rsub")
def _reversed(t: Translator, meta: torch.Tensor, a: Any, b: Any, alpha: Any = 1) -> Value:
    return _added(t, meta, b, a, alpha, "sub")


@rule("div")
def _quotient(t: Translator, meta: torch.Tensor, a: Any, b: Any) -> Value:
    return elementwise(t, meta, _binary("div"), [a, b], PROMOTION.INT_TO_FLOAT)


@rule("div.Tensor_mode", "div.Scalar_mode", "floor_divide")
def _rounded_quotient(
    t: Translator, meta: torch.Tensor, a: Any, b: Any, *, rounding_mode: str | None = "floor"
) -> Value:
    if rounding_mode is None:
        return _quotient(t, meta, a, b)
    compute = _floored if rounding_mode == "floor" else _truncated
    return elementwise(t, meta, compute, [a, b])


def _truncated(o: Emitter, a: V, b: V) -> V:
    return o("trunc", o("div", a, b)) if o.is_float else o("div", a, b)


def _floored(o: Emitter, a: V, b: V) -> V:
    """`floor(a / b)` as torch computes it."""
    if not o.is_float:
        quotient, rest = o("div", a, b), o("remainder", a, b)
        # `div` rounds towards zero. The two remainders differ where that isn't the floor.
        cut = o("fmod", a, b)
        return o("where", o("eq", rest, cut, kind="Bool"), quotient, o("sub", quotient, 1))
    # The steps of torch's `div_floor_floating`. They are right where a / b would round up to an
    # integer, and give a / b where b is zero.
    rest = o("fmod", a, b)
    whole = o("div", o("sub", a, rest), b)
    differs = o("ne", o("lt", rest, 0.0, kind="Bool"), o("lt", b, 0.0, kind="Bool"), kind="Bool")
    is_below = o("logical_and", o("ne", rest, 0.0, kind="Bool"), differs, kind="Bool")
    whole = o("where", is_below, o("sub", whole, 1.0), whole)
    floor = o("floor", whole)
    is_short = o("gt", o("sub", whole, floor), 0.5, kind="Bool")
    nearest = o("where", is_short, o("add", floor, 1.0), floor)
    quotient = o("div", a, b)
    signed_zero = o("mul", quotient, 0.0)
    nearest = o("where", o("eq", whole, 0.0, kind="Bool"), signed_zero, nearest)
    return o("where", o("eq", b, 0.0, kind="Bool"), quotient, nearest)


@rule("where", "prims.where")
def _where(t: Translator, meta: torch.Tensor, condition: Value, a: Any, b: Any) -> Value:
    test = t.held_as(condition, "Bool")

    def compute(o: Emitter, x: Any, y: Any) -> V:
        return o("where", test, x, y)

    value = elementwise(t, meta, compute, [a, b], bools_as_ints=False)
    # `elementwise` knows nothing of the condition, which is no operand of the promotion
    is_number = value.is_number and condition.is_number
    return Value(value.at, value.kind, meta, is_number)


@rule("clamp", "clamp_min")
def _clamp(t: Translator, meta: torch.Tensor, x: Value, low: Any = None, high: Any = None) -> Value:
    def compute(o: Emitter, value: V, least: Any, most: Any) -> V:
        value = value if least is None else o("maximum", value, least)
        return value if most is None else o("minimum", value, most)

    return elementwise(t, meta, compute, [x, low, high])


@rule("clamp_max")
def _clamp_max(t: Translator, meta: torch.Tensor, x: Value, high: Any) -> Value:
    return _clamp(t, meta, x, None, high)


@rule("threshold")
def _threshold(t: Translator, meta: torch.Tensor, x: Value, threshold: Any, value: Any) -> Value:
    def compute(o: Emitter, of: V, limit: Any, other: Any) -> V:
        test = o("le", of, limit, kind="Bool")
        return o("where", test, other, of)

    return elementwise(t, meta, compute, [x, threshold, value])


@rule("round.decimals")
def _round_decimals(t: Translator, meta: torch.Tensor, x: Value, *, decimals: int) -> Value:
    # as in torch, negative decimals divide by a power of ten instead of multiplying by its inverse
    scale = 10.0 ** abs(decimals)
    there, back = ("mul", "div") if decimals > 0 else ("div", "mul")

    def compute(o: Emitter, value: V) -> V:
        if not o.is_float:
            return value
        return o(back, o("round", o(there, value, scale)), scale)

    return elementwise(t, meta, compute, [x])


@rule("_to_copy", "prims.convert_element_type", "to")
def _converted(
    t: Translator, meta: torch.Tensor, x: Value, dtype: torch.dtype | None = None, **_: Any
) -> Value:
    kind = kind_of(meta.dtype)
    return Value(t.held_as(x, kind), kind, meta, x.is_number)


@rule("alias", "clone", "detach", "lift_fresh", "lift_fresh_copy", "positive", "contiguous",
      "prims.copy_strided")  # fmt: skip
def _same(t: Translator, meta: torch.Tensor, x: Value, *_: Any, **__: Any) -> Value:
    return Value(x.at, x.kind, meta, x.is_number)


@rule("hypot", "prims.hypot")
def _hypot(t: Translator, meta: torch.Tensor, a: Value, b: Value) -> Value:
    def compute(o: Emitter, x: V, y: V) -> V:
        # divided by the larger one, so that squares neither overflow nor underflow
        x, y = o("abs", x), o("abs", y)
        most, least = o("maximum", x, y), o("minimum", x, y)
        is_plain = o(
            "logical_and",
            o("gt", most, 0.0, kind="Bool"),
            o("isfinite", most, kind="Bool"),
            kind="Bool",
        )
        # not divided by 0 or infinity: `length` below is not used there
        ratio = o("div", least, o("where", is_plain, most, 1.0))
        length = o("mul", most, o("sqrt", o("add", o("mul", ratio, ratio), 1.0)))
        infinite = o(
            "logical_or", o("isinf", x, kind="Bool"), o("isinf", y, kind="Bool"), kind="Bool"
        )
        length = o("where", is_plain, length, most)
        # infinite if either operand is, even if the other one is NaN
        return o("where", infinite, math.inf, length)

    return elementwise(t, meta, compute, [a, b])


@rule("copysign")
def _copysign(t: Translator, meta: torch.Tensor, a: Any, b: Any) -> Value:
    def compute(o: Emitter, x: V, sign: Any) -> V:
        size = o("abs", x)
        if not isinstance(sign, V):
            return o("neg", size) if math.copysign(1.0, sign) < 0 else size
        return o("where", o("signbit", sign, kind="Bool"), o("neg", size), size)

    return elementwise(t, meta, compute, [a, b], PROMOTION.INT_TO_FLOAT)
