"""Programs: aten ops and kernels, one after the other, run by C++.

In: instructions, as `call` and `segment` make them. Out: a `Program`, which takes tensors and
numbers and gives tensors. Plans are such programs, and so are segments that run op by op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch._ops import OpOverload

from lazy_tensor.kernels import cpp
from lazy_tensor.kernels.artifact import loaded
from lazy_tensor.kernels.disk import Disk
from lazy_tensor.kernels.extension import Extension, module_at
from lazy_tensor.kernels.segment import Ref, ScalarRef, TensorSpec, n_bytes

Slots = Sequence[int | None]
Instruction = tuple[Any, ...]

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

    def step(self, i: int, values: dict[int, torch.Tensor], numbers: list[complex]) -> None:
        """Run one instruction on `values`, by slot, and add what it gives."""

    def take_failure(self) -> tuple[int, dict[int, torch.Tensor], int] | None:
        """The instruction that its last run in this thread has not got past, the values there were
        by slot, and the call of a segment that raised, or -1; None if it has ended, or not begun.
        """


def call(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    made: Slots,
    dead: Sequence[int],
    touched: Iterable[TensorSpec | None],
    strides: Sequence[tuple[int, ...] | None] = (),
) -> Instruction:
    """A call of `op`, whose arguments nest by tuples and name slots by `Ref`, numbers by
    `ScalarRef`.

    It sets the slots `made`, None where nobody wants a result, whose strides become `strides` where
    they are given; `dead` are read by no later one. `touched` are the tensors that it reads and
    makes.
    """
    lets_go = (
        op.namespace == "_c10d_functional"
        or sum(n_bytes(spec) for spec in touched if spec is not None) >= LETS_GO_FROM_BYTES
    )
    schema = op._schema
    names = schema.name, schema.overload_name
    return (*names, tuple(args), dict(kwargs), made, dead, lets_go, tuple(strides))


def segment(
    kernel: Any, inputs: Sequence[int], numbers: Sequence[int], made: Slots, dead: Sequence[int]
) -> Instruction:
    """A call of `kernel.run`, a `Kernel`, on slots and numbers."""
    return kernel, inputs, numbers, made, dead


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


def are_there() -> bool:
    """Whether programs can be made."""
    return _class is not None


def ask_for(disk: Disk | None, *, may_compile: bool, wait: bool) -> bool:
    """Whether they can now: what runs them is taken from disk, or compiled if it `may_compile`: in
    the background, or at once if `wait`."""
    if _class is None:
        EXTENSION.ask_disk(disk)
        if may_compile and _class is None:
            EXTENSION.ask_for(disk, wait=wait)
    return _class is not None
