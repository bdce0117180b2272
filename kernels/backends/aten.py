"""The reference backend: runs a segment's calls one by one, as eager execution does.

In: any segment. Out: a program of its calls, bit-equal to eager. Each fusion runs it until its
kernel is there, and falls back to it. Kernels of other backends are timed and checked against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lazy_tensor.kernels.backend import Kernel
from lazy_tensor.kernels.extension import program
from lazy_tensor.kernels.segment import Call, Ref, ScalarRef, Segment, TensorSpec, creates, refs


class AtenBackend:
    """Runs op by op. It refuses every call, so no segment is made for it, but `compile` accepts
    every segment, as the fallback of other backends."""

    name = "aten"

    def unavailable(self, device_type: str) -> str | None:
        return None

    def refuses(self, call: Call, inputs: Sequence[TensorSpec] = ()) -> str | None:
        return "aten runs op by op"

    def compile(self, segment: Segment) -> Kernel:
        return compile_aten(segment)


def compile_aten(segment: Segment) -> Kernel:
    """A callable that runs the calls of `segment` in order.

    It takes tens of microseconds to make. It is a C++ program if the C++ is there.
    """
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
    """Runs a segment's calls in Python, where C++ programs are not available."""

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
            # it wrote an argument, and returns nothing new
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
    """An argument with each `Ref` and `ScalarRef` replaced by its value, and tuples by lists."""
    if isinstance(argument, Ref):
        return values[argument.index]
    if isinstance(argument, ScalarRef):
        return scalars[argument.index]
    if type(argument) is tuple:
        return [real(item, values, scalars) for item in argument]
    return argument


def _gives_many(call: Call) -> bool:
    """Whether the op returns a tuple or a list, and not one tensor."""
    returns = call.op._schema.returns
    return len(returns) > 1 or str(returns[0].type).startswith("List")


def _made(call: Call, first: int) -> list[int | None]:
    """For each return of `call` the number of the value it creates, or None if it creates none.

    `first` is the number of the first created value.
    """
    if not call.outputs:
        return []
    numbers = iter(range(first, first + len(call.outputs)))
    # one tensor, or one list whose items are all new
    if not _gives_many(call) or len(call.op._schema.returns) == 1:
        return [*numbers]
    return [next(numbers) if new else None for new in creates(call)]


def _last_uses(segment: Segment) -> list[list[int]]:
    """For each call, the created values that no later call uses and that are no outputs.

    They are freed after the call, as eager execution frees its temporaries.
    """
    # the last call that uses each value; the call that creates it, if nothing does
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
