"""Measures which of two callables is faster, on the program's own calls.

`service.fusion` uses it to compare a kernel with op-by-op execution on the user's own data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import torch

from lazy_tensor.kernels.backend import Kernel

N_ROUNDS = 5


class Trial:
    """Runs `kernel` and `aten` in turn, one at each call, then calls `decide(kernel_s, aten_s)`.

    The times are medians of `N_ROUNDS` calls each, after a first call of each as a warm-up.
    """

    def __init__(
        self, kernel: Kernel, aten: Kernel, decide: Callable[[float, float], None]
    ) -> None:
        self._candidates = (kernel, aten)
        self._times_s: tuple[list[float], list[float]] = ([], [])
        self._decide = decide
        self._turn = 0

    def __call__(
        self, tensors: Sequence[torch.Tensor], scalars: Sequence[float]
    ) -> Sequence[torch.Tensor]:
        turn = self._turn & 1
        self._turn += 1
        start = perf_counter()
        results = self._candidates[turn](tensors, scalars)
        self._times_s[turn].append(perf_counter() - start)
        kernel_s, aten_s = self._times_s
        if min(len(kernel_s), len(aten_s)) > N_ROUNDS:
            self._decide(median(kernel_s[1:]), median(aten_s[1:]))
        return results
