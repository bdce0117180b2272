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
"""The most float32 numbers that are added one to another in float32."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Where the elements of a value lie: the C name of an array, strides, and the first element."""

    name: str
    stride: tuple[int, ...]
    start: int = 0

    def at(self, index: Indices) -> Index:
        return offset_of(index, self.stride) + Index((), self.start)


@dataclass(eq=False)
class Sink:
    """Something that a nest computes: a reduction, or a value that it stores in `memory`."""

    value: Value
    memory: Memory | None
    # an input is stored in the last pass, when all of it has been read
    is_input: bool = False

    @property
    def over(self) -> tuple[int, ...]:
        """The sizes of the tensor over which it loops."""
        return self.value.base.size if isinstance(self.value, Reduced) else self.value.size


@dataclass(eq=False)
class Nest:
    """Loops over a tensor's sizes `over`, its dimensions in the given order. `kept` is the number
    of outer dimensions, which reductions keep; None without a reduction."""

    over: tuple[int, ...]
    order: tuple[int, ...]
    kept: int | None = None
    sinks: list[Sink] = field(default_factory=list)

    @property
    def size(self) -> tuple[int, ...]:
        """The sizes in the order of the loops."""
        return tuple(self.over[d] for d in self.order)

    def takes(self, sink: Sink) -> bool:
        value = sink.value
        if not isinstance(value, Reduced):
            return sink.over == self.over or self.is_row(value)
        is_same = (value.order, len(value.size)) == (self.order, self.kept)
        return sink.over == self.over and (self.kept is None or is_same)

    def is_row(self, value: Value) -> bool:
        """Whether the value has one element for each round of the outer loops."""
        row = self.size[: self.kept]
        return self.kept is not None and without_ones(value.size) == without_ones(row)


def stored_type(dtype: torch.dtype) -> str:
    """The C type of an element in memory."""
    if dtype in HALVES:
        return "unsigned short"
    return "unsigned char" if dtype is torch.bool else C_TYPES[dtype]


def _as_stored(dtype: torch.dtype, text: str) -> str:
    """A variable as memory has it."""
    return f"narrow_{HALVES[dtype]}({text})" if dtype in HALVES else text


@dataclass(eq=False)
class Kernel:
    """What the nests of a kernel share.

    `in_memory` are the values that lie in memory, since the nest that stores them has been written.
    `written` are the inputs that the nest at hand or one before it writes.
    `functions` are those of `cpp.FUNCTIONS` that the text calls.
    """

    n_threads: int
    in_memory: dict[Value, Memory] = field(default_factory=dict)
    functions: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)


class NestText:
    """The text of a nest as far as it is written: what its innermost lines need to know of it.

    `index` is the index of an element in the order of the loops, and `kept` the number of outer
    dimensions.
    `saved` and `stored` are the values that a pass computes and a later one needs, by the array
    that keeps them; `results` are the names of reductions' results, and of functions of these that
    have one element for each round of the outer loops. `writes` are those of inputs: the name, the
    place in memory and the number of the pass.
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
        # variables of loops that are one with the next loop
        self.joined: set[Variable] = set()
        # variables that are rolled: variable, start of the index, shift, size
        self.rolls: set[tuple[Variable, int, int, int]] = set()
        self._levels: dict[Value, int] = {}
        self.begin()

    def _index(self) -> Indices:
        """The index that the loops make. Each dimension has one loop or several."""
        found = [Index() for _ in self.nest.size]
        steps = [1 for _ in self.nest.size]
        for variable in reversed(self.loops):
            found[variable.dim] += Index(((variable, steps[variable.dim]),))
            steps[variable.dim] *= variable.n
        return tuple(found)

    @property
    def full(self) -> Indices:
        """The index of an element of a value that has the nest's sizes."""
        return restored(self.index, self.nest.order)

    def row(self, value: Value) -> Indices:
        """The index of a value that has one element for each round of the outer loops."""
        outer = zip(self.index[: self.kept], self.nest.size, strict=False)
        left = [index for index, n in outer if n != 1]
        return tuple(left.pop(0) if n != 1 else Index() for n in value.size)

    def begin(self) -> None:
        """Begin the text again. Which variables are rolled stays known."""
        # how each access of memory moves with the variables
        self.accesses: list[Index] = []
        # lines that begin a round of a variable's loop
        self.hoisted: dict[str, list[str]] = {}
        self._n_names = 0

    def name(self, prefix: str) -> str:
        """A new name."""
        self._n_names += 1
        return f"{prefix}{self._n_names}"

    def level_of(self, value: Value, *, inside: bool = False) -> int:
        """The number of the first pass that can compute the value. `inside`: a reduction's pass
        itself, while its result is there for the next one."""
        if value in self.kernel.in_memory:
            return 0
        if isinstance(value, Reduced):
            is_here = any(s.value is value and s.memory is None for s in self.nest.sinks)
            return self.level_of(value.base) + (0 if inside and is_here else 1)
        found = self._levels.get(value)
        if found is None:
            found = self._levels[value] = max(map(self.level_of, parts_of(value)), default=0)
        return found


