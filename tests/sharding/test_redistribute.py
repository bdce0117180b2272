"""All pairs of placements: what is moved, where, and that nothing is lost."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist

import lazy_tensor
from lazy_tensor.sharding import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from tests.sharding.ranks import run_on_ranks

FROM = (Replicate(), Shard(0), Shard(1), Partial())
TO = FROM[:3]


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 3), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("size", [(12, 6), (5, 7), (1, 4)], ids=str)
def test_every_pair_keeps_the_tensor(shape, size):
    whole = torch.randn(size)

    def body():
        mesh = init_device_mesh("cpu", shape)
        pairs = list(itertools.product(itertools.product(FROM, repeat=len(shape)),
                                       itertools.product(TO, repeat=len(shape))))  # fmt: skip
        for before, after in pairs[:: max(1, len(pairs) // 40)]:
            known = [Replicate() if p.is_partial() else p for p in before]
            tensor = distribute_tensor(whole, mesh, known)
            n_sums = 1
            for dim, placement in enumerate(before):
                n_sums *= mesh.size(dim) if placement.is_partial() else 1
            tensor = DTensor.from_local(
                tensor.to_local(), mesh, before, shape=whole.shape, stride=whole.stride()
            )
            for _ in range(2):  # the second time it is a hit
                moved = tensor.redistribute(placements=after)
                assert moved.placements == after
                assert torch.equal(moved.full_tensor(), whole * n_sums), (before, after)

    run_on_ranks(math.prod(shape), body)


def test_second_time_nothing_is_asked():
    def body():
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        counts = []
        for _ in range(3):
            (tensor + tensor).relu().sum().full_tensor().item()
            counts.append(lazy_tensor.cache_info()["sharding"].misses)
        dist.barrier()  # the first rank to leave forgets decisions, for all threads
        return counts

    first, second, third = run_on_ranks(2, body)[0]
    assert second == third
