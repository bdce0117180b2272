"""A compiled segment as bytes, and back: a JSON header, then the shared libraries that it lists.

`packed` takes what Inductor compiled, and how the results make up the segment's outputs (from
`lower`). `unpacked` makes a kernel of the bytes: a `Program` that C++ runs, if the steps of
Inductor's wrapper are known, else a Python function. Loading takes about a millisecond and imports
nothing of Inductor. Called by the backends `inductor` and `whole`.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch

from lazy_tensor.kernels.backend import Kernel
from lazy_tensor.kernels.backends.torch_inductor import Compiled, addresses_of, load_kernels
from lazy_tensor.kernels.extension import program
from lazy_tensor.kernels.library import loaded
from lazy_tensor.kernels.segment import Ref, op_named

SCALAR_DTYPES = {float: torch.float64, int: torch.int64, bool: torch.int64}
"""The dtype of the 0-dim tensor that passes a run-time scalar of a Python type to a kernel."""


@dataclass(frozen=True, slots=True)
class View:
    """An output that shares the memory of result number `result`."""

    result: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int


@dataclass(frozen=True, slots=True)
class Outputs:
    """How the results of the compiled function make up the segment's outputs.

    Each output is the number of a result, or a `View` of one. If `has_check`, the last result is no
    output: it says whether an index was out of range.
    """

    outputs: tuple[int | View, ...]
    has_check: bool

    @property
    def is_plain(self) -> bool:
        """Whether the results are exactly the outputs, in their order."""
        return not self.has_check and self.outputs == tuple(range(len(self.outputs)))

    def expressions(self) -> list[str]:
        """A Python expression for each output, in terms of the variable `results`."""
        return [_expression(output) for output in self.outputs]

    def return_line(self, *, has_more: bool = False) -> str:
        """The `return` line of a generated kernel. With `has_more` the results hold others too."""
        if self.is_plain and not has_more:
            return " return results"
        return f" return ({''.join(f'{text}, ' for text in self.expressions())})"


def packed(compiled: Compiled, outputs: Outputs) -> bytes:
    """The artifact: the length of the header, the header as JSON, and the libraries."""
    header = {
        "source": compiled.source,
        "library_bytes": [len(library) for library in compiled.libraries],
        "kernels": compiled.kernels,
        "steps": compiled.steps,
        "outputs": [astuple(o) if isinstance(o, View) else o for o in outputs.outputs],
        "has_check": outputs.has_check,
        "symbols": compiled.symbols,
        "conditions": compiled.conditions,
    }
    text = json.dumps(header).encode()
    return b"".join((len(text).to_bytes(8, "little"), text, *compiled.libraries))


def _header(artifact: bytes) -> tuple[dict[str, Any], int]:
    """The header, and the offset at which the libraries begin."""
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
    return all(eval(condition, names) for condition in conditions)


WRAPPER, SOURCE = "<inductor wrapper>", "_source"
"""The file name under which Inductor's wrapper is compiled, and the global that holds its source.

