"""Values that are functions of an index, each a C expression of others.

`Builder` makes them for `rules`; `read` makes those of a whole segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from typing import Any

import torch

from lazy_tensor.kernels.backend import Declined

C_TYPES = {
    torch.float32: "float", torch.float64: "double", torch.int64: "long", torch.int32: "int",
    torch.bool: "bool",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Index:
    """An index of one dimension: the sum of loop variables, each times a number, and `start`."""

    terms: tuple[tuple[str, int], ...] = ()
    start: int = 0

    def __add__(self, other: Index) -> Index:
        found = dict(self.terms)
        for name, factor in other.terms:
            found[name] = found.get(name, 0) + factor
        terms = tuple(sorted((name, factor) for name, factor in found.items() if factor))
        return Index(terms, self.start + other.start)

    def times(self, factor: int) -> Index:
        if factor == 0:
            return Index()
        terms = tuple((name, factor * one) for name, one in self.terms)
        return Index(terms, factor * self.start)

    def text(self) -> str:
        parts = [name if one == 1 else f"{one}L * {name}" for name, one in self.terms]
        if self.start or not parts:
            parts.append(str(self.start))
        return " + ".join(parts)


Indices = tuple[Index, ...]


def offset_of(index: Sequence[Index], stride: Sequence[int]) -> Index:
    """The place in memory of an element: its index times the strides."""
    return reduce(Index.__add__, map(Index.times, index, stride), Index())


def dense_stride(size: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(size[d + 1 :]) for d in range(len(size)))


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """A tensor of the segment. Values are equal only if they are the same object."""

    size: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False, slots=True)
class Input(Value):
    """Input `number` of the segment, or a view of it; `stride` and `start` count elements."""

    number: int
    stride: tuple[int, ...]
    start: int


@dataclass(frozen=True, eq=False, slots=True)
class Computed(Value):
    """An expression of the elements of `parts` at the same index; `{0}` stands for the first."""

    text: str
    parts: tuple[Value, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class View(Value):
    """An element of `base` for each index: at the index that `place` gives."""

    base: Value
    place: Callable[[Indices], Indices]


@dataclass(frozen=True, eq=False, slots=True)
class Rolled(Value):
    """`base` moved by `shift` along dimension `dim`, where 0 < shift < size of it."""

    base: Value
    dim: int
    shift: int


@dataclass(frozen=True, eq=False, slots=True)
class Reduced(Value):
    """The `sum`, `max` or `min` of `base` over all its dimensions behind those of `size`."""

    base: Value
    kind: str


def literal(number: float, dtype: torch.dtype) -> str:
    """A Python number as a C expression of `dtype`."""
    kind = C_TYPES[dtype]
    if dtype.is_floating_point:
        value = float(number)
        if math.isnan(value):
            return f'({kind})__builtin_nan("")'
        if math.isinf(value):
            return f"({kind}){'-' if value < 0 else ''}__builtin_inf()"
        return f"({kind}){value.hex()}"
    if isinstance(number, float):
        raise Declined("a float beside integers")
    if dtype is torch.bool:
        return "true" if number else "false"
    if not -(2**63) < number < 2**63:
        raise Declined("an integer that is too large")
    return f"({kind}){int(number)}L"


def broadcast_size(sizes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """`torch.broadcast_shapes`, which takes a second to import what it needs."""
    behind = zip_longest(*(size[::-1] for size in sizes), fillvalue=1)
    return tuple(next((n for n in one if n != 1), 1) for one in behind)[::-1]


def broadcast(size: tuple[int, ...]) -> Callable[[Indices], Indices]:
    """The place of an element of a value of `size` that is broadcast."""

    def place(index: Indices) -> Indices:
        behind = index[len(index) - len(size) :]
        return tuple(Index() if n == 1 else i for n, i in zip(size, behind, strict=True))

    return place


def expanded(value: Value, size: tuple[int, ...]) -> Value:
    """The value broadcast to `size`."""
    if value.size == size:
        return value
    return View(size, value.dtype, value, broadcast(value.size))


class Builder:
    """Makes values for the rules of ops: those of a call that computes in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        if value.dtype is dtype:
            return value
        if dtype is torch.bool:
            return Computed(value.size, dtype, "{0} != 0", (value,))
        if value.dtype.is_floating_point and not dtype.is_floating_point:
            raise Declined(f"from {value.dtype} to {dtype}")
        return Computed(value.size, dtype, f"({C_TYPES[dtype]}){{0}}", (value,))

    def value(self, given: Any) -> Value:
        """A number as a value; a value itself."""
        if isinstance(given, Value):
            return given
        if not isinstance(given, (bool, int, float)):
            raise Declined(f"{given!r} among the arguments")
        return Computed((), self.dtype, literal(given, self.dtype))

    def of(self, text: str, *parts: Any) -> Value:
        """An expression of values and numbers, in the dtype in which the call computes."""
        return self._expression(self.dtype, text, parts)

    def test(self, text: str, *parts: Any) -> Value:
        return self._expression(torch.bool, text, parts)

    def _expression(self, dtype: torch.dtype, text: str, parts: Sequence[Any]) -> Value:
        values = tuple(map(self.value, parts))
        return Computed(broadcast_size(one.size for one in values), dtype, text, values)

    def reduced(self, kind: str, value: Value, dims: Any, *, keepdim: bool = True) -> Value:
        """`value` reduced over its last dimensions, which must be `dims`; None means all."""
        n_dims = len(value.size)
        if n_dims == 0:
            return value
        if dims is None or dims == ():
            dims = tuple(range(n_dims))
        dims = sorted({d % n_dims for d in (dims if isinstance(dims, tuple) else (dims,))})
        kept = n_dims - len(dims)
        if dims != list(range(kept, n_dims)):
            raise Declined("a reduction over other dimensions than the last ones")
        found: Value = Reduced(value.size[:kept], value.dtype, value, kind)
        if keepdim:
            size = (*found.size, *[1] * len(dims))
            found = View(size, found.dtype, found, lambda index: index[:kept])
        return found
