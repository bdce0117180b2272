"""Measures which of two callables is faster, on the program's own calls.

`service.fusion` uses it to compare a kernel with op-by-op execution on the user's own data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch

from lazy_tensor.kernels.backend import Kernel

N_ROUNDS = 5


@dataclass(eq=False)
class Trial:
    """Runs `kernel` and `aten` in turn, one at each call, then calls `decide(kernel_s, aten_s)`.

    The times are medians of `N_ROUNDS` calls each, after a first call of each as a warm-up.
    """

    kernel: Kernel
    aten: Kernel
    decide: Callable[[float, float], None]
    _times_s: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def __call__(
        self, tensors: Sequence[torch.Tensor], scalars: Sequence[float]
    ) -> Sequence[torch.Tensor]:
        kernel_s, aten_s = self._times_s
        is_kernel = len(kernel_s) <= len(aten_s)
        start = perf_counter()
        results = (self.kernel if is_kernel else self.aten)(tensors, scalars)
        (kernel_s if is_kernel else aten_s).append(perf_counter() - start)
        if min(len(kernel_s), len(aten_s)) > N_ROUNDS:
            self.decide(median(kernel_s[1:]), median(aten_s[1:]))
        return results
