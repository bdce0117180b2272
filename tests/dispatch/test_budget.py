"""What recording may cost: loops get it back, programs that never repeat themselves don't."""

from __future__ import annotations

import itertools
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

import lazy_tensor
from lazy_tensor.dispatch import budget, flush, grow, record, request
from lazy_tensor.dispatch.budget import FIRST_COLD_OPS, Budget
from lazy_tensor.dispatch.stats import STATS
from lazy_tensor.dispatch.trace import State, local
from lazy_tensor.kernels import Kernel, Segment, backend
from lazy_tensor.kernels.aten import AtenBackend

N_OPS = 300
TICK_S = 100e-6


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first there is enough for some ten states, and work earns nothing. Each look at the clock
    takes the same time, whatever else the machine does."""
    ticks = itertools.count()
    for module in (flush, grow, record, request):
        monkeypatch.setattr(module, "perf_counter", lambda: next(ticks) * TICK_S)
    monkeypatch.setattr(budget, "START_S", 0.002)
    monkeypatch.setattr(budget, "SHARE_OF_WORK", 0.0)
    lazy_tensor.cache_clear()


def step(x: torch.Tensor) -> float:
    for i in range(N_OPS):
        x = x * 0.5 + i % 7
    return float(x.sum())


def recorded(x: torch.Tensor) -> int:
    before = lazy_tensor.stats()["ops"]
    with lazy_tensor.lazy_mode():
        found = step(x)
    assert found == step(x)
    n: int = lazy_tensor.stats()["ops"] - before
    return n


def test_a_loop_that_repeats_itself_is_recorded_whole_within_some_steps(scarce: None) -> None:
    x = torch.randn(8)
    counts = [recorded(x) for _ in range(6)]
    assert counts[0] < N_OPS // 4
    assert counts[-1] >= 2 * N_OPS


def test_sizes_that_come_back_late_are_not_taken_for_a_loop(scarce: None) -> None:
    batches = [torch.randn(8 + i) for i in range(20)]
    counts = [recorded(x) for _ in range(5) for x in batches]
    assert sum(counts) < N_OPS


def test_plans_wait_until_they_are_earned(scarce: None) -> None:
    x = torch.randn(8)
    with lazy_tensor.lazy_mode():
        (x + 1).tolist()
        local.trace.budget.left_s = -1.0
        (x + 1).tolist()
        assert lazy_tensor.stats().get("plans_built", 0) == 0
        local.trace.budget.left_s = 1.0
        (x + 1).tolist()
        assert lazy_tensor.stats()["plans_built"] == 1


def path(n: int, start: Any = None) -> State:
    state = State(None, (), None) if start is None else start
    for _ in range(n):
        state = State(state, (), None)
        state.n_ops += 1
    return state


def test_a_debt_is_bounded_and_some_looks_are_free(scarce: None) -> None:
    it = Budget()
    it.pay_plan(10.0, 0)
    assert it.left_s == -budget.MOST_DEBT_S
    it.pay(1.0)
    it.go_cold()
    it.try_again()
    assert not it.cold  # something grew: does the program come there again?
    it.go_cold()
    it.try_again()
    assert not it.cold  # not here
    it.go_cold(n_known=3)
    it.try_again()
    assert it.cold  # it went another way


def test_work_pays_for_more(scarce: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose running earns what recording it costs is not left unrecorded."""
    monkeypatch.setattr(budget, "SHARE_OF_WORK", 1e6)
    assert recorded(torch.randn(8)) >= 2 * N_OPS


def test_what_was_paid_comes_back_if_the_path_is_taken_again_soon(scarce: None) -> None:
    for n_between, comes_back in ((0, True), (budget.N_RECENT, False)):
        it = Budget()
        tip = path(5)
        for _ in range(5):
            it.pay(1e-4)
        it.earn(tip, 0.0)
        for _ in range(n_between):
            it.earn(path(1), 0.0)
        before = it.left_s
        it.earn_back(path(3, tip))
        assert (it.left_s > before) is comes_back


def test_less_is_spent_on_what_never_comes_again(scarce: None) -> None:
    it = Budget()
    tip = path(5)
    hopes, looks = [], []
    for _ in range(6):
        for _ in range(tip.n_ops):
            it.pay(1e-4)
        it.earn(tip, 0.0)
        it.go_cold()
        looks.append(it.looks)
        it.age += budget.N_RECENT
        it.earn_back(path(1))
        hopes.append(it.hope)
    assert hopes == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16, 1 / 16]
    assert looks == [8, 4, 2, 2, 2, 2]
    it.pay(1e-4)
    it.earn(tip, 0.0)
    it.earn_back(path(1, tip))
    assert it.hope == 1.0


@lazy_tensor.lazy_mode()
def is_seen(x: torch.Tensor) -> bool:
    """A step, and whether `lazy_mode` sees it."""
    seen = _get_current_dispatch_mode() is not None
    found = step(x)
    if not seen:
        assert type(x + 1) is torch.Tensor
        assert found == step(x)
    return seen


