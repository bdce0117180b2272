"""A compiled segment as bytes, and back: a JSON header, then the shared libraries it speaks of.

In: what Inductor compiled, and what `lower` found out about outputs. Out: a kernel. Loading imports
nothing of Inductor and compiles a few dozen lines of Python: about a millisecond.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch

from lazy_tensor.kernels.backend import Kernel
from lazy_tensor.kernels.torch_inductor import Compiled, Library, load_kernels

T = TypeVar("T")

SCALAR_DTYPES = {float: torch.float64, int: torch.int64, bool: torch.int64}
"""What holds a run-time scalar on its way into a kernel."""


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

    An output is a result, by number, or a view of one. If `has_check`, one more result says whether
    an index was out of range.
    """

    outputs: tuple[int | View, ...]
    has_check: bool

    @property
    def is_plain(self) -> bool:
        """Whether the results are the outputs, as they are."""
        return not self.has_check and self.outputs == tuple(range(len(self.outputs)))

    def expressions(self) -> list[str]:
        """Source of each output in terms of `results`."""
        return [_expression(output) for output in self.outputs]

    def return_line(self, *, has_more: bool = False) -> str:
        """The line that ends a kernel; `has_more` if there are results of another use."""
        if self.is_plain and not has_more:
            return " return results"
        return f" return ({''.join(f'{text}, ' for text in self.expressions())})"


def packed(compiled: Compiled, outputs: Outputs) -> bytes:
    """One artifact of all that `unpacked` needs."""
    header = {
        "source": compiled.source,
        "library_bytes": [len(library) for library in compiled.libraries],
        "kernels": compiled.kernels,
        "outputs": [astuple(o) if isinstance(o, View) else o for o in outputs.outputs],
        "has_check": outputs.has_check,
        "symbols": compiled.symbols,
        "conditions": compiled.conditions,
    }
    text = json.dumps(header).encode()
    return b"".join((len(text).to_bytes(8, "little"), text, *compiled.libraries))


def _header(artifact: bytes) -> tuple[dict[str, Any], int]:
    """The header, and where the libraries begin."""
    start = 8 + int.from_bytes(artifact[:8], "little")
    header: dict[str, Any] = json.loads(artifact[8:start])
    return header, start


def holds_for(artifact: bytes, values: Sequence[int]) -> bool:
    """Whether what was compiled with symbolic sizes is right for these."""
    header, _ = _header(artifact)
    return hold(header["conditions"], header["symbols"], values)


def hold(conditions: Sequence[str], symbols: Sequence[str], values: Sequence[int]) -> bool:
    """Whether all `conditions`, expressions in the symbols, are true for these values of theirs."""
    names = {"math": math, **dict(zip(symbols, values, strict=True))}
    return all(eval(condition, names) for condition in conditions)


WRAPPER, SOURCE = "<inductor wrapper>", "_source"
"""The file that a wrapper of Inductor's is compiled as; and the name of its source, one statement a
line, in its module."""


def unpacked(artifact: bytes, scalars: Sequence[type]) -> Kernel:
    """The kernel that `artifact` holds, for run-time scalars of the given Python types."""
    header, start = _header(artifact)
    kernels: dict[tuple[int, str], Library] = {}
    for i, n_bytes in enumerate(header["library_bytes"]):
        wanted = [name for library, name in header["kernels"] if library == i]
        found = loaded(artifact[start : start + n_bytes], partial(load_kernels, wanted))
        kernels.update(zip([(i, name) for name in wanted], found, strict=True))
        start += n_bytes
    names: dict[str, Any] = {"_kernels": [kernels[i, name] for i, name in header["kernels"]]}
    names[SOURCE] = header["source"]
    exec(compile(header["source"], WRAPPER, "exec"), names)
    outputs = tuple(o if isinstance(o, int) else View(*o) for o in header["outputs"])
    return kernel_of(names["call"], Outputs(outputs, header["has_check"]), scalars)


def kernel_of(
    call: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    outputs: Outputs,
    scalars: Sequence[type],
) -> Kernel:
    """`call`, which takes one list of tensors, as a kernel: scalars become tensors, views."""
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
    """Source that sets `results`: the scalars go through memory that `slots` and the tensors share.

    Slots in use are out of the list `free`, so that threads don't meet in one; writing to them
    takes 20 ns a scalar, a new tensor would take 800.
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
    """One C number for each scalar, and last the 0-dim tensors on the same memory."""
    numbers = [ctypes.c_double(0) if kind is float else ctypes.c_int64(0) for kind in scalars]
    tensors = [
        torch.frombuffer(number, dtype=SCALAR_DTYPES[kind])[0]
        for number, kind in zip(numbers, scalars, strict=True)
    ]
    return (*numbers, tensors)


_serial = itertools.count()


def loaded(library: bytes, load: Callable[[str, str], T]) -> T:
    """What `load(path, name)` makes of a shared library that lies in memory."""
    # dlopen needs a file, and a path it has never seen; once it is mapped, the file may go
    name = f"lazy_tensor_kernel_{next(_serial)}"
    path = os.path.join(own_folder(), f"{os.getpid()}_{name}.so")
    with open(path, "xb") as file:
        file.write(library)
    try:
        return load(path, name)
    finally:
        os.unlink(path)


@cache
def own_folder() -> str:
    """A directory that only this user can read or write, removed at exit."""
    directory = tempfile.mkdtemp(prefix="lazy_tensor_")
    owner = os.getpid()

    def remove() -> None:
        # a forked child runs this too
        if os.getpid() == owner:
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    return directory
