"""Generic segments: one kernel, whose sizes are symbols, for segments that differ only in sizes.

`structure_of` splits a segment into a text without sizes and the list of its sizes. Segments with
the same text have the same structure. `generic_of` compares the sizes of such segments and makes a
`Generic`. It says which sizes are the same symbol, and how the calls' size arguments follow
from the symbols. `service.families` calls both. `backends.lower` traces a `Generic` with symbolic
sizes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from torch._ops import OpOverload

from lazy_tensor.kernels.segment import Call, Segment, TensorSpec

Sizes = tuple[int, ...]

LEAST, MOST = 2, 1 << 31
"""Sizes from `LEAST` and below `MOST` can be symbols. Others have a meaning of their own (1
broadcasts, -1 is inferred, a huge one means "to the end") and are part of the structure."""


@dataclass(frozen=True, slots=True)
class Size:
    """A size as a function of the symbols: `factor * product(symbols) + offset`.

    `symbols` holds numbers of symbols; a number that occurs twice stands for a square.
    """

    factor: int
    symbols: tuple[int, ...]
    offset: int

    def at(self, values: Sequence[Any]) -> Any:
        """Its value for these values of the symbols, which are numbers or torch's SymInts."""
        result: Any = self.factor
        for i in self.symbols:
            result = result * values[i]
        return result + self.offset if self.offset else result

    def of(self, products: Sequence[Size]) -> Size:
        """The same with a product, a size without an offset, in place of each symbol."""
        factor = self.factor * math.prod(products[i].factor for i in self.symbols)
        symbols = [j for i in self.symbols for j in products[i].symbols]
        return Size(factor, tuple(sorted(symbols)), self.offset)

    @property
    def is_symbol(self) -> bool:
        return self.factor == 1 and len(self.symbols) == 1 and not self.offset


@dataclass(frozen=True, slots=True)
class Structure:
    """A segment split into what is independent of sizes (`text`) and its sizes.

    `text` is equal for segments that differ in sizes only. `of_inputs` are the sizes of the inputs'
    dimensions, `of_calls` the size arguments of the calls, both in order. Both leave out sizes that
    can't be symbols, which stand in the text.
    """

    text: str
    of_inputs: Sizes
    of_calls: Sizes


def structure_of(segment: Segment) -> Structure | None:
    """The structure of `segment`; None if an input or an output has gaps in memory.

    Without gaps the strides follow from the sizes and the order of dimensions. So the text holds
    that order in place of strides, which would differ between sizes.
    """
    text = [f"default {segment.default_dtype}"]
    of_inputs: list[int] = []
    of_calls: list[int] = []
    for spec in segment.inputs:
        order = order_of(spec)
        if order is None:
            return None
        size = [_taken(n, of_inputs) for n in spec.size]
        text.append(f"{spec.dtype} {size} {order} {spec.device}")
    text.append(repr([kind.__name__ for kind in segment.scalars]))
    for call in segment.calls:
        args, kwargs = _mapped(call, lambda n: _taken(n, of_calls))
        # the sizes of results follow from the inputs and arguments, so their rank is enough
        kinds = [None if s is None else (s.dtype, s.device, len(s.size)) for s in call.outputs]
        text.append(f"{call.op}{args!r}{kwargs!r}->{kinds!r}")
    for number in segment.outputs:
        promised = segment.specs[number]
        order = None if promised is None else order_of(promised)
        if order is None:
            return None
        text.append(f"{number} {order}")
    return Structure("\n".join(text), tuple(of_inputs), tuple(of_calls))


def order_of(spec: TensorSpec) -> tuple[int, ...] | None:
    """The dimensions from outermost to innermost in memory; None if the tensor has gaps.

    The stride of a dimension of one element addresses nothing, and may be any number. Where an
    order of all dimensions gives exactly the strides, that order is returned. Else each dimension
    of one element keeps its own position, as in a contiguous tensor.
    """
    n_dims = len(spec.size)
    # of equal strides a dimension of one element is the inner one
    by_stride = sorted(range(n_dims), key=lambda d: (-spec.stride[d], spec.size[d] == 1))
    if dense_strides(by_stride, spec.size) == spec.stride:
        return tuple(by_stride)
    # dimensions of one element stay, the others fill the positions between them by stride
    places = iter([d for d in by_stride if spec.size[d] != 1])
    order = tuple(d if spec.size[d] == 1 else next(places) for d in range(n_dims))
    dense = dense_strides(order, spec.size)
    is_dense = all(spec.size[d] == 1 or spec.stride[d] == dense[d] for d in range(n_dims))
    return order if is_dense else None


