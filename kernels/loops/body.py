"""The innermost lines of a nest's loops: loads, expressions, stores and reductions.

`Nest` and `Sink` say what is computed, `NestText` is the text as far as it is written, and
`Body` writes one piece of the innermost loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.loops.builder import broadcast
from lazy_tensor.kernels.loops.cpp import CALLED, FUNCTIONS
from lazy_tensor.kernels.loops.index import (
    Index,
    Indices,
    NeedsOld,
    NeedsParts,
    Variable,
    dense_stride,
    offset_of,
    restored,
)
from lazy_tensor.kernels.loops.values import (
    C_TYPES,
    HALVES,
    Computed,
    Gathered,
    Input,
    Joined,
    Permuted,
    Place,
    Reduced,
    Reshaped,
    Rolled,
    Value,
    View,
    parts_of,
    without_ones,
)

MOST_ADDED = 64
"""The most numbers that one float32 accumulator adds up; longer sums are in double."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The array that holds a value: its C name, strides, and the offset of the first element."""

    name: str
    stride: tuple[int, ...]
    start: int = 0

    def at(self, index: Indices) -> Index:
        return offset_of(index, self.stride) + Index((), self.start)


@dataclass(eq=False)
class Sink:
    """What a nest computes: a reduction, or a value that it stores in `memory`."""

    value: Value
    memory: Memory | None
    # an input is stored in the last pass, after all reads of it
    is_input: bool = False

    @property
    def over(self) -> tuple[int, ...]:
        """The size of the tensor that the loops go over."""
        return self.value.base.size if isinstance(self.value, Reduced) else self.value.size


@dataclass(eq=False)
class Nest:
    """Loops over a tensor of size `over`, with its dimensions in `order`, outermost first.

    The reductions of the nest keep its `kept` outer dimensions; `kept` is None if it has none.
    """

    over: tuple[int, ...]
    order: tuple[int, ...]
    kept: int | None = None
    sinks: list[Sink] = field(default_factory=list)

    @property
    def size(self) -> tuple[int, ...]:
        """The sizes in the order of the loops."""
        return tuple(self.over[d] for d in self.order)

    def can_compute(self, sink: Sink) -> bool:
        """Whether these loops can compute the sink, too."""
        value = sink.value
        if not isinstance(value, Reduced):
            return sink.over == self.over or self.is_row(value)
        is_same = (value.order, len(value.size)) == (self.order, self.kept)
        return sink.over == self.over and (self.kept is None or is_same)

    def is_row(self, value: Value) -> bool:
        """Whether the value has one element for each iteration of the outer loops."""
        row = self.size[: self.kept]
        return self.kept is not None and without_ones(value.size) == without_ones(row)


def stored_type(dtype: torch.dtype) -> str:
    """The C type of an element in memory."""
    if dtype in HALVES:
        return "unsigned short"
    return "unsigned char" if dtype is torch.bool else C_TYPES[dtype]


def _as_memory_type(dtype: torch.dtype, text: str) -> str:
    """The C expression that converts a variable to its type in memory."""
    return f"narrow_{HALVES[dtype]}({text})" if dtype in HALVES else text


@dataclass(eq=False)
class Kernel:
    """What the nests of a kernel share.

    `in_memory` are the values that nests stored whose text is complete, with their memory.
    `written` are the inputs that the current nest or an earlier one writes.
    `functions` are those of `cpp.FUNCTIONS` that the text calls.
    """

    n_threads: int
    in_memory: dict[Value, Memory] = field(default_factory=dict)
    functions: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)


