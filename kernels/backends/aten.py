"""The reference backend: a segment's calls, one by one, as eager execution would make them.

In: any segment. Out: a program of its calls, bit-equal to eager. Every other backend is measured
and checked against it, and falls back to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lazy_tensor.kernels.backend import Kernel
from lazy_tensor.kernels.extension import program
from lazy_tensor.kernels.segment import Call, Ref, ScalarRef, Segment, TensorSpec, creates, refs


class AtenBackend:
    """Runs op by op and fuses nothing; `compile` takes every segment: it is the fallback."""

    name = "aten"

    def unavailable(self, device_type: str) -> str | None:
        return None

    def refuses(self, call: Call, inputs: Sequence[TensorSpec] = ()) -> str | None:
        return "aten runs op by op"

    def compile(self, segment: Segment) -> Kernel:
        return compile_aten(segment)


def compile_aten(segment: Segment) -> Kernel:
    """What runs `segment`'s calls in order; tens of microseconds, compiles nothing."""
    if not program.are_there():
        return _Interpreted(segment)
    specs: list[TensorSpec | None] = list(segment.inputs)
    instructions = []
    for call, dead in zip(segment.calls, _last_uses(segment), strict=True):
        made = _made(call, len(specs))
        specs += call.outputs
        arguments = [value for _, value in call.arguments()]
        touched = (*(specs[ref.index] for ref in refs(arguments)), *call.outputs)
        instructions.append(
            program.call(call.op, call.args, dict(call.kwargs), made, dead, touched)
        )
    leaves = range(len(segment.inputs))
    return program.program_of(len(specs), leaves, segment.outputs, instructions, is_inner=True)


class _Interpreted:
    """The same by Python, where no programs can be made."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def __call__(
        self, tensors: Sequence[torch.Tensor], scalars: Sequence[float]
    ) -> tuple[torch.Tensor, ...]:
        values: list[Any] = [*tensors]
        for call in self._segment.calls:
            args = real(call.args, values, scalars)
            kwargs = {name: real(value, values, scalars) for name, value in call.kwargs}
            results = call.op._op(*args, **kwargs)
            if not call.outputs:
                continue
            made = _made(call, len(values))
            values += [None] * len(call.outputs)
            given = results if _gives_many(call) else (results,)
            for number, result in zip(made, given, strict=True):
                if number is not None:
                    values[number] = result
        return tuple(values[number] for number in self._segment.outputs)


def real(argument: Any, values: Any, scalars: Sequence[complex]) -> Any:
    """An argument with the values that it names by number, tuples as lists."""
    if isinstance(argument, Ref):
        return values[argument.index]
    if isinstance(argument, ScalarRef):
        return scalars[argument.index]
    if type(argument) is tuple:
        return [real(item, values, scalars) for item in argument]
    return argument


def _gives_many(call: Call) -> bool:
    returns = call.op._schema.returns
    return len(returns) > 1 or str(returns[0].type).startswith("List")


def _made(call: Call, first: int) -> list[int | None]:
    """For each thing that `call` returns the number of the value that it creates, if it does;
    `first` is that of the first."""
    if not call.outputs:
        return []
    numbers = iter(range(first, first + len(call.outputs)))
    if not _gives_many(call) or len(call.op._schema.returns) == 1:
        return [*numbers]
    return [next(numbers) if new else None for new in creates(call)]


def _last_uses(segment: Segment) -> list[list[int]]:
    """For each call, the created values that nothing names after it."""
    last: dict[int, int] = {}
    n_values = len(segment.inputs)
    for position, call in enumerate(segment.calls):
        for number in range(n_values, n_values + len(call.outputs)):
            last[number] = position
        n_values += len(call.outputs)
        for ref in refs(value for _, value in call.arguments()):
            if ref.index >= len(segment.inputs):
                last[ref.index] = position
    dying: list[list[int]] = [[] for _ in segment.calls]
    for number, position in last.items():
        if number not in segment.outputs:
            dying[position].append(number)
    return dying
