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
    """Runs op by op. `refuses` gives a reason for every call, so no segment is made for this
    backend. `compile` accepts every segment, as the fallback of other backends."""

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
    # the numbers of the values that each call reads, and of those that it creates
    steps: list[tuple[list[int], range]] = []
    for call in segment.calls:
        read = [ref.index for ref in refs(value for _, value in call.arguments())]
        steps.append((read, range(len(specs), len(specs) + len(call.outputs))))
        specs += call.outputs
    leaves = range(len(segment.inputs))
    dying = last_uses([[*read, *created] for read, created in steps], (*leaves, *segment.outputs))
    instructions = [
        program.call(
            call.op, call.args, dict(call.kwargs), _created_numbers(call, created.start), dead,
            (specs[i] for i in (*read, *created)),
        )
        for call, (read, created), dead in zip(segment.calls, steps, dying, strict=True)
    ]  # fmt: skip
    return program.program_of(len(specs), leaves, segment.outputs, instructions, is_inner=True)


def _created_numbers(call: Call, first: int) -> list[int | None]:
    """For each return of `call` the number of the value it creates, or None if it creates none.

    `first` is the number of the first created value.
    """
    numbers = iter(range(first, first + len(call.outputs)))
    # nothing, one tensor, or one list whose items are all new
    if not call.outputs or len(call.op._schema.returns) == 1:
        return [*numbers]
    return [next(numbers) if new else None for new in creates(call)]
