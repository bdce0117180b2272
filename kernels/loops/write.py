"""Writes the kernel of a simple segment.

In: a segment. Out: a `Written`: the text of one C function and the steps of a program that calls
it, as `torch_inductor.steps_of` describes them; Declined if the segment isn't simple. Called by the
backend `inductor`.

`read` gives the segment's values as functions of an index. Each result and each reduction is
computed by a loop over its elements. Loops over the same sizes become one nest.
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
"""The most reductions that are found, one in each attempt, to be read elsewhere than in their own
row. With one more, all reductions are stored."""
MOST_ATTEMPTS = 32
"""The most times that writing begins again, with something more stored or cut."""
NAME = "kernel_0"
"""The name of the C function."""


@dataclass(frozen=True, slots=True)
class Written:
    """The text of a C function, and the steps of a program around it.

    Of a generic segment, sizes among the steps are expressions in `symbols`, and the kernel is
    correct where `conditions` hold, which are Python expressions.
    """

    text: str
    steps: dict[str, Any]
    # the last result says whether an index from data was out of range
    has_check: bool
    symbols: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()


def written(segment: Segment, n_threads: int) -> Written:
    """The kernel of `segment` for so many threads; Declined if it isn't simple.

    The kernel of a `Generic` is for all sizes. Its loops are written for those of the example, and
    what that depends on becomes a condition.
    """
    if not isinstance(segment, Generic):
        return _Writer(segment, n_threads).written()
    symbols = Symbols(segment.own_values)
    found = _Writer(segment.with_sizes(symbols.sizes), n_threads, symbols.names).written()
    return replace(found, symbols=symbols.names, conditions=symbols.conditions)


def _told(sizes: Sequence[Any]) -> list[int | str]:
    """Sizes as steps have them: integers, or expressions in the symbols."""
    return [n if isinstance(n, int) else str(n) for n in sizes]


def _moved(value: Rolled | Gathered) -> Value:
    """What is moved, behind views and other moves. Of 16 bits, it is kept as such."""
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
    """The sinks of a result or an input. If that is a copy or a view of a value, they store this
    value, so that loops over the same sizes compute both; if it is joined of parts, they store each
    part."""
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
        case Reshaped() if (shown := _seen_as(value, memory.stride)) is not None:
            yield from sinks(value.base, replace(memory, stride=shown))
        case Input(number=n) if is_input and Memory(f"in{n}", value.stride, value.start) == memory:
            pass  # a part that isn't written
        case _:
            yield Sink(value, memory, is_input)


def _seen_as(value: Reshaped, stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of a value's memory when it is seen in the sizes of its base, if it can be."""
    return stride_of_view(value.size, stride, value.base.size)


def _repeated(results: Iterable[Value]) -> Iterator[Value]:
    """Values of functions that broadcasting repeats, each of which is to be computed once.

    What depends on a reduction is left out: it is computed in the loops of the reduction.
    """
    left, seen = [*results], set[Value]()
    while left:
        value = left.pop()
        if value in seen:
            continue
        seen.add(value)
        left += parts_of(value)
        for part in parts_of(value) if isinstance(value, (Computed, View)) else ():
            base = part
            while isinstance(base, (Permuted, Reshaped)):
                base = base.base
            is_repeated = len(without_ones(part.size)) < len(without_ones(value.size))
            is_costly = isinstance(base, Computed) and not is_cheap(base)
            if is_repeated and is_costly and not has_reduction(base):
                yield base


