"""Values: the tensors of a segment as functions of an index, each a C expression of others.

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
"""The C types of variables. A variable of a 16-bit dtype is a float, rounded to that dtype."""
HALVES = {torch.bfloat16: "bfloat16", torch.float16: "half"}
"""The 16-bit floating-point dtypes, with their names in the C functions that convert them."""
CHEAP = 3
"""A value of at most so many expressions is computed again at each use instead of stored."""


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
    """The C expression `text` of the elements of `parts` at the same index.

    `{0}` stands for the element of the first part.
    """

    text: str
    parts: tuple[Value, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class View(Value):
    """Elements of `base`: the one at `index` is that of `base` at `place(index)`."""

    base: Value
    place: Callable[[Indices], Indices]


@dataclass(frozen=True, eq=False, slots=True)
class Permuted(Value):
    """`base` with its dimensions permuted: dimension `d` is dimension `order[d]` of `base`."""

    base: Value
    order: tuple[int, ...]

    def place(self, index: Indices) -> Indices:
        """The index in `base`."""
        return restored(index, self.order)


@dataclass(frozen=True, eq=False, slots=True)
class Reshaped(Value):
    """The elements of `base` in the same row-major order, in another shape."""

    base: Value

    def place(self, index: Indices) -> Indices:
        """The index in `base`."""
        offset = offset_of(index, dense_stride(self.size))
        # from the last dimension to the first
        remainders = []
        for n in self.base.size[:0:-1]:
            offset, remainder = offset.divided(n)
            remainders.append(remainder)
        return (offset, *remainders[::-1]) if self.base.size else ()


@dataclass(frozen=True, eq=False, slots=True)
class Joined(Value):
    """The concatenation of `parts` along dimension `dim`."""

    parts: tuple[Value, ...]
    dim: int


@dataclass(frozen=True, eq=False, slots=True)
class Gathered(Value):
    """Elements of `base` at indices from data: `places` holds the index along dimension `dim`.

    If `is_spread`, `places` has the size of the result, as in `gather`. Otherwise the dimensions of
    `places` take the position of `dim` in the result, as in `index_select`.
    """

    base: Value
    places: Value
    dim: int
    is_spread: bool


@dataclass(frozen=True, eq=False, slots=True)
class Place(Value):
    """The index of each element along dimension `dim`."""

    dim: int


@dataclass(frozen=True, eq=False, slots=True)
class Rolled(Value):
    """`base` rolled by `shift` along dimension `dim`, where 0 < shift < the size of `dim`."""

    base: Value
    dim: int
    shift: int


@dataclass(frozen=True, eq=False, slots=True)
class Reduced(Value):
    """The `sum`, `product`, `max` or `min` of `base`.

    `order` lists the dimensions of `base`: those that are kept, then those that are reduced.
    """

    base: Value
    kind: str
    order: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Number(Computed):
    """A run-time number: an argument of each call of the kernel."""


def copied(value: Computed) -> Value | None:
    """The value that `value` is a copy of; None if it isn't a copy."""
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
    stack, seen = [value], set[Value]()
    while stack:
        value = stack.pop()
        if isinstance(value, Reduced):
            return True
        if value not in seen:
            seen.add(value)
            stack += parts_of(value)
    return False


def without_ones(size: Sequence[int]) -> list[int]:
    """The sizes of the dimensions that have more than one element."""
    return [n for n in size if n != 1]


def is_cheap(value: Value) -> bool:
    """Whether it costs less to compute the value again than to store it."""
    return _cost_of(value) <= CHEAP


def _cost_of(value: Value) -> int:
    """The number of expressions that compute a value from inputs and reductions.

    A function of `FUNCTIONS` counts as more than `CHEAP`, at which the count stops.
    """
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
