"""Programs: aten ops and kernels, one after the other, run by C++ (`program.cpp`).

In: instructions, made by `call`, `segment`, `allocate`, `view`, `kernel` and `check`. Out: a
`Program`, which takes tensors and numbers and gives tensors. Plans are such programs, and so are
the kernels of their segments. Values are in numbered slots; `dead` slots of an instruction are
those that no later one reads. C++ reads the tuples by position: `instruction_of` there must agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, TypeGuard

import torch
from torch._ops import OpOverload

from lazy_tensor.kernels.disk import Disk
from lazy_tensor.kernels.extension import cpp
from lazy_tensor.kernels.extension.build_apart import module_at
from lazy_tensor.kernels.extension.extension import Extension
from lazy_tensor.kernels.library import loaded
from lazy_tensor.kernels.segment import Ref, ScalarRef, Segment, TensorSpec, n_bytes

Slots = Sequence[int | None]
Instruction = tuple[Any, ...]
Argument = tuple[Literal["tensor", "number", "size"], int]
"""An argument of a kernel: the slot of a tensor, the place of a run-time number, or a size."""

LETS_GO_FROM_BYTES = 16 << 10
"""The GIL is released for ops that read and make at least so many bytes. Such an op takes some
microseconds; releasing and acquiring the GIL takes 0.1."""


class Program(Protocol):
    """Instructions that read and set numbered slots; `program(tensors, numbers)` gives the results.

    If an instruction raises, or a signal's handler does between two, `take_failure` has the values
    that there are by then.
    """

    def __call__(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[complex]
    ) -> tuple[torch.Tensor, ...]: ...

    def run(
        self,
        leaves: list[torch.Tensor],
        numbers: list[complex],
        given: list[Sequence[torch.Tensor]],
        around: Any = None,
        check: Any = None,
        /,
    ) -> None:
        """Run the program and append its results to `given`.

        `leaves` is emptied, so that each leaf is freed at its last use. Results that were returned
        would be lost if an interrupt came behind the last instruction.

        With both `around` and `check`, of which either may be None, each instruction `i` runs
        within the context `around(i)`, and what an op gave is replaced by `check(i, tensors)`.
        """

    def measure_after(self, n: int) -> None:
        """Call `measure_again` of the fusion whose `program` this is at the n-th run from now on;
        never for 0."""

    def step(self, i: int, values: dict[int, torch.Tensor], numbers: list[complex]) -> None:
        """Run instruction `i` on `values`, a dict by slot, and add what it gives."""

    def take_failure(self) -> tuple[int, dict[int, torch.Tensor], int] | None:
        """What is known of this thread's last run, if that was of this program and raised; else
        None. It is forgotten then.

        The number of the first instruction that is not over, the values by slot, and the number of
        the call that raised in a segment that ran op by op, or -1.
        """


def is_long(touched: Iterable[TensorSpec | None]) -> bool:
    """Whether what reads and makes these tensors takes so long that the GIL is released for it."""
    return sum(n_bytes(spec) for spec in touched if spec is not None) >= LETS_GO_FROM_BYTES


def touches_much(segment: Segment) -> bool:
    """Whether a segment takes so long."""
    return is_long(segment.specs)


def call(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    made: Slots,
    dead: Sequence[int],
    touched: Iterable[TensorSpec | None],
    strides: Sequence[Sequence[int] | None] = (),
    *,
    lets_go: bool = False,
) -> Instruction:
    """A call of `op`. Its arguments nest by tuples; `Ref` names a slot, `ScalarRef` a number.

    It sets the slots `made`, None where nobody wants a result. A result gets its `strides` if some
    are given. The GIL is released if the op `lets_go`, or if the tensors that it reads and makes,
    `touched`, have many bytes.
    """
    # a collective waits for other ranks: this rank's other threads must not wait with it
    lets_go = lets_go or op.namespace == "_c10d_functional" or is_long(touched)
    schema = op._schema
    names = schema.name, schema.overload_name
    return ("call", *names, tuple(args), dict(kwargs), made, dead, lets_go, tuple(strides))


def segment(
    fusion: Any, inputs: Sequence[int], numbers: Sequence[int], made: Slots, dead: Sequence[int]
) -> Instruction:
    """A call of `fusion.run`, a `Kernel`, on slots and numbers; or of `fusion.program`, if that is
    a program. If a kernel's program raises, `run` is called, unless the segment `writes`."""
    return "segment", fusion, inputs, numbers, made, dead


def allocate(
    made: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Instruction:
    """A new tensor on the CPU, not initialized."""
    return "allocate", made, size, stride, dtype


def view(
    made: int,
    base: int,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dead: Sequence[int] = (),
) -> Instruction:
    """Another tensor on the memory of `base`, that begins `offset` elements behind its start."""
    return "view", made, base, size, stride, offset, dead


def kernel(
    address: int, arguments: Sequence[Argument], dead: Sequence[int], *, lets_go: bool
) -> Instruction:
    """A call of the C function at `address`. Each argument is a pointer, to a tensor's memory or to
    a number (a double or an int64), or a size itself."""
    return "kernel", address, list(arguments), dead, lets_go


def check(slot: int) -> Instruction:
    """Raises IndexError if the slot holds True: a kernel has found an index out of range."""
    return "check", slot


def program_of(
    n_slots: int,
    leaves: Sequence[int],
    live: Sequence[int],
    instructions: list[Instruction],
    *,
    is_inner: bool = False,
    peak_bytes: int = 0,
) -> Program:
    """A program that takes tensors for the slots `leaves` and gives those in `live`.

    One that `is_inner` runs within an instruction of another program, and so without a look for
    signals. If what it makes takes many bytes at its peak, its memory is pooled (see `pool`).
    """
    # plans are made once it is there; others, such as a script that runs a kernel alone, may wait
    if not ask_for(None, may_compile=True, wait=True):
        raise RuntimeError(f"the C++ that runs programs is missing: {EXTENSION.status}")
    made: Program = native.Program(n_slots, leaves, live, instructions, is_inner, peak_bytes)
    return made


native: Any = None  # the module in C++, once it is loaded


def _use(library: bytes) -> None:
    global native
    module = loaded(library, partial(module_at, "lazy_tensor_program"))
    module.install(Ref, ScalarRef)
    native = module


EXTENSION = Extension(cpp.PROGRAM, _use)


def is_program(kernel: Any) -> TypeGuard[Program]:
    """Whether a kernel is a program, which C++ can run within another."""
    return native is not None and type(kernel) is native.Program


def are_there() -> bool:
    """Whether programs can be made: the C++ is loaded."""
    return native is not None


def ask_for(disk: Disk | None, *, may_compile: bool, wait: bool) -> bool:
    """Load the C++ that runs programs from disk. If it isn't there and `may_compile`, compile it,
    in the background or, if `wait`, at once. Returns whether programs can be made now."""
    if native is None:
        EXTENSION.ask(disk, may_compile=may_compile, wait=wait)
    return native is not None
