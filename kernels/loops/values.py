"""Values that are functions of an index, each a C expression of others.

`Builder` makes them for `rules`; `read` makes those of a whole segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lazy_tensor.kernels.loops.cpp import FUNCTIONS
from lazy_tensor.kernels.loops.index import Indices, dense_stride, offset_of, restored

C_TYPES = {
    torch.float32: "float", torch.float64: "double", torch.int64: "long", torch.int32: "int",
    torch.int16: "short", torch.int8: "signed char", torch.uint8: "unsigned char",
    torch.bool: "bool", torch.bfloat16: "float", torch.float16: "float",
}  # fmt: skip
"""The C types of variables. Numbers of 16 bits are floats that are rounded to them."""
HALVES = {torch.bfloat16: "bfloat16", torch.float16: "half"}
"""The dtypes that lie in memory as 16 bits: the name in functions that round and convert them."""
CHEAP = 3
"""The most expressions that are computed again instead of kept."""


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
class Permuted(Value):
    """`base` with dimension `order[0]` of it as the first, and so on."""

    base: Value
    order: tuple[int, ...]

    def place(self, index: Indices) -> Indices:
        """The index in `base`."""
        return restored(index, self.order)


@dataclass(frozen=True, eq=False, slots=True)
class Reshaped(Value):
    """The elements of `base` in the same order, in other sizes."""

    base: Value

    def place(self, index: Indices) -> Indices:
        """The index in `base`."""
        left = offset_of(index, dense_stride(self.size))
        found = []
        for n in self.base.size[:0:-1]:
            left, one = left.divided(n)
            found.append(one)
        return (left, *found[::-1]) if self.base.size else ()


@dataclass(frozen=True, eq=False, slots=True)
class Joined(Value):
    """The parts, one behind the other along dimension `dim`."""

    parts: tuple[Value, ...]
    dim: int


@dataclass(frozen=True, eq=False, slots=True)
class Gathered(Value):
    """Elements of `base` at the places, along dimension `dim`, that the value `places` holds.

    `is_spread`: `places` has the sizes of the result, as in `gather`; else its dimensions stand in
    the result where `dim` stands in the base, as in `index_select`.
    """

    base: Value
    places: Value
    dim: int
    is_spread: bool


@dataclass(frozen=True, eq=False, slots=True)
class Place(Value):
    """The index of each element in dimension `dim`."""

    dim: int


@dataclass(frozen=True, eq=False, slots=True)
class Rolled(Value):
    """`base` moved by `shift` along dimension `dim`, where 0 < shift < size of it."""

    base: Value
    dim: int
    shift: int


@dataclass(frozen=True, eq=False, slots=True)
class Reduced(Value):
    """The `sum`, `max` or `min` of `base`. `order` has the dimensions that are kept, then those
    over which it is reduced."""

    base: Value
    kind: str
    order: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Number(Computed):
    """A number that is given to the kernel at each call."""


def copied(value: Computed) -> Value | None:
    """What it is a copy of, if it is one."""
    if value.text != "{0}" or len(value.parts) != 1:
        return None
    (part,) = value.parts
    return part if (part.size, part.dtype) == (value.size, value.dtype) else None


def parts_of(value: Value) -> tuple[Value, ...]:
    match value:
        case Computed() | Joined():
            return value.parts
        case Gathered():
            return value.base, value.places
        case View() | Permuted() | Reshaped() | Rolled() | Reduced():
            return (value.base,)
    return ()


def has_reduction(value: Value) -> bool:
    """Whether the value is computed from a reduction."""
    left, seen = [value], set[Value]()
    while left:
        one = left.pop()
        if isinstance(one, Reduced):
            return True
        if one not in seen:
            seen.add(one)
            left += parts_of(one)
    return False


def without_ones(size: Sequence[int]) -> list[int]:
    """The sizes of the dimensions that have more than one element."""
    return [n for n in size if n != 1]


def is_cheap(value: Value) -> bool:
    """Whether to compute the value again costs less than to keep it."""
    return _cost_of(value) <= CHEAP


def _cost_of(value: Value) -> int:
    """The number of expressions that compute a value from inputs and reductions, or more than
    `CHEAP`. A function counts as that."""
    if isinstance(value, (Input, Reduced)):
        return 0
    cost = 0
    if isinstance(value, Computed) and value.parts:
        cost = 1
        if any(f"{name}(" in value.text for name in FUNCTIONS):
            return CHEAP + 1
    for part in parts_of(value):
        cost += _cost_of(part)
        if cost > CHEAP:
            break
    return cost