def _cut(sink: Sink, parts: NeedsParts) -> Iterator[Sink]:
    """The sinks of the parts of a value."""
    memory, dim = sink.memory, parts.dim
    assert memory is not None
    # another object, as the value itself is there only when its parts are
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
        self._made: dict[str, TensorSpec] = {}
        # those of a generic segment have no gaps
        if not symbols and any(order_of(segment.inputs[i]) is None for i in segment.written):
            raise Declined("a written input with gaps")
        self._values = values_of(segment)
        self._sinks = [*self._all_sinks()]
        # of results alone
        self._made_first = {**self._made}
        # values that are stored before others read them, by these sinks if they are results
        self._stored: dict[Value, tuple[Sink, ...]] = {}
        # reductions that were found to be read elsewhere than in their own row
        self._apart: set[Value] = set()
        # values that are stored first of all
        results = (*self._values.outputs, *self._values.written.values())
        self._repeated = dict.fromkeys(_repeated(results))
        # inputs that are written at the end: they are read at other places, or an index may be bad
        written = self._values.written if self._values.bad is not None else {}
        self._late = {f"in{number}" for number in written}
        # nests of all but these inputs
        self._n_before_writes = 0
        self._begin()

    def _begin(self) -> None:
        """Begin with the results alone, and without any nest."""
        self._kernel = Kernel(self._n_threads)
        # name -> its specification; results and reductions that another nest reads
        self._made = {**self._made_first}
        self._nests: list[Nest] = []
        self._nest_of: dict[Value, int] = {}
        self._placed: dict[Sink, int] = {}

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
            yield from _sinks(value, self._make(f"out{i}", spec))
        for number, value in values.written.items():
            memory = Memory(f"in{number}", segment.inputs[number].stride)
            yield from _sinks(value, memory, is_input=True)

    def _bodies(self) -> list[str] | None:
        """The text of each nest; None if something must be stored or cut for it."""
        copies = []
        for value in self._repeated:
            self._home(value)
        for sink in self._sinks:
            if sink.memory is not None and sink.is_input and sink.memory.name in self._late:
                self._place(Sink(sink.value, self._kept(sink.value)))
                copies.append(sink)
            else:
                self._place(sink)
        self._keep_reductions()
        self._keep_shared()
        self._n_before_writes = len(self._nests)
        for sink in copies:
            value = sink.value
            same = View(value.size, value.dtype, value, lambda index: index)
            nest = Nest(same.size, (*range(len(same.size)),))
            nest.sinks.append(replace(sink, value=same))
            self._nests.append(nest)
        bodies = []
        for nest in self._nests:
            stores = [sink for sink in nest.sinks if sink.memory is not None]
            self._kernel.written |= {s.memory.name for s in stores if s.memory and s.is_input}
            try:
                bodies.append(Loops(self._kernel, nest).text())
            except NeedsOld as old:
                self._late.add(f"in{old.number}")
                return None
            except NeedsParts as parts:
                self._cut(nest, parts)
                return None
            for sink in stores:
                if sink.memory is not None and not sink.is_input:
                    self._kernel.in_memory.setdefault(sink.value, sink.memory)
        return bodies

    def _cut(self, nest: Nest, parts: NeedsParts) -> None:
        """Cut the results that a nest stores into parts, or else have a value be stored."""
        if isinstance(parts.value, Reduced):
            self._apart.add(parts.value)
            return
        pieces = {
            sink: tuple(_cut(sink, parts))
            for sink in self._sinks
            if sink in nest.sinks and sink.over == nest.over and not isinstance(sink.value, Reduced)
        }
        if not parts.cuts or not pieces:
            self._stored[parts.value] = ()
            return
        self._stored |= {sink.value: (sink,) for sink in pieces if not sink.is_input}
        self._stored = {
            value: tuple(piece for sink in sinks for piece in pieces.get(sink, (sink,)))
            for value, sinks in self._stored.items()
        }
        self._sinks = [piece for sink in self._sinks for piece in pieces.get(sink, (sink,))]

    def _make(self, name: str, spec: TensorSpec) -> Memory:
        self._made[name] = spec
        return Memory(name, spec.stride)

    def _needs(self, value: Value) -> list[Value]:
        """The values that other sinks compute for this one, without what those need in turn.

        These are reductions. Values that are rolled are stored, too: each roll would compute them
        again.
        """
        found: dict[Value, None] = {}
        seen: set[Value] = set()
        left = [*parts_of(value)] if isinstance(value, Reduced) else [value]
        while left:
            one = left.pop()
            if one in seen:
                continue
            seen.add(one)
            is_repeated = one in self._repeated and one is not value
            if isinstance(one, Reduced) or one in self._stored or is_repeated:
                found[one] = None
            elif isinstance(one, (Rolled, Gathered)) and not is_cheap(base := _moved(one)):
                found[base] = None
                left += parts_of(one)[1:]
            else:
                left += parts_of(one)
        if len(seen) > MOST_LINES:
            raise Declined("too many values")
        return list(found)

    def _place(self, sink: Sink) -> int:
        """Put the sink into a nest behind those of the values that it needs; its number."""
        if sink not in self._placed:
            self._placed[sink] = self._place_new(sink)
        return self._placed[sink]

    def _place_new(self, sink: Sink) -> int:
        if isinstance(sink.value, Reduced) and sink.memory is not None:
            home = self._home(sink.value)
            self._nests[home].sinks.append(sink)
            return home
        first = 0
        for value in self._needs(sink.value):
            # a reduction's result is there in its own nest
            home = self._home(value)
            is_there = isinstance(value, Reduced) and not self._is_apart(value)
            first = max(first, home if is_there else home + 1)
        for i in range(first, len(self._nests)):
            if self._nests[i].takes(sink):
                break
        else:
            i = len(self._nests)
            self._nests.append(Nest(sink.over, (*range(len(sink.over)),)))
        nest = self._nests[i]
        if isinstance(sink.value, Reduced):
            nest.order, nest.kept = sink.value.order, len(sink.value.size)
        nest.sinks.append(sink)
        return i

    def _is_apart(self, value: Reduced) -> bool:
        """Whether only later nests read a reduction, from memory. So it is for one that is read
        elsewhere than in its own row, and for all if there are many of these."""
        return value in self._apart or len(self._apart) > MOST_APART

    def _home(self, value: Value) -> int:
        """The number of the nest that computes what another sink needs."""
        if value not in self._nest_of:
            if value in self._stored:
                home = self._home_of_parts(value)
            else:
                home = self._place(self._sink_for(value))
            self._nest_of[value] = home
        return self._nest_of[value]

    def _sink_for(self, value: Value) -> Sink:
        """The sink of a value that others need: that of a result if it is one."""
        if isinstance(value, Reduced):
            return Sink(value, None)
        for sink in self._sinks:
            if sink.value is value and sink.memory is not None and not sink.is_input:
                return sink
        return Sink(value, self._kept(value))

    def _home_of_parts(self, value: Value) -> int:
        """The number of the last nest that stores a part of the value."""
        sinks = self._stored[value]
        if sinks and sinks[0].memory is not None:
            first = min(sink.memory.start for sink in sinks if sink.memory is not None)
            memory = replace(sinks[0].memory, start=first)
        else:
            memory = self._kept(value)
            sinks = tuple(_sinks(value, memory))
        self._kernel.in_memory[value] = memory
        return max(map(self._place, sinks))

    def _kept(self, value: Value) -> Memory:
        """New memory for a value."""
        stride = dense_stride(value.size)
        spec = TensorSpec(value.size, stride, value.dtype, torch.device("cpu"))
        return self._make(f"kept{len(self._made)}", spec)

    def _keep_reductions(self) -> None:
        """Give memory to reductions that another nest needs."""
        for i, nest in enumerate(self._nests):
            for value in {one: None for sink in [*nest.sinks] for one in self._needs(sink.value)}:
                home = self._nest_of[value]
                if isinstance(value, Reduced) and home != i:
                    self._keep(value, home)

    def _keep(self, value: Value, home: int) -> None:
        """Have a nest store a value, if it doesn't."""
        sinks = self._nests[home].sinks
        if not any(s.value is value and s.memory and not s.is_input for s in sinks):
            sinks.append(Sink(value, self._kept(value)))

    def _keep_shared(self) -> None:
        """Give memory to what several nests would compute, if that is worth it."""
        first: dict[Value, int] = {}
        for i, nest in enumerate(self._nests):
            left = [
                part
                for s in nest.sinks
                for part in (parts_of(s.value) if isinstance(s.value, Reduced) else (s.value,))
            ]
            seen: set[Value] = set()
            while left:
                value = left.pop()
                is_kept = value in self._stored or value in self._repeated
                if value in seen or isinstance(value, Reduced) or is_kept:
                    continue
                seen.add(value)
                home = first.setdefault(value, i)
                is_full = value.size == self._nests[home].over and isinstance(value, Computed)
                if home < i and is_full and not is_cheap(value):
                    self._keep(value, home)
                else:
                    left += parts_of(value)

    def _text(self, bodies: Sequence[str]) -> str:
        segment = self._segment
        arguments = [
            f"{'' if i in segment.written else 'const '}{stored_type(one.dtype)}* in{i}"
            for i, one in enumerate(segment.inputs)
        ]
        numbers = [
            ("double" if kind is float else "long", i) for i, kind in enumerate(segment.scalars)
        ]
        arguments += [f"const {kind}* number{i}_at" for kind, i in numbers]
        arguments += [f"{stored_type(spec.dtype)}* {name}" for name, spec in self._made.items()]
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
        for name, spec in self._made.items():
            dtype = str(spec.dtype).removeprefix("torch.")
            steps.append(["allocate", name, _told(spec.size), _told(spec.stride), dtype])
        dead = [name for name in [*arguments, *self._made] if name not in self._results]
        sizes = [[name] for name in self._symbols]
        steps.append(["kernel", 0, [*arguments, *self._made, *sizes], dead])
        return {"arguments": arguments, "steps": steps, "results": self._results}
