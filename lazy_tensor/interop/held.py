"""Lazy tensors that a program holds besides its arguments: in closures, attributes, dicts.

In: functions and objects that a compiler or tracer of torch's will read. Out: the same, with plain
tensors in their places for a while; in attributes of modules for good, as `unwrap` does with their
parameters and buffers.
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
"""Looked at for a call: what compiled functions hold is looked at each time."""

PASSED_OVER = frozenset({bool, int, float, str, type(None), set, list, tuple})
"""Types of most attributes, containers among them, that are not looked into: each module has a
dozen of them."""

OF_MODULES = frozenset(vars(torch.nn.Module())) - {"_modules"}
"""What every module has: parameters and buffers, which are seen to elsewhere, and hooks."""

Place = tuple[dict[Any, Any], Any] | tuple[CellType, None]


@contextmanager
def made_plain(roots: Iterable[Any]) -> Iterator[None]:
    """Plain tensors, which autograd knows as aliases, stand for the lazy ones that `roots` hold."""
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
            if _at(place) is plain_of[id(tensor)]:  # else the program put something else there
                _put(place, tensor)


def make_attributes_plain(module: torch.nn.Module) -> None:
    """Plain tensors, for good, for the lazy ones that are attributes of a module or its parts."""
    for part in module.modules():
        attributes = vars(part)
        for name in [name for name in attributes if name not in OF_MODULES]:
            if isinstance(attributes[name], LazyTensor):
                setattr(part, name, plain_alias(attributes[name]))


def _lazy_places(roots: Iterable[Any]) -> Iterator[tuple[Place, LazyTensor]]:
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
    """Where an object holds others that can be put in and out."""
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
        return None  # not bound yet


def _put(place: Place, tensor: torch.Tensor) -> None:
    holder, key = place
    if isinstance(holder, dict):
        holder[key] = tensor
    else:
        holder.cell_contents = tensor
