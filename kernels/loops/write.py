"""Writes the kernel of a simple segment.

In: a segment. Out: a `Written`: the text of one C function, and the steps of a program that calls
it, as `torch_inductor.steps_of` describes them; Declined if the segment isn't simple. Called by the
backend `inductor`.

`read` gives the segment's values as functions of an index. A *sink* is a result or a reduction,
which loops over its elements compute. Sinks with loops over the same sizes share a nest. If the
text of a nest shows that a value must be in memory first, writing begins again with that known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.generic import Generic, order_of, strides_like
from lazy_tensor.kernels.loops.body import Kernel, Memory, Nest, Sink, stored_type
from lazy_tensor.kernels.loops.builder import sliced
from lazy_tensor.kernels.loops.cpp import FUNCTIONS, PRELUDE, declared
from lazy_tensor.kernels.loops.index import (
    NeedsOld,
    NeedsParts,
    dense_stride,
    restored,
    stride_of_view,
)
from lazy_tensor.kernels.loops.nest import MOST_LINES, Loops
from lazy_tensor.kernels.loops.read import values_of
from lazy_tensor.kernels.loops.values import (
    HALVES,
    Computed,
    Gathered,
    Input,
    Joined,
    Permuted,
    Reduced,
    Reshaped,
    Rolled,
    Value,
    View,
    copied,
    has_reduction,
    is_cheap,
    parts_of,
    without_ones,
)
from lazy_tensor.kernels.segment import Segment, TensorSpec
from lazy_tensor.kernels.symbolic import Symbols

MOST_APART = 4
"""The most reductions that are stored because a nest reads them outside of their own row. Each one
costs an attempt; with one more, all reductions are stored."""
MOST_ATTEMPTS = 32
"""The most times that writing begins, each time with more values stored or cut."""
NAME = "kernel_0"
"""The name of the C function."""


@dataclass(frozen=True, slots=True)
class Written:
    """The text of a C function, and the steps of a program around it.

    For a generic segment, sizes in the steps are expressions in `symbols`. The kernel is correct
    where all `conditions` hold, which are Python expressions.
    """

    text: str
    steps: dict[str, Any]
    # the last result says whether an index from data was out of range
    has_check: bool
    symbols: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()


def written(segment: Segment, n_threads: int) -> Written:
    """The kernel of `segment` for `n_threads` threads; Declined if the segment isn't simple.

    The kernel of a `Generic` is for all sizes. Its loops are written for the example's sizes, and
    each comparison of sizes that this depends on becomes a condition.
    """
    if not isinstance(segment, Generic):
        return _Writer(segment, n_threads).written()
    symbols = Symbols(segment.own_values)
    kernel = _Writer(segment.with_sizes(symbols.sizes), n_threads, symbols.names).written()
    return replace(kernel, symbols=symbols.names, conditions=symbols.conditions)


def _as_json(sizes: Sequence[Any]) -> list[int | str]:
    """Sizes as steps have them in JSON: integers, or texts of expressions in the symbols."""
    return [n if isinstance(n, int) else str(n) for n in sizes]


def _moved_base(value: Rolled | Gathered) -> Value:
    """The value that is rolled or gathered, behind views and other moves.

    Behind a cast from a 16-bit dtype it is the value before the cast, which needs half the memory.
    """
    base = value.base
    while True:
        match base:
            case View() | Permuted() | Reshaped() | Rolled() | Gathered():
                base = base.base
            case Computed(parts=(part,)) if part.dtype in HALVES and base.text == "(float){0}":
                base = part
            case _:
                return base


def _sinks(value: Value, memory: Memory, *, is_input: bool = False) -> Iterator[Sink]:
    """The sinks that store `value`, a result or a written input, in `memory`.

    For a copy or a view they store its base, so that the loops over the base compute both. For a
    concatenation, one stores each part.
    """
    sinks = partial(_sinks, is_input=is_input)
    match value:
        case Permuted():
            stride = restored(memory.stride, value.order)
            yield from sinks(value.base, replace(memory, stride=stride))
        case Computed() if (part := copied(value)) is not None:
            yield from sinks(part, memory)
        case Joined():
            start = memory.start
            for part in value.parts:
                yield from sinks(part, replace(memory, start=start))
                start += part.size[value.dim] * memory.stride[value.dim]
        case Reshaped() if (base_stride := _stride_in_base(value, memory.stride)) is not None:
            yield from sinks(value.base, replace(memory, stride=base_stride))
        case Input(number=n) if is_input and Memory(f"in{n}", value.stride, value.start) == memory:
            pass  # a part of the input that keeps its elements
        case _:
            yield Sink(value, memory, is_input)


def _stride_in_base(value: Reshaped, stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides by which the base of a value indexes the value's memory; None if none do."""
    return stride_of_view(value.size, stride, value.base.size)


