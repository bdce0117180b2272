"""The reference backend: runs a segment's calls one by one, as eager execution does.

In: any segment. Out: a program of its calls, bit-equal to eager. Each fusion runs it until its
kernel is there, and falls back to it. Kernels of other backends are timed and checked against it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lazy_tensor.kernels.backend import Kernel
from lazy_tensor.kernels.extension import program
from lazy_tensor.kernels.segment import Call, Segment, TensorSpec, creates, last_uses, refs


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
    """A program in C++ that runs the calls of `segment` in order.

    It takes tens of microseconds to make.
    """
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


def _made(call: Call, first: int) -> list[int | None]:
    """For each return of `call` the number of the value it creates, or None if it creates none.

    `first` is the number of the first created value.
    """
    numbers = iter(range(first, first + len(call.outputs)))
    # nothing, one tensor, or one list whose items are all new
    if not call.outputs or len(call.op._schema.returns) == 1:
        return [*numbers]
    return [next(numbers) if new else None for new in creates(call)]


def _last_uses(segment: Segment) -> list[list[int]]:
    """For each call, the created values that no later call uses and that are no outputs."""
    n_values = len(segment.inputs)
    named: list[list[int]] = []
    for call in segment.calls:
        taken = [ref.index for ref in refs(value for _, value in call.arguments())]
        named.append([*taken, *range(n_values, n_values + len(call.outputs))])
        n_values += len(call.outputs)
    return last_uses(named, (*range(len(segment.inputs)), *segment.outputs))
