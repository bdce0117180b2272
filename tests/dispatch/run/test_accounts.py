"""What C++ accounts for by itself: the same as Python does where C++ leaves it to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

import lazy_tensor
from lazy_tensor.dispatch.run import flush, hits
from lazy_tensor.dispatch.stats import STATS, FlushRecord
from lazy_tensor.dispatch.trie.trace import local

Program = Callable[[], object]
NUMBERS = ("_n_flushed", "_n_flushes", "_n_known", "_n_reads", "_n_recorded", "_is_parted",
           "has_read", "n_turns", "n_turns_noted", "_outcome")  # fmt: skip


def reading() -> None:
    x = torch.ones(4)
    with lazy_tensor.lazy_mode():
        for _ in range(20):
            y = (x + 1).exp()
            lazy_tensor.flush()
            if y.sum().item() > 0:
                x = y / y.sum()
        x.numpy()


def in_one_block() -> None:
    x: torch.Tensor = lazy_tensor.wrap(torch.ones(4))
    for i in range(20):
        x = x * 2 - i
        float(x.sum())
        bool(x.any())
    lazy_tensor.flush()


def training() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(8):
        with lazy_tensor.lazy_mode():
            loss = model(torch.ones(3, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        loss.item()


def told_by(program: Program) -> dict[str, Any]:
    """What the statistics and the policy say of a program that has run before."""
    lazy_tensor.cache_clear()
    for _ in range(3):
        program()
    lazy_tensor.reset_stats()
    program()
    told = [
        {one.name: getattr(record, one.name) for one in fields(FlushRecord)} for record in STATS.log
    ]
    for record in told:
        record["seconds"] = record["seconds"] > 0
        record["gap_s"] = record["gap_s"] >= 0
        record["steps"] = len(record["steps"] or [])
        del record["began_s"], record["plan_s"], record["state"]
    policy = local.trace.policy
    return {
        "counts": dict(STATS.counts),
        "causes": dict(STATS.causes),
        "regions": dict(STATS.regions),
        "log": told,
        **{name: getattr(policy, name) for name in NUMBERS},
    }


@pytest.mark.parametrize("program", [reading, in_one_block, training])
def test_cpp_accounts_as_python_does(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    if hits.native is None:
        pytest.skip("there is no C++")
    n_left = 0

    def left_to_python(*_: object) -> Any:
        nonlocal n_left
        n_left += 1
        return flush._Work()

    by_cpp = told_by(program)
    monkeypatch.setattr(hits.native, "flush_known", left_to_python)
    monkeypatch.setattr(hits.native, "end_region_of_hits", lambda trace, is_read: False)
    assert told_by(program) == by_cpp
    assert n_left


def test_times_of_flushes_and_regions_add_up() -> None:
    x = torch.ones(4)
    lazy_tensor.reset_stats()
    with lazy_tensor.lazy_mode():
        for _ in range(30):
            (x + 1).sum().item()
    records = list(STATS.log)
    assert all(one.began_s < two.began_s for one, two in zip(records, records[1:], strict=False))
    assert sum(one.seconds for one in records) <= STATS.flush_s + 1e-9
    assert STATS.flush_s <= sum(STATS.regions_s.values())