class Body:
    """The innermost lines of a loop, for a piece of it that begins at `piece`: variable, start.

    Without a piece it is outside of the inner loops, where only values of rows are known.
    """

    def __init__(
        self, text: NestText, number: int, piece: tuple[Variable | None, int] | None
    ) -> None:
        self._text, self._number, self._piece = text, number, piece
        self._names: dict[tuple[Value, Indices], str] = {}
        self._name_of: dict[str, str] = {}
        # loads that are the same in all rounds of the innermost loop: lines ahead of it
        self.ahead: list[str] = []
        self.lines: list[str] = []
        self.stores: list[str] = []

    def save(self, value: Value) -> None:
        text = self._computed(value, self._text.full)
        found = _as_stored(value.dtype, text)
        self.stores.append(f"{self._text.saved[value]}[{self._access(self._flat())}] = {found};")

    def keep(self, value: Value, name: str) -> None:
        """Keep a value that has one element for each round of the outer loops."""
        self.lines.append(f"{name} = {self._computed(value, self._text.row(value))};")

    def store(self, sink: Sink, index: Indices) -> None:
        assert sink.memory is not None
        at = self._access(sink.memory.at(index))
        found = _as_stored(sink.value.dtype, self.read(sink.value, index))
        self.stores.append(f"{sink.memory.name}[{at}] = {found};")

    def read(self, value: Value, index: Indices) -> str:
        """The C name of an element."""
        key = (value, index)
        found = self._names.get(key)
        if found is None:
            found = self._names[key] = self._found(value, index)
        return found

    def _found(self, value: Value, index: Indices) -> str:
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
                return self._load(value, text.saved[value], self._flat())
            memory = text.stored[value]
            return self._load(value, memory.name, memory.at(index))
        return self._computed(value, index)

    def _computed(self, value: Value, index: Indices) -> str:
        key = (value, index)
        if key in self._names:
            return self._names[key]
        match value:
            case Input():
                at = offset_of(index, value.stride) + Index((), value.start)
                self._check_written(value.number, at)
                found = self._load(value, f"in{value.number}", at)
            case Reshaped():
                try:
                    place = value.place(index)
                except Declined:
                    raise NeedsParts(value) from None
                found = self.read(value.base, place)
            case View() | Permuted():
                found = self.read(value.base, value.place(index))
            case Joined():
                found = self._part(value, index)
            case Gathered():
                found = self._gathered(value, index)
            case Place():
                found = self._line(value, self._access(index[value.dim]))
            case Rolled():
                moved = self._rolled(index[value.dim], value.shift, value.size[value.dim])
                place = (*index[: value.dim], moved, *index[value.dim + 1 :])
                found = self.read(value.base, place)
            case Computed():
                found = self._line(value, self._expression(value, index))
            case _:
                raise AssertionError(value)
        self._names[key] = found
        return found

    def _part(self, value: Joined, index: Indices) -> str:
        """The element of the part in which it is. The loop may not go on from one to the next."""
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

    def _gathered(self, value: Gathered, index: Indices) -> str:
        """The element at an index from data, which is a variable of its own name."""
        dim, n = value.dim, len(value.places.size)
        behind = dim + (1 if value.is_spread else n)
        name = self.read(value.places, index if value.is_spread else index[dim:behind])
        place = Index(((Variable(name, value.base.size[dim], -1), 1),))
        return self.read(value.base, (*index[:dim], place, *index[behind:]))

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
            # GCC has vectors for conditions that are comparisons, and not for bools from memory
            text += " != 0"
        return self._line(value, text, is_ahead=self._is_same(at))

    def _is_same(self, at: Index) -> bool:
        """Whether a place is the same in all rounds of the innermost loop.

        GCC can't tell that no store changes what lies there. It may move the load to the end of the
        loop, which then has no vectors.
        """
        if self._piece is None or self._piece[0] is None:
            return False
        others = [loop for loop in self._text.loops if loop != self._piece[0]]
        return all(variable in others or variable in self._text.joined for variable, _ in at.terms)

    def _access(self, at: Index) -> str:
        self._text.accesses.append(at)
        joined = self._text.joined
        return Index(tuple(one for one in at.terms if one[0] not in joined), at.start).text()

    def _flat(self) -> Index:
        """The number of the element within the inner loops."""
        size = self._text.nest.size[self._text.kept :]
        return offset_of(self._text.index[self._text.kept :], dense_stride(size))

    def _check_written(self, number: int, at: Index) -> None:
        """An input may be read before it is written: in nests before, or by the same round."""
        name = f"in{number}"
        if name not in self._text.kernel.written:
            return
        if not any(
            (name, at) == (written, place) and self._number <= last
            for written, place, last in self._text.writes
        ):
            raise NeedsOld(number)

    def _rolled(self, index: Index, shift: int, n: int) -> Index:
        """The index, of a dimension of `n` elements, from which a roll by `shift` takes."""
        if not index.terms:
            return Index((), (index.start - shift) % n)
        (variable, factor), *others = index.terms
        if others or factor != 1:
            raise Declined("a roll of a moved dimension")
        text = self._text
        text.rolls.add((variable, index.start, shift, n))
        if self._piece is not None and variable == self._piece[0]:
            # the piece doesn't wrap around
            low = self._piece[1] + index.start
            return Index(index.terms, index.start + (low - shift) % n - low)
        base, _, _ = variable.name.partition("_")
        rolled = text.name(f"{base}_")
        moved = f"{index.text()} - {shift}"
        line = f"const long {rolled} = {moved} < 0 ? {moved} + {n} : {moved};"
        lines = text.hoisted.setdefault(base, [])
        same = [one for one in lines if one.partition(" = ")[2] == line.partition(" = ")[2]]
        if same:
            rolled = same[0].split()[2]
        else:
            lines.append(line)
        return Index(((Variable(rolled, n, variable.dim), 1),))


