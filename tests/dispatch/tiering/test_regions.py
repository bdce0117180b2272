"""A region of a program has one hash, whether it is recorded or runs as in eager."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.distributed.fake_pg import FakeStore

import lazy_tensor
from lazy_tensor.dispatch.record import sync_points
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.tiering import policy, sites
from lazy_tensor.dispatch.tiering.policy import Policy
from lazy_tensor.dispatch.trie.trace import local

Step = Callable[[], object]


@pytest.fixture
def sharding() -> Any:
    return pytest.importorskip("lazy_tensor.sharding", exc_type=ImportError)  # not on torch 2.10


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Step], tuple[set[Any], set[Any]]]:
    """The hashes of a step's regions when it is recorded, and when it isn't."""
    found: list[Any] = []
    records, at_sync_point = True, Policy.at_sync_point

    def forced(self: Policy, *, n_recorded: int) -> None:
        sync_points.catch_up(local.trace)  # with the hits, which nobody notes
        if self.past.has_begun():
            found.append(self.past.region())
        at_sync_point(self, n_recorded=n_recorded)
        self.cold = int(not records)

    monkeypatch.setattr(Policy, "at_sync_point", forced)
    if hits.native is not None:
        monkeypatch.setattr(hits.native, "end_region_of_hits", lambda trace, is_read: False)

    def both(step: Step) -> tuple[set[Any], set[Any]]:
        nonlocal records
        seen: dict[bool, set[Any]] = {True: set(), False: set()}
        for records in (True, True, True, False, False, True):
            found.clear()
            with lazy_tensor.lazy_mode():
                local.trace.policy.cold = int(not records)
                step()
            seen[records] = set(found)  # of the last time: the first one may differ
        local.trace.policy.reset()
        return seen[True], seen[False]

    return both


def one_hot_means() -> object:
    x = torch.arange(12.0).view(6, 2)
    members = F.one_hot(torch.tensor([0, 1, 2, 0, 1, 2]), 3).float()
    return members.T @ x / members.sum(0)[:, None]


def nearest_centres() -> object:
    x = torch.arange(12.0).view(6, 2)
    nearest = torch.cdist(x, x[:3]).argmin(1)  # lazy if it is recorded
    return F.one_hot(nearest, 3).float().T @ x


def attention_with_dropout() -> object:
    q = torch.ones(2, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool)
    return F.dropout(F.scaled_dot_product_attention(q, q, q, attn_mask=mask), 0.5)


def recurrent_training() -> object:
    torch.manual_seed(0)
    cell = nn.GRUCell(3, 5)
    optimizer = torch.optim.Adam(cell.parameters())
    state = torch.zeros(2, 5)
    for _ in range(3):
        state = cell(torch.ones(2, 3), state)
    state.square().mean().backward()
    optimizer.step()
    return state


def a_factorization_in_between() -> object:
    matrix = torch.eye(3) * 2 + 1
    return torch.linalg.cholesky(matrix * 3).sum() + torch.geqrf(matrix + 1)[0]


def noise_and_lists() -> object:
    x = torch.ones(4) * 2
    noisy = x + torch.randn(4) * torch.rand_like(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])
    return noisy[torch.randperm(4)] * torch.randint(0, 3, (4,))


def values_that_are_read() -> object:
    x = torch.ones(4) * 2
    return x / x.sum().item() + torch.nonzero(x > 1)


@pytest.mark.parametrize(
    "step",
    [
        one_hot_means,
        nearest_centres,
        attention_with_dropout,
        recurrent_training,
        a_factorization_in_between,
        noise_and_lists,
        values_that_are_read,
    ],
)
def test_recorded_or_not_a_region_has_one_hash(step: Step, hashes: Any) -> None:
    recorded, unrecorded = hashes(step)
    assert recorded == unrecorded
    assert recorded


@pytest.mark.filterwarnings("ignore")  # some ops are deprecated
@pytest.mark.parametrize("part", range(8))
def test_a_region_of_any_op_has_one_hash(part: int, hashes: Any) -> None:
    n_regions = 0
    for op in op_db[part::8]:
        if torch.float32 not in op.dtypes or op.name.startswith("jiterator"):
            continue
        sample = next(iter(op.sample_inputs("cpu", torch.float32)), None)
        if sample is None:
            continue
        call = op.op, (sample.input, *sample.args), sample.kwargs
        recorded, unrecorded = hashes(lambda call=call: call[0](*call[1], **call[2]))
        assert recorded == unrecorded, op.name
        n_regions += len(unrecorded)
    assert n_regions >= 40


@pytest.mark.parametrize("program", ["chain", "mlp"])
def test_a_sharded_region_has_one_hash(
    program: str, mesh: DeviceMesh, sharding: Any, hashes: Any
) -> None:
    if program == "chain":
        x = sharding.distribute_tensor(torch.ones(8, 4), mesh, [sharding.Shard(0)])

        def step() -> object:
            y = x + x
            return (y * 2).sum(), y.t() @ x
    else:
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        plan: dict[str, Any] = {"0": sharding.ColwiseParallel(), "2": sharding.RowwiseParallel()}
        sharding.parallelize_module(model, mesh, plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> object:
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            return None

    recorded, unrecorded = hashes(step)
    assert recorded == unrecorded
    assert recorded


def test_a_sharded_program_is_recorded_whatever_it_takes(
    mesh: DeviceMesh, sharding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that chose by their own times would issue their collectives at different places."""
    monkeypatch.setattr(sites, "TRIALS", 1)
    ever_quicker = itertools.count(step=-1).__next__
    monkeypatch.setattr(sites, "perf_counter", ever_quicker)
    monkeypatch.setattr(sites, "thread_time", ever_quicker)
    x = sharding.distribute_tensor(torch.ones(8, 4), mesh, [sharding.Shard(0)])
    plain = torch.ones(8, 4)
    local.trace.policy.reset()
    are_recorded = []
    for _ in range(6):
        with lazy_tensor.lazy_mode():
            y = (x + x) * 2 - x * 3
            z = (plain + plain) * 2
            are_recorded.append(lazy_tensor.is_pending(y) and lazy_tensor.is_pending(z))
    local.trace.policy.reset()
    assert all(are_recorded[1:])  # until a first block it was no sharded program


