"""Rules for ops with run-time scalars: Python numbers that change without a new kernel.

In: a call with `ScalarRef`s, its tensors, and each scalar as a 0-dim tensor of full precision. Out:
the result that eager execution gives for the Python numbers. In type promotion a Python number
weighs less than any tensor. The op computes in the wider dtype of eager's kernels (float32 for
bfloat16). Called by `backends.lower`; `fusible` asks here which arguments may be run-time scalars.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazy_tensor.kernels.segment import Call, ScalarRef, base_name

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ScalarRule:
    """How to compute one op. `compute` takes a dict of its arguments by the schema's names.

    All tensors in it but masks have the computation dtype.
    """

    compute: Callable[[Arguments], Any]
    scalars: str
    """The names of the arguments that may be run-time scalars, separated by spaces."""
    int_to_float: bool = False
    """Whether integers are computed in the default float dtype, as `div` does."""
    rounds: bool = False
    """Whether eager rounds numbers to the tensors' dtype first, as matters in half precision."""


def _scaled(a: Arguments) -> Any:
    """`other * alpha`, or just `other` if alpha is not given."""
    alpha = a.get("alpha")
    return a["other"] if alpha is None else a["other"] * alpha


def _clamp(a: Arguments) -> torch.Tensor:
    result: torch.Tensor = a["self"]
    # one bound at a time: `torch.clamp` raises if one is a number and the other a tensor
    if a.get("min") is not None:
        result = torch.clamp(result, min=a["min"])
    if a.get("max") is not None:
        result = torch.clamp(result, max=a["max"])
    return result


def _pow(a: Arguments) -> torch.Tensor:
    """A power. For some exponents eager has other code, which differs at -0.0 and -inf."""
    x, exponent = a["self"], a["exponent"]
    result = torch.pow(x, exponent)
    if exponent.dim() > 0 or not result.dtype.is_floating_point:
        return result
    special = {0.5: x.sqrt(), -0.5: x.rsqrt(), 1.0: x, 3.0: x * x * x, -1.0: x.reciprocal()}
    for value, power in special.items():
        result = torch.where(exponent == value, power, result)
    return result


def _full(a: Arguments) -> torch.Tensor:
    value: torch.Tensor = a["fill_value"]
    return value.expand(a["size"] if "size" in a else a["self"].shape)


# by the op's name without overload and without the `_` of in-place ops
RULES: Mapping[str, ScalarRule] = {
    "add": ScalarRule(lambda a: a["self"] + _scaled(a), "other alpha", rounds=True),
    "sub": ScalarRule(lambda a: a["self"] - _scaled(a), "other alpha", rounds=True),
    "rsub": ScalarRule(
        lambda a: a["other"] - (a["self"] * a["alpha"] if "alpha" in a else a["self"]),
        "other alpha",
        rounds=True,
    ),
    "mul": ScalarRule(lambda a: a["self"] * a["other"], "other"),
    "div": ScalarRule(lambda a: a["self"] / a["other"], "other", int_to_float=True),
    "pow": ScalarRule(_pow, "self exponent", rounds=True),
    "remainder": ScalarRule(lambda a: torch.remainder(a["self"], a["other"]), "other", rounds=True),
    "fmod": ScalarRule(lambda a: torch.fmod(a["self"], a["other"]), "other", rounds=True),
    "addcdiv": ScalarRule(
        lambda a: a["self"] + a.get("value", 1) * a["tensor1"] / a["tensor2"], "value"
    ),
    "addcmul": ScalarRule(
        lambda a: a["self"] + a.get("value", 1) * a["tensor1"] * a["tensor2"], "value"
    ),
    "lerp": ScalarRule(lambda a: torch.lerp(a["self"], a["end"], a["weight"]), "weight"),
    "clamp": ScalarRule(_clamp, "min max"),
    "clamp_min": ScalarRule(_clamp, "min"),
    "clamp_max": ScalarRule(_clamp, "max"),
    "fill": ScalarRule(lambda a: a["value"].expand(a["self"].shape), "value"),
    "full": ScalarRule(_full, "fill_value"),
    "full_like": ScalarRule(_full, "fill_value"),
    "new_full": ScalarRule(_full, "fill_value"),
    "scalar_tensor": ScalarRule(lambda a: a["s"], "s"),
    "masked_fill": ScalarRule(lambda a: torch.where(a["mask"], a["value"], a["self"]), "value"),
    "where": ScalarRule(lambda a: torch.where(a["condition"], a["self"], a["other"]), "self other"),
    "leaky_relu": ScalarRule(
        lambda a: torch.where(a["self"] > 0, a["self"], a["self"] * a["negative_slope"]),
        "negative_slope",
    ),
    "native_dropout_backward": ScalarRule(
        lambda a: a["grad_output"] * a["mask"] * a["scale"], "scale"
    ),
    "eq": ScalarRule(lambda a: a["self"] == a["other"], "other", rounds=True),
    "ne": ScalarRule(lambda a: a["self"] != a["other"], "other", rounds=True),
    "lt": ScalarRule(lambda a: a["self"] < a["other"], "other", rounds=True),
    "le": ScalarRule(lambda a: a["self"] <= a["other"], "other", rounds=True),
    "gt": ScalarRule(lambda a: a["self"] > a["other"], "other", rounds=True),
    "ge": ScalarRule(lambda a: a["self"] >= a["other"], "other", rounds=True),
}