The source has one statement a line. `dispatch.run.failure` uses both: after Ctrl-C in the middle of
a wrapper it runs the remaining lines.
"""


def unpacked(artifact: bytes, scalars: Sequence[type], *, is_long: bool = False) -> Kernel:
    """The kernel in `artifact`, for run-time scalars of the given Python types.

    It is a `Program` if its steps are known, or `Steps` if its sizes are symbols as well, else a
    Python function. With `is_long` the program releases the interpreter while its kernels run.
    """
    header, start = _header(artifact)
    outputs = [o if isinstance(o, int) else View(*o) for o in header["outputs"]]
    told = Outputs(tuple(outputs), header["has_check"])
    is_program = program.are_there() and _is_program(header["steps"], len(scalars))
    # a program calls kernels by address, Python by a function of the library's extension module
    load: Callable[..., list[Any]] = addresses_of if is_program else load_kernels
    kernels: dict[tuple[int, str], Any] = {}
    for i, n_bytes in enumerate(header["library_bytes"]):
        wanted = [name for library, name in header["kernels"] if library == i]
        found = loaded(artifact[start : start + n_bytes], partial(load, wanted))
        kernels.update(zip([(i, name) for name in wanted], found, strict=True))
        start += n_bytes
    ordered = [kernels[i, name] for i, name in header["kernels"]]
    if is_program:
        steps = Steps(header["steps"], ordered, told, len(scalars), header["symbols"])
        return steps if steps.symbols else steps.for_sizes((), is_long=is_long)
    names: dict[str, Any] = {"_kernels": ordered}
    names[SOURCE] = header["source"]
    exec(compile(header["source"], WRAPPER, "exec"), names)
    return kernel_of(names["call"], told, scalars)


def _is_program(steps: dict[str, Any] | None, n_scalars: int) -> bool:
    """Whether a program can run these steps.

    They must be known. The last `n_scalars` arguments are scalars, which only kernels may use: in a
    program they are numbers, and there is no tensor for a view or a library call.
    """
    if steps is None:
        return False
    arguments = steps["arguments"]
    scalars = arguments[len(arguments) - n_scalars :]
    used = [step[2] for step in steps["steps"] if step[0] == "view"]
    used += [one for step in steps["steps"] if step[0] == "call" for one in _tensors_in(step[2:4])]
    return set(scalars).isdisjoint((*used, *steps["results"]))


def _tensors_in(given: Any) -> Iterator[str]:
    """The names of tensors among arguments in the form that `torch_inductor.steps_of` gives."""
    if isinstance(given, dict) and set(given) == {"tensor"}:
        yield given["tensor"]
    elif isinstance(given, (list, dict)):
        for one in given.values() if isinstance(given, dict) else given:
            yield from _tensors_in(one)


@dataclass(frozen=True)
class Steps:
    """The steps of Inductor's wrapper with the kernels' addresses: a program but for its sizes.

    A generic kernel is kept in this form, and `for_sizes` makes a program for each segment's sizes.
    `told` is the result of `torch_inductor.steps_of`. The last `n_scalars` arguments are numbers.
    """

    told: dict[str, Any]
    addresses: Sequence[int]
    outputs: Outputs
    n_scalars: int
    symbols: Sequence[str]

    def __call__(self, tensors: Sequence[torch.Tensor], scalars: Sequence[float]) -> Any:
        raise TypeError("a generic kernel runs for sizes: see `for_sizes`")

    def for_sizes(self, sizes: Sequence[int], *, is_long: bool) -> program.Program:
        """The kernel for these values of the symbols. `is_long` as for `unpacked`."""
        return _Numbered(self, sizes, is_long=is_long).build()


class _Numbered:
    """Makes a program of steps: names become numbers of slots, and sizes become integers.

    Each kind of step has a method of its name (`_allocate`, `_view`, `_kernel`, `_call`).
    """

    def __init__(self, steps: Steps, sizes: Sequence[int], *, is_long: bool) -> None:
        arguments: list[str] = steps.told["arguments"]
        self._n_tensors = len(arguments) - steps.n_scalars
        # arguments come first, so that the leaves of the program are the first slots
        self._slots = {name: i for i, name in enumerate(arguments[: self._n_tensors])}
        self._numbers = {name: i for i, name in enumerate(arguments[self._n_tensors :])}
        self._values: dict[str, Any] = {"math": math}
        self._values.update(zip(steps.symbols, sizes, strict=True))
        self._steps = steps
        self._is_long = is_long
        self._instructions: list[program.Instruction] = []

    def build(self) -> program.Program:
        for kind, *rest in self._steps.told["steps"]:
            getattr(self, f"_{kind}")(*rest)
        results = [self._slots[name] for name in self._steps.told["results"]]
        outputs = self._steps.outputs
        # before the outputs are made: an index out of range raises and returns nothing
        if outputs.has_check:
            self._instructions.append(program.check(results[-1]))
        live = [self._output(i, output, results) for i, output in enumerate(outputs.outputs)]
        leaves = range(self._n_tensors)
        return program.program_of(len(self._slots), leaves, live, self._instructions, is_inner=True)

    def _output(self, i: int, output: int | View, results: Sequence[int]) -> int:
        if isinstance(output, int):
            return results[output]
        made = self._slot(f"output {i}")
        place = self._sizes(output.size), self._sizes(output.stride)
        offset = self._size(output.storage_offset)
        base = results[output.result]
        # `View` counts from the start of the storage, while Inductor's views count from their base
        self._instructions.append(program.view(made, base, *place, offset, is_absolute=True))
        return made

    def _allocate(self, name: str, size: Any, stride: Any, dtype: str) -> None:
        place = self._sizes(size), self._sizes(stride)
        self._instructions.append(program.allocate(self._slot(name), *place, getattr(torch, dtype)))

    def _view(self, name: str, base: str, size: Any, stride: Any, offset: int | str) -> None:
        place = self._sizes(size), self._sizes(stride), self._size(offset)
        self._instructions.append(program.view(self._slot(name), self._slots[base], *place))

    def _kernel(self, number: int, taken: Sequence[str | list[int | str]], dead: Any) -> None:
        self._instructions.append(
            program.kernel(
                self._steps.addresses[number],
                [self._argument(one) for one in taken],
                [self._slots[name] for name in dead if name in self._slots],
                lets_go=self._is_long,
            )
        )

    def _call(
        self, op: str, args: Any, kwargs: Any, made: Any, strides: Any, dead: Sequence[str]
    ) -> None:
        arguments = [self._given(one) for one in args]
        named = {name: self._given(one) for name, one in kwargs.items()}
        slots = [None if name is None else self._slot(name) for name in made]
        gone = [self._slots[name] for name in dead if name in self._slots]
        laid_out = [None if stride is None else tuple(stride) for stride in strides]
        self._instructions.append(
            program.call(
                op_named(op), arguments, named, slots, gone, (), laid_out, lets_go=self._is_long
            )
        )

    def _given(self, argument: Any) -> Any:
        match argument:
            case {"tensor": name}:
                return Ref(self._slots[name])
            case {"torch": name}:
                return getattr(torch, name)
            case list():
                return tuple(self._given(one) for one in argument)
        return argument

    def _argument(self, taken: str | list[int | str]) -> program.Argument:
        if isinstance(taken, list):
            return "size", self._size(taken[0])
        if taken in self._numbers:
            return "number", self._numbers[taken]
        return "tensor", self._slots[taken]

    def _slot(self, name: str) -> int:
        return self._slots.setdefault(name, len(self._slots))

    def _sizes(self, given: Sequence[int | str]) -> list[int]:
        return [self._size(one) for one in given]

    def _size(self, given: int | str) -> int:
        return given if isinstance(given, int) else int(eval(given, self._values))


def kernel_of(
    call: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    outputs: Outputs,
    scalars: Sequence[type],
) -> Kernel:
    """A kernel in Python around `call`, which takes one list of tensors and returns results.

    It passes scalars as 0-dim tensors, checks for bad indices, and makes views of the results. The
    source is generated, so that each call costs only what this segment needs.
    """
    names: dict[str, Any] = {"call": call, "new_slots": lambda: _new_slots(scalars), "free": []}
    lines = ["def kernel(tensors, scalars):", *_scalar_lines(scalars)]
    if outputs.has_check:
        lines.append(" if results[-1].item():")
        lines.append("  raise IndexError('index out of range in a compiled segment')")
    lines.append(outputs.return_line())
    exec(compile("\n".join(lines), "<kernel>", "exec"), names)
    kernel: Kernel = names["kernel"]
    return kernel


def _expression(output: int | View) -> str:
    if isinstance(output, int):
        return f"results[{output}]"
    return (
        f"results[{output.result}]"
        f".as_strided({tuple(output.size)}, {tuple(output.stride)}, {output.storage_offset})"
    )


def _scalar_lines(scalars: Sequence[type]) -> list[str]:
    """Source lines that set `results`.

    Scalars are written to C numbers whose memory 0-dim tensors share: 20 ns for each, where a new
    tensor takes 800. Each call takes its set of numbers off the list `free` and puts it back
    afterwards, so that no two threads use the same set.
    """
    if not scalars:
        return [" results = call([*tensors])"]
    return [
        " try: slots = free.pop()",
        " except IndexError: slots = new_slots()",
        *(f" slots[{i}].value = scalars[{i}]" for i in range(len(scalars))),
        " results = call([*tensors, *slots[-1]])",
        " free.append(slots)",
    ]


def _new_slots(scalars: Sequence[type]) -> tuple[Any, ...]:
    """One C number for each scalar, and then a list of 0-dim tensors on their memory."""
    numbers = [ctypes.c_double(0) if kind is float else ctypes.c_int64(0) for kind in scalars]
    tensors = [
        torch.frombuffer(number, dtype=SCALAR_DTYPES[kind])[0]
        for number, kind in zip(numbers, scalars, strict=True)
    ]
    return (*numbers, tensors)
