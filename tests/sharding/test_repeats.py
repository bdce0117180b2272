"""Sharded calls that differ from those before in numbers alone, or in where their memory begins:
no rule is asked again, and all is as in torch."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs
from torch import nn

import lazy_tensor
from lazy_tensor import sharding
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.sharding import Replicate, Shard

pytestmark = pytest.mark.usefixtures("mesh")


def recorded() -> AbstractContextManager[Any]:
    return lazy_tensor.lazy_mode(record="always")


def test_an_optimizer_whose_numbers_change_each_step(mesh: Any, asked: list[Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    plan = {"0": sharding.ColwiseParallel(), "2": sharding.RowwiseParallel()}
    sharding.parallelize_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters())
    n_asked = []
    for _ in range(6):
        asked.clear()
        with recorded():
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        n_asked.append(len(asked))
    # its state is made in the first step; the third is the first with other numbers than before
    assert n_asked[3:] == [0, 0, 0], n_asked


@pytest.mark.parametrize(
    "call",
    [
        lambda x, a, b: torch.histc(x, 5, a, b), lambda x, a, b: x.clamp(a, b),
        lambda x, a, b: x.add(a, alpha=b), lambda x, a, b: torch.addcmul(x * a, x, x, value=b),
        lambda x, a, b: torch._foreach_add([x, x], [a, b])[1],
    ],
    ids=["histc", "clamp", "add", "addcmul", "a list"],
)  # fmt: skip
def test_numbers_that_change(mesh: Any, call: Any) -> None:
    data = torch.linspace(0, 10, 60).view(20, 3)
    replicated = sharding.distribute_tensor(data, mesh, [Replicate()])
    for a, b in ((0.0, 5.0), (1.0, 2.0), (2.0, 4.0), (2.0, 3.0), (2, 7)):
        with recorded():
            found = call(replicated, a, b).to_local()
        assert torch.equal(lazy_tensor.materialize(found), call(data, a, b))


def test_rows_of_a_data_set(mesh: Any, asked: list[Any]) -> None:
    data = torch.randn(6, 2, 4)
    weight = sharding.distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
    for i, x in enumerate(data):
        with recorded():
            y = sharding.DTensor.from_local(x, mesh, [Replicate()], run_check=False) @ weight
            found = (y.relu() * 2).to_local()
        assert torch.equal(lazy_tensor.materialize(found), (x @ torch.ones(4, 2)).relu() * 2)
        if i == 1:  # the first row is where memory begins
            asked.clear()
    assert not asked


def test_short_blocks_are_recorded_where_all_must_be(mesh: Any) -> None:
    x = sharding.distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    for _ in range(4):
        with recorded():
            y = x + x
            assert tensor_types.value_in(y).slot is not None


@pytest.mark.parametrize("way", ["eager", "recorded"])
def test_views_of_parts_that_begin_anywhere(way: str, mesh: Any) -> None:
    """The same calls again and again, as hits would be."""
    own, within = (theirs, torch.no_grad) if way == "eager" else (sharding, recorded)
    data = torch.arange(48.0).view(6, 8)
    for i in range(4):
        with within():
            part = data.clone()[i : i + 2]
            x = own.DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            view = x[:, 2:4].to_local()
            x.add_(1)
            locals_ = [view, x.to_local(), x.t().to_local(), (x * 2).to_local()]
            offsets = [tensor.storage_offset() for tensor in locals_]
            beside = view.as_strided((2,), (1,), view.storage_offset() + 1).tolist()
            found = view.tolist()
        assert offsets == [8 * i + 2, 8 * i, 8 * i, 0]
        first = 8.0 * i + 3
        assert found == [[first, first + 1], [first + 8, first + 9]]
        assert beside == [first + 1, first + 2]