OPERATORS = {"sum": "+", "product": "*"}
"""The operators of reductions that aren't a maximum or minimum."""


@dataclass(frozen=True, slots=True)
class Total:
    """The accumulator of a reduction, or one for each column: `n` of them, this one `[at]`.

    Long sums of float32 are in double: as accurate as eager's sums in cascades. A maximum notes
    whether it met a NaN, as the vector instruction forgets it.
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
        # rows are added up in the parts of a vector
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
        """What the reduction gives, after `end`."""
        return f"{self.name}_result{self.at}"

    @property
    def n_bytes(self) -> int:
        """Bytes on the stack."""
        return self.n * (8 + self.value.dtype.itemsize + 4 * self._has_nan)

    @property
    def _first(self) -> str:
        """What the result is of no elements."""
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
        yield f"{self._cell} = {self._first};"
        if self._has_nan:
            yield f"{self._nan} = 0;"

    def begin_parts(self, n: int) -> Iterator[str]:
        """Arrays for what each of `n` threads adds up; there may come fewer."""
        yield f"{self._type} {self.name}_of[{n}];"
        yield f"for (int i = 0; i < {n}; i++) {self.name}_of[i] = {self._first};"
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
        found = self._cell
        if self._has_nan:
            found = f'{self._nan} ? __builtin_nan("") : {found}'
        return f"{self.result} = ({C_TYPES[self.value.dtype]})({found});"
