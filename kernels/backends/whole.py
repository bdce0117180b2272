"""The backend for plans that are compiled whole: fused kernels with library calls between them.

In: a segment with library calls in it. Out: an artifact whose program runs both. Users can't choose
this backend: `dispatch.plan.second_tier` uses it for plans that have run for a while.
"""

from __future__ import annotations

from lazy_tensor.kernels import fusible
from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.backends.inductor import PortableInductor
from lazy_tensor.kernels.segment import Segment


class WholeBackend(PortableInductor):
    """Inductor with library calls. Its kernels can be kept on disk, and are for fixed sizes."""

    name = "inductor whole"
    taken = fusible.FUSIBLE | fusible.LIBRARY

    def unavailable(self, device_type: str) -> str | None:
        return None if device_type == "cpu" else "for CPUs alone"

    def build(self, segment: Segment) -> bytes:
        try:
            return super().build(segment)
        except Exception as error:
            # no failure: the plan goes on with the kernels of its segments
            raise Declined(f"it can't be compiled whole: {error!r}") from error


WHOLE = WholeBackend()
