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
"""A reduction of at most so many elements is unrolled into one expression."""


def literal(number: Any, dtype: torch.dtype) -> str:
    """A Python number as a C expression of `dtype`."""
    c_type = C_TYPES[dtype]
    if isinstance(number, (SymbolicInt, Ratio)):
        if isinstance(number, Ratio) and not dtype.is_floating_point:
            raise Declined("a float beside integers")
        return f"({c_type}){number}"
    if dtype.is_floating_point:
        value = float(number)
        if dtype in HALVES:
            value = float(torch.tensor(value, dtype=dtype))
        if math.isnan(value):
            return f'({c_type})__builtin_nan("")'
        if math.isinf(value):
            return f"({c_type}){'-' if value < 0 else ''}__builtin_inf()"
        return f"({c_type}){value.hex()}"
    if isinstance(number, float):
        raise Declined("a float beside integers")
    if dtype is torch.bool:
        return "true" if number else "false"
    info = torch.iinfo(dtype)
    # C has no literal for the smallest integer: `-n` is an expression of a positive `n`
    if not info.min < number <= info.max:
        raise Declined("an integer that is too large")
    return f"({c_type}){int(number)}L"


def broadcast_size(sizes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The size that `torch.broadcast_shapes` gives, whose imports take a second."""
    from_last = zip_longest(*(size[::-1] for size in sizes), fillvalue=1)
    return tuple(next((n for n in ns if n != 1), 1) for ns in from_last)[::-1]


def broadcast(size: tuple[int, ...]) -> Callable[[Indices], Indices]:
    """The function from an index in a broadcast value to the index in the value, of `size`."""

    def place(index: Indices) -> Indices:
        trailing = index[len(index) - len(size) :]
        return tuple(Index() if n == 1 else i for n, i in zip(size, trailing, strict=True))

    return place


def expanded(value: Value, size: tuple[int, ...]) -> Value:
    """The value broadcast to `size`."""
    if value.size == size:
        return value
    return View(size, value.dtype, value, broadcast(value.size))


def expanded_size(size: Sequence[int], target: Sequence[Any]) -> tuple[int, ...]:
    """The size after `expand(target)`, in which -1 keeps the size of a dimension."""
    aligned = [*[1] * (len(target) - len(size)), *size]
    # a symbolic size is no int, and comparing it would become a condition of the kernel
    return tuple(
        n if isinstance(new, int) and new == -1 else new
        for n, new in zip(aligned, target, strict=True)
    )


def first_of(n: int, start: int | None) -> int:
    """The index at which a slice from `start` begins, in a dimension of `n` elements."""
    start = start or 0
    return min(max(start + n if start < 0 else start, 0), n)


def sliced(value: Value, dim: int, begin: int, end: int) -> Value:
    """The elements from `begin` to `end` along a dimension."""
    size = (*value.size[:dim], end - begin, *value.size[dim + 1 :])
    if isinstance(value, Input):
        start = value.start + begin * value.stride[dim]
        return Input(size, value.dtype, value.number, value.stride, start)
    return View(size, value.dtype, value, partial(_shift, dim, begin))


def _shift(dim: int, begin: int, index: Indices) -> Indices:
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
    dims = {d % n_dims for d in (dims if isinstance(dims, (tuple, range)) else (dims,))}
    size = tuple(n for d, n in enumerate(value.size) if d not in dims)
    return Reshaped(size, value.dtype, value)


def clamped(index: Value, n: int) -> Value:
    """An index that comes from data, clamped to a dimension of `n` elements."""
    b = Builder(torch.int64)
    index = b.cast(index, torch.int64)
    return b.of("smaller(larger({0}, {1}), {2})", index, 0, n - 1)


class Builder:
    """Makes the values of a call that computes in `dtype`, for the rules of ops.

    `stored_dtype` is the dtype of the results (of a test: of its operands). It differs from `dtype`
    if it has 16 bits. `bad` are 0-dim bools: each is true if an index from data is out of range.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = self.stored_dtype = dtype
        self.bad: list[Value] = []

    def check(self, index: Value, n: int, counts: Value | None = None) -> None:
        """Add to `bad` whether `index` is out of range for `n` elements where `counts` is true."""
        b = Builder(torch.int64)
        text = "(({0} < 0) | ({0} >= {1}))" + ("" if counts is None else " & {2}")
        operands = [index, n] if counts is None else [index, n, counts]
        bad = b.reduced("max", b.cast(b.test(text, *operands), torch.int32), None, keepdim=False)
        self.bad.append(b.test("{0} != 0", bad))

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        if value.dtype is dtype:
            return value
        if dtype is torch.bool:
            return Computed(value.size, dtype, "{0} != 0", (value,))
        if value.dtype is torch.bool:
            # GCC has no vectors for the conversion
            c_type = C_TYPES[dtype]
            return Computed(value.size, dtype, f"{{0}} ? ({c_type})1 : ({c_type})0", (value,))
        if dtype in HALVES:
            return Computed(value.size, dtype, f"round_{HALVES[dtype]}((float){{0}})", (value,))
        c_type = C_TYPES[dtype]
        if value.dtype.is_floating_point and not dtype.is_floating_point:
            return Computed(value.size, dtype, f"as_integer<{c_type}>({{0}})", (value,))
        return Computed(value.size, dtype, f"({c_type}){{0}}", (value,))

    def round_number(self, number: Any) -> Any:
        """A number rounded to `stored_dtype` if that has 16 bits; any other operand as it is."""
        is_tensor = isinstance(number, Value) and not isinstance(number, Number)
        if is_tensor or self.stored_dtype not in HALVES:
            return number
        return self.cast(self.value(number), self.stored_dtype)

    def round_step(self, value: Value, other: Any) -> Value:
        """An intermediate value of a division by `other`, rounded as in eager.

        Eager rounds it if both operands are tensors of a 16-bit dtype.
        """
        is_number = not isinstance(other, Value) or not other.size
        return value if is_number else self.cast(value, self.stored_dtype)

    def value(self, operand: Any) -> Value:
        """The operand as a value: a number becomes a 0-dim one."""
        if isinstance(operand, Value):
            return operand
        if not isinstance(operand, (bool, int, float, SymbolicInt, Ratio)):
            raise Declined(f"{operand!r} among the arguments")
        return Computed((), self.dtype, literal(operand, self.dtype))

    def of(self, text: str, *parts: Any) -> Value:
        """An expression of values and numbers, in the dtype in which the call computes."""
        return self._expression(self.dtype, text, parts)

    def test(self, text: str, *parts: Any) -> Value:
        return self._expression(torch.bool, text, parts)

    def _expression(self, dtype: torch.dtype, text: str, parts: Sequence[Any]) -> Value:
        values = tuple(map(self.value, parts))
        return Computed(broadcast_size(value.size for value in values), dtype, text, values)

    def reduced(self, kind: str, value: Value, dims: Any, *, keepdim: bool = True) -> Value:
        """`value` reduced over `dims`, which stay with size 1 if `keepdim`; None means all."""
        n_dims = len(value.size)
        if n_dims == 0:
            return value
        if dims is None or dims == ():
            dims = tuple(range(n_dims))
        dims = sorted({d % n_dims for d in (dims if isinstance(dims, tuple) else (dims,))})
        result = self._reduced(kind, value, dims)
        if keepdim:
            size = tuple(1 if d in dims else n for d, n in enumerate(value.size))
            result = Reshaped(size, result.dtype, result)
        return result

    def _reduced(self, kind: str, value: Value, dims: Sequence[int]) -> Value:
        """`value` reduced over `dims`, without these dimensions."""
        kept_dims = [d for d in range(len(value.size)) if d not in dims]
        size = tuple(value.size[d] for d in kept_dims)
        result = self._of_base(kind, value, dims)
        return result if result.size == size else Reshaped(size, result.dtype, result)

    def _of_base(self, kind: str, value: Value, dims: Sequence[int]) -> Value:
        """The same elements as `_reduced`, perhaps in another shape.

        A reduction of a view or a copy becomes one of the base where possible, so that the loops
        that compute the base reduce it too.
        """
        n_reduced = math.prod(value.size[d] for d in dims)
        if n_reduced == 1 or (n_reduced <= FEW and is_cheap(value)):
            return self._unrolled(kind, value, dims)
        kept_dims = [d for d in range(len(value.size)) if d not in dims]
        size = tuple(value.size[d] for d in kept_dims)
        match value:
            case Reshaped() if (base_dims := _dims_before(value, dims)) is not None:
                return self._reduced(kind, value.base, base_dims)
            case Permuted():
                result = self._reduced(kind, value.base, [value.order[d] for d in dims])
                kept_of_base = sorted(value.order[d] for d in kept_dims)
                order = tuple(kept_of_base.index(value.order[d]) for d in kept_dims)
                return Permuted(size, result.dtype, result, order)
            case Computed() if (part := copied(value)) is not None:
                return self._reduced(kind, part, dims)
        return Reduced(size, value.dtype, value, kind, (*kept_dims, *dims))

    def _unrolled(self, kind: str, value: Value, dims: Sequence[int]) -> Value:
        """A reduction of few elements as one expression, in which each element is a view."""
        size = tuple(1 if d in dims else n for d, n in enumerate(value.size))
        elements: list[Value] = []
        for place in product(*(range(value.size[d]) for d in dims)):
            at = dict(zip(dims, place, strict=True))
            elements.append(View(size, value.dtype, value, partial(_fix, at)))
        text = {
            "sum": "{0} + {1}", "product": "{0} * {1}", "max": "maximum({0}, {1})",
            "min": "minimum({0}, {1})",
        }[kind]  # fmt: skip
        if kind == "sum" and value.dtype.is_floating_point:
            # a sum begins with 0: that of negative zeros is positive
            elements[0] = Computed(size, value.dtype, "0 + {0}", (elements[0],))
        return reduce(lambda a, b: Computed(size, value.dtype, text, (a, b)), elements)


def _fix(places: dict[int, int], index: Indices) -> Indices:
    """`index` with a constant in the dimensions of `places`."""
    return tuple(Index((), places[d]) if d in places else i for d, i in enumerate(index))


def _dims_before(value: Reshaped, dims: Sequence[int]) -> list[int] | None:
    """The dimensions of the base that have the elements of `dims`; None if there are no such."""
    base_dims: list[int] = []
    for group, base_group in groups_of(value.size, value.base.size):
        are_in = {d in dims for d in group}
        # the base has one dimension for both reduced and kept ones
        if len(are_in) > 1:
            return None
        if are_in == {True}:
            base_dims += base_group
    return base_dims
