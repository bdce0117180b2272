"""Lazy tensors that a function reaches besides its arguments: in closures, attributes and dicts.

In: functions and objects that one of torch's compilers or tracers is about to read. Out: the same
objects with plain tensors in place of lazy ones, until the tracer is done (`made_plain`), or for
good in attributes of modules (`make_attributes_plain`). Called by `interop.wrappers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from lazy_tensor.tensor import LazyTensor, plain_alias

MOST_OBJECTS = 1000
"""Most objects that are searched for a call. A compiled function is searched at each of its calls,
so the search must stay short."""

PASSED_OVER = frozenset({bool, int, float, str, type(None), set, list, tuple})
"""Types of attributes that are not searched. Each module has a dozen of them, which would use
`MOST_OBJECTS` up. Lists are among them, so lazy tensors in lists are not found."""

OF_MODULES = frozenset(vars(torch.nn.Module())) - {"_modules"}
"""Attributes that every module has, and that are not searched: hooks, and dicts of parameters and
buffers, which `wrappers` converts."""

Place = tuple[dict[Any, Any], Any] | tuple[CellType, None]
"""Where a tensor is held: a dict and a key, or a cell of a closure."""


@contextmanager
def made_plain(roots: Iterable[Any]) -> Iterator[None]:
    """Context manager: plain aliases stand in place of the lazy tensors that `roots` hold.

    Autograd sees them as aliases. A lazy tensor that is held twice has one alias.
    """
    found = list(_lazy_places(roots))
    plain_of: dict[int, torch.Tensor] = {}
    for place, tensor in found:
        if id(tensor) not in plain_of:
            plain_of[id(tensor)] = plain_alias(tensor)
        _put(place, plain_of[id(tensor)])
    try:
        yield
    finally:
        for place, tensor in found:
            # not if the program has put something else there
            if _at(place) is plain_of[id(tensor)]:
                _put(place, tensor)


def make_attributes_plain(module: torch.nn.Module) -> None:
    """Make lazy tensors plain, for good, that are attributes of a module or of its parts."""
    for part in module.modules():
        attributes = vars(part)
        for name in [name for name in attributes if name not in OF_MODULES]:
            if isinstance(attributes[name], LazyTensor):
                setattr(part, name, plain_alias(attributes[name]))


def _lazy_places(roots: Iterable[Any]) -> Iterator[tuple[Place, LazyTensor]]:
    """Each place below `roots` that holds a lazy tensor, and the tensor."""
    # A list of what is left, and no local function that calls itself: that would be a cycle, which
    # holds tensors until the garbage collector runs.
    seen: set[int] = set()
    left = list(roots)
    while left and len(seen) < MOST_OBJECTS:
        held = left.pop()
        if id(held) in seen or isinstance(held, (torch.Tensor, type, ModuleType)):
            continue
        seen.add(id(held))
        for place in _places(held):
            value = _at(place)
            if isinstance(value, LazyTensor):
                yield place, value
            elif type(value) not in PASSED_OVER:
                left.append(value)


def _places(held: Any) -> Iterator[Place]:
    """The places of an object: cells of a function, items of a dict, attributes of an instance."""
    # a method's function can't be replaced: it is shown in a dict of its own, to be searched
    if isinstance(held, MethodType):
        yield {"": held.__func__}, ""
        held = held.__self__
    elif isinstance(held, partial):
        held = held.func
    if isinstance(held, FunctionType):
        for cell in held.__closure__ or ():
            yield cell, None
        return
    attributes = held if isinstance(held, dict) else getattr(held, "__dict__", None)
    if isinstance(attributes, dict):
        is_module = isinstance(held, torch.nn.Module)
        for name in list(attributes):
            if not (is_module and name in OF_MODULES):
                yield attributes, name


def _at(place: Place) -> Any:
    holder, key = place
    if isinstance(holder, dict):
        return holder.get(key)
    try:
        return holder.cell_contents
    except ValueError:
        # a cell whose variable isn't bound yet
        return None


def _put(place: Place, tensor: torch.Tensor) -> None:
    holder, key = place
    if isinstance(holder, dict):
        holder[key] = tensor
    else:
        holder.cell_contents = tensor