class NestText:
    """A nest whose text is being written: what its innermost lines need to know of it.

    - `index`: the index of an element, in the order of the loops
    - `kept`: the number of outer dimensions
    - `saved`, `stored`: values that one pass computes and a later one needs; `saved` has the names
      of arrays made for that, `stored` the memory of results
    - `results`: the C names of reductions' results, and of functions of them that have one element
      for each iteration of the outer loops
    - `writes`: for each write to an input, its name, the offset, and the number of the pass
    """

    def __init__(self, kernel: Kernel, nest: Nest) -> None:
        self.kernel, self.nest = kernel, nest
        self.kept = nest.kept or 0
        self.loops = [Variable(f"i{d}", n, d) for d, n in enumerate(nest.size) if n != 1]
        self.index = self._index()
        self.saved: dict[Value, str] = {}
        self.stored: dict[Value, Memory] = {}
        self.results: dict[Value, str] = {}
        self.writes: list[tuple[str, Index, int]] = []
        # variables of loops that were merged into the next loop
        self.joined: set[Variable] = set()
        # rolls along a loop: variable, start of the index, shift, size of the dimension
        self.rolls: set[tuple[Variable, int, int, int]] = set()
        self._levels: dict[Value, int] = {}
        self.begin()

    def _index(self) -> Indices:
        """The index of an element by the loop variables. A dimension may have several loops."""
        index = [Index() for _ in self.nest.size]
        steps = [1 for _ in self.nest.size]
        for variable in reversed(self.loops):
            index[variable.dim] += Index(((variable, steps[variable.dim]),))
            steps[variable.dim] *= variable.n
        return tuple(index)

    @property
    def full(self) -> Indices:
        """The index of an element of a value that has the nest's sizes."""
        return restored(self.index, self.nest.order)

    def row(self, value: Value) -> Indices:
        """The index in a value that has one element for each iteration of the outer loops."""
        outer = zip(self.index[: self.kept], self.nest.size, strict=False)
        indices = [index for index, n in outer if n != 1]
        return tuple(indices.pop(0) if n != 1 else Index() for n in value.size)

    def begin(self) -> None:
        """Start the text anew; `rolls` stays, since the pieces of a loop depend on it."""
        # the offsets of all loads and stores, by which the loops are arranged
        self.accesses: list[Index] = []
        # lines at the beginning of each iteration of a variable's loop
        self.hoisted: dict[str, list[str]] = {}
        self._n_names = 0

    def name(self, prefix: str) -> str:
        """A new C name."""
        self._n_names += 1
        return f"{prefix}{self._n_names}"

    def level_of(self, value: Value, *, inside: bool = False) -> int:
        """The number of the first pass that can use the value.

        For a reduction of this nest that is the pass after the one that accumulates it; with
        `inside`, it is the one that accumulates it.
        """
        if value in self.kernel.in_memory:
            return 0
        if isinstance(value, Reduced):
            is_here = any(s.value is value and s.memory is None for s in self.nest.sinks)
            return self.level_of(value.base) + (0 if inside and is_here else 1)
        level = self._levels.get(value)
        if level is None:
            level = self._levels[value] = max(map(self.level_of, parts_of(value)), default=0)
        return level