# arguments that take no part in type promotion and stay bool
_MASKS = ("mask", "condition")
OF_OWN_DTYPE = ("fill", "masked_fill", "threshold")
"""Ops that cast numbers to the tensor's dtype: an integer's bits must not go through a float."""
# ops whose result dtype is given, and doesn't follow from the arguments
_FACTORIES = ("full", "full_like", "new_full", "scalar_tensor")


def has_scalars(call: Call) -> bool:
    """Whether an argument of `call` is a run-time scalar."""
    return any(isinstance(value, ScalarRef) for _, value in call.arguments())


def scalars_refused(call: Call) -> str | None:
    """Why a run-time scalar of `call` can't be compiled; None if all can."""
    for name, value in call.arguments():
        if isinstance(value, tuple) and any(isinstance(item, ScalarRef) for item in value):
            return f"{call.op}: {name!r} holds a run-time scalar in a list"
        if isinstance(value, ScalarRef):
            rule = RULES.get(base_name(call.op))
            if rule is None or name not in rule.scalars.split() or _rounds(call):
                return f"{call.op}: {name!r} can't be a run-time scalar"
    return None


def _rounds(call: Call) -> bool:
    """Whether it is a `div` with a rounding mode, which the rule of `div` doesn't apply."""
    return any(name == "rounding_mode" and value is not None for name, value in call.kwargs)


def computed(call: Call, arguments: Arguments, kinds: Sequence[type]) -> torch.Tensor:
    """The result of `call`. For an in-place op it is written to `self`, which is returned.

    `arguments` are its arguments by name, run-time scalars as 0-dim tensors. `kinds` are the Python
    types of the segment's run-time scalars.
    """
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND, elementwise_dtypes

    rule = RULES[base_name(call.op)]
    weighed = [
        n
        for n, v in arguments.items()
        if n not in _MASKS and isinstance(v, (torch.Tensor, bool, int, float))
    ]
    is_factory = base_name(call.op) in _FACTORIES
    # A run-time scalar counts as a Python number of its type; any value does. The float64 or
    # int64 tensor that carries it would make the result too wide.
    samples = {n: kinds[v.index](1) for n, v in call.arguments() if isinstance(v, ScalarRef)}
    numbers_in = None
    if is_factory:
        dtype = _dtype_of(call)
    elif base_name(call.op) in OF_OWN_DTYPE:
        dtype = arguments["self"].dtype
    else:
        # the factor `value` of `addcmul` doesn't count
        dtype, numbers_in = elementwise_dtypes(
            *(samples.get(n, arguments[n]) for n in weighed if n != "value"),
            type_promotion_kind=KIND.INT_TO_FLOAT if rule.int_to_float else KIND.DEFAULT,
        )
    cast = {n: arguments[n] for n in weighed if isinstance(arguments[n], torch.Tensor)}
    if rule.rounds and numbers_in is not None:
        cast |= {n: cast[n].to(numbers_in) for n in samples}
    cast = {n: value.to(dtype) for n, value in cast.items()}
    result: torch.Tensor = rule.compute(arguments | cast)
    if not call.outputs:
        target: torch.Tensor = arguments["self"]
        return target.copy_(result)
    # computed wide, stored in the op's own dtype
    result = result.to(_dtype_of(call))
    # For programs a run-time scalar is a number: it can't be a result itself.
    return result.clone() if is_factory else result


def _dtype_of(call: Call) -> torch.dtype:
    (spec,) = call.outputs
    assert spec is not None, "ops with run-time scalars have one result"
    return spec.dtype
