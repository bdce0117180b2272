"""Rules for ops with run-time scalars: Python numbers that change without a new kernel.

In: a call with `ScalarRef`s, its tensors, and each scalar as a 0-dim tensor of full precision. Out:
the result that eager execution gives for the Python numbers. In type promotion a Python number
weighs less than any tensor. The op computes in the wider dtype of eager's kernels (float32 for
bfloat16). Called by `backends.lower`; `fusible` asks here which arguments may be run-time scalars.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lazy_tensor.kernels.segment import Call, ScalarRef

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ScalarRule:
    """How to compute one op. `compute` takes a dict of its arguments by the schema's names.

    All tensors in it but masks have the computation dtype.
    """

    compute: Callable[[Arguments], torch.Tensor]
    scalars: frozenset[str]
    """The names of the arguments that may be run-time scalars."""
    int_to_float: bool = False
    """Whether integers are computed in the default float dtype, as `div` does."""


def _scaled(a: Arguments) -> Any:
    """`other * alpha`, or just `other` if alpha is not given."""
    alpha = a.get("alpha")
    return a["other"] if alpha is None else a["other"] * alpha


def _addcdiv(a: Arguments) -> torch.Tensor:
    value = a.get("value", 1)
    result: torch.Tensor = a["self"] + value * a["tensor1"] / a["tensor2"]
    return result


def _addcmul(a: Arguments) -> torch.Tensor:
    value = a.get("value", 1)
    result: torch.Tensor = a["self"] + value * a["tensor1"] * a["tensor2"]
    return result


def _clamp(a: Arguments) -> torch.Tensor:
    result: torch.Tensor = a["self"]
    # one bound at a time: `torch.clamp` raises if one is a number and the other a tensor
    if a.get("min") is not None:
        result = torch.clamp(result, min=a["min"])
    if a.get("max") is not None:
        result = torch.clamp(result, max=a["max"])
    return result


def _fill(a: Arguments) -> torch.Tensor:
    value: torch.Tensor = a["value"]
    return value.expand(a["self"].shape)


def _full(a: Arguments) -> torch.Tensor:
    value: torch.Tensor = a["fill_value"]
    return value.expand(a["size"] if "size" in a else a["self"].shape)


def _masked_fill(a: Arguments) -> torch.Tensor:
    return torch.where(a["mask"], a["value"], a["self"])


def _where(a: Arguments) -> torch.Tensor:
    return torch.where(a["condition"], a["self"], a["other"])


def _rule(
    compute: Callable[[Arguments], Any], scalars: str, *, int_to_float: bool = False
) -> ScalarRule:
    return ScalarRule(compute, frozenset(scalars.split()), int_to_float)


# by the op's name without overload and without the `_` of in-place ops
RULES: Mapping[str, ScalarRule] = {
    "add": _rule(lambda a: a["self"] + _scaled(a), "other alpha"),
    "sub": _rule(lambda a: a["self"] - _scaled(a), "other alpha"),
    "rsub": _rule(
        lambda a: a["other"] - (a["self"] * a["alpha"] if "alpha" in a else a["self"]),
        "other alpha",
    ),
    "mul": _rule(lambda a: a["self"] * a["other"], "other"),
    "div": _rule(lambda a: a["self"] / a["other"], "other", int_to_float=True),
    "pow": _rule(lambda a: torch.pow(a["self"], a["exponent"]), "self exponent"),
    "remainder": _rule(lambda a: torch.remainder(a["self"], a["other"]), "other"),
    "fmod": _rule(lambda a: torch.fmod(a["self"], a["other"]), "other"),
    "addcdiv": _rule(_addcdiv, "value"),
    "addcmul": _rule(_addcmul, "value"),
    "lerp": _rule(lambda a: torch.lerp(a["self"], a["end"], a["weight"]), "weight"),
    "clamp": _rule(_clamp, "min max"),
    "clamp_min": _rule(_clamp, "min"),
    "clamp_max": _rule(_clamp, "max"),
    "fill": _rule(_fill, "value"),
    "full": _rule(_full, "fill_value"),
    "full_like": _rule(_full, "fill_value"),
    "new_full": _rule(_full, "fill_value"),
    "scalar_tensor": _rule(lambda a: a["s"], "s"),
    "masked_fill": _rule(_masked_fill, "value"),
    "where": _rule(_where, "self other"),
    "leaky_relu": _rule(
        lambda a: torch.where(a["self"] > 0, a["self"], a["self"] * a["negative_slope"]),
        "negative_slope",
    ),
    "native_dropout_backward": _rule(lambda a: a["grad_output"] * a["mask"] * a["scale"], "scale"),
    "eq": _rule(lambda a: a["self"] == a["other"], "other"),
    "ne": _rule(lambda a: a["self"] != a["other"], "other"),
    "lt": _rule(lambda a: a["self"] < a["other"], "other"),
    "le": _rule(lambda a: a["self"] <= a["other"], "other"),
    "gt": _rule(lambda a: a["self"] > a["other"], "other"),
    "ge": _rule(lambda a: a["self"] >= a["other"], "other"),
}

# arguments that take no part in type promotion and stay bool
_MASKS = ("mask", "condition")
# ops whose result dtype is given, and doesn't follow from the arguments
_FACTORIES = ("full", "full_like", "new_full", "scalar_tensor")


def _name(call: Call) -> str:
    name: str = call.op._schema.name.partition("::")[2]
    return name.removesuffix("_")


def has_scalars(call: Call) -> bool:
    """Whether an argument of `call` is a run-time scalar."""
    return any(isinstance(value, ScalarRef) for _, value in call.arguments())


def scalars_refused(call: Call) -> str | None:
    """Why a run-time scalar of `call` can't be compiled; None if all can."""
    for name, value in call.arguments():
        if isinstance(value, tuple) and any(isinstance(item, ScalarRef) for item in value):
            return f"{call.op}: {name!r} holds a run-time scalar in a list"
        if isinstance(value, ScalarRef):
            rule = RULES.get(_name(call))
            if rule is None or name not in rule.scalars or _rounds(call):
                return f"{call.op}: {name!r} can't be a run-time scalar"
    return None


