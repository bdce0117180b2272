"""Recording has to pay: what runs quicker as in eager is left to it, and tried again at times."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lazy_tensor
from lazy_tensor.dispatch import pays, policy
from lazy_tensor.dispatch.options import Record
from lazy_tensor.dispatch.pays import COLD_TRIALS, EMPTY, TRIALS, TRIES_AGAIN, Pays, Times
from lazy_tensor.dispatch.sites import LISTENS
from lazy_tensor.dispatch.stats import COMPILES_AFTER_S, NEW, STATS
from lazy_tensor.dispatch.trace import local
from lazy_tensor.kernels.fusion import Fusion


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    it = Clock()
    monkeypatch.setattr(pays, "perf_counter", it)
    monkeypatch.setattr(pays, "TRIALS", TRIALS)
    monkeypatch.setattr(STATS, "worked_s", -math.inf)
    yield it
    lazy_tensor.reset_stats()  # of what only the clock says


def takes(it: Pays, clock: Clock, seconds: float, flush_s: float = 0.0, **is_recorded: bool) -> Any:
    """A run of stretch 7, and of what the block's end makes of it."""
    clock.now_s += seconds
    coming = it.goes_on(7, NEW, **is_recorded)
    clock.now_s += flush_s
    it.add_flush(flush_s)
    clock.now_s += 100.0  # outside
    it.goes_on(EMPTY, NEW, is_recorded=False)
    return coming


def test_the_quicker_way_is_taken(clock: Clock) -> None:
    for recorded_s, pays_off in ((0.5, True), (1.5, False)):
        it = Pays()
        for _ in range(TRIALS + 1):
            coming = takes(it, clock, recorded_s / 2, recorded_s / 2, is_recorded=True)
        assert not coming.pays  # it has to be known what it takes as in eager
        assert not coming.is_compared
        for _ in range(COLD_TRIALS + 1):
            coming = takes(it, clock, 1.0, is_recorded=False)
        assert coming.is_compared
        assert coming.pays is pays_off


def test_what_was_slower_is_tried_again_less_and_less(clock: Clock) -> None:
    it = Pays()
    n_recorded = 0
    for _ in range(4 * TRIES_AGAIN):
        coming = it.goes_on(EMPTY, NEW, is_recorded=False)
        is_recorded = coming is None or coming.pays
        n_recorded += is_recorded
        takes(it, clock, 2.0 if is_recorded else 1.0, is_recorded=is_recorded)
    assert n_recorded in range(3 * TRIALS, 3 * TRIALS + 5)  # at first, and twice again


def test_kernels_that_come_are_tried(clock: Clock) -> None:
    it = Pays()
    for is_recorded in [True] * (TRIALS + 1) + [False] * (COLD_TRIALS + 1):
        coming = takes(it, clock, 1.0 + is_recorded, is_recorded=is_recorded)
    assert not coming.pays
    it.try_again()
    assert coming.pays


def test_stretches_that_follow_each_other_are_told_apart(clock: Clock) -> None:
    it = Pays()
    cost = {(1, True): 1.0, (1, False): 2.0, (2, True): 2.0, (2, False): 1.0}
    way = {1: True, 2: True}
    for _ in range(3 * TRIALS):
        for stretch, other in ((1, 2), (2, 1)):
            clock.now_s += cost[stretch, way[stretch]]
            coming = it.goes_on(stretch, NEW, is_recorded=way[stretch])
            if coming is not None:
                way[other] = coming.pays
    assert way == {1: True, 2: False}


def block(x: torch.Tensor) -> bool:
    """Whether ops in it are seen, and recorded."""
    before = lazy_tensor.stats()["ops"]
    with lazy_tensor.lazy_mode():
        float((x + 1).sum())
    return bool(lazy_tensor.stats()["ops"] > before)


def test_what_is_pending_runs_before_anything_is_left_to_eager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A value may be read that nothing pending makes, behind a write to a plain tensor."""
    slower = Times()
    slower.recorded_s, slower.n_recorded, slower.cold_s, slower.n_cold = 2.0, 1 << 40, 1.0, 9
    x, mask = torch.zeros(3), torch.tensor([True, False])
    with lazy_tensor.lazy_mode():
        x.add_(1)
        monkeypatch.setattr(Pays, "goes_on", lambda *_, **__: slower)
        assert mask.nonzero().shape == (1, 1)
        assert local.trace.policy.cold
        assert (x * 2).tolist() == [2.0] * 3


@pytest.mark.parametrize("record", ["auto", "always"])
def test_a_loop_that_recording_slows_down_is_let_alone(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, record: Record
) -> None:
    lazy_tensor.cache_clear()
    monkeypatch.setattr(policy, "FIRST_CALLS", 1 << 60)
    local.trace.policy.reset()
    x = torch.randn(3)
    with lazy_tensor.lazy_mode(record=record):
        pass
    lazy_tensor.configure(record=record)
    recorded = []
    for _ in range(TRIALS + COLD_TRIALS + 3 * LISTENS):
        cold = local.trace.policy.cold
        clock.now_s += 1.0 if cold else 2.0
        recorded.append(block(x))
    if record == "always":
        assert all(recorded)
        return
    assert all(recorded[:TRIALS])
    assert not any(recorded[TRIALS + COLD_TRIALS :])
    assert lazy_tensor.stats()["unrecorded_blocks"] >= 2 * LISTENS


@pytest.mark.parametrize("news", ["it runs for long", "a kernel came"])
def test_what_was_left_to_eager_is_tried_again_with_kernels(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, news: str
) -> None:
    lazy_tensor.cache_clear()
    x = torch.randn(3)
    for _ in range(TRIALS + COLD_TRIALS + LISTENS):
        clock.now_s += 1.0 if local.trace.policy.cold else 2.0
        recorded = block(x)
    assert not recorded
    if news == "a kernel came":
        monkeypatch.setattr(Fusion, "n_adopted", Fusion.n_adopted + 1)
    else:
        monkeypatch.setattr(STATS, "worked_s", COMPILES_AFTER_S)
    assert any(block(x) for _ in range(4))
