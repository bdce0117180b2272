"""Training goes on for long without holding more: each of torch's optimizers on sharded parameters.

`--full` takes 10,000 steps each, a quarter of an hour in all; the sample takes some hundreds.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.testing._internal.distributed.fake_pg import FakeStore

import lazy_tensor
from lazy_tensor import sharding
from lazy_tensor.sharding import Shard, layout

PAGE_BYTES = 4096
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {}, "Adadelta": {}, "Adafactor": {}, "Adagrad": {}, "Adam": {"amsgrad": True},
    "AdamW": {"fused": True}, "Adamax": {}, "LBFGS": {"max_iter": 2}, "NAdam": {}, "RAdam": {},
    "RMSprop": {"momentum": 0.9}, "Rprop": {}, "SGD": {"momentum": 0.9},
}  # fmt: skip


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield sharding.init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def held() -> tuple[int, int, int]:
    """Python's memory blocks, the process's bytes, and the caches' entries."""
    gc.collect()
    n_pages = int(Path("/proc/self/statm").read_text().split()[1])
    entries = sum(info.currsize for info in lazy_tensor.cache_info().values())
    return sys.getallocatedblocks(), n_pages * PAGE_BYTES, entries


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_holds_no_more_after_many_steps(
    name: str, mesh: Any, request: pytest.FixtureRequest
) -> None:
    n_steps = 10_000 if request.config.getoption("full") else 500
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    plan = {"0": sharding.ColwiseParallel(), "2": sharding.RowwiseParallel()}
    sharding.parallelize_module(model, mesh, plan)
    optimizer = getattr(optim, name)(model.parameters(), lr=1e-4, **OPTIMIZERS[name])
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    x = torch.randn(4, 8)

    def loss() -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    n_window = n_steps // 5
    seen = []
    for step in range(1, n_steps + 1):
        with lazy_tensor.lazy_mode(record="always"):
            optimizer.step(loss)
            scheduler.step()
        if step % n_window == 0:
            seen.append(held())
    # What leaks does so in every window; what fills caches is in the first, what another thread
    # does meanwhile in one or two.
    columns = zip(*seen, strict=True)
    blocks, n_bytes, entries = (min(b - a for a, b in pairwise(column)) for column in columns)
    most = n_window * 3 // 4  # a quarter less than one of each a step
    assert blocks < most, seen
    assert n_bytes < max(1 << 18, 16 * most), seen
    assert entries < most, seen


def test_what_sizes_have_in_common_is_forgotten_with_the_caches(mesh: Any) -> None:
    def n_families() -> int:
        lazy_tensor.cache_clear()
        lazy_tensor.reset_stats()  # the log of flushes holds states, and these layouts
        gc.collect()
        return len(layout._families)

    before = n_families()
    for size in ((4, 6), (5, 6), (1, 6)):
        x = sharding.distribute_tensor(torch.ones(size), mesh, [Shard(0)])
        (x + x).to_local().tolist()
    assert len(layout._families) > before
    del x
    assert n_families() <= before


def test_a_collective_whose_end_nobody_learns_marks_only_its_own_memory(mesh: Any) -> None:
    """The fake backend never calls a collective completed. Its memory's number is used again."""
    for _ in range(100):
        dist.all_reduce(torch.ones(3, 4))
    given = [torch.ones(3, 4) for _ in range(100)]
    lazy = [lazy_tensor.wrap(tensor).t()[0] for tensor in given]
    assert {tensor.stride() for tensor in lazy_tensor.materialize(lazy)} == {(4,)}
