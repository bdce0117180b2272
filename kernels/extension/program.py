"""Programs: aten ops and kernels, one after the other, run by C++.

In: instructions, as `call` and its like make them. Out: a `Program`, which takes tensors and
numbers and gives tensors. Plans are such programs, and so are the kernels of their segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, TypeGuard

import torch
from torch._ops import OpOverload

from lazy_tensor.kernels.disk import Disk
from lazy_tensor.kernels.extension import cpp
from lazy_tensor.kernels.extension.extension import Extension, module_at
from lazy_tensor.kernels.library import loaded
from lazy_tensor.kernels.segment import Ref, ScalarRef, Segment, TensorSpec, n_bytes

Slots = Sequence[int | None]
Instruction = tuple[Any, ...]
Argument = tuple[Literal["tensor", "number", "size"], int]
"""Of a kernel: a slot, the place of a run-time number, or a size itself."""

LETS_GO_FROM_BYTES = 16 << 10
"""Bytes that an op reads and makes from which other threads of Python may run meanwhile: it takes
some microseconds then, and letting them run takes 0.1."""


class Program(Protocol):
    """Instructions that read and set numbered slots; `program(tensors, numbers)` gives the results.

    Where an instruction raises, or a signal's handler between two, `take_failure` has what there is
    by then.
    """

    def __call__(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[complex]
    ) -> tuple[torch.Tensor, ...]: ...

    def run(
        self,
        leaves: list[torch.Tensor],
        numbers: list[complex],
        given: list[Sequence[torch.Tensor]],
    ) -> None:
        """Empty `leaves`, so that each is freed at its last use, and append the results to `given`,
        where an interrupt that comes behind the last instruction leaves them."""

    def run_observed(
        self,
        leaves: list[torch.Tensor],
        numbers: list[complex],
        given: list[Sequence[torch.Tensor]],
        around: Any,
        check: Any,
    ) -> None:
        """The same, instruction `i` within `around(i)`, and what an op gave replaced by
        `check(i, tensors)`; None for either."""

    def measure_after(self, n: int) -> None:
        """Have `measure_again` of the fusion that it is the `program` of called at run `n`."""

    def step(self, i: int, values: dict[int, torch.Tensor], numbers: list[complex]) -> None:
        """Run one instruction on `values`, by slot, and add what it gives."""

    def take_failure(self) -> tuple[int, dict[int, torch.Tensor], int] | None:
        """The instruction that its last run in this thread has not got past, the values there were
        by slot, and the call of a segment that raised, or -1; None if it has ended, or not begun.
        """


def is_long(touched: Iterable[TensorSpec | None]) -> bool:
    """Whether what reads and makes these tensors is worth letting other threads run meanwhile."""
    return sum(n_bytes(spec) for spec in touched if spec is not None) >= LETS_GO_FROM_BYTES


def touches_much(segment: Segment) -> bool:
    """The same of a segment."""
    outputs = (spec for call in segment.calls for spec in call.outputs)
    return is_long((*segment.inputs, *outputs))


def call(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    made: Slots,
    dead: Sequence[int],
    touched: Iterable[TensorSpec | None],
    strides: Sequence[tuple[int, ...] | None] = (),
    *,
    lets_go: bool = False,
) -> Instruction:
    """A call of `op`, whose arguments nest by tuples and name slots by `Ref`, numbers by
    `ScalarRef`.

    It sets the slots `made`, None where nobody wants a result, whose strides become `strides` where
    they are given; `dead` are read by no later one. `touched` are the tensors that it reads and
    makes: of many bytes, or where it `lets_go`, other threads of Python may run meanwhile.
    """
    lets_go = lets_go or op.namespace == "_c10d_functional" or is_long(touched)
    schema = op._schema
    names = schema.name, schema.overload_name
    return ("call", *names, tuple(args), dict(kwargs), made, dead, lets_go, tuple(strides))


def segment(
    fusion: Any, inputs: Sequence[int], numbers: Sequence[int], made: Slots, dead: Sequence[int]
) -> Instruction:
    """A call of `fusion.run`, a `Kernel`, on slots and numbers; or of `fusion.program`, if that is
    a program. If it raises and is no op-by-op one, `run` is called, unless the segment `writes`."""
    return "segment", fusion, inputs, numbers, made, dead


def allocate(
    made: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Instruction:
    """New memory on the CPU."""
    return "allocate", made, size, stride, dtype


def view(
    made: int,
    base: int,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dead: Sequence[int] = (),
    *,
    is_absolute: bool = False,
) -> Instruction:
    """Another tensor on the memory of `base`, `offset` elements behind where that begins, or where
    its storage does if that `is_absolute`."""
    return "view", made, base, size, stride, offset, dead, is_absolute


def kernel(
    address: int, arguments: Sequence[Argument], dead: Sequence[int], *, lets_go: bool
) -> Instruction:
    """A call of a C function that takes so many pointers: to tensors' memory, to a number as a
    double or an int64; a size is passed as it is."""
    return "kernel", address, list(arguments), dead, lets_go


def check(slot: int) -> Instruction:
    """IndexError if the slot holds True."""
    return "check", slot


def program_of(
    n_slots: int,
    leaves: Sequence[int],
    live: Sequence[int],
    instructions: list[Instruction],
    *,
    is_inner: bool = False,
) -> Program:
    """A program that takes tensors for the slots `leaves` and gives those in `live`. One that
    `is_inner` runs within an instruction of another, which no signal divides."""
    assert _class is not None, "it was asked for"
    made: Program = _class(n_slots, leaves, live, instructions, is_inner)
    return made


_class: Any = None


def _use(library: bytes) -> None:
    global _class
    module = loaded(library, partial(module_at, "lazy_tensor_program"))
    module.install(Ref, ScalarRef)
    _class = module.Program


EXTENSION = Extension(cpp.PROGRAM.path, cpp.PROGRAM.libraries, _use)


def is_program(kernel: Any) -> TypeGuard[Program]:
    """Whether C++ can run it within another."""
    return _class is not None and type(kernel) is _class


def are_there() -> bool:
    """Whether programs can be made."""
    return _class is not None


def ask_for(disk: Disk | None, *, may_compile: bool, wait: bool) -> bool:
    """Load the C++ that runs programs from disk, or compile it if that `may_compile`: in the
    background, or at once if `wait`. Returns whether programs can be made now."""
    if _class is None:
        EXTENSION.ask(disk, may_compile=may_compile, wait=wait)
    return _class is not None
