"""How fast this machine reads and writes memory, against which reports hold a kernel's bytes.

In: a step with its bytes and its time. Out: its share of that speed. Nothing is measured before a
report asks.
"""

from __future__ import annotations

from functools import cache
from time import perf_counter

import torch

from lazy_tensor.reports.flushes import Step

N_BYTES, ROUNDS = 64 << 20, 5


def share_of_bandwidth(step: Step) -> float | None:
    """A step's bytes a second over those of a copy; None if the step was not timed.

    It is above 1 if what the step reads was still in a cache.
    """
    if not step.seconds or not step.n_bytes:
        return None
    return step.n_bytes / step.seconds / limit_bytes_per_s(step.device)


@cache
def limit_bytes_per_s(device_type: str) -> float:
    """Bytes read and written a second when 64 MiB are copied, the best of five times.

    That takes some 50 ms, once in a process.
    """
    with torch.no_grad():
        source = torch.ones(N_BYTES, dtype=torch.uint8, device=device_type)
        target = torch.empty_like(source)
        best_s = min(_seconds(source, target) for _ in range(ROUNDS))
    return 2 * N_BYTES / best_s


def _seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    start = perf_counter()
    target.copy_(source)
    if source.is_cuda:
        torch.cuda.synchronize()
    return perf_counter() - start
