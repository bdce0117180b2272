"""The backend for plans that are compiled whole: fused kernels with library calls between them.

In: a segment that holds library calls too. Out: an artifact whose program runs both. Users can't
choose this backend: `dispatch.plan.second_tier` uses it for plans that have run for long.
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
    """Inductor with library calls. Its kernels can be kept on disk, and are for fixed sizes."""

    name = "inductor whole"

    def __init__(self) -> None:
        self._inductor = InductorBackend()

    def unavailable(self, device_type: str) -> str | None:
        return self._inductor.unavailable(device_type) if device_type == "cpu" else "for CPUs alone"

    def refuses(self, call: Call, inputs: Sequence[TensorSpec] = ()) -> str | None:
        return fusible.refuses(call, TAKEN) or fusible.refuses_bytes(call, inputs)

    def compile(self, segment: Segment) -> Kernel:
        return self.load(segment, self.build(segment))

    def can_build(self, segment: Segment) -> bool:
        return segment.device.type == "cpu"

    def fingerprint(self) -> str:
        return self._inductor.fingerprint()

    def build(self, segment: Segment) -> bytes:
        # a plan has many kernels, and most of the C++ compiler's time goes to headers
        unit = Unit()
        try:
            with unit:
                made, outputs = compiled(segment, calls_libraries=True)
        except Exception as error:
            # no failure: the plan's segments have kernels of their own, which go on running
            raise Declined(f"it can't be compiled whole: {error!r}") from error
        libraries = (unit.compile(),) if made.kernels else ()
        return packed(replace(made, libraries=libraries), outputs)

    def load(self, segment: Segment, artifact: bytes) -> Kernel:
        # the artifact has no wrapper in Python that could call the libraries
        if not program.are_there():
            raise Declined("the C++ that runs programs isn't there")
        return unpacked(artifact, segment.scalars, is_long=program.touches_much(segment))


WHOLE = WholeBackend()