def test_a_region_that_begins_with_a_call_that_does_not_count_is_recorded(
    monkeypatch: pytest.MonkeyPatch, sharding: Any, mesh: DeviceMesh
) -> None:
    """`detach` of a sharded tensor is a state of the trie, and no call that the past has."""
    monkeypatch.setattr(policy, "FIRST_CALLS", 0)
    local.trace.policy.reset()
    model = sharding.parallelize_module(nn.Linear(4, 8), mesh, sharding.ColwiseParallel())
    x, were_recorded = torch.randn(2, 4), []
    for _ in range(4):
        with lazy_tensor.lazy_mode():
            model(x).sum().backward()
            were_recorded.append(local.trace.state is not local.trace.root)
    assert were_recorded[-1]


READS: dict[str, tuple[Callable[[Any], object], int]] = {
    "item": (lambda t: t.item(), 1),
    "float": (float, 1),
    "bool": (bool, 1),
    "numpy": (lambda t: t.numpy(), 1),
    "array": (lambda t: np.asarray(t), 1),
    "tolist": (lambda t: t.tolist(), 1),
    "a number of an op": (lambda t: torch.zeros(2).add_(torch.ones(2), alpha=t), 0),
    "an op": (lambda t: t.reshape(1).nonzero(), 0),
    "an op that gives a bool": (lambda t: torch.equal(t, t), 0),
}


@pytest.mark.parametrize("way", ["recorded", "seen", "asleep"])
@pytest.mark.parametrize("name", READS)
def test_a_round_counts_the_reads_that_python_asks_for(
    monkeypatch: pytest.MonkeyPatch, name: str, way: str
) -> None:
    """However the block runs: ops that read are not seen while it is asleep."""
    if way == "asleep" and hits.native is None:
        pytest.skip("without C++ no block falls asleep")
    read, n_reads = READS[name]
    x, it = torch.arange(3.0), local.trace.policy
    lazy_tensor.cache_clear()
    it.reset()
    with lazy_tensor.lazy_mode(record="always" if way == "recorded" else "auto"):
        it.cold = int(way != "recorded")
        if way == "asleep":
            sync_points.fall_asleep(local.trace)
            x + 1  # the first op that is let pass
            assert it.is_asleep
        total = x.sum()
        before = it._n_reads
        if way == "asleep":
            hits.native.passed_reads()
        read(total)
        counted = it._n_reads - before
        # of a block that is asleep C++ counts reads, all but the last one of a round
        counted += hits.native.passed_reads() if way == "asleep" else 0
    it.reset()
    assert counted == n_reads
