"""Sharded calls while nothing is recorded: known ones run as one local op, with torch's results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs
import torch.nn.functional as F
from torch import nn, optim
from torch.distributed.tensor import parallel

import lazy_tensor
from lazy_tensor import sharding
from lazy_tensor.dispatch.stats import STATS
from lazy_tensor.dispatch.trie.trace import local
from lazy_tensor.sharding import Replicate, Shard

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {"amsgrad": True}, "AdamW": {"fused": True}, "Adadelta": {}, "NAdam": {},
    "RMSprop": {"momentum": 0.9}, "SGD": {"momentum": 0.9, "foreach": True},
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("mesh")


def unrecorded() -> None:
    local.trace.policy.cold = 1 << 40


def step(x: Any, factor: float) -> Any:
    y = (x + x) * factor
    y.mul_(0.5).add_(x, alpha=factor)
    first, second = torch._foreach_add([y, x], 1.0)
    torch._foreach_mul_([first, second], factor)
    return torch.cat([first, second], 0).t().detach().relu()


def test_what_is_known_asks_nothing_more(mesh: Any, asked: list[Any]) -> None:
    given = torch.rand(4, 6)
    x = sharding.distribute_tensor(given, mesh, [Shard(1)])
    plain = theirs.distribute_tensor(given, mesh, [Shard(1)])
    for i in range(6):
        unrecorded()
        asked.clear()
        result, expected = step(x, 1.5 + i), step(plain, 1.5 + i)
        assert torch.equal(result.to_local(), expected.to_local())
        assert result.placements == expected.placements
        assert result.stride() == expected.stride()
    assert asked == []


def test_a_write_is_counted_and_seen_by_views_and_by_autograd(mesh: Any) -> None:
    x = sharding.distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    w = sharding.distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]).requires_grad_()
    for i in range(4):
        unrecorded()
        view = x.t()
        before = x._version
        product = (w * x).sum()
        x.add_(1)
        assert x._version == before + 1
        torch._foreach_add_([x], 1.0)
        assert x._version == before + 2
        assert view.to_local()[0, 0].item() == 1 + 2 * (i + 1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_what_is_pending_is_not_run_at_once(mesh: Any) -> None:
    x = sharding.distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    for _ in range(3):
        unrecorded()
        assert (x + x).to_local().tolist() == [2.0, 2.0]
    with lazy_tensor.lazy_mode(record="always"):
        y = x * 3
        unrecorded()
        assert (y + y).to_local().tolist() == [6.0, 6.0]


def test_the_sign_of_zero_is_part_of_a_known_call(mesh: Any) -> None:
    x = sharding.distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    for zero in (0.0, -0.0) * 3:
        unrecorded()
        (product,) = torch._foreach_mul([x], [zero])
        clamped = (x - 1).clamp(max=zero)
        expected = torch.ones(2) * zero
        assert torch.equal(product.to_local().signbit(), expected.signbit())
        assert torch.equal(clamped.to_local().signbit(), torch.zeros(2).clamp(max=zero).signbit())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_unrecorded_is_torchs(name: str, mesh: Any) -> None:
    def trained(api: Any) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        plan = {"0": api.ColwiseParallel(), "2": api.RowwiseParallel()}
        api.parallelize_module(model, mesh, plan)
        optimizer = getattr(optim, name)(model.parameters(), lr=1e-2, **OPTIMIZERS[name])
        x = torch.randn(4, 8)
        for _ in range(6):
            unrecorded()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [lazy_tensor.materialize(p.detach().to_local()) for p in model.parameters()]

    ours, expected = trained(sharding), trained(parallel)
    assert all(map(torch.equal, ours, expected))


LOSSES: dict[str, Any] = {
    "mse": F.mse_loss, "smooth l1": F.smooth_l1_loss, "huber": F.huber_loss,
    "soft margin": F.soft_margin_loss,
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_mean_losses(name: str, mesh: Any) -> None:
    """Such a gradient is computed by that of the sum, which is another call of the same op."""
    x = torch.arange(8.0).view(4, 2)
    plain = x.clone().requires_grad_()
    LOSSES[name](plain, x + 1).backward()
    for _ in range(4):
        unrecorded()
        w = sharding.distribute_tensor(x.clone(), mesh, [Shard(0)]).requires_grad_()
        LOSSES[name](w, sharding.distribute_tensor(x + 1, mesh, [Shard(0)])).backward()
        assert plain.grad is not None
        assert w.grad is not None
        assert torch.equal(w.grad.to_local(), plain.grad[:2])


def test_a_mean_of_losses_is_reduced_each_time(mesh: Any) -> None:
    x, t = torch.arange(8.0).view(4, 2), torch.tensor([0, 1, 1, 0])
    for _ in range(4):
        unrecorded()
        given = [sharding.distribute_tensor(one, mesh, [Shard(0)]) for one in (x, t)]
        assert F.cross_entropy(*given).placements == (Replicate(),)


def test_lists_of_partial_tensors_are_reduced_each_time(mesh: Any) -> None:
    moved = []
    for _ in range(4):
        unrecorded()
        before = sum(STATS.redistributions.values())
        parts = [
            sharding.DTensor.from_local(torch.ones(3), mesh, [sharding.Partial()]) for _ in "ab"
        ]
        assert torch._foreach_abs(parts)[0].placements == (Replicate(),)
        moved.append(sum(STATS.redistributions.values()) - before)
    assert moved[0] > 0
    assert len({*moved}) == 1


def test_the_default_dtype_is_part_of_a_known_call(mesh: Any) -> None:
    x = sharding.distribute_tensor(torch.arange(8), mesh, [Shard(0)])
    try:
        for dtype in (torch.float32, torch.float64) * 2:
            torch.set_default_dtype(dtype)
            unrecorded()
            y = x / 2
            assert (y.dtype, y.to_local().dtype) == (dtype, dtype)
    finally:
        torch.set_default_dtype(torch.float32)