def _repeated_values(results: Iterable[Value]) -> Iterator[Value]:
    """Costly values that are broadcast, so that their consumers would compute them repeatedly.

    Those that depend on a reduction are left out: the nest of the reduction computes them.
    """
    stack, seen = [*results], set[Value]()
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        stack += parts_of(value)
        for part in parts_of(value) if isinstance(value, (Computed, View)) else ():
            base = part
            while isinstance(base, (Permuted, Reshaped)):
                base = base.base
            is_repeated = len(without_ones(part.size)) < len(without_ones(value.size))
            is_costly = isinstance(base, Computed) and not is_cheap(base)
            if is_repeated and is_costly and not has_reduction(base):
                yield base


def _cut_sink(sink: Sink, parts: NeedsParts) -> Iterator[Sink]:
    """The sinks that store a value in parts, cut at `parts.cuts`."""
    memory, dim = sink.memory, parts.dim
    assert memory is not None
    # a new object: `value` itself counts as stored only once all parts are
    value = replace(sink.value)
    for begin, end in pairwise([0, *parts.cuts, value.size[dim]]):
        start = memory.start + begin * memory.stride[dim]
        part = sliced(value, dim, begin, end)
        yield Sink(part, replace(memory, start=start), sink.is_input)


class _Writer:
    """Writes one segment's kernel: sinks, nests, then the text of each nest."""

    def __init__(self, segment: Segment, n_threads: int, symbols: tuple[str, ...] = ()) -> None:
        self._segment, self._n_threads, self._symbols = segment, n_threads, symbols
        self._results: list[str] = []
        self._allocations: dict[str, TensorSpec] = {}
        # the inputs of a generic segment have no gaps
        if not symbols and any(order_of(segment.inputs[i]) is None for i in segment.written):
            raise Declined("a written input with gaps")
        self._values = values_of(segment)
        self._sinks = [*self._all_sinks()]
        # the arrays of results, with which each attempt begins
        self._result_allocations = {**self._allocations}
        # values that are stored before others read them; if results, with the sinks of all parts
        self._early_stores: dict[Value, tuple[Sink, ...]] = {}
        # reductions that a nest reads outside of their own row, and so from memory
        self._memory_reads: set[Value] = set()
        # stored before all else
        results = (*self._values.outputs, *self._values.written.values())
        self._repeated_values = dict.fromkeys(_repeated_values(results))
        # inputs that are written at the end: a nest reads them elsewhere, or a check may fail first
        written = self._values.written if self._values.bad is not None else {}
        self._late_inputs = {f"in{number}" for number in written}
        # the number of nests before those that write these inputs
        self._n_before_writes = 0
        self._begin()

    def _begin(self) -> None:
        """Begin an attempt: without nests, and with memory for the results alone."""
        self._kernel = Kernel(self._n_threads)
        # the C name of an array that the program allocates -> its specification
        self._allocations = {**self._result_allocations}
        self._nests: list[Nest] = []
        self._nest_of_value: dict[Value, int] = {}
        self._nest_of_sink: dict[Sink, int] = {}

    def written(self) -> Written:
        for _ in range(MOST_ATTEMPTS):
            self._begin()
            bodies = self._bodies()
            if bodies is not None:
                text = self._text(bodies)
                return Written(text, self._steps(), has_check=self._values.bad is not None)
        raise Declined("many joined or written tensors")

    def _all_sinks(self) -> Iterator[Sink]:
        """The sinks of results, and of inputs that are written."""
        segment, values = self._segment, self._values
        specs = [segment.specs[number] for number in segment.outputs]
        outputs = [*zip(values.outputs, specs, strict=True)]
        if values.bad is not None:
            outputs.append((values.bad, TensorSpec((), (), torch.bool, torch.device("cpu"))))
        for i, (value, spec) in enumerate(outputs):
            assert spec is not None
            if order_of(spec) is None:
                raise Declined("a result with gaps")
            if self._symbols:
                stride = strides_like(spec, value.size)
                spec = replace(spec, size=value.size, stride=stride)
            self._results.append(f"out{i}")
            yield from _sinks(value, self._allocate(f"out{i}", spec))
        for number, value in values.written.items():
            memory = Memory(f"in{number}", segment.inputs[number].stride)
            yield from _sinks(value, memory, is_input=True)

    def _bodies(self) -> list[str] | None:
        """The text of each nest; None if a value must first be stored or cut."""
        copies = []
        for value in self._repeated_values:
            self._nest_number(value)
        for sink in self._sinks:
            if sink.memory is not None and sink.is_input and sink.memory.name in self._late_inputs:
                self._place_sink(Sink(sink.value, self._new_memory(sink.value)))
                copies.append(sink)
            else:
                self._place_sink(sink)
        self._keep_reductions()
        self._keep_shared()
        self._n_before_writes = len(self._nests)
        for sink in copies:
            value = sink.value
            copy = View(value.size, value.dtype, value, lambda index: index)
            nest = Nest(copy.size, (*range(len(copy.size)),))
            nest.sinks.append(replace(sink, value=copy))
            self._nests.append(nest)
        bodies = []
        for nest in self._nests:
            stores = [sink for sink in nest.sinks if sink.memory is not None]
            self._kernel.written |= {s.memory.name for s in stores if s.memory and s.is_input}
            try:
                bodies.append(Loops(self._kernel, nest).text())
            except NeedsOld as old:
                self._late_inputs.add(f"in{old.number}")
                return None
            except NeedsParts as parts:
                self._cut_nest(nest, parts)
                return None
            for sink in stores:
                if sink.memory is not None and not sink.is_input:
                    self._kernel.in_memory.setdefault(sink.value, sink.memory)
        return bodies

    def _cut_nest(self, nest: Nest, parts: NeedsParts) -> None:
        """Cut the results of a nest as `parts` says, or else store its value before."""
        if isinstance(parts.value, Reduced):
            self._memory_reads.add(parts.value)
            return
        pieces = {
            sink: tuple(_cut_sink(sink, parts))
            for sink in self._sinks
            if sink in nest.sinks and sink.over == nest.over and not isinstance(sink.value, Reduced)
        }
        if not parts.cuts or not pieces:
            self._early_stores[parts.value] = ()
            return
        self._early_stores |= {sink.value: (sink,) for sink in pieces if not sink.is_input}
        self._early_stores = {
            value: tuple(piece for sink in sinks for piece in pieces.get(sink, (sink,)))
            for value, sinks in self._early_stores.items()
        }
        self._sinks = [piece for sink in self._sinks for piece in pieces.get(sink, (sink,))]

    def _allocate(self, name: str, spec: TensorSpec) -> Memory:
        self._allocations[name] = spec
        return Memory(name, spec.stride)

    def _needs(self, value: Value) -> list[Value]:
        """The values that `value` depends on and that other sinks compute, the nearest ones only.

        These are reductions and values in memory. A costly value that is rolled or gathered is put
        into memory, too: each roll would compute it again.
        """
        needs: dict[Value, None] = {}
        seen: set[Value] = set()
        stack = [*parts_of(value)] if isinstance(value, Reduced) else [value]
        while stack:
            part = stack.pop()
            if part in seen:
                continue
            seen.add(part)
            is_repeated = part in self._repeated_values and part is not value
            if isinstance(part, Reduced) or part in self._early_stores or is_repeated:
                needs[part] = None
            elif isinstance(part, (Rolled, Gathered)) and not is_cheap(base := _moved_base(part)):
                needs[base] = None
                stack += parts_of(part)[1:]
            else:
                stack += parts_of(part)
        if len(seen) > MOST_LINES:
            raise Declined("too many values")
        return list(needs)

    def _place_sink(self, sink: Sink) -> int:
        """Put the sink into a nest, not before those of the values it needs; the nest's number."""
        if sink not in self._nest_of_sink:
            self._nest_of_sink[sink] = self._place_new(sink)
        return self._nest_of_sink[sink]

    def _place_new(self, sink: Sink) -> int:
        if isinstance(sink.value, Reduced) and sink.memory is not None:
            number = self._nest_number(sink.value)
            self._nests[number].sinks.append(sink)
            return number
        first = 0
        for value in self._needs(sink.value):
            # a reduction's own nest has its result, for the same row
            number = self._nest_number(value)
            is_there = isinstance(value, Reduced) and not self._is_read_from_memory(value)
            first = max(first, number if is_there else number + 1)
        for i in range(first, len(self._nests)):
            if self._nests[i].can_compute(sink):
                break
        else:
            i = len(self._nests)
            self._nests.append(Nest(sink.over, (*range(len(sink.over)),)))
        nest = self._nests[i]
        if isinstance(sink.value, Reduced):
            nest.order, nest.kept = sink.value.order, len(sink.value.size)
        nest.sinks.append(sink)
        return i

    def _is_read_from_memory(self, value: Reduced) -> bool:
        """Whether only later nests read a reduction, from memory.

        That is so if it is read outside of its own row, and for all if many are.
        """
        return value in self._memory_reads or len(self._memory_reads) > MOST_APART

    def _nest_number(self, value: Value) -> int:
        """The number of the nest that computes a value that a sink needs."""
        if value not in self._nest_of_value:
            if value in self._early_stores:
                number = self._nest_of_parts(value)
            else:
                number = self._place_sink(self._sink_for(value))
            self._nest_of_value[value] = number
        return self._nest_of_value[value]

    def _sink_for(self, value: Value) -> Sink:
        """The sink of a value that others need: that of a result if it is one."""
        if isinstance(value, Reduced):
            return Sink(value, None)
        for sink in self._sinks:
            if sink.value is value and sink.memory is not None and not sink.is_input:
                return sink
        return Sink(value, self._new_memory(value))

    def _nest_of_parts(self, value: Value) -> int:
        """The number of the last nest that stores a part of the value."""
        sinks = self._early_stores[value]
        if sinks and sinks[0].memory is not None:
            first = min(sink.memory.start for sink in sinks if sink.memory is not None)
            memory = replace(sinks[0].memory, start=first)
        else:
            memory = self._new_memory(value)
            sinks = tuple(_sinks(value, memory))
        self._kernel.in_memory[value] = memory
        return max(map(self._place_sink, sinks))

    def _new_memory(self, value: Value) -> Memory:
        """Allocate a contiguous array for a value."""
        stride = dense_stride(value.size)
        spec = TensorSpec(value.size, stride, value.dtype, torch.device("cpu"))
        return self._allocate(f"kept{len(self._allocations)}", spec)

    def _keep_reductions(self) -> None:
        """Give memory to reductions that another nest needs."""
        for i, nest in enumerate(self._nests):
            for value in {v: None for sink in [*nest.sinks] for v in self._needs(sink.value)}:
                number = self._nest_of_value[value]
                if isinstance(value, Reduced) and number != i:
                    self._ensure_stored(value, number)

    def _ensure_stored(self, value: Value, number: int) -> None:
        """Add a sink that stores the value to a nest, if it has none."""
        sinks = self._nests[number].sinks
        if not any(s.value is value and s.memory and not s.is_input for s in sinks):
            sinks.append(Sink(value, self._new_memory(value)))

    def _keep_shared(self) -> None:
        """Give memory to costly values that several nests would compute."""
        first: dict[Value, int] = {}
        for i, nest in enumerate(self._nests):
            stack = [
                part
                for s in nest.sinks
                for part in (parts_of(s.value) if isinstance(s.value, Reduced) else (s.value,))
            ]
            seen: set[Value] = set()
            while stack:
                value = stack.pop()
                is_kept = value in self._early_stores or value in self._repeated_values
                if value in seen or isinstance(value, Reduced) or is_kept:
                    continue
                seen.add(value)
                number = first.setdefault(value, i)
                is_full = value.size == self._nests[number].over and isinstance(value, Computed)
                if number < i and is_full and not is_cheap(value):
                    self._ensure_stored(value, number)
                else:
                    stack += parts_of(value)

    def _text(self, bodies: Sequence[str]) -> str:
        segment = self._segment
        arguments = [
            f"{'' if i in segment.written else 'const '}{stored_type(spec.dtype)}* in{i}"
            for i, spec in enumerate(segment.inputs)
        ]
        numbers = [
            ("double" if kind is float else "long", i) for i, kind in enumerate(segment.scalars)
        ]
        arguments += [f"const {kind}* number{i}_at" for kind, i in numbers]
        arguments += [
            f"{stored_type(spec.dtype)}* {name}" for name, spec in self._allocations.items()
        ]
        arguments += [f"const long {name}" for name in self._symbols]
        return "\n".join([
            "namespace {",
            PRELUDE,
            *(declared(name) for name in FUNCTIONS if name in self._kernel.functions),
            "}",
            'extern "C" __attribute__((visibility("default")))',
            f"void {NAME}({', '.join(arguments)}) {{",
            *(f"const {kind} number{i} = *number{i}_at;" for kind, i in numbers),
            *bodies[: self._n_before_writes],
            # the check's result is the last one
            *([f"if (*{self._results[-1]}) return;"] if self._values.bad is not None else []),
            *bodies[self._n_before_writes :],
            "}",
        ])  # fmt: skip

    def _steps(self) -> dict[str, Any]:
        """As `torch_inductor.steps_of` describes them."""
        arguments = [f"in{i}" for i in range(len(self._segment.inputs))]
        arguments += [f"number{i}" for i in range(len(self._segment.scalars))]
        steps: list[Any] = []
        for name, spec in self._allocations.items():
            dtype = str(spec.dtype).removeprefix("torch.")
            steps.append(["allocate", name, _as_json(spec.size), _as_json(spec.stride), dtype])
        dead = [name for name in [*arguments, *self._allocations] if name not in self._results]
        sizes = [[name] for name in self._symbols]
        steps.append(["kernel", 0, [*arguments, *self._allocations, *sizes], dead])
        return {"arguments": arguments, "steps": steps, "results": self._results}
