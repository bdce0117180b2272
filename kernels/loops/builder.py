"""Makes values for the rules of ops: expressions, broadcasting and reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from itertools import product, zip_longest
from typing import Any

import torch

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.loops.index import Index, Indices, groups_of
from lazy_tensor.kernels.loops.values import (
    C_TYPES,
    HALVES,
    Computed,
    Input,
    Number,
    Permuted,
    Reduced,
    Reshaped,
    Value,
    View,
    copied,
    is_cheap,
)
from lazy_tensor.kernels.symbolic import Ratio, SymbolicInt

FEW = 4
"""The most elements that are reduced by one expression."""


def literal(number: Any, dtype: torch.dtype) -> str:
    """A Python number as a C expression of `dtype`."""
    kind = C_TYPES[dtype]
    if isinstance(number, (SymbolicInt, Ratio)):
        if isinstance(number, Ratio) and not dtype.is_floating_point:
            raise Declined("a float beside integers")
        return f"({kind}){number}"
    if dtype.is_floating_point:
        value = float(number)
        if dtype in HALVES:
            value = float(torch.tensor(value, dtype=dtype))
        if math.isnan(value):
            return f'({kind})__builtin_nan("")'
        if math.isinf(value):
            return f"({kind}){'-' if value < 0 else ''}__builtin_inf()"
        return f"({kind}){value.hex()}"
    if isinstance(number, float):
        raise Declined("a float beside integers")
    if dtype is torch.bool:
        return "true" if number else "false"
    info = torch.iinfo(dtype)
    # the least one is no literal in C
    if not info.min < number <= info.max:
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


def expanded_size(size: Sequence[int], asked: Sequence[Any]) -> tuple[int, ...]:
    """The sizes that `expand` gives for those asked, where -1 keeps one."""
    shown = [*[1] * (len(asked) - len(size)), *size]
    return tuple(
        n if isinstance(one, int) and one == -1 else one
        for n, one in zip(shown, asked, strict=True)
    )


def first_of(n: int, start: int | None) -> int:
    """The index, in a dimension of `n` elements, of the first one of a slice."""
    start = start or 0
    return min(max(start + n if start < 0 else start, 0), n)


def sliced(value: Value, dim: int, begin: int, end: int) -> Value:
    """The elements from `begin` to `end` along a dimension."""
    size = (*value.size[:dim], end - begin, *value.size[dim + 1 :])
    if isinstance(value, Input):
        start = value.start + begin * value.stride[dim]
        return Input(size, value.dtype, value.number, value.stride, start)
    return View(size, value.dtype, value, partial(_behind, dim, begin))


def _behind(dim: int, begin: int, index: Indices) -> Indices:
    return (*index[:dim], index[dim] + Index((), begin), *index[dim + 1 :])


def halves(value: Value, dim: int) -> tuple[Value, Value]:
    """The two halves of a value along a dimension."""
    dim = dim % len(value.size)
    n = value.size[dim] // 2
    return sliced(value, dim, 0, n), sliced(value, dim, n, 2 * n)


def squeezed(value: Value, dims: Any) -> Value:
    """The value without these dimensions, all of one element; None means all."""
    n_dims = len(value.size)
    if n_dims == 0:
        return value
    dims = range(n_dims) if dims is None or dims == () else dims
    gone = {d % n_dims for d in (dims if isinstance(dims, (tuple, range)) else (dims,))}
    size = tuple(n for d, n in enumerate(value.size) if d not in gone)
    return Reshaped(size, value.dtype, value)


def clamped(index: Value, n: int) -> Value:
    """An index that comes from data, made one of `n` elements."""
    b = Builder(torch.int64)
    index = b.cast(index, torch.int64)
    return b.of("smaller(larger({0}, {1}), {2})", index, 0, n - 1)


class Builder:
    """Makes values for the rules of ops: those of a call that computes in `dtype`.

    `holds` is the dtype of the results, another one if they are halves. `bad` are values that say
    of indices from data whether they are out of range.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = self.holds = dtype
        self.bad: list[Value] = []

    def check(self, index: Value, n: int, counts: Value | None = None) -> None:
        """Have an index checked, where `counts` is true: it must be one of `n` elements."""
        b = Builder(torch.int64)
        text = "(({0} < 0) | ({0} >= {1}))" + ("" if counts is None else " & {2}")
        given = [index, n] if counts is None else [index, n, counts]
        found = b.reduced("max", b.cast(b.test(text, *given), torch.int32), None, keepdim=False)
        self.bad.append(b.test("{0} != 0", found))

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        if value.dtype is dtype:
            return value
        if dtype is torch.bool:
            return Computed(value.size, dtype, "{0} != 0", (value,))
        if value.dtype is torch.bool:
            # GCC has no vectors for the conversion
            kind = C_TYPES[dtype]
            return Computed(value.size, dtype, f"{{0}} ? ({kind})1 : ({kind})0", (value,))
        if dtype in HALVES:
            return Computed(value.size, dtype, f"round_{HALVES[dtype]}((float){{0}})", (value,))
        kind = C_TYPES[dtype]
        if value.dtype.is_floating_point and not dtype.is_floating_point:
            return Computed(value.size, dtype, f"as_integer<{kind}>({{0}})", (value,))
        return Computed(value.size, dtype, f"({kind}){{0}}", (value,))

    def held(self, given: Any) -> Any:
        """A number as the results' dtype holds it; others as they are."""
        if self.holds not in HALVES or (isinstance(given, Value) and not isinstance(given, Number)):
            return given
        return self.cast(self.value(given), self.holds)

    def step(self, value: Value, other: Any) -> Value:
        """What a step of a division by `other` gives: eager rounds it if both are halves."""
        is_number = not isinstance(other, Value) or not other.size
        return value if is_number else self.cast(value, self.holds)

    def value(self, given: Any) -> Value:
        """A number as a value; a value itself."""
        if isinstance(given, Value):
            return given
        if not isinstance(given, (bool, int, float, SymbolicInt, Ratio)):
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
        """`value` reduced over dimensions; None means all."""
        n_dims = len(value.size)
        if n_dims == 0:
            return value
        if dims is None or dims == ():
            dims = tuple(range(n_dims))
        dims = sorted({d % n_dims for d in (dims if isinstance(dims, tuple) else (dims,))})
        found = self._reduced(kind, value, dims)
        if keepdim:
            size = tuple(1 if d in dims else n for d, n in enumerate(value.size))
            found = Reshaped(size, found.dtype, found)
        return found

    def _reduced(self, kind: str, value: Value, dims: Sequence[int]) -> Value:
        """`value` reduced over dimensions, without them."""
        kept = [d for d in range(len(value.size)) if d not in dims]
        size = tuple(value.size[d] for d in kept)
        found = self._of_base(kind, value, dims)
        return found if found.size == size else Reshaped(size, found.dtype, found)

    def _of_base(self, kind: str, value: Value, dims: Sequence[int]) -> Value:
        """The same, perhaps in other sizes. Of a view or a copy, the base is reduced where that can
        be, so that the same loops compute both."""
        n_reduced = math.prod(value.size[d] for d in dims)
        if n_reduced == 1 or (n_reduced <= FEW and is_cheap(value)):
            return self._unrolled(kind, value, dims)
        kept = [d for d in range(len(value.size)) if d not in dims]
        match value:
            case Reshaped() if (before := _dims_before(value, dims)) is not None:
                return self._reduced(kind, value.base, before)
            case Permuted():
                found = self._reduced(kind, value.base, [value.order[d] for d in dims])
                left = sorted(value.order[d] for d in kept)
                order = tuple(left.index(value.order[d]) for d in kept)
                return Permuted(tuple(value.size[d] for d in kept), found.dtype, found, order)
            case Computed() if (part := copied(value)) is not None:
                return self._reduced(kind, part, dims)
        size = tuple(value.size[d] for d in kept)
        return Reduced(size, value.dtype, value, kind, (*kept, *dims))

    def _unrolled(self, kind: str, value: Value, dims: Sequence[int]) -> Value:
        """A reduction of few elements, each of which is a view."""
        size = tuple(1 if d in dims else n for d, n in enumerate(value.size))
        elements: list[Value] = []
        for place in product(*(range(value.size[d]) for d in dims)):
            at = dict(zip(dims, place, strict=True))
            elements.append(View(size, value.dtype, value, partial(_at, at)))
        text = {
            "sum": "{0} + {1}", "product": "{0} * {1}", "max": "maximum({0}, {1})",
            "min": "minimum({0}, {1})",
        }[kind]  # fmt: skip
        if kind == "sum" and value.dtype.is_floating_point:
            # a sum begins with 0: that of negative zeros is positive
            elements[0] = Computed(size, value.dtype, "0 + {0}", (elements[0],))
        return reduce(lambda a, b: Computed(size, value.dtype, text, (a, b)), elements)


def _at(places: dict[int, int], index: Indices) -> Indices:
    return tuple(Index((), places[d]) if d in places else one for d, one in enumerate(index))


def _dims_before(value: Reshaped, dims: Sequence[int]) -> list[int] | None:
    """The dimensions of the base that make up these ones of the value; None if there are none."""
    found: list[int] = []
    for here, there in groups_of(value.size, value.base.size):
        are_in = {d in dims for d in here}
        if len(are_in) > 1:
            return None
        if are_in == {True}:
            found += there
    return found