class Body:
    """The innermost lines of a pass, for one piece of the innermost loop.

    `piece` is the variable of that loop, if there is one, and the start of the piece. None stands
    for lines behind the inner loops, where only values with one element for each iteration of the
    outer loops are known.
    """

    def __init__(
        self, text: NestText, number: int, piece: tuple[Variable | None, int] | None
    ) -> None:
        self._text, self._number, self._piece = text, number, piece
        self._names: dict[tuple[Value, Indices], str] = {}
        self._name_of: dict[str, str] = {}
        # lines ahead of the innermost loop: loads that are the same in all its iterations
        self.ahead: list[str] = []
        self.lines: list[str] = []
        self.stores: list[str] = []

    def save(self, value: Value) -> None:
        """Store a value in the array that keeps it for later passes."""
        text = _as_memory_type(value.dtype, self._compute(value, self._text.full))
        array, at = self._text.saved[value], self._access(self._flat_index())
        self.stores.append(f"{array}[{at}] = {text};")

    def keep(self, value: Value, name: str) -> None:
        """Assign a value that has one element for each iteration of the outer loops to `name`."""
        self.lines.append(f"{name} = {self._compute(value, self._text.row(value))};")

    def store(self, sink: Sink, index: Indices) -> None:
        assert sink.memory is not None
        at = self._access(sink.memory.at(index))
        text = _as_memory_type(sink.value.dtype, self.read(sink.value, index))
        self.stores.append(f"{sink.memory.name}[{at}] = {text};")

    def read(self, value: Value, index: Indices) -> str:
        """The C name of an element."""
        key = (value, index)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = self._element(value, index)
        return name

    def _element(self, value: Value, index: Indices) -> str:
        text = self._text
        memory = text.kernel.in_memory.get(value)
        if memory is not None:
            return self._load(value, memory.name, memory.at(index))
        if value in text.results and index == text.row(value):
            return text.results[value]
        if isinstance(value, Reduced):
            raise NeedsParts(value)
        is_kept = value in text.saved or value in text.stored
        if is_kept and text.level_of(value) < self._number:
            if index != text.full:
                raise Declined("a value that is read at other places")
            if value in text.saved:
                return self._load(value, text.saved[value], self._flat_index())
            memory = text.stored[value]
            return self._load(value, memory.name, memory.at(index))
        return self._compute(value, index)

    def _compute(self, value: Value, index: Indices) -> str:
        key = (value, index)
        if key in self._names:
            return self._names[key]
        match value:
            case Input():
                at = offset_of(index, value.stride) + Index((), value.start)
                self._check_written(value.number, at)
                name = self._load(value, f"in{value.number}", at)
            case Reshaped():
                try:
                    place = value.place(index)
                except Declined:
                    raise NeedsParts(value) from None
                name = self.read(value.base, place)
            case View() | Permuted():
                name = self.read(value.base, value.place(index))
            case Joined():
                name = self._joined_part(value, index)
            case Gathered():
                name = self._gathered_element(value, index)
            case Place():
                name = self._line(value, self._access(index[value.dim]))
            case Rolled():
                base_index = self._roll_index(index[value.dim], value.shift, value.size[value.dim])
                place = (*index[: value.dim], base_index, *index[value.dim + 1 :])
                name = self.read(value.base, place)
            case Computed():
                name = self._line(value, self._expression(value, index))
            case _:
                raise AssertionError(value)
        self._names[key] = name
        return name

    def _joined_part(self, value: Joined, index: Indices) -> str:
        """The element, read from the part that has it. NeedsParts if the loop runs over several."""
        at = index[value.dim]
        least, most = at.bounds()
        ends = [*accumulate(part.size[value.dim] for part in value.parts)]
        for part, end in zip(value.parts, ends, strict=True):
            begin = end - part.size[value.dim]
            if begin <= least and most < end:
                place = at + Index((), -begin)
                return self.read(part, (*index[: value.dim], place, *index[value.dim + 1 :]))
        if len(at.terms) != 1 or at.terms[0][1] != 1 or at.terms[0][0].dim < 0:
            raise NeedsParts(value)
        cuts = tuple(end - at.start for end in ends if least < end <= most)
        raise NeedsParts(value, self._text.nest.order[at.terms[0][0].dim], cuts)

    def _gathered_element(self, value: Gathered, index: Indices) -> str:
        """The element at an index from data, whose C name becomes a `Variable`."""
        dim, n = value.dim, len(value.places.size)
        end = dim + (1 if value.is_spread else n)
        name = self.read(value.places, index if value.is_spread else index[dim:end])
        place = Index(((Variable(name, value.base.size[dim], -1), 1),))
        return self.read(value.base, (*index[:dim], place, *index[end:]))

    def _expression(self, value: Computed, index: Indices) -> str:
        names = [self.read(part, broadcast(part.size)(index)) for part in value.parts]
        used = {f for f in FUNCTIONS if f"{f}(" in value.text}
        self._text.kernel.functions |= used | {CALLED[f] for f in used if f in CALLED}
        return value.text.format(*names)

    def _line(self, value: Value, expression: str, *, is_ahead: bool = False) -> str:
        line = f"const {C_TYPES[value.dtype]} {{}} = {expression};"
        if line not in self._name_of:
            self._name_of[line] = self._text.name("v")
            lines = self.ahead if is_ahead else self.lines
            lines.append(line.format(self._name_of[line]))
        return self._name_of[line]

    def _load(self, value: Value, array: str, at: Index) -> str:
        text = f"{array}[{self._access(at)}]"
        if value.dtype in HALVES:
            text = f"widen_{HALVES[value.dtype]}({text})"
        elif value.dtype is torch.bool:
            # GCC vectorizes conditions that are comparisons, but not bools from memory
            text += " != 0"
        return self._line(value, text, is_ahead=self._is_invariant(at))

    def _is_invariant(self, at: Index) -> bool:
        """Whether an offset is the same in all iterations of the innermost loop.

        A load from it goes ahead of the loop. Inside, GCC can't tell that no store changes the
        element: it may move the load to the end of the loop, which then isn't vectorized.
        """
        if self._piece is None or self._piece[0] is None:
            return False
        others = [loop for loop in self._text.loops if loop != self._piece[0]]
        return all(variable in others or variable in self._text.joined for variable, _ in at.terms)

    def _access(self, at: Index) -> str:
        self._text.accesses.append(at)
        joined = self._text.joined
        # the inner variable of merged loops counts for the outer one, too
        return Index(tuple((v, n) for v, n in at.terms if v not in joined), at.start).text()

    def _flat_index(self) -> Index:
        """The offset of the element in an array that has the sizes of the inner loops."""
        size = self._text.nest.size[self._text.kept :]
        return offset_of(self._text.index[self._text.kept :], dense_stride(size))

    def _check_written(self, number: int, at: Index) -> None:
        """Raise NeedsOld if a read of an input may come after a write to the same element.

        It comes before the write in earlier nests, and in the iteration that writes the element.
        """
        name = f"in{number}"
        if name not in self._text.kernel.written:
            return
        if not any(
            (name, at) == (written, place) and self._number <= last
            for written, place, last in self._text.writes
        ):
            raise NeedsOld(number)

    def _roll_index(self, index: Index, shift: int, n: int) -> Index:
        """The index in the base of a roll by `shift`, in a dimension of `n` elements."""
        if not index.terms:
            return Index((), (index.start - shift) % n)
        (variable, factor), *others = index.terms
        if others or factor != 1:
            raise Declined("a roll of a moved dimension")
        text = self._text
        text.rolls.add((variable, index.start, shift, n))
        if self._piece is not None and variable == self._piece[0]:
            # the roll doesn't wrap around within a piece
            low = self._piece[1] + index.start
            return Index(index.terms, index.start + (low - shift) % n - low)
        base, _, _ = variable.name.partition("_")
        rolled = text.name(f"{base}_")
        difference = f"{index.text()} - {shift}"
        line = f"const long {rolled} = {difference} < 0 ? {difference} + {n} : {difference};"
        lines = text.hoisted.setdefault(base, [])
        equal = [old for old in lines if old.partition(" = ")[2] == line.partition(" = ")[2]]
        if equal:
            rolled = equal[0].split()[2]
        else:
            lines.append(line)
        return Index(((Variable(rolled, n, variable.dim), 1),))


