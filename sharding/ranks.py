"""Which ranks are still there: asked when a collective has failed, to say who let it down.

In: nothing but the store that the ranks met by. Out: a sentence for the error.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from lazy_tensor.sharding import torch_private

PATIENCE_S = 5.0
"""How long the others have to fail too. Those that wait for the same collective do so at once."""


def who_is_missing() -> str:
    """This rank, and those that did not fail within `PATIENCE_S`: they are gone, or elsewhere."""
    rank, others = dist.get_rank(), set(range(dist.get_world_size())) - {dist.get_rank()}
    try:
        store = torch_private.store()
        store.set(_key(rank), "failed")
        deadline = time.monotonic() + PATIENCE_S
        while others and time.monotonic() < deadline:
            others = {other for other in others if not store.check([_key(other)])}
            time.sleep(0.05)
    except RuntimeError as error:  # torch's DistNetworkError and its like
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