def let_alone() -> None:
    """Go on with what never repeats itself until it is let alone."""
    sizes = itertools.count(8)
    assert any(not is_seen(torch.randn(next(sizes))) for _ in range(40))
    assert not is_seen(torch.randn(next(sizes)))


def test_blocks_of_what_never_repeats_itself_are_let_alone(scarce: None) -> None:
    before = lazy_tensor.stats().get("unrecorded_blocks", 0)
    let_alone()
    assert lazy_tensor.stats()["unrecorded_blocks"] >= before + 2
    assert "blocks ran as in eager" in str(lazy_tensor.explain())


def test_another_block_is_not(scarce: None) -> None:
    let_alone()
    with lazy_tensor.lazy_mode():
        assert _get_current_dispatch_mode() is not None
    assert lazy_tensor.lazy_mode(compile="off")(is_seen.__wrapped__)(torch.randn(8))  # type: ignore[attr-defined]


def test_what_wants_to_see_the_calls_sees_them_there(scarce: None) -> None:
    """A function in `replay`, and one that is explained, within a block that is let alone."""
    replayed = lazy_tensor.replay(lambda x: x.sin() * 2)
    x = torch.randn(8)

    @lazy_tensor.lazy_mode()
    def block(x: torch.Tensor) -> bool:
        seen = _get_current_dispatch_mode() is not None
        step(x)
        if not seen:
            assert torch.equal(replayed(fixed), fixed.sin() * 2)
            assert lazy_tensor.explain(lambda: fixed + 1).result.tolist() == (fixed + 1).tolist()
        return seen

    fixed = x
    n_let_alone = sum(not block(torch.randn(8 + i)) for i in range(60))
    assert n_let_alone > 10
    assert replayed.n_replayed > 0, replayed.obstacle


def test_a_program_that_begins_to_repeat_itself_is_recorded(
    scarce: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_alone()
    monkeypatch.setattr(budget, "SHARE_OF_WORK", 1.0)
    x = torch.randn(500)
    assert any(is_seen(x) for _ in range(200))
    before = lazy_tensor.stats()["ops"]
    for _ in range(40):
        is_seen(x)
    assert lazy_tensor.stats()["ops"] >= before + 20 * N_OPS


class Built:
    """A plan whose kernels are being built, or not any more."""

    def __init__(self, n_there: int, n_under_way: int) -> None:
        self.n_there, self.n_under_way = n_there, n_under_way

    def awaits_kernels(self) -> bool:
        return self.n_under_way > self.n_there


def test_nothing_is_recorded_while_kernels_are_built(scarce: None) -> None:
    it, plan = Budget(), Built(n_there=3, n_under_way=8)
    it.note_kernels(Built(n_there=4, n_under_way=3))
    assert not it.cold
    it.note_kernels(plan)
    assert it.cold
    for _ in range(3):
        it.begin_block(None)
        it.end_block()
        assert it.cold > FIRST_COLD_OPS
    plan.n_under_way = 0
    assert it.begin_block(None)
    assert not it.cold


def test_what_has_its_kernels_goes_on_beside_what_awaits_some(scarce: None) -> None:
    it = Budget()
    for _ in range(20):
        it.note_kernels(Built(n_there=8, n_under_way=0))
    it.note_kernels(Built(n_there=0, n_under_way=50))
    assert not it.cold
    for _ in range(3):
        it.note_kernels(Built(n_there=0, n_under_way=50))
    assert it.cold


class Slow(AtenBackend):
    """Kernels that are there once somebody lets them."""

    name = "slow"

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def refuses(self, call: Any, inputs: Any = ()) -> str | None:
        return None

    def compile(self, segment: Segment) -> Kernel:
        self.may_end.wait()
        return super().compile(segment)


@pytest.mark.parametrize("around", ["step", "loop"])
def test_a_loop_runs_as_in_eager_until_its_kernels_are_there(
    around: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_backends", {"slow": Slow(), **backend._backends})
    monkeypatch.setattr(STATS, "all_flushes_s", flush.COMPILES_AFTER_S)
    monkeypatch.setattr(budget, "MOST_COLD_OPS", 100)
    lazy_tensor.configure(backend="slow", compile="background")
    slow: Any = backend._backends["slow"]
    x, y = torch.randn(8), torch.randn(8)

    def steps(n: int) -> None:
        nonlocal y
        for _ in range(n):
            with lazy_tensor.lazy_mode() if around == "step" else nullcontext():
                y = (x * 2 + y).relu() * 0.5
                assert float(y.sum()) >= 0

    with lazy_tensor.lazy_mode() if around == "loop" else nullcontext():
        try:
            steps(8)
            before = lazy_tensor.stats()["ops"]
            steps(50)
            assert lazy_tensor.stats()["ops"] == before
        finally:
            slow.may_end.set()
        flush.compiler().wait()
        steps(50)
        assert lazy_tensor.stats()["ops"] > before + 100