OPERATORS = {"sum": "+", "product": "*"}
"""The operators of reductions that aren't a maximum or minimum."""


@dataclass(frozen=True, slots=True)
class Total:
    """The C accumulator of a reduction. With `at`, an array of `n`, of which `at` subscripts one.

    Long sums of float32 are in double, to be as accurate as eager's cascade sum. A maximum or
    minimum also has a flag for NaN, which the vector instruction loses.
    """

    value: Reduced
    name: str
    n: int = 1
    at: str = ""

    @property
    def _type(self) -> str:
        kind = C_TYPES[self.value.dtype]
        if kind != "float" or self.value.kind != "sum":
            return kind
        n_added = math.prod(self.value.base.size) // math.prod(self.value.size)
        # without `at`, the 8 lanes of a vector add up a part of the numbers each
        return "float" if n_added <= (1 if self.at else 8) * MOST_ADDED else "double"

    @property
    def _has_nan(self) -> bool:
        return self.value.kind in ("max", "min") and self.value.dtype.is_floating_point

    @property
    def _cell(self) -> str:
        return f"{self.name}{self.at}"

    @property
    def _nan(self) -> str:
        return f"{self.name}_nan{self.at}"

    @property
    def result(self) -> str:
        """The C name of the result, which `end` assigns."""
        return f"{self.name}_result{self.at}"

    @property
    def n_bytes(self) -> int:
        """Bytes on the stack."""
        return self.n * (8 + self.value.dtype.itemsize + 4 * self._has_nan)

    @property
    def _identity(self) -> str:
        """The initial value: the result for no elements."""
        if self.value.kind in OPERATORS:
            return "0" if self.value.kind == "sum" else "1"
        is_max = self.value.kind == "max"
        if self.value.dtype.is_floating_point:
            return f"{'-' if is_max else ''}__builtin_inf()"
        info = torch.iinfo(self.value.dtype)
        return f"{info.min + 1}L - 1" if is_max else f"{info.max}L"

    def declared(self) -> Iterator[str]:
        n = f"[{self.n}]" if self.at else ""
        yield f"{self._type} {self.name}{n};"
        yield f"{C_TYPES[self.value.dtype]} {self.name}_result{n};"
        if self._has_nan:
            yield f"int {self.name}_nan{n};"

    def begin(self) -> Iterator[str]:
        yield f"{self._cell} = {self._identity};"
        if self._has_nan:
            yield f"{self._nan} = 0;"

    def begin_parts(self, n: int) -> Iterator[str]:
        """Arrays for the partial results of `n` threads, of which fewer may start."""
        yield f"{self._type} {self.name}_of[{n}];"
        yield f"for (int i = 0; i < {n}; i++) {self.name}_of[i] = {self._identity};"
        if self._has_nan:
            yield f"int {self.name}_nan_of[{n}] = {{}};"

    def keep_part(self, thread: str) -> Iterator[str]:
        yield f"{self.name}_of[{thread}] = {self.name};"
        if self._has_nan:
            yield f"{self.name}_nan_of[{thread}] = {self.name}_nan;"

    def add_part(self, thread: str) -> Iterator[str]:
        yield from self.add(f"{self.name}_of[{thread}]")
        if self._has_nan:
            yield f"{self.name}_nan |= {self.name}_nan_of[{thread}];"

    def clauses(self) -> Iterator[str]:
        """The OpenMP clauses of the innermost loop."""
        if self.at:
            return
        operation = OPERATORS.get(self.value.kind, self.value.kind)
        yield f" reduction({operation}:{self.name})"
        if self._has_nan:
            yield f" reduction(|:{self.name}_nan)"

    def add(self, element: str) -> Iterator[str]:
        operator = OPERATORS.get(self.value.kind)
        if operator is not None:
            yield f"{self._cell} {operator}= {element};"
            return
        sign = ">" if self.value.kind == "max" else "<"
        yield f"{self._cell} = {element} {sign} {self._cell} ? {element} : {self._cell};"
        if self._has_nan:
            yield f"{self._nan} |= {element} != {element};"

    def end(self) -> str:
        text = self._cell
        if self._has_nan:
            text = f'{self._nan} ? __builtin_nan("") : {text}'
        return f"{self.result} = ({C_TYPES[self.value.dtype]})({text});"
