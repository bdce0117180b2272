"""The innermost lines of a nest's loops: loads, expressions, stores and reductions.

`Nest` and `Sink` say what is computed, `NestText` is the text as far as it is written, and
`Body` writes one piece of the innermost loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.loops.cpp import FUNCTIONS
from lazy_tensor.kernels.loops.values import (
    C_TYPES,
    Computed,
    Index,
    Indices,
    Input,
    Reduced,
    Rolled,
    Value,
    View,
    broadcast,
    dense_stride,
    offset_of,
)
from lazy_tensor.kernels.segment import Segment

CHEAP = 3
"""The most expressions that are computed again instead of kept."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Where the elements of a value lie: the C name of an array, and strides."""

    name: str
    stride: tuple[int, ...]


@dataclass(eq=False)
class Sink:
    """Something that a nest computes: a reduction, or a value that it stores in `memory`."""

    value: Value
    memory: Memory | None
    # an input is stored in the last pass, when all of it has been read
    is_input: bool = False

    @property
    def over(self) -> tuple[int, ...]:
        """The sizes of its loop."""
        return self.value.base.size if isinstance(self.value, Reduced) else self.value.size


@dataclass(eq=False)
class Nest:
    """Loops over the same sizes. `kept` is the number of outer dimensions, which reductions keep;
    None without a reduction."""

    size: tuple[int, ...]
    kept: int | None = None
    sinks: list[Sink] = field(default_factory=list)

    def takes(self, sink: Sink) -> bool:
        if sink.over == self.size:
            if not isinstance(sink.value, Reduced):
                return True
            kept = len(sink.value.size)
            return self.kept in (None, kept)
        return not isinstance(sink.value, Reduced) and self.is_row(sink.value)

    def is_row(self, value: Value) -> bool:
        """Whether the value has one element for each round of the outer loops."""
        if self.kept is None:
            return False
        row, rest = self.size[: self.kept], value.size[self.kept :]
        return value.size[: self.kept] == row and all(n == 1 for n in rest)


def stored_type(dtype: torch.dtype) -> str:
    """The C type of an element in memory."""
    return "unsigned char" if dtype is torch.bool else C_TYPES[dtype]


def parts_of(value: Value) -> tuple[Value, ...]:
    match value:
        case Computed():
            return value.parts
        case View() | Rolled() | Reduced():
            return (value.base,)
    return ()


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


@dataclass(eq=False)
class Kernel:
    """What the nests of a kernel share.

    `in_memory` are the values that lie in memory, since the nest that stores them has been written.
    `functions` are those of `cpp.FUNCTIONS` that the text calls.
    """

    segment: Segment
    n_threads: int
    in_memory: dict[Value, Memory] = field(default_factory=dict)
    functions: set[str] = field(default_factory=set)


