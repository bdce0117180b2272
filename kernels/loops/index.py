"""Where elements are: sums of loops' variables, each times a number.

`values` gives each view's place in its base by them, and `body` each access of memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import Any, TypeVar

from lazy_tensor.kernels.backend import Declined

T = TypeVar("T")


@dataclass(frozen=True, order=True, slots=True)
class Variable:
    """A loop's variable: its C name, how many rounds the loop has, and the nest's dimension that
    it counts in. Or an index that comes from data: -1 is its dimension."""

    name: str
    n: int = field(compare=False)
    dim: int = field(compare=False)


class NeedsSplit(Exception):
    """A loop must become two, of which the inner one has `n` rounds."""

    def __init__(self, variable: Variable, n: int) -> None:
        super().__init__(variable, n)
        self.variable, self.n = variable, n


class NeedsParts(Exception):
    """The `value` must be stored, or loops over dimension `dim` be cut at these places, if any."""

    def __init__(self, value: Any, dim: int = 0, cuts: tuple[int, ...] = ()) -> None:
        super().__init__(value, dim, cuts)
        self.value, self.dim, self.cuts = value, dim, cuts


class NeedsOld(Exception):
    """Input `number` must be written when all has been computed: it is read at other places."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True, slots=True)
class Index:
    """An index of one dimension: the sum of loop variables, each times a number, and `start`."""

    terms: tuple[tuple[Variable, int], ...] = ()
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

    def bounds(self) -> tuple[int, int]:
        """The least and the greatest value."""
        ends = [factor * (variable.n - 1) for variable, factor in self.terms]
        least = self.start + sum(end for end in ends if end < 0)
        return least, self.start + sum(end for end in ends if end > 0)

    def divided(self, n: int) -> tuple[Index, Index]:
        """The quotient and the rest of a division by `n`; NeedsSplit if a loop has rounds with
        several quotients, Declined if it can't be split so that each has one."""
        whole = tuple((v, factor // n) for v, factor in self.terms if factor % n == 0)
        rest = Index(tuple((v, factor) for v, factor in self.terms if factor % n), self.start % n)
        least, most = rest.bounds()
        if least >= 0 and most < n:
            return Index(whole, self.start // n), rest
        for variable, factor in rest.terms:
            is_loop = variable.dim >= 0
            if is_loop and factor > 0 and n % factor == 0 and variable.n % (n // factor) == 0:
                raise NeedsSplit(variable, n // factor)
        raise Declined("a view of other sizes")

    def text(self) -> str:
        parts = [v.name if one == 1 else f"{long_of(one)} * {v.name}" for v, one in self.terms]
        if self.start or not parts:
            parts.append(str(self.start))
        return " + ".join(parts)


Indices = tuple[Index, ...]


def long_of(n: Any) -> str:
    """An integer in C; a symbolic one is a long already."""
    return f"{n}L" if isinstance(n, int) else str(n)


def offset_of(index: Sequence[Index], stride: Sequence[int]) -> Index:
    """The place in memory of an element: its index times the strides."""
    return reduce(Index.__add__, map(Index.times, index, stride), Index())


def dense_stride(size: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(size[d + 1 :]) for d in range(len(size)))


def stride_of_view(
    size: Sequence[int], stride: Sequence[int], shown: Sequence[int]
) -> tuple[int, ...] | None:
    """The strides of memory that is seen in other sizes; None if it can't be."""
    found = [0] * len(shown)
    for dims, dims_shown in groups_of(size, shown):
        if any(stride[d] != stride[e] * size[e] for d, e in pairwise(dims)):
            return None
        step = stride[dims[-1]]
        for d in reversed(dims_shown):
            found[d] = step
            step *= shown[d]
    return tuple(found)


def groups_of(size: Sequence[int], other: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The least groups of dimensions of two sizes that have as many elements each. Dimensions of
    one element are left out."""
    left, right = ([d for d, n in enumerate(one) if n != 1] for one in (size, other))
    here: list[int] = []
    there: list[int] = []
    n = m = 1
    while left or right:
        if n <= m:
            here.append(left.pop(0))
            n *= size[here[-1]]
        else:
            there.append(right.pop(0))
            m *= other[there[-1]]
        if n == m:
            yield here, there
            here, there = [], []


def restored(permuted: Sequence[T], order: Sequence[int]) -> tuple[T, ...]:
    """What comes in the given order, in its own."""
    return tuple(permuted[order.index(d)] for d in range(len(order)))
