"""A compiled segment as bytes, and back: a JSON header, then a shared library.

`packed` makes the bytes of what Inductor or `loops.write` compiled. `unpacked` makes a kernel of
the bytes: a `Program`, which C++ runs. Loading takes about a millisecond and doesn't import
Inductor. Called by the backends `inductor` and `whole`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CodeType
from typing import Any

import torch

from lazy_tensor.kernels.backend import Declined, Kernel
from lazy_tensor.kernels.backends.torch_inductor import Compiled, addresses_of
from lazy_tensor.kernels.extension import program
from lazy_tensor.kernels.generic import Generic
from lazy_tensor.kernels.library import loaded
from lazy_tensor.kernels.segment import Ref, Segment, op_named

SCALAR_DTYPES = {float: torch.float64, int: torch.int64, bool: torch.int64}
"""The dtype of the 0-dim tensor that passes a run-time scalar of a Python type to a kernel."""


def packed(compiled: Compiled, library: bytes, *, has_check: bool) -> bytes:
    """The artifact: the length of the header, the header as JSON, and the library.

    The results are the segment's outputs. If `has_check`, one more says whether an index was out of
    range.
    """
    header = {
        "kernels": compiled.kernels,
        "steps": compiled.steps,
        "has_check": has_check,
        "symbols": compiled.symbols,
        "conditions": compiled.conditions,
    }
    text = json.dumps(header).encode()
    return b"".join((len(text).to_bytes(8, "little"), text, library))


@lru_cache(maxsize=256)
def _header(artifact: bytes) -> tuple[dict[str, Any], int]:
    """The header, and the offset at which the library begins."""
    start = 8 + int.from_bytes(artifact[:8], "little")
    header: dict[str, Any] = json.loads(artifact[8:start])
    return header, start


def holds_for(artifact: bytes, values: Sequence[int]) -> bool:
    """Whether an artifact with symbolic sizes is correct for these values of its symbols."""
    header, _ = _header(artifact)
    return hold(header["conditions"], header["symbols"], values)


def hold(conditions: Sequence[str], symbols: Sequence[str], values: Sequence[int]) -> bool:
    """Whether all `conditions`, Python expressions in the symbols, are true for these values."""
    names = {"math": math, **dict(zip(symbols, values, strict=True))}
    return all(eval(_code(condition), names) for condition in conditions)


@lru_cache(maxsize=4096)
def _code(expression: str) -> CodeType:
    """An expression in symbols, compiled once, as it is evaluated for each new size."""
    return compile(expression, "<size>", "eval")


def unpacked(artifact: bytes, scalars: Sequence[type], *, is_long: bool = False) -> Kernel:
    """The kernel in `artifact`, for run-time scalars of the given Python types.

    It is a `Program`, or `Steps` if its sizes are symbols. With `is_long` the program releases the
    interpreter while its kernels run.
    """
    header, start = _header(artifact)
    kernels = header["kernels"]
    # without a kernel, the artifact has no library
    addresses = loaded(artifact[start:], partial(addresses_of, kernels)) if kernels else []
    has_check, symbols = header["has_check"], header["symbols"]
    steps = Steps(header["steps"], addresses, has_check, len(scalars), symbols)
    return steps if steps.symbols else steps.for_sizes((), is_long=is_long)


@dataclass(frozen=True)
class Steps:
    """The steps of a program whose sizes are symbols, with the kernels' addresses.

    A generic kernel is kept in this form, and `for_sizes` makes a program for each segment's sizes.
    `data` has the form that `torch_inductor.steps_of` returns; `has_check` as for `packed`. The
    last `n_scalars` arguments are numbers.
    """

    data: dict[str, Any]
    addresses: Sequence[int]
    has_check: bool
    n_scalars: int
    symbols: Sequence[str]

    def __call__(self, tensors: Sequence[torch.Tensor], scalars: Sequence[float]) -> Any:
        raise TypeError("a generic kernel runs for sizes: see `for_sizes`")

    def for_sizes(self, sizes: Sequence[int], *, is_long: bool) -> program.Program:
        """The kernel for these values of the symbols. `is_long` as for `unpacked`."""
        try:
            return _ProgramBuilder(self, sizes, is_long=is_long).build()
        except KeyError as name:  # a number has no slot, which a view or a library call needs
            raise Declined(f"the run-time number {name} is needed as a tensor") from None


def for_own_sizes(kernel: Kernel, segment: Segment) -> Kernel:
    """`kernel`, or its program for the example sizes of `segment` if this is generic."""
    if isinstance(kernel, Steps) and isinstance(segment, Generic):
        return kernel.for_sizes(segment.own_values, is_long=False)
    return kernel


class _ProgramBuilder:
    """Makes the program of `steps`: names become slot numbers, and sizes become integers.

    Each kind of step has a method of its name (`_allocate`, `_view`, `_kernel`, `_call`).
    """

    def __init__(self, steps: Steps, sizes: Sequence[int], *, is_long: bool) -> None:
        arguments: list[str] = steps.data["arguments"]
        self._n_tensors = len(arguments) - steps.n_scalars
        # arguments come first, so that the leaves of the program are the first slots
        self._slots = {name: i for i, name in enumerate(arguments[: self._n_tensors])}
        self._scalar_numbers = {name: i for i, name in enumerate(arguments[self._n_tensors :])}
        self._values = {"math": math, **dict(zip(steps.symbols, sizes, strict=True))}
        self._steps = steps
        self._is_long = is_long

    def build(self) -> program.Program:
        data = self._steps.data
        instructions = [getattr(self, f"_{kind}")(*rest) for kind, *rest in data["steps"]]
        results = [self._slots[name] for name in data["results"]]
        if self._steps.has_check:
            instructions.append(program.check(results.pop()))
        leaves = range(self._n_tensors)
        return program.program_of(len(self._slots), leaves, results, instructions, is_inner=True)

    def _allocate(self, name: str, size: Any, stride: Any, dtype: str) -> program.Instruction:
        place = self._sizes(size), self._sizes(stride)
        return program.allocate(self._slot(name), *place, getattr(torch, dtype))

    def _view(
        self, name: str, base: str, size: Any, stride: Any, offset: int | str
    ) -> program.Instruction:
        place = self._sizes(size), self._sizes(stride), self._size(offset)
        return program.view(self._slot(name), self._slots[base], *place)

    def _kernel(
        self, number: int, args: Sequence[str | list[int | str]], dead: Sequence[str]
    ) -> program.Instruction:
        arguments = [self._kernel_argument(arg) for arg in args]
        address = self._steps.addresses[number]
        return program.kernel(address, arguments, self._tensor_slots(dead), lets_go=self._is_long)

    def _call(
        self, op: str, args: Any, kwargs: Any, results: Any, strides: Any, dead: Sequence[str]
    ) -> program.Instruction:
        arguments = [self._call_argument(arg) for arg in args]
        keywords = {name: self._call_argument(arg) for name, arg in kwargs.items()}
        slots = [None if name is None else self._slot(name) for name in results]
        result_strides = [None if stride is None else self._sizes(stride) for stride in strides]
        return program.call(
            op_named(op), arguments, keywords, slots, self._tensor_slots(dead), (), result_strides,
            lets_go=self._is_long,
        )  # fmt: skip

    def _tensor_slots(self, names: Sequence[str]) -> list[int]:
        """The slots of those `names` that are tensors."""
        return [self._slots[name] for name in names if name in self._slots]

    def _call_argument(self, argument: Any) -> Any:
        match argument:
            case {"tensor": name}:
                return Ref(self._slots[name])
            case {"torch": name}:
                return getattr(torch, name)
            case list():
                return tuple(self._call_argument(item) for item in argument)
        return argument

    def _kernel_argument(self, argument: str | list[int | str]) -> program.Argument:
        if isinstance(argument, list):
            return "size", self._size(argument[0])
        if argument in self._scalar_numbers:
            return "number", self._scalar_numbers[argument]
        return "tensor", self._slots[argument]

    def _slot(self, name: str) -> int:
        return self._slots.setdefault(name, len(self._slots))

    def _sizes(self, sizes: Sequence[int | str]) -> list[int]:
        return [self._size(size) for size in sizes]

    def _size(self, size: int | str) -> int:
        return size if isinstance(size, int) else int(eval(_code(size), self._values))


def kernel_of(
    call: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]], scalars: Sequence[type]
) -> Kernel:
    """A kernel in Python around `call`, which takes one list of tensors and returns the outputs.

    It passes scalars as 0-dim tensors.
    """
    dtypes = [SCALAR_DTYPES[kind] for kind in scalars]

    def kernel(tensors: Sequence[torch.Tensor], numbers: Sequence[float]) -> Sequence[torch.Tensor]:
        # on the CPU whatever torch's default device is: Inductor reads their values there
        scalar_tensors = [
            torch.tensor(number, dtype=dtype, device="cpu")
            for number, dtype in zip(numbers, dtypes, strict=True)
        ]
        results = call([*tensors, *scalar_tensors])  # `results` as `Fusion` requires
        return results  # noqa: RET504

    return kernel
