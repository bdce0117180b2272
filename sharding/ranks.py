"""Finds out which ranks did not report the failure of a collective, for the error's text.

In: the store by which the ranks rendezvoused. Out: a sentence that `dispatch.run.failure` adds to
the error of a collective that failed at a flush.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from lazy_tensor.sharding import torch_private

PATIENCE_S = 5.0
"""How long to wait for the other ranks' reports. A rank in the same collective fails at once."""


def who_is_missing() -> str:
    """A sentence naming this rank, and the ranks that reported no failure within `PATIENCE_S`."""
    rank, others = dist.get_rank(), set(range(dist.get_world_size())) - {dist.get_rank()}
    try:
        store = torch_private.store()
        store.set(_key(rank), "failed")
        deadline = time.monotonic() + PATIENCE_S
        while others and time.monotonic() < deadline:
            others = {other for other in others if not store.check([_key(other)])}
            time.sleep(0.05)
    # DistNetworkError and similar: the process of rank 0, which has the store, may be the lost one
    except RuntimeError as error:
        return f"on rank {rank}; the store that rank 0 keeps does not answer ({error})"
    if not others:
        return f"on rank {rank}; all ranks failed: see what each of them says"
    names = ", ".join(map(str, sorted(others)))
    return (
        f"on rank {rank}; no failure was reported by rank {names} within {PATIENCE_S:.0f} s: it is "
        "gone, or has gone another way than the ranks that wait for it"
    )


def _key(rank: int) -> str:
    return f"lazy_tensor/failed/{rank}"
