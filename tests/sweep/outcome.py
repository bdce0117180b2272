"""What a program gives, and how two outcomes differ.

A program calls the callable, and looks at the result and at the operands; it writes the first
operand and looks again, then writes the result and looks once more: what shares memory eagerly
shares it lazily.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

import numpy
import torch
import torch.utils.dlpack

import lazy_tensor
from tests.conformance.compare import value_difference
from tests.sweep.callables import resolve
from tests.sweep.operands import Operands, way
from tests.sweep.patterns import NAMES, are_values_known, operands_of

ADDRESS = 2**32
"""A whole number from here on is an address."""
N_ITEMS = 20
REFUSALS = re.compile(r"lazy_tensor|lazy tensor|LazyTensor")


class Program(NamedTuple):
    """A callable, given what a pattern says, of operands of a kind and a dtype."""

    name: str
    pattern: str
    kind: str
    dtype: str

    @property
    def is_exact(self) -> bool:
        """Whether it gives the same values each time."""
        return are_values_known(self.name, self.pattern)


@dataclass
class Outcome:
    """What was seen, in words and in tensors, and what was raised."""

    words: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    error: BaseException | None = None
    is_late: bool = False
    """Whether the error was raised where values were asked for, not at the callable's line."""

    @property
    def is_refused(self) -> bool:
        """Whether the error says that lazy tensors are the reason."""
        return self.error is not None and bool(REFUSALS.search(str(self.error)))

    def see(self, label: str, value: Any) -> None:
        """Keep what `value` is now."""
        self.words.append(f"{label}: {self._text(value)}")

    def _text(self, value: Any, depth: int = 0) -> str:
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, torch.UntypedStorage | torch.TypedStorage):
            return f"{type(value).__name__} {value.tolist()}"
        if isinstance(value, numpy.ndarray):
            return f"array {value.dtype} {value.shape} {value.tolist()}"
        if isinstance(value, bool) or value is None:
            return repr(value)
        if isinstance(value, int) and abs(value) > ADDRESS:
            return "address"
        if isinstance(value, str):
            return re.sub(r"0x[0-9a-f]+", "0x", value)
        if isinstance(value, int | float | complex | bytes | torch.dtype | torch.device):
            return f"{type(value).__name__} {value!r}"
        return self._of_container(value, depth)

    def _of_tensor(self, tensor: torch.Tensor) -> str:
        with torch.no_grad():
            if tensor.is_nested:
                return f"nested {[self._of_tensor(part) for part in tensor.unbind()]}"
            if tensor.layout is not torch.strided:
                self.tensors.append(tensor.detach().to_dense())
            elif tensor.is_quantized:
                self.tensors.append(tensor.detach().dequantize())
            elif tensor.device.type != "meta":
                self.tensors.append(tensor.detach().clone())
            strides = tensor.stride() if tensor.layout is torch.strided else ""
        return (
            f"tensor {tensor.dtype} {tuple(tensor.shape)} {strides} {tensor.layout} "
            f"{tensor.device} {tensor.requires_grad} {tensor.is_leaf}"
        )

    def _of_container(self, value: Any, depth: int) -> str:
        if depth > 4:
            return "deep"
        if isinstance(value, Mapping):
            items = {key: self._text(v, depth + 1) for key, v in value.items()}
            return f"mapping {items}"
        if isinstance(value, list | tuple | Iterator):
            inside = [self._text(v, depth + 1) for v in itertools.islice(value, N_ITEMS)]
            return f"{type(value).__name__} {inside}"
        if isinstance(value, torch.nn.Module):
            return f"module {self._text(value.state_dict(), depth + 1)}"
        if isinstance(value, io.BytesIO):
            return f"file of {len(value.getvalue())} bytes"
        return f"a {type(value).__name__}"


@cache
def _code(pattern: str) -> CodeType:
    return compile(pattern, "<pattern>", "eval")


def outcome(program: Program, *, lazily: bool) -> Outcome:
    """What one program gives; its errors are a part of it."""
    seen = Outcome()
    function = resolve(program.name)
    names = operands_of(program.pattern)
    operands = Operands(program.kind, program.dtype, names, lazily=lazily)
    torch.default_generator.manual_seed(0)
    try:
        with way(program.kind, lazily=lazily):
            _run(function, program.pattern, operands, seen)
    except Exception as error:
        seen.is_late = True
        seen.error = seen.error or error
    try:
        for name, tensor in operands.tensors.items():
            seen.see(f"{name} in the end", tensor)
        seen.tensors = [lazy_tensor.materialize(tensor) for tensor in seen.tensors]
    except Exception as error:
        seen.is_late = seen.is_late or seen.error is None
        seen.error = seen.error or error
    return seen


def _run(function: Any, pattern: str, operands: Operands, seen: Outcome) -> None:
    known = {**NAMES, **operands.pend(), "f": function}
    try:
        given = eval(_code(pattern), known)
        if type(given).__name__ == "PyCapsule":
            given = torch.utils.dlpack.from_dlpack(given)
        if isinstance(given, Iterator):
            given = list(itertools.islice(given, N_ITEMS))
    except Exception as error:
        seen.error = error
        given = None
    _see_all("", given, operands, seen)
    if seen.error is not None:
        return
    with torch.no_grad():
        first = next(iter(operands.tensors.values()))
        if first.dtype is not torch.bool and first.layout is torch.strided:
            first.add_(1)
            _see_all("after a write of an operand, ", given, operands, seen)
        if isinstance(given, torch.Tensor) and given.layout is torch.strided:
            given.zero_()
            _see_all("after a write of the result, ", given, operands, seen)


def _see_all(when: str, given: Any, operands: Operands, seen: Outcome) -> None:
    seen.see(f"{when}result", given)
    for name, tensor in operands.tensors.items():
        seen.see(f"{when}{name}", tensor)


def difference(got: Outcome, expected: Outcome, *, exact: bool) -> tuple[str, str] | None:
    """What eager and lazy give, where they differ first; None if they don't."""
    if type(got.error) is not type(expected.error):
        return _named(expected.error), _named(got.error)
    if got.is_late and expected.error is not None:
        return None
    for one, other in itertools.zip_longest(got.words, expected.words):
        if one != other and (exact or not _are_values(one)):
            return str(other)[:300], str(one)[:300]
    if not exact:
        return None
    if len(got.tensors) != len(expected.tensors):
        return f"{len(expected.tensors)} tensors", f"{len(got.tensors)} tensors"
    for number, (a, b) in enumerate(zip(got.tensors, expected.tensors, strict=True)):
        found = value_difference(a, b, None)
        if found is not None:
            return f"{_at(expected, number)}: {b.flatten()[:4].tolist()}", (
                f"{a.flatten()[:4].tolist()} ({found})"
            )
    return None


def _are_values(word: str | None) -> bool:
    return word is not None and not word.partition(": ")[2].startswith("tensor")


def _at(outcome: Outcome, number: int) -> str:
    """Which of the words is about a tensor."""
    for word in outcome.words:
        number -= word.count("tensor torch.")
        if number < 0:
            return word.partition(": ")[0]
    return "a tensor"


def _named(error: BaseException | None) -> str:
    return "nothing raised" if error is None else f"{type(error).__name__}({str(error)[:200]!r})"
