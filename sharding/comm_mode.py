"""`CommDebugMode` for our `DTensor`: torch's mode compares classes by `==`, and misses subclasses.

Users enter it around code whose collectives they want to count.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode

from lazy_tensor.sharding.tensor import DTensor
from lazy_tensor.sharding.torch_private import TorchDTensor


class CommDebugMode(TorchCommDebugMode):
    """Counts the collectives that are recorded inside it; torch's mode counts those that run."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # torch's mode returns NotImplemented for a call with a DTensor. Then the tensor's own
        # dispatch runs, and the mode sees its collectives.
        known = tuple([TorchDTensor if issubclass(t, DTensor) else t for t in types])
        return super().__torch_dispatch__(func, known, args, kwargs)  # type: ignore[no-untyped-call]
