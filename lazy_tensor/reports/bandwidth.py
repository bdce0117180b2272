"""How fast memory can be read and written here: what a kernel's bytes are held against."""

from __future__ import annotations

from functools import cache
from time import perf_counter

import torch

from lazy_tensor.reports.flushes import Step

N_BYTES, ROUNDS = 64 << 20, 5


def share_of_bandwidth(step: Step) -> float | None:
    """Which share of what memory gives a step got; None where it was not timed.

    Above 1 where what it reads was still in a cache.
    """
    if not step.seconds or not step.n_bytes:
        return None
    return step.n_bytes / step.seconds / limit_bytes_per_s(step.device)


@cache
def limit_bytes_per_s(device_type: str) -> float:
    """Bytes read and written a second by copying 64 MiB, the best of five times; some 50 ms, once
    a process."""
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
