"""Plans compiled whole: Inductor's kernels for all that can be fused, library calls between them.

In: a segment that holds library calls too. Out: an artifact whose program has both. No user chooses
this backend: `dispatch.plan.second_tier` does, for plans that have run for long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lazy_tensor.kernels import fusible
from lazy_tensor.kernels.backend import Declined, Kernel
from lazy_tensor.kernels.backends.artifact import packed, unpacked
from lazy_tensor.kernels.backends.inductor import InductorBackend, compiled
from lazy_tensor.kernels.backends.torch_inductor import Unit
from lazy_tensor.kernels.extension import program
from lazy_tensor.kernels.segment import Call, Segment, TensorSpec

TAKEN = fusible.FUSIBLE | fusible.LIBRARY


class WholeBackend:
    """Inductor with library calls. A kernel of its can be kept on disk, and is for one set of
    sizes."""

    name = "inductor whole"

    def __init__(self) -> None:
        self._inductor = InductorBackend()

    def unavailable(self, device_type: str) -> str | None:
        return self._inductor.unavailable(device_type) if device_type == "cpu" else "for CPUs alone"

    def refuses(self, call: Call, inputs: Sequence[TensorSpec] = ()) -> str | None:
        return fusible.refuses(call, TAKEN)

    def compile(self, segment: Segment) -> Kernel:
        return self.load(segment, self.build(segment))

    def can_build(self, segment: Segment) -> bool:
        return segment.device.type == "cpu"

    def fingerprint(self) -> str:
        return self._inductor.fingerprint()

    def build(self, segment: Segment) -> bytes:
        unit = Unit()  # a plan has many kernels, and most of their compiler's time goes to headers
        try:
            with unit:
                made, outputs = compiled(segment, calls_libraries=True)
        except Exception as error:  # Inductor may fail at a plan whose parts have kernels
            raise Declined(f"it can't be compiled whole: {error!r}") from error
        libraries = (unit.compile(),) if made.kernels else ()
        return packed(replace(made, libraries=libraries), outputs)

    def load(self, segment: Segment, artifact: bytes) -> Kernel:
        if not program.are_there():
            raise Declined("the C++ that runs programs isn't there")
        return unpacked(artifact, segment.scalars, is_long=program.touches_much(segment))


WHOLE = WholeBackend()
