"""Numbers among the arguments of a call, such as a step count or a weight.

In: a function. Out: the arguments whose numbers may be others in each replay, as the function's
bytecode only computes with them, compares them, gives them to ops or returns them. Called by
`replay` for `Arguments`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from lazy_tensor.dispatch.mentions import mentions_of
from lazy_tensor.dispatch.number_takers import known_in
from lazy_tensor.dispatch.value_flow import exits_of_argument, is_decorator

Followed = dict[int | str, bool]
"""Arguments, by place or by name, each with whether a call of an op gets its number: an op reads a
traced number as a float."""


def followed_arguments(
    function: Callable[..., Any], of_users: frozenset[str] = frozenset()
) -> Followed:
    """The arguments of a function whose numbers are followed. `of_users` are names of the user's
    functions and attributes."""
    n_bound = 0
    while isinstance(function, types.MethodType) or is_decorator(
        getattr(function, "__code__", None)
    ):
        n_bound += isinstance(function, types.MethodType)
        function = getattr(function, "__func__", None) or function.__wrapped__  # type: ignore[attr-defined]
    if not isinstance(function, types.FunctionType):
        return {}
    code = function.__code__
    rules = known_in(code, function.__globals__), mentions_of(code).rates_stored, of_users
    followed: Followed = {}
    n_named = code.co_argcount + code.co_kwonlyargcount
    for i, name in enumerate(code.co_varnames[n_bound:n_named]):
        exits = exits_of_argument(code, name, rules)
        if exits is None:
            continue
        if i + n_bound < code.co_argcount:
            followed[i] = exits[1]
        if i + n_bound >= code.co_posonlyargcount:
            followed[name] = exits[1]
    return followed
