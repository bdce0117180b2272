"""A backend for counts: it fuses what Inductor does, notes the segments, and runs them op by op."""

from __future__ import annotations

from collections.abc import Sequence

from lazy_tensor.kernels import Call, Kernel, Segment, TensorSpec
from lazy_tensor.kernels.backends.aten import compile_aten
from lazy_tensor.kernels.fusible import refuses


class Counting:
    """`segments` are those that were compiled, in order."""

    name = "counting"

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def unavailable(self, device_type: str) -> str | None:
        return None

    def refuses(self, call: Call, inputs: Sequence[TensorSpec] = ()) -> str | None:
        return refuses(call)

    def compile(self, segment: Segment) -> Kernel:
        self.segments.append(segment)
        return compile_aten(segment)