def _rounds(call: Call) -> bool:
    """Whether it is a `div` with a rounding mode, which the rule of `div` doesn't apply."""
    return any(name == "rounding_mode" and value is not None for name, value in call.kwargs)


def computed(call: Call, arguments: Arguments, kinds: Mapping[str, type]) -> torch.Tensor:
    """The result of `call`. For an in-place op it is written to `self`, which is returned.

    `arguments` are its arguments by name, run-time scalars as 0-dim tensors. `kinds` maps the names
    of the run-time scalars to their Python types.
    """
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND, elementwise_dtypes

    rule = RULES[_name(call)]
    weighed = [n for n, v in arguments.items() if n not in _MASKS and _is_number_or_tensor(v)]
    if _name(call) in _FACTORIES:
        spec = call.outputs[0]
        assert spec is not None
        dtype = spec.dtype
    else:
        # A run-time scalar counts as a Python number of its type; any value does. The float64 or
        # int64 tensor that carries it would make the result too wide.
        dtype, _ = elementwise_dtypes(
            *(kinds[n](1) if n in kinds else arguments[n] for n in weighed),
            type_promotion_kind=KIND.INT_TO_FLOAT if rule.int_to_float else KIND.DEFAULT,
        )
    cast = {n: arguments[n].to(dtype) for n in weighed if isinstance(arguments[n], torch.Tensor)}
    result = rule.compute(arguments | cast)
    # computed wide, stored in the op's own dtype
    if call.outputs:
        assert call.outputs[0] is not None
        return result.to(call.outputs[0].dtype)
    target: torch.Tensor = arguments["self"]
    return target.copy_(result)


def _is_number_or_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, bool, int, float))
