"""Functions and methods that may be given a number that is followed.

In: the globals that code sees, and names that it loads. Out: what these are. Called by
`value_flow`.
"""

from __future__ import annotations

import math
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional

Known = frozenset[tuple[str, str]]
"""Names that are known, each with its kind: for a function of `NOTED` its name, for a module that
in `MODULES`, or "module", for a function in Python an `InPython`."""


class InPython(str):
    """The kind of a function in Python, which is followed itself: equal for the same function."""

    function: Any

    def __new__(cls, function: FunctionType) -> InPython:
        made = super().__new__(cls, f"function {id(function)}")
        made.function = function
        return made


NOTED = frozenset({"abs", "bool", "dict", "len", "max", "min", "round"})
"""Functions that a number may be given to: they call its methods, or keep it as `dict` does."""
OP = "op"
"""The kind of all functions and methods that are ops of torch's. A number that is given to one is
matched with the op's later: see `op_numbers`."""
MODULES = {math: "math", torch: "torch", torch.nn: "torch", torch.nn.functional: "functional"}
"""Modules whose functions may get numbers. Those of `math` ask them: see `math_of_numbers`."""
_CHECKING = {"alpha_dropout", "cosine_similarity", "dropout", "nanquantile", "quantile"}
"""Composite ops that check a number themselves: the ops that they are recorded as don't."""
_NO_OPS = {"apply_", "backward", "map_", "map2_", "register_hook"}
_OPS = frozenset(dir(torch.Tensor)) - _NO_OPS - _CHECKING
METHODS = _OPS.difference(*map(dir, (bytes, dict, list, set, str)))
"""Methods that are ops: no container has one of that name."""
FUNCTIONS = {
    "torch": _OPS.intersection(dir(torch)) | {"full", "full_like", "tensor", "where"},
    "functional": frozenset(dir(torch.nn.functional)) - {"math", "torch", "cosine_similarity"},
    "math": frozenset(name for name, one in vars(math).items() if callable(one) and name[0] != "_"),
}
ASKING = frozenset({OP, "abs", "bool", "round"}) | FUNCTIONS["math"]
"""Kinds of functions that ask a number, or are ops, and don't give the number itself back."""
OPERATOR_METHODS = frozenset(
    f"__{i}{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge")
    for i in ("", "i")
)
"""Methods by which an object on the left of an operator may do anything with the number."""


def known_in(code: CodeType, seen: dict[str, Any]) -> Known:
    """The globals that code names and that are known, each with what it is. It sees those in
    `seen`."""
    known = set()
    for name in code.co_names:
        value: Any = seen.get(name)
        if name in NOTED and name not in seen:
            known.add((name, name))
        elif issubclass(type(value), ModuleType):  # `isinstance` would ask a proxy for its object
            known.add((name, MODULES.get(value, "module")))
        elif type(value) is FunctionType:
            known.add((name, InPython(value)))
    return frozenset(known)


def member_of(owner: str, name: str, of_users: frozenset[str]) -> str:
    """The kind of an attribute of a value of kind `owner`; "" if nothing is known of it. `of_users`
    are names of the user's functions and attributes."""
    if owner in FUNCTIONS:
        if owner == "torch" and name in ("nn", "functional"):
            return owner if name == "nn" else name
        if name not in FUNCTIONS[owner]:
            return ""
        return name if owner == "math" else OP
    return OP if not owner and name in METHODS and name not in of_users else ""
