"""Views at an index that changes from step to step: one plan for all, and eager's values."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import lazy_tensor

Body = Callable[[torch.Tensor, int, random.Random], object]


def read_row(data: torch.Tensor, i: int, chance: random.Random) -> object:
    row = data[i]
    return (row * 2 + 1).sum()


def read_rows(data: torch.Tensor, i: int, chance: random.Random) -> object:
    return (data[i : i + 3] * data[i]).sum(1)


def write_row(data: torch.Tensor, i: int, chance: random.Random) -> object:
    data[i] = data[i] * 0.5 + 1
    return data.sum()


def write_before_and_behind(data: torch.Tensor, i: int, chance: random.Random) -> object:
    data.mul_(0.9)
    row = data[i]
    total = row.sum()
    data.add_(1)
    row.sub_(total)
    return total + data[(i + 1) % len(data)].sum() + data.sum()


def cache_of_keys(data: torch.Tensor, i: int, chance: random.Random) -> object:
    data[:, i % data.shape[1]] = float(i)
    return data[:, : i % data.shape[1] + 1].sum()


def by_chance(data: torch.Tensor, i: int, chance: random.Random) -> object:
    rows = [data[chance.randrange(len(data))] for _ in range(3)]
    begin = chance.randrange(len(data) - 2)
    part = data[begin : begin + 2]
    if chance.random() < 0.3:
        part.mul_(0.5)
    if chance.random() < 0.3:
        rows[1].copy_(rows[0] + rows[2])
    return sum(row.sum() for row in rows) + part.sum()


@pytest.mark.parametrize("wraps", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize(
    "body", [read_row, read_rows, write_row, write_before_and_behind, cache_of_keys, by_chance]
)
def test_values_are_those_of_eager(body: Body, wraps: bool) -> None:
    def run(block: Any, data: torch.Tensor) -> list[Any]:
        chance, found = random.Random(0), []
        for step in range(40):
            with block():
                found.append(body(data, step * 7 % 10, chance))
        return [*map(lazy_tensor.materialize, found), lazy_tensor.materialize(data)]

    data = torch.arange(130.0).view(13, 10) / 7
    expected = run(nullcontext, data.clone())
    mine = data.clone()
    for a, b in zip(
        expected, run(lazy_tensor.lazy_mode, lazy_tensor.wrap(mine) if wraps else mine), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("body", [read_row, read_rows])
def test_one_plan_serves_all_indices(body: Body) -> None:
    data = torch.randn(100, 5)
    chance = random.Random(0)
    for i in range(3):
        with lazy_tensor.lazy_mode():
            body(data, i, chance)
    built = lazy_tensor.stats()["plans_built"]
    for i in range(3, 90):
        with lazy_tensor.lazy_mode():
            assert lazy_tensor.is_pending(body(data, i, chance))
    assert lazy_tensor.stats()["plans_built"] <= built + 1


def test_a_constant_index_stays_recorded() -> None:
    data = torch.randn(4, 5)
    for _ in range(3):
        with lazy_tensor.lazy_mode():
            row = data[2]
            assert lazy_tensor.is_pending(row)
            row.sum()


def test_gradients_of_an_indexed_parameter() -> None:
    def run(block: Any) -> torch.Tensor:
        torch.manual_seed(0)
        table = nn.Parameter(torch.randn(6, 3))
        optimizer = torch.optim.SGD([table], lr=0.1)
        for step in range(12):
            with block():
                optimizer.zero_grad()
                (table[step % 6] * table[step * 5 % 6]).sum().backward()
                optimizer.step()
        return table.detach()

    assert torch.equal(run(nullcontext), run(lazy_tensor.lazy_mode))


class Rows(torch.Tensor):
    """A class of the user's."""


@pytest.mark.parametrize("make", [lambda x: x.as_subclass(Rows), lambda x: TwoTensor(x, x)])
def test_views_of_other_classes(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    data = torch.arange(12.0).view(4, 3)
    with lazy_tensor.lazy_mode(record="always"):
        torch.full((2,), 0.5)  # from here on the trace knows a place with numbers
    for i in range(3):
        given = make(data)
        with lazy_tensor.lazy_mode(record="always"):
            row, part = given[i], given[i : i + 2]
        assert type(row) is type(part) is type(given)
        assert torch.equal(row + 0, make(data[i]))
        assert torch.equal(part + 0, make(data[i : i + 2]))