class NestText:
    """The text of a nest as far as it is written: what its innermost lines need to know of it.

    `index` is the index of a value of the nest's sizes, and `kept` the number of outer dimensions.
    `saved` and `stored` are the values that a pass computes and a later one needs, by the array
    that keeps them; `scalars` are the names of reductions' results.
    """

    def __init__(self, kernel: Kernel, nest: Nest) -> None:
        self.kernel, self.nest = kernel, nest
        self.kept = nest.kept or 0
        sizes = [*enumerate(nest.size)]
        self.loops = [(f"i{d}", n) for d, n in sizes if n != 1]
        self.index: Indices = tuple(Index(((f"i{d}", 1),)) if n != 1 else Index() for d, n in sizes)
        self.saved: dict[Value, str] = {}
        self.stored: dict[Value, Memory] = {}
        self.scalars: dict[Reduced, str] = {}
        # variables that are rolled: name, start of the index, shift, size
        self.rolls: set[tuple[str, int, int, int]] = set()
        self._levels: dict[Value, int] = {}
        self.begin()

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

    def __init__(self, text: NestText, number: int, piece: tuple[str, int] | None) -> None:
        self._text, self._number, self._piece = text, number, piece
        self._names: dict[tuple[Value, Indices], str] = {}
        self.lines: list[str] = []
        self.stores: list[str] = []

    def save(self, value: Value) -> None:
        text = self._computed(value, self._text.index)
        self.stores.append(f"{self._text.saved[value]}[{self._access(self._flat())}] = {text};")

    def store(self, sink: Sink, index: Indices) -> None:
        assert sink.memory is not None
        at = self._access(offset_of(index, sink.memory.stride))
        self.stores.append(f"{sink.memory.name}[{at}] = {self.read(sink.value, index)};")

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
            return self._load(value, memory.name, offset_of(index, memory.stride))
        if isinstance(value, Reduced):
            if value not in text.scalars or index != text.index[: text.kept]:
                raise Declined("a reduction that is read at other places")
            return text.scalars[value]
        is_kept = value in text.saved or value in text.stored
        if is_kept and text.level_of(value) < self._number:
            if index != text.index:
                raise Declined("a value that is read at other places")
            if value in text.saved:
                return self._load(value, text.saved[value], self._flat())
            memory = text.stored[value]
            return self._load(value, memory.name, offset_of(index, memory.stride))
        return self._computed(value, index)

    def _computed(self, value: Value, index: Indices) -> str:
        key = (value, index)
        if key in self._names:
            return self._names[key]
        match value:
            case Input():
                if value.number in self._text.kernel.segment.written:
                    self._check_written(value, index)
                at = offset_of(index, value.stride) + Index((), value.start)
                found = self._load(value, f"in{value.number}", at)
            case View():
                found = self.read(value.base, value.place(index))
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

    def _expression(self, value: Computed, index: Indices) -> str:
        names = [self.read(part, broadcast(part.size)(index)) for part in value.parts]
        used = {f for f in FUNCTIONS if f"{f}(" in value.text}
        self._text.kernel.functions |= used | ({"exp"} if "quick_erf" in used else set())
        return value.text.format(*names)

    def _line(self, value: Value, expression: str) -> str:
        name = self._text.name("v")
        self.lines.append(f"const {C_TYPES[value.dtype]} {name} = {expression};")
        return name

    def _load(self, value: Value, array: str, at: Index) -> str:
        # GCC has vectors for conditions that are comparisons, and not for bools from memory
        is_bool = " != 0" if value.dtype is torch.bool else ""
        return self._line(value, f"{array}[{self._access(at)}]{is_bool}")

    def _access(self, at: Index) -> str:
        self._text.accesses.append(at)
        return at.text()

    def _flat(self) -> Index:
        """The number of the element within the inner loops."""
        size = self._text.nest.size[self._text.kept :]
        return offset_of(self._text.index[self._text.kept :], dense_stride(size))

    def _check_written(self, value: Input, index: Indices) -> None:
        """An input that is written may be read at the written element alone, by the same loop."""
        spec = self._text.kernel.segment.inputs[value.number]
        is_same = value.size == spec.size and value.stride == spec.stride and not value.start
        arrays = [s.memory.name for s in self._text.nest.sinks if s.memory is not None]
        if not (is_same and index == self._text.index and f"in{value.number}" in arrays):
            raise Declined("a written input that is read at other places")

    def _rolled(self, index: Index, shift: int, n: int) -> Index:
        """The index, of a dimension of `n` elements, from which a roll by `shift` takes."""
        if not index.terms:
            return Index((), (index.start - shift) % n)
        (name, factor), *others = index.terms
        if others or factor != 1:
            raise Declined("a roll of a moved dimension")
        text = self._text
        text.rolls.add((name, index.start, shift, n))
        if self._piece is not None and name == self._piece[0]:
            # the piece doesn't wrap around
            low = self._piece[1] + index.start
            return Index(index.terms, index.start + (low - shift) % n - low)
        base, _, _ = name.partition("_")
        rolled = text.name(f"{base}_")
        moved = f"{index.text()} - {shift}"
        line = f"const long {rolled} = {moved} < 0 ? {moved} + {n} : {moved};"
        lines = text.hoisted.setdefault(base, [])
        same = [one for one in lines if one.partition(" = ")[2] == line.partition(" = ")[2]]
        if same:
            rolled = same[0].split()[2]
        else:
            lines.append(line)
        return Index(((rolled, 1),))


@dataclass(frozen=True, slots=True)
class Total:
    """The accumulators of a reduction.

    Sums of float32 are in double: as accurate as eager's sums in cascades. A maximum notes whether
    it met a NaN, as the vector instruction forgets it.
    """

    value: Reduced
    name: str

    @property
    def _type(self) -> str:
        kind = C_TYPES[self.value.dtype]
        return "double" if self.value.kind == "sum" and kind == "float" else kind

    @property
    def _has_nan(self) -> bool:
        return self.value.kind != "sum" and self.value.dtype.is_floating_point

    @property
    def _first(self) -> str:
        """What the result is of no elements."""
        if self.value.kind == "sum":
            return "0"
        is_max = self.value.kind == "max"
        if self.value.dtype.is_floating_point:
            return f"{'-' if is_max else ''}__builtin_inf()"
        info = torch.iinfo(self.value.dtype)
        return f"{info.min + 1}L - 1" if is_max else f"{info.max}L"

    def begin(self) -> Iterator[str]:
        yield f"{self._type} {self.name} = {self._first};"
        if self._has_nan:
            yield f"int {self.name}_nan = 0;"

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
        operation = {"sum": "+"}.get(self.value.kind, self.value.kind)
        yield f" reduction({operation}:{self.name})"
        if self._has_nan:
            yield f" reduction(|:{self.name}_nan)"

    def add(self, element: str) -> Iterator[str]:
        if self.value.kind == "sum":
            yield f"{self.name} += {element};"
            return
        sign = ">" if self.value.kind == "max" else "<"
        yield f"{self.name} = {element} {sign} {self.name} ? {element} : {self.name};"
        if self._has_nan:
            yield f"{self.name}_nan |= {element} != {element};"

    def end(self, name: str) -> str:
        found = self.name
        if self._has_nan:
            found = f'{self.name}_nan ? __builtin_nan("") : {self.name}'
        kind = C_TYPES[self.value.dtype]
        return f"const {kind} {name} = ({kind})({found});"