def strides_like(spec: TensorSpec, size: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of a dense tensor of `size` whose dimensions lie in the order of `spec`."""
    order = order_of(spec)
    assert order is not None, "a generic segment's inputs and outputs are dense"
    return dense_strides(order, size)


def dense_strides(order: Sequence[int], size: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of a tensor without gaps whose dimensions lie in `order`, outermost first."""
    strides: list[Any] = [1] * len(size)
    step: Any = 1
    for dim in reversed(order):
        strides[dim] = step
        step = step * size[dim]
    return tuple(strides)


def _can_be_symbol(n: Any) -> bool:
    # `type`, as a bool is an int
    return type(n) is int and LEAST <= n < MOST


def _taken(n: Any, taken: list[int]) -> Any:
    """Append `n` to `taken` and return `...`, if it can be a symbol; else return `n` itself.

    `...` stands for a size in the text of a structure.
    """
    if not _can_be_symbol(n):
        return n
    taken.append(n)
    return ...


def _mapped(
    call: Call, replace: Callable[[int], Any]
) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """The arguments of `call`, with `replace(n)` in place of each integer in a size argument."""
    sized = _sized(call.op)

    def map_one(name: str, value: Any) -> Any:
        return _mapped_size(value, replace) if name in sized else value

    names = [argument.name for argument in call.op._schema.arguments]
    args = tuple(map_one(name, value) for name, value in zip(names, call.args, strict=False))
    return args, tuple((name, map_one(name, value)) for name, value in call.kwargs)


@cache
def _sized(op: OpOverload) -> frozenset[str]:
    """The names of the arguments that are sizes.

    Only the schema's text says "SymInt": in the schema object such a type reads as "int".
    """
    return frozenset(re.findall(r"SymInt(?:\[\d*\])?\??\ (\w+)", str(op._schema)))


def _mapped_size(value: Any, replace: Callable[[int], Any]) -> Any:
    if type(value) is tuple:
        return tuple(_mapped_size(item, replace) for item in value)
    return replace(value) if type(value) is int else value


@dataclass(frozen=True, eq=False)
class Generic(Segment):
    """A segment whose sizes are symbols, compiled once for all segments that `values_of` accepts.

    As a `Segment` it has the sizes of one of them, which serve as an example while it is traced.
    The symbols are numbered from 0. `of_inputs` says of each entry of `structure.of_inputs` which
    symbol or constant it is, and `of_calls` how each entry of `structure.of_calls` follows from the
    symbols.
    """

    structure: Structure = field(kw_only=True)
    of_inputs: tuple[Size, ...] = field(kw_only=True)
    of_calls: tuple[Size, ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        # the text, and with it the name on disk, must not depend on the sizes that came first
        lines = ("generic", self.structure.text, repr(self.of_inputs), repr(self.of_calls))
        object.__setattr__(self, "_text", "\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        kind = partial(
            Generic, structure=self.structure, of_inputs=self.of_inputs, of_calls=self.of_calls
        )
        return kind, super().__reduce__()[1]

    @property
    def own_values(self) -> Sizes:
        """The symbols' values for the example sizes that the segment itself has."""
        values = self.values_of(self.structure)
        assert values is not None
        return values

    def values_of(self, structure: Structure) -> Sizes | None:
        """The symbols' values for a segment of this structure; None if its sizes don't fit."""
        sizes = (*self.of_inputs, *self.of_calls)
        given = list(zip(sizes, (*structure.of_inputs, *structure.of_calls), strict=True))
        values = {size.symbols[0]: n for size, n in given if size.is_symbol}
        found = tuple(values[i] for i in range(len(values)))
        # sizes that were equal in the segments it is made from must be equal in all
        return found if all(size.at(found) == n for size, n in given) else None

    def with_symbols(
        self, values: Sequence[Any]
    ) -> tuple[tuple[TensorSpec, ...], tuple[Call, ...]]:
        """The inputs' specs and the calls, with `values` in place of the symbols.

        It walks the sizes in the order in which `structure_of` listed them.
        """
        taken, given = iter(self.of_inputs), iter(self.of_calls)

        def spec_with(spec: TensorSpec) -> TensorSpec:
            size = tuple(next(taken).at(values) if _can_be_symbol(n) else n for n in spec.size)
            return replace(spec, size=size, stride=strides_like(spec, size))

        def replaced(n: int) -> Any:
            return next(given).at(values) if _can_be_symbol(n) else n

        calls = (Call(call.op, *_mapped(call, replaced), call.outputs) for call in self.calls)
        return tuple(map(spec_with, self.inputs)), tuple(calls)

    def with_sizes(self, values: Sequence[Any]) -> Segment:
        """The segment with `values` in place of the symbols; results keep the example's sizes."""
        inputs, calls = self.with_symbols(values)
        return Segment(inputs, self.scalars, calls, self.outputs, self.default_dtype)

    def of(self, segment: Segment, structure: Structure) -> Generic:
        """The same with another segment of the structure as its example."""
        return replace(self, inputs=segment.inputs, calls=segment.calls, structure=structure)


def generic_of(structures: Sequence[Structure], segment: Segment) -> Generic:
    """A generic segment for segments of one structure; `segment` is the one of the last.

    Two dimensions are the same symbol if they have the same position, counted from the last, and
    the same size in each of the segments. Of two segments, dimensions of the same size in both stay
    constants: loops over them are faster. A size argument of a call that does not follow from the
    inputs' sizes is a symbol, from which these may follow: `[4 * n, 8]` viewed as `[4, n, 8]`.
    """
    assert len({one.text for one in structures}) == 1
    # from the last, as broadcasting aligns dimensions: a bias's width is its matrix's width
    positions = [
        dim - len(spec.size)
        for spec in segment.inputs
        for dim, n in enumerate(spec.size)
        if _can_be_symbol(n)
    ]
    placed = list(zip(positions, zip(*(s.of_inputs for s in structures), strict=True), strict=True))
    asked = list(zip(*(s.of_calls for s in structures), strict=True))
    keeps_constants = len(structures) == 2
    changing = [one for one in dict.fromkeys(placed) if not keeps_constants or _changes(one[1])]
    columns = [sizes for _, sizes in changing]
    of_calls: list[Size] = []
    for sizes in asked:
        size = size_of(sizes, columns)
        if size is None:
            size = Size(1, (len(columns),), 0)
            columns.append(sizes)
        of_calls.append(size)
    # the sizes of inputs that follow from the calls' are no symbols
    added = columns[len(changing) :]
    found = [_product_of(sizes, added) for _, sizes in changing] + [None] * len(added)
    symbols = [i for i, product in enumerate(found) if product is None]
    n_left = len(symbols) - len(added)
    by_column = [
        Size(1, (symbols.index(i),), 0)
        if product is None
        else replace(product, symbols=tuple(n_left + j for j in product.symbols))
        for i, product in enumerate(found)
    ]
    of_inputs = [
        by_column[changing.index(one)] if one in changing else Size(one[1][0], (), 0)
        for one in placed
    ]
    return Generic(
        segment.inputs, segment.scalars, segment.calls, segment.outputs, segment.default_dtype,
        structure=structures[-1], of_inputs=tuple(of_inputs),
        of_calls=tuple(size.of(by_column) for size in of_calls),
    )  # fmt: skip


def _changes(sizes: Sizes) -> bool:
    return len({*sizes}) > 1


def _product_of(asked: Sizes, symbols: list[Sizes]) -> Size | None:
    """The size as a multiple of a product of these symbols."""
    found = size_of(asked, symbols)
    return found if found is not None and found.symbols and not found.offset else None


MOST_FACTORS = 4
"""The most symbols in a product that `size_of` tries."""


def size_of(asked: Sizes, symbols: list[Sizes]) -> Size | None:
    """A `Size` that gives `asked`, a size in several segments, from the symbols' values in them.

    The simplest explanation is preferred: a symbol, a constant, a product, a multiple of a
    product, a symbol plus a constant. A wrong guess can't give wrong results: `values_of` compares
    each size with that of another segment, and returns None where they differ.
    """
    if asked in symbols:
        return Size(1, (symbols.index(asked),), 0)
    if not _changes(asked):
        return Size(asked[0], (), 0)
    # the first multiple that fits, used only if no plain product of any length does
    scaled: Size | None = None
    for n in range(1, MOST_FACTORS + 1):
        for chosen in itertools.combinations_with_replacement(range(len(symbols)), n):
            products = tuple(map(math.prod, zip(*(symbols[i] for i in chosen), strict=True)))
            if asked == products:
                return Size(1, chosen, 0)
            factor = asked[0] // products[0]
            if scaled is None and asked == tuple(factor * one for one in products):
                scaled = Size(factor, chosen, 0)
    for i, values in enumerate(symbols):
        offset = asked[0] - values[0]
        if scaled is None and all(n - one == offset for n, one in zip(asked, values, strict=True)):
            scaled = Size(1, (i,), offset)
    return scaled
