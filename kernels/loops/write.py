"""Writes the kernel of a simple segment.

In: a segment. Out: a `Written`: the text of one C function and the steps of a program that calls
it, as `torch_inductor.steps_of` describes them; Declined if the segment isn't simple. Called by the
backend `inductor`.

`read` gives the segment's values as functions of an index. Each result and each reduction is
computed by a loop over its elements. Loops over the same sizes become one nest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.generic import order_of
from lazy_tensor.kernels.loops.body import (
    Kernel,
    Memory,
    Nest,
    Sink,
    is_cheap,
    parts_of,
    stored_type,
)
from lazy_tensor.kernels.loops.cpp import FUNCTIONS, PRELUDE, declared
from lazy_tensor.kernels.loops.nest import MOST_LINES, Loops
from lazy_tensor.kernels.loops.read import values_of
from lazy_tensor.kernels.loops.values import Reduced, Rolled, Value, View, dense_stride
from lazy_tensor.kernels.segment import Segment, TensorSpec

NAME = "kernel_0"
"""The name of the C function."""
LEAST_INNER = 16
"""The least elements of a row that is reduced: shorter loops have no vectors."""


@dataclass(frozen=True, slots=True)
class Written:
    """The text of a C function, and the steps of a program around it."""

    text: str
    steps: dict[str, Any]


def written(segment: Segment, n_threads: int) -> Written:
    """The kernel of `segment` for so many threads; Declined if it isn't simple."""
    return _Writer(segment, n_threads).written()


def _moved(value: Rolled) -> Value:
    """What is rolled, behind views and other rolls."""
    base = value.base
    while isinstance(base, (View, Rolled)):
        base = base.base
    return base


class _Writer:
    """Writes one segment's kernel: sinks, nests, then the text of each nest."""

    def __init__(self, segment: Segment, n_threads: int) -> None:
        self._segment = segment
        self._kernel = Kernel(segment, n_threads)
        self._results: list[str] = []
        # name -> its specification; results and reductions that another nest reads
        self._made: dict[str, TensorSpec] = {}
        self._nests: list[Nest] = []
        self._nest_of: dict[Value, int] = {}

    def written(self) -> Written:
        segment = self._segment
        self._check_inputs()
        values = values_of(segment)
        sinks = []
        for i, (value, number) in enumerate(zip(values.outputs, segment.outputs, strict=True)):
            spec = segment.specs[number]
            assert spec is not None
            if order_of(spec) is None:
                raise Declined("a result with gaps")
            sinks.append(Sink(value, self._make(f"out{i}", spec)))
            self._results.append(f"out{i}")
        for number, value in values.written.items():
            spec = segment.inputs[number]
            sinks.append(Sink(value, Memory(f"in{number}", spec.stride), is_input=True))
        for sink in sinks:
            self._place(sink)
        self._keep_what_others_read()
        bodies = []
        for nest in self._nests:
            bodies.append(Loops(self._kernel, nest).text())
            for sink in nest.sinks:
                if sink.memory is not None and not sink.is_input:
                    self._kernel.in_memory.setdefault(sink.value, sink.memory)
        return Written(self._text(bodies), self._steps())

    def _check_inputs(self) -> None:
        for spec in self._segment.specs:
            if spec is not None and (0 in spec.size or spec.device.type != "cpu"):
                raise Declined("an empty tensor, or one that is not on the CPU")
        for i in self._segment.written:
            if order_of(self._segment.inputs[i]) is None:
                raise Declined("a written input with gaps")

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
            if isinstance(one, Reduced):
                found[one] = None
            elif isinstance(one, Rolled) and not is_cheap(base := _moved(one)):
                found[base] = None
            else:
                left += parts_of(one)
        if len(seen) > MOST_LINES:
            raise Declined("too many values")
        return list(found)

    def _place(self, sink: Sink) -> int:
        """Put the sink into a nest behind those of the values that it needs; its number."""
        if isinstance(sink.value, Reduced) and sink.memory is not None:
            home = self._home(sink.value)
            self._nests[home].sinks.append(sink)
            return home
        first = 0
        for value in self._needs(sink.value):
            # a reduction's result is there in its own nest
            home = self._home(value)
            first = max(first, home if isinstance(value, Reduced) else home + 1)
        for i in range(first, len(self._nests)):
            if self._nests[i].takes(sink):
                break
        else:
            i = len(self._nests)
            self._nests.append(Nest(sink.over))
        nest = self._nests[i]
        if isinstance(sink.value, Reduced):
            nest.kept = len(sink.value.size)
            if math.prod(nest.size[nest.kept :]) < LEAST_INNER:
                raise Declined("a reduction of few elements")
        nest.sinks.append(sink)
        return i

    def _home(self, value: Value) -> int:
        """The number of the nest that computes what another sink needs."""
        if value not in self._nest_of:
            memory = None if isinstance(value, Reduced) else self._kept(value)
            self._nest_of[value] = self._place(Sink(value, memory))
        return self._nest_of[value]

    def _kept(self, value: Value) -> Memory:
        """New memory for a value."""
        stride = dense_stride(value.size)
        spec = TensorSpec(value.size, stride, value.dtype, torch.device("cpu"))
        return self._make(f"kept{len(self._made)}", spec)

    def _keep_what_others_read(self) -> None:
        """Give memory to reductions that another nest needs."""
        for i, nest in enumerate(self._nests):
            for value in {one: None for sink in [*nest.sinks] for one in self._needs(sink.value)}:
                home = self._nest_of[value]
                sinks = self._nests[home].sinks
                if home != i and not any(s.value is value and s.memory for s in sinks):
                    sinks.append(Sink(value, self._kept(value)))

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
        return "\n".join([
            "namespace {",
            PRELUDE,
            *(declared(name) for name in FUNCTIONS if name in self._kernel.functions),
            "}",
            'extern "C" __attribute__((visibility("default")))',
            f"void {NAME}({', '.join(arguments)}) {{",
            *(f"const {kind} number{i} = *number{i}_at;" for kind, i in numbers),
            *bodies,
            "}",
        ])  # fmt: skip

    def _steps(self) -> dict[str, Any]:
        """As `torch_inductor.steps_of` describes them."""
        arguments = [f"in{i}" for i in range(len(self._segment.inputs))]
        arguments += [f"number{i}" for i in range(len(self._segment.scalars))]
        steps: list[Any] = [
            ["allocate", name, [*spec.size], [*spec.stride], str(spec.dtype).removeprefix("torch.")]
            for name, spec in self._made.items()
        ]
        dead = [name for name in [*arguments, *self._made] if name not in self._results]
        steps.append(["kernel", 0, [*arguments, *self._made], dead])
        return {"arguments": arguments, "steps": steps, "results": self._results}
