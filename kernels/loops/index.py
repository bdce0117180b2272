"""Indices and memory offsets: sums of loop variables, each times a constant.

`values` maps the index in a view to the index in its base. `body` turns an index into the offset
of a load or a store.
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
    """A loop variable: its C name, the loop's number of iterations, and the nest's dimension.

    The C variable of an index that comes from data is one too, with -1 as its dimension.
    """

    name: str
    n: int = field(compare=False)
    dim: int = field(compare=False)


class NeedsSplit(Exception):
    """The loop of `variable` must become two nested loops, the inner one of `n` iterations."""

    def __init__(self, variable: Variable, n: int) -> None:
        super().__init__(variable, n)
        self.variable, self.n = variable, n


class NeedsParts(Exception):
    """A nest can't compute `value` as it is.

    With `cuts`, the loops over dimension `dim` must be cut at these indices. Without, `value` must
    be stored before the nest.
    """

    def __init__(self, value: Any, dim: int = 0, cuts: tuple[int, ...] = ()) -> None:
        super().__init__(value, dim, cuts)
        self.value, self.dim, self.cuts = value, dim, cuts


class NeedsOld(Exception):
    """Input `number` must be written after all nests: it is read at other indices than written."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True, slots=True)
class Index:
    """An index of one dimension: `start` plus the sum of `terms`, variables times constants."""

    terms: tuple[tuple[Variable, int], ...] = ()
    start: int = 0

    def __add__(self, other: Index) -> Index:
        factors = dict(self.terms)
        for variable, factor in other.terms:
            factors[variable] = factors.get(variable, 0) + factor
        # sorted, so that equal indices compare equal
        terms = tuple(sorted((v, factor) for v, factor in factors.items() if factor))
        return Index(terms, self.start + other.start)

    def times(self, factor: int) -> Index:
        if factor == 0:
            return Index()
        terms = tuple((v, factor * old) for v, old in self.terms)
        return Index(terms, factor * self.start)

    def bounds(self) -> tuple[int, int]:
        """The least and the greatest value."""
        ends = [factor * (variable.n - 1) for variable, factor in self.terms]
        least = self.start + sum(end for end in ends if end < 0)
        return least, self.start + sum(end for end in ends if end > 0)

    def divided(self, n: int) -> tuple[Index, Index]:
        """The quotient and the remainder of a division by `n`.

        Raises NeedsSplit if the quotient changes within a loop, and Declined if it would also
        change within the two loops of a split.
        """
        quotient = tuple((v, factor // n) for v, factor in self.terms if factor % n == 0)
        terms = tuple((v, factor) for v, factor in self.terms if factor % n)
        remainder = Index(terms, self.start % n)
        least, most = remainder.bounds()
        if least >= 0 and most < n:
            return Index(quotient, self.start // n), remainder
        for variable, factor in remainder.terms:
            is_loop = variable.dim >= 0
            if is_loop and factor > 0 and n % factor == 0 and variable.n % (n // factor) == 0:
                raise NeedsSplit(variable, n // factor)
        raise Declined("a view of other sizes")

    def text(self) -> str:
        parts = [v.name if n == 1 else f"{long_of(n)} * {v.name}" for v, n in self.terms]
        if self.start or not parts:
            parts.append(str(self.start))
        return " + ".join(parts)


Indices = tuple[Index, ...]


def long_of(n: Any) -> str:
    """An integer as a C expression of type long; a symbolic one has that type already."""
    return f"{n}L" if isinstance(n, int) else str(n)


def offset_of(index: Sequence[Index], stride: Sequence[int]) -> Index:
    """The memory offset of an element: the dot product of its index and the strides."""
    return reduce(Index.__add__, map(Index.times, index, stride), Index())


def dense_stride(size: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(size[d + 1 :]) for d in range(len(size)))


def stride_of_view(
    size: Sequence[int], stride: Sequence[int], new_size: Sequence[int]
) -> tuple[int, ...] | None:
    """The strides of a view that reshapes a tensor to `new_size`; None if there is no such view."""
    new_stride = [0] * len(new_size)
    for dims, new_dims in groups_of(size, new_size):
        if any(stride[d] != stride[e] * size[e] for d, e in pairwise(dims)):
            return None
        step = stride[dims[-1]]
        for d in reversed(new_dims):
            new_stride[d] = step
            step *= new_size[d]
    return tuple(new_stride)


def groups_of(size: Sequence[int], other: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest groups of dimensions, of two shapes, that have equal numbers of elements.

    `(6, 4)` and `(2, 3, 4)` give `([0], [0, 1])` and `([1], [2])`. Dimensions of one element are in
    no group.
    """
    dims, other_dims = ([d for d, n in enumerate(sizes) if n != 1] for sizes in (size, other))
    group: list[int] = []
    other_group: list[int] = []
    n = m = 1
    while dims or other_dims:
        if n <= m:
            group.append(dims.pop(0))
            n *= size[group[-1]]
        else:
            other_group.append(other_dims.pop(0))
            m *= other[other_group[-1]]
        if n == m:
            yield group, other_group
            group, other_group = [], []


def restored(permuted: Sequence[T], order: Sequence[int]) -> tuple[T, ...]:
    """`permuted` before its permutation: dimension `order[i]` of the result is item `i`."""
    return tuple(permuted[order.index(d)] for d in range(len(order)))
