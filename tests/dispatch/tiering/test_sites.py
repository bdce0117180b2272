"""Blocks that are bypassed, and parts of blocks: nobody sees their ops, nothing else changes."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import lazy_tensor
from lazy_tensor import mode
from lazy_tensor.dispatch.options import Record
from lazy_tensor.dispatch.record import recorder
from lazy_tensor.dispatch.run import flush, hits
from lazy_tensor.dispatch.stats import COMPILES_AFTER_S, STATS
from lazy_tensor.dispatch.tiering import policy, sites
from lazy_tensor.dispatch.tiering.policy import (
    MOST_SITES,
    PAUSED,
    READS_WITHOUT,
    UNREAD_STEPS,
    Policy,
)
from lazy_tensor.dispatch.tiering.sites import (
    AS_ONE,
    AT_MOST,
    BLOCKS,
    COMPARED,
    GOES_ON,
    LISTENS,
    READS,
    ROUND,
    ROUND_S,
    SHARE,
    SHORT_ONES,
    TRIALS,
    Site,
)  # fmt: skip
from lazy_tensor.dispatch.trie.trace import local
from lazy_tensor.kernels.service.fusion import Fusion

needs_cpp = pytest.mark.skipif(
    hits.status() == "LAZY_TENSOR_HITS is python", reason="ops come by torch's own C++"
)


def are_seen() -> bool:
    """Whether torch hands this thread's ops on plain tensors to a mode."""
    key = torch._C.DispatchKey.Python
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(key))


class QuickerAlone(Site):
    """Blocks that are known to be quicker if they are bypassed, for good."""

    def begin(self, *, may_choose: bool) -> bool:
        self._n_left, self._eager_is_better = 1 << 40, True
        return super().begin(may_choose=may_choose)


def bypassed_rounds(where: str, unit: str) -> Site:
    """The same of rounds, but not of whole blocks."""
    return (QuickerAlone if unit != BLOCKS else Site)(where, unit)


NATIVE = SimpleNamespace(end_passing=lambda: None)
"""Stands for the C++ where a test calls a policy's methods by itself."""


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """The time, and a process that asks for no kernels."""
    it = Clock()
    monkeypatch.setattr(sites, "perf_counter", it)
    monkeypatch.setattr(sites, "thread_time", it)
    monkeypatch.setattr(policy, "perf_counter", it)
    monkeypatch.setattr(sites, "TRIALS", TRIALS)
    monkeypatch.setattr(STATS, "worked_s", -math.inf)
    yield it
    lazy_tensor.reset_stats()  # of what only the clock says


@pytest.fixture
def in_block(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Policy:
    """A policy in a block, without the C++."""
    monkeypatch.setattr(Policy, "native", NATIVE)
    it = Policy()
    it.begin_block("here")
    return it


def ways(
    site: Site,
    clock: Clock,
    n: int,
    seen_s: float,
    bypassed_s: float = 1.0,
    *,
    host_s: float = 0.0,
    cycle: int = 1,
) -> list[bool]:
    """Whether each of `n` blocks is seen, which take longer and longer, `cycle` in turn; to record
    takes `host_s` of them."""
    found: list[bool] = []
    for i in range(n):
        site.is_followed(ran_s=seen_s - host_s if found and found[-1] else 0.0)
        if site.rests():
            found.append(False)
            continue
        is_seen = site.begin(may_choose=True)
        clock.now_s += (seen_s if is_seen else bypassed_s) * (1 + i % cycle)
        if is_seen:
            site.end(n_known=1, n_new=0, n_unknown=0)
        found.append(is_seen)
    return found


UNTIL_THEN = TRIALS + COMPARED
"""Blocks until the better way is taken."""


@pytest.mark.parametrize("cycle", [1, 2, 6, 50])
def test_the_quicker_way_is_taken(clock: Clock, cycle: int) -> None:
    for seen_s, is_seen in ((0.7, True), (1.4, False)):
        found = ways(Site(), clock, UNTIL_THEN + GOES_ON, seen_s, cycle=cycle)
        assert found[:TRIALS] == [True] * TRIALS
        compared = found[TRIALS : TRIALS + 4]
        assert compared.count(True) == 2
        assert set(found[UNTIL_THEN : UNTIL_THEN + GOES_ON - COMPARED]) == {is_seen}


@pytest.mark.parametrize(("round_s", "reads_a_block"), [(ROUND_S, 1), (0.9 * ROUND_S, AS_ONE)])
def test_reads_of_a_long_round_count_as_blocks(
    clock: Clock, round_s: float, reads_a_block: int
) -> None:
    site, n_reads, n_recorded = Site(unit=READS), 8, 0
    while not site.is_compared:
        site.is_followed()
        site.begin(may_choose=True)
        clock.now_s += round_s
        site.end(n_known=1, n_new=0, n_unknown=0, n_parts=n_reads)
        n_recorded += n_reads * (not site.is_compared)
    assert n_recorded == TRIALS * reads_a_block


def test_what_a_gpu_is_behind_counts_in_compared_blocks_alone(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are recorded take the GPU 0.5, the others 3, the host 1 either way."""
    behind_s = 0.0
    waits: list[float] = []

    def waited() -> float:
        nonlocal behind_s
        waits.append(behind_s)
        clock.now_s += behind_s
        behind_s = 0.0
        return clock.now_s

    monkeypatch.setattr(sites, "comparison_clock", lambda: waited)
    site, found = Site(), []
    for _ in range(TRIALS + 4 + GOES_ON):
        site.is_followed()
        is_seen = site.begin(may_choose=True)
        clock.now_s += 1
        behind_s = max(behind_s - 1, 0) + (0.5 if is_seen else 3)
        if is_seen:
            site.end(n_known=1, n_new=0, n_unknown=0)
        found.append(is_seen)
    assert found[TRIALS + 4 :] == [True] * GOES_ON
    assert len(waits) == 2 * 4


def test_time_of_others_does_not_count_in_a_program_of_one_thread(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks wait for another rank ten times as long as they run, recorded ones for longer."""
    ran = Clock()
    monkeypatch.setattr(sites, "thread_time", ran)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    site, found = Site(), []
    for _ in range(TRIALS + 4 + GOES_ON):
        site.is_followed()
        is_seen = site.begin(may_choose=True)
        ran.now_s += 0.4 if is_seen else 1.0
        clock.now_s += 10.4 if is_seen else 8.0
        if is_seen:
            site.end(n_known=1, n_new=0, n_unknown=0)
        found.append(is_seen)
    assert found[TRIALS + 4 :] == [True] * GOES_ON


def test_four_blocks_say_enough_where_one_way_takes_twice_as_long(clock: Clock) -> None:
    for seen_s, is_seen in ((0.3, True), (4.0, False)):
        found = ways(Site(), clock, TRIALS + 4 + GOES_ON, seen_s)
        assert found[TRIALS + 4 :] == [is_seen] * GOES_ON


def test_blocks_that_are_ever_new_take_a_small_share_of_the_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sites, "TRACED", 3)
    site, n_seen, n_blocks = Site(), 0, 1000
    for _ in range(n_blocks):
        is_seen = site.begin(may_choose=True)
        n_seen += is_seen
        clock.now_s += 11.0 if is_seen else 1.0
        if is_seen:
            site.end(n_known=1, n_new=0, n_unknown=0)
        site.is_followed(new_s=10.0 if is_seen else 0.0)
    assert n_seen <= 4 + n_blocks / 190


def test_the_first_steps_of_a_loop_do_not_keep_it_from_being_recorded(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of three steps, of which those in the first two rounds are new."""
    monkeypatch.setattr(sites, "TRACED", 3)
    site = Site(unit=READS)
    for new_s in (0.2, 0.1, 0.0, 0.0):
        assert site.begin(may_choose=True)
        clock.now_s += 0.1 + new_s
        site.end(n_known=1, n_new=0, n_unknown=0, n_parts=3)
        site.is_followed(new_s=new_s)


def test_rounds_of_which_a_part_is_new_rest_for_that_part(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sites, "TRACED", 0)
    site = Site()
    assert site.begin(may_choose=True)
    clock.now_s += 1.0
    site.end(n_known=1, n_new=0, n_unknown=0)
    site.is_followed(new_s=0.1)
    seen = []
    for _ in range(8):
        seen.append(site.begin(may_choose=True))
        clock.now_s += 0.4
        site.end(n_known=1, n_new=0, n_unknown=0)
        site.is_followed()
    assert seen == [False] * 7 + [True]  # LOST * 0.1 is SHARE of the 3.5 seconds until then


def test_blocks_in_which_little_is_new_are_compared(clock: Clock) -> None:
    site, found = Site(), []
    for _ in range(TRIALS + COMPARED + 1):
        found.append(site.begin(may_choose=True))
        clock.now_s += 1.1 if found[-1] else 2.0
        if found[-1]:
            site.end(n_known=1, n_new=0, n_unknown=0)
        site.is_followed(new_s=0.05 if found[-1] else 0.0)
    assert found[-1]
    assert site.compared is not None
    assert (site.compared.recorded_s, site.compared.bypassed_s) == pytest.approx((1.05, 2.0))


def test_it_is_looked_again_less_and_less(clock: Clock) -> None:
    site = Site()
    assert sum(ways(site, clock, 20 * AT_MOST, 1.1)) <= TRIALS + 13 * COMPARED
    found = ways(site, clock, 2 * AT_MOST, 0.9)
    assert sum(found[AT_MOST + COMPARED :]) >= AT_MOST - 2 * COMPARED


def test_kernels_that_come_are_tried_when_the_last_comparison_is_paid_for(clock: Clock) -> None:
    site = Site()
    assert not ways(site, clock, UNTIL_THEN + 1, 1.1)[-1]
    site.try_again()
    found = ways(site, clock, GOES_ON, 0.7)
    n_paid = found.index(True)
    lost_s = 0.1 * (TRIALS + COMPARED // 2)
    assert n_paid + 1 == pytest.approx(lost_s / SHARE, abs=1)
    assert found[n_paid : n_paid + TRIALS + 12].count(False) == 6


def test_no_kernels_are_tried_where_recording_alone_takes_longer(clock: Clock) -> None:
    site = Site()
    assert not ways(site, clock, TRIALS + 8 + 1, 2.0, host_s=1.1)[-1]
    site.try_again()
    assert not any(ways(site, clock, GOES_ON - 1, 2.0, host_s=1.1))


class Built:
    """A plan whose kernels are being built, or not any more."""

    communicates = False

    def __init__(self, n_there: int, n_under_way: int) -> None:
        self.n_there, self.n_under_way = n_there, n_under_way
        self.spent_s, self.is_ready = 0.0, False

    def may_get_better(self) -> bool:
        return self.is_ready

    def awaits_kernels(self) -> bool:
        return self.n_under_way > self.n_there


def test_blocks_are_bypassed_while_their_kernels_are_built(clock: Clock) -> None:
    it, plan = Policy(), Built(n_there=0, n_under_way=8)

    def sees(place: str, *plans: Built) -> bool:
        is_seen = it.begin_block(place)
        it.end_block()
        for one in plans if is_seen else ():  # a block's plan runs at its end
            it.note_kernels(one)
        return is_seen

    assert sees("here", plan)
    assert not any(sees("here", plan) for _ in range(9))
    assert sees("elsewhere", Built(n_there=9, n_under_way=0), plan)
    assert sees("elsewhere"), "most of its ops have their kernels"
    assert it.begin_block("here", may_choose=False), "all ranks record alike"
    it.end_block()
    plan.n_under_way = 0
    assert sees("here")


def test_waiting_for_kernels_counts_as_runs_of_the_plan(clock: Clock) -> None:
    """So that it is compiled whole as early as if it had run all the time."""
    site, plan = Site(), Built(n_there=0, n_under_way=8)
    site.awaited = plan
    assert not any(ways(site, clock, 3, 0.7, 1.0))
    site.is_followed()
    assert plan.spent_s == pytest.approx(3.0)
    site.rested(5, 4.0)
    assert plan.spent_s == pytest.approx(7.0)


def test_a_plan_that_lost_is_tried_again_once_it_was_compiled_whole(clock: Clock) -> None:
    """It is asked for as if it had run in the blocks that ran as in eager."""
    site, plan = Site(), Built(n_there=9, n_under_way=0)
    site.note_plan(plan)
    assert not ways(site, clock, UNTIL_THEN + 1, 1.1, 1.0)[-1]
    assert plan.spent_s == pytest.approx(GOES_ON)
    plan.is_ready = True
    found = ways(site, clock, GOES_ON, 0.7)
    n_paid = found.index(True)
    assert n_paid < GOES_ON - TRIALS
    assert all(found[n_paid : n_paid + TRIALS])


def test_a_plan_that_no_block_runs_any_more_is_not_waited_for(clock: Clock) -> None:
    site, plan = Site(), Built(n_there=9, n_under_way=0)
    site.note_plan(plan)
    plan.is_ready = True
    assert not any(ways(site, clock, COMPARED + UNTIL_THEN + 9, 1.5)[-8:])


def test_a_plan_is_not_tried_again_where_recording_alone_takes_longer(clock: Clock) -> None:
    site, plan = Site(), Built(n_there=9, n_under_way=0)
    site.note_plan(plan)
    assert not any(ways(site, clock, TRIALS + 8 + 8, 2.0, host_s=1.1)[-4:])
    assert plan.spent_s == 0
    plan.is_ready = True
    assert site.rests()


def test_many_places_are_remembered() -> None:
    it = Policy()
    for place in [*range(MOST_SITES), *range(MOST_SITES), MOST_SITES]:
        it.begin_block(place)
        it.end_block()
    assert list(it._sites) == [*range(1, MOST_SITES + 1)]


def test_what_is_paused_stays_so_if_all_is_forgotten() -> None:
    it = Policy()
    it.pause(True)
    it.reset()
    assert it.cold == PAUSED
    it.pause(False)
    assert it.cold == 0


def test_the_plan_of_a_block_is_the_one_that_ran_longest() -> None:
    it = Policy()
    short, long = Built(n_there=9, n_under_way=0), Built(n_there=9, n_under_way=0)
    long.spent_s = 1.0
    it.begin_block("here")
    for plan in (short, long, short):
        it.note_kernels(plan)
    it.end_block()
    it.note_kernels(short)
    assert [site.plan for site in it._sites.values()] == [long]


def test_times_decide_nothing_where_they_may_not(clock: Clock) -> None:
    """On several ranks, each of which has its own."""
    site = Site()
    assert not ways(site, clock, UNTIL_THEN + 1, 1.1)[-1]
    assert all(site.begin(may_choose=False) for _ in range(GOES_ON))


def test_calls_decide_on_all_ranks_alike(clock: Clock) -> None:
    site, found = Site(), []
    for _ in range(3 + SHORT_ONES):
        found.append(site.begin(may_choose=False))
        if found[-1]:
            site.end(n_known=1, n_new=0, n_unknown=0, is_short=True)
    assert found == [True] + [False] * SHORT_ONES + [True, False]


def block(x: torch.Tensor) -> bool:
    """Whether ops in it are seen, and recorded."""
    before = lazy_tensor.stats()["ops"]
    with lazy_tensor.lazy_mode():
        float((x + 1).sum())
    return bool(lazy_tensor.stats()["ops"] > before)


@pytest.mark.parametrize("record", ["auto", "always"])
def test_a_loop_that_recording_slows_down_is_bypassed(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, record: Record
) -> None:
    lazy_tensor.cache_clear()
    x = torch.randn(3)
    lazy_tensor.configure(record=record)
    found: list[bool] = []
    for _ in range(TRIALS + 8 + GOES_ON):
        found.append(block(x))
        clock.now_s += 2.0 if found[-1] else 1.0
    if record == "always":
        assert all(found)
        return
    assert all(found[:TRIALS])
    assert not any(found[TRIALS + 8 :])
    assert lazy_tensor.stats()["unrecorded_blocks"] == GOES_ON + 8 // 2
    (told,) = map(str, lazy_tensor.explain().blocks)
    assert __file__ in told
    assert told.endswith("as in eager, 1000.00 ms; recorded 2000.00 ms")


@pytest.mark.parametrize("news", ["it runs for long", "a kernel came"])
def test_what_was_left_to_eager_is_tried_again_with_kernels(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, news: str
) -> None:
    run = flush._run

    def slow(*args: Any) -> None:
        clock.now_s += 1.05
        run(*args)

    monkeypatch.setattr(flush, "_run_known", lambda *_: flush._Work())
    monkeypatch.setattr(flush, "_run", slow)
    monkeypatch.setattr(flush, "perf_counter", clock)
    lazy_tensor.cache_clear()
    x = torch.randn(3)
    for _ in range(UNTIL_THEN + LISTENS):
        is_recorded = block(x)
        clock.now_s += 0.0 if is_recorded else 1.0
    assert not is_recorded
    if news == "a kernel came":
        monkeypatch.setattr(Fusion, "n_adopted", Fusion.n_adopted + 1)
    else:
        monkeypatch.setattr(STATS, "worked_s", COMPILES_AFTER_S)
    assert any(block(x) for _ in range(4))


def test_ranks_await_no_kernels(clock: Clock) -> None:
    """Each has its own at its own time, and all must record alike."""
    it = Policy()
    it.span_ranks()
    for _ in range(9):
        assert it.begin_block("here")
        it.end_block()
        it.note_kernels(Built(n_there=0, n_under_way=8))


@needs_cpp
@pytest.mark.parametrize("form", ["a block around the loop", "wrap"])
@pytest.mark.parametrize("recorded_s", [0.7, 1.4])
def test_a_loop_that_reads_nothing_runs_the_quicker_way(
    clock: Clock, form: str, recorded_s: float
) -> None:
    lazy_tensor.cache_clear()
    it = local.trace.policy
    it.reset()
    it.calls_left = 0
    x, found = torch.randn(8), []
    if form == "wrap":
        x = lazy_tensor.wrap(x)
    y = x
    with lazy_tensor.lazy_mode() if form != "wrap" else nullcontext():
        for _ in range(1500):
            found.append(not it.cold)
            clock.now_s += recorded_s if found[-1] else 1.0
            for i in range(50):
                y = x * 0.5 + i
    assert torch.equal(y, x * 0.5 + 49)
    assert not found[20], "it isn't known yet"
    assert any(found)
    assert set(found[-256:]) == {recorded_s < 1}
    lazy_tensor.cache_clear()


@pytest.fixture
def sleepy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks fall asleep at the end of their first round."""
    monkeypatch.setattr(policy, "Site", bypassed_rounds)
    local.trace.policy.reset()
    yield
    local.trace.policy.reset()


def read(x: torch.Tensor, n: int) -> None:
    for _ in range(n):
        assert (x * 2).sum().item() == float(x.sum()) * 2


def fall_asleep(x: torch.Tensor) -> None:
    read(x, ROUND)
    x + 1  # the first op that is let pass
    assert local.trace.policy.is_asleep
    assert not are_seen()


@needs_cpp
def test_ops_of_a_block_that_is_asleep_are_not_seen(sleepy: None) -> None:
    x = torch.arange(3.0)
    with lazy_tensor.lazy_mode():
        fall_asleep(x)
        before = lazy_tensor.stats()["ops"]
        assert type(x + 1) is torch.Tensor
        x.add_(1)
        assert x.tolist() == [1.0, 2.0, 3.0]
        assert x.numpy().tolist() == [1.0, 2.0, 3.0]
        read(x, 5 * ROUND)
        assert local.trace.policy.is_asleep
        assert lazy_tensor.stats()["ops"] == before
    assert not local.trace.policy.is_asleep
    with lazy_tensor.lazy_mode():
        assert are_seen()
        assert lazy_tensor.is_pending(x + 1)


@needs_cpp
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "transform", [lambda x: torch.func.jvp(torch.sin, (x,), (x,)), torch.func.grad(torch.sum)]
)
def test_a_block_falls_asleep_within_a_transform(sleepy: None, transform: Any) -> None:
    x = torch.arange(3.0)
    expected = transform(x)
    with lazy_tensor.lazy_mode():
        read(x, ROUND)
        torch.testing.assert_close(transform(x), expected, rtol=0, atol=0)  # the first op after it
        assert local.trace.policy.is_asleep
        assert type(x + 1) is torch.Tensor
        assert not are_seen()
        torch.testing.assert_close(transform(x), expected, rtol=0, atol=0)
    assert (x + 1).tolist() == [1.0, 2.0, 3.0]
    assert not are_seen()


def test_blocks_that_are_long_bypassed_are_not_even_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy, "Site", QuickerAlone)
    monkeypatch.setattr(Policy, "has_wrapped", False)
    local.trace.policy.reset()
    with lazy_tensor.lazy_mode(record="always"):
        kept = torch.arange(3.0) * 2
    timed: list[Site] = []

    def begin(site: Site, own: Any = Site.begin, **options: bool) -> bool:
        timed.append(site)
        return bool(own(site, **options))

    monkeypatch.setattr(Site, "begin", begin)
    x, before = torch.arange(3.0), lazy_tensor.stats().get("unrecorded_blocks", 0)
    n = 100
    for i in range(n):
        with lazy_tensor.lazy_mode():
            assert type(x + 1) is torch.Tensor
            x.add_(1)
            assert (kept + 1).tolist() == [1.0, 3.0, 5.0]
            if i == n // 2:
                with lazy_tensor.lazy_mode(record="always"):
                    assert lazy_tensor.is_pending(x * 2)
                with pytest.raises(ZeroDivisionError), lazy_tensor.lazy_mode():
                    raise ZeroDivisionError
        assert x.tolist() == [i + 1, i + 2, i + 3]
    assert lazy_tensor.stats()["unrecorded_blocks"] == before + n + 1
    assert len(timed) <= 6
    local.trace.policy.reset()


@needs_cpp
def test_blocks_rest_until_settings_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "Site", QuickerAlone)
    monkeypatch.setattr(Policy, "has_wrapped", False)
    local.trace.policy.reset()
    x, before = torch.arange(3.0), lazy_tensor.stats()
    for i in range(20):
        if i == 10:
            lazy_tensor.configure(record="always")
        with lazy_tensor.lazy_mode():
            assert lazy_tensor.is_lazy(x + 1) is (i >= 10)
    after = lazy_tensor.stats()
    assert after["unrecorded_blocks"] == before["unrecorded_blocks"] + 10
    assert after["regions_s"]["quicker"] > before["regions_s"]["quicker"]
    local.trace.policy.reset()


@needs_cpp
def test_empty_blocks_are_bypassed() -> None:
    local.trace.policy.reset()
    before = lazy_tensor.stats().get("unrecorded_blocks", 0)
    for i in range(4 * LISTENS):
        with lazy_tensor.lazy_mode():
            if i < LISTENS:
                assert are_seen()
    assert lazy_tensor.stats()["unrecorded_blocks"] == before + 3 * LISTENS
    local.trace.policy.reset()


@needs_cpp
def test_what_wants_to_see_ops_wakes_the_block(sleepy: None) -> None:
    x = torch.arange(3.0)
    replayed = lazy_tensor.replay(lambda x: x.sin() * 2)
    with lazy_tensor.lazy_mode():
        fall_asleep(x)
        with lazy_tensor.lazy_mode():
            assert not are_seen()
        with lazy_tensor.lazy_mode(record="always"):
            assert are_seen()
            assert lazy_tensor.is_pending(x + 1)
        fall_asleep(x)
        assert lazy_tensor.explain(lambda: x + 1).result.tolist() == [1.0, 2.0, 3.0]
        fall_asleep(x)
        for _ in range(8):
            assert torch.equal(replayed(x), x.sin() * 2)
    assert replayed.n_replayed > 0, replayed.obstacle


@needs_cpp
def test_torchs_own_modes_work_in_a_block_that_is_asleep(sleepy: None) -> None:
    x = torch.arange(3.0)
    with lazy_tensor.lazy_mode():
        fall_asleep(x)
        with FakeTensorMode() as fake:
            assert type(fake.from_tensor(x) + 1).__name__ == "FakeTensor"
        assert type(x + 1) is torch.Tensor
        assert torch.func.grad(lambda x: (x * x).sum())(x).tolist() == [0.0, 2.0, 4.0]
        read(x, 2 * ROUND)
        assert local.trace.policy.is_asleep
        with FlopCounterMode(display=False) as counter:
            read(x, 2 * ROUND)
            assert torch.eye(3).mm(torch.eye(3)).trace().item() == 3.0
        assert counter.get_total_flops() == 2 * 3**3
        assert local.trace.policy.is_asleep
        read(x, 2 * ROUND)
    assert not are_seen()


@needs_cpp
def test_values_are_read_in_backward_of_a_block_that_is_asleep(sleepy: None) -> None:
    x, weight, norms = torch.arange(3.0), torch.ones(3, requires_grad=True), []
    weight.register_hook(lambda grad: norms.append(grad.norm().item()))
    with lazy_tensor.lazy_mode():
        fall_asleep(x)
        for _ in range(3 * ROUND):
            (weight * x).sum().backward()
        assert norms == [x.norm().item()] * 3 * ROUND
        read(x, 2 * ROUND)
    assert not are_seen()


@needs_cpp
def test_an_exception_leaves_a_block_that_is_asleep(sleepy: None) -> None:
    x = torch.arange(3.0)

    @lazy_tensor.lazy_mode()
    def fails() -> None:
        fall_asleep(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not are_seen()
    assert not local.trace.policy.is_asleep
    lazy_tensor.cache_clear()
    with lazy_tensor.lazy_mode():
        assert lazy_tensor.is_pending(x + 1)
        fall_asleep(x)
        lazy_tensor.cache_clear()
        read(x, 1)
        assert are_seen()


@needs_cpp
@pytest.mark.parametrize("bypassed_s", [0.5, 1.5])
def test_what_is_seen_is_compared_to_what_nobody_sees(clock: Clock, bypassed_s: float) -> None:
    """Blocks around a step, and one around the loop, of which recording pays beside ops that are
    seen and let pass."""
    x = torch.arange(3.0)

    def step() -> str:
        how = "seen" if are_seen() else "bypassed"
        total = (x + 1).sum()
        how = "recorded" if lazy_tensor.is_pending(total) else how
        clock.now_s += {"recorded": 1.0, "seen": 2.0, "bypassed": bypassed_s}[how]
        float(total)
        return how

    settled = "bypassed" if bypassed_s < 1 else "recorded"
    local.trace.policy.reset()
    in_block = lazy_tensor.lazy_mode()(step)
    first = [in_block() for _ in range(UNTIL_THEN + 20)]
    assert first[:TRIALS] == ["recorded"] * TRIALS
    assert "bypassed" in first
    assert first[-5:] == [settled] * 5
    local.trace.policy.reset()
    with lazy_tensor.lazy_mode():
        in_loop = [step() for _ in range(ROUND * (UNTIL_THEN // 4 + 4))]
    assert "bypassed" in in_loop
    assert in_loop[-5:] == [settled] * 5
    local.trace.policy.reset()


@needs_cpp
@pytest.mark.parametrize(("recorded_s", "settled"), [(2.0, "bypassed"), (0.5, "recorded")])
def test_blocks_of_many_reads_are_compared_whole(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, recorded_s: float, settled: str
) -> None:
    """The reads of a bypassed block are not seen, so it isn't cut into rounds."""
    monkeypatch.setattr(Policy, "has_wrapped", False)
    x = torch.arange(3.0)

    @lazy_tensor.lazy_mode(compile="off")
    def step() -> str:
        for _ in range(3 * ROUND):
            total = (x + 1).sum()
            how = "recorded" if lazy_tensor.is_pending(total) else "bypassed"
            clock.now_s += recorded_s if how == "recorded" else 1.0
            float(total)
        return how

    local.trace.policy.reset()
    found = [step() for _ in range(UNTIL_THEN + 8)]
    (compared,) = [one for one in local.trace.policy.compared() if one.unit == BLOCKS]
    assert found[-5:] == [settled] * 5
    assert compared.recorded_s == recorded_s * compared.bypassed_s
    local.trace.policy.reset()


@needs_cpp
def test_what_autograd_saves_is_detached_by_cpp_where_nothing_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def record(owner: Any, func: Any, *call: Any) -> Any:
        seen.append(func)
        return recorder.record(owner, func, *call)

    monkeypatch.setattr(mode, "record", record)
    x = torch.randn(3, requires_grad=True)
    local.trace.policy.reset()
    with lazy_tensor.lazy_mode():
        local.trace.policy.cold = 1
        y = x.tanh().sigmoid()
        assert not lazy_tensor.is_lazy(y)
        grad = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
        (twice,) = torch.autograd.grad(grad.sum(), x)
    expected = torch.autograd.grad(x.tanh().sigmoid().sum(), x, create_graph=True)[0]
    assert torch.equal(grad, expected)
    assert torch.equal(twice, torch.autograd.grad(expected.sum(), x)[0])
    assert torch.ops.aten.detach.default not in seen
    local.trace.policy.reset()


class Moody(Site):
    """Rounds that are bypassed by chance."""

    chance = random.Random(0)

    def begin(self, *, may_choose: bool) -> bool:
        self._n_left, self._eager_is_better = 1, bool(self.chance.getrandbits(1))
        return super().begin(may_choose=may_choose)


def moody_rounds(where: str, unit: str) -> Site:
    return (Moody if unit != BLOCKS else Site)(where, unit)


def trained(optimizer: Any, n_steps: int, block: Any, wrap: Any) -> list[Any]:
    """Losses, parameters and buffers, the optimizer's state and a moving average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    wrap(model)
    steps = optimizer(model.parameters())
    losses, means = [], [p.detach().clone() for p in model.parameters()]
    for i in range(n_steps):
        with block():
            steps.zero_grad(set_to_none=i % 5 < 3)
            loss = model(torch.randn(16, 4)).square().mean()
            loss.backward()
            steps.step()
            with torch.no_grad():
                for mean, parameter in zip(means, model.parameters(), strict=True):
                    mean.mul_(0.9).add_(parameter, alpha=0.1)
            losses.append(loss.item())
    state = [v for s in steps.state.values() for v in s.values() if v is not None]
    return [*losses, *model.parameters(), *model.buffers(), *means, *state]


@pytest.mark.parametrize("way", ["loop", "step", "wrap", "wrap and loop"])
@pytest.mark.parametrize("optimizer", [
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    partial(torch.optim.Adam, lr=0.01),
    partial(torch.optim.AdamW, lr=0.01, foreach=False),
], ids=["SGD", "Adam", "AdamW"])  # fmt: skip
def test_what_is_recorded_now_and_then_is_as_in_eager(
    monkeypatch: pytest.MonkeyPatch, way: str, optimizer: Any
) -> None:
    n_steps = 12 * ROUND
    expected = trained(optimizer, n_steps, nullcontext, lambda _: None)
    monkeypatch.setattr(policy, "Site", Moody if way == "step" else moody_rounds)
    monkeypatch.setattr(Policy, "has_wrapped", "wrap" in way)
    local.trace.policy.reset()
    before = lazy_tensor.stats()["ops"]
    with lazy_tensor.lazy_mode() if "loop" in way else nullcontext():
        block = lazy_tensor.lazy_mode if way == "step" else nullcontext
        wrap = lazy_tensor.wrap if "wrap" in way else lambda _: None
        found = trained(optimizer, n_steps, block, wrap)
    assert lazy_tensor.stats()["ops"] > before + n_steps
    local.trace.policy.reset()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@needs_cpp
@pytest.mark.parametrize("end", ["flush", "materialize"])
def test_a_loop_whose_steps_end_without_an_op_falls_asleep(
    sleepy: None, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(Policy, "has_wrapped", True)
    model = lazy_tensor.wrap(nn.Linear(3, 3))

    def steps(n: int) -> Any:
        for _ in range(n):
            made = model(torch.ones(3)) * 2
            lazy_tensor.flush() if end == "flush" else lazy_tensor.materialize(made)
        return made

    steps(ROUND + 1)  # a first flush isn't counted in a process that has worked for long
    before = lazy_tensor.stats()["ops"]
    for _ in range(4):
        assert local.trace.policy.is_asleep
        assert type(steps(ROUND // 2)) is torch.Tensor
    assert lazy_tensor.stats()["ops"] == before


@needs_cpp
def test_what_comes_of_wrapped_tensors_is_plain_while_nothing_is_recorded(
    sleepy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Policy, "has_wrapped", True)
    model = lazy_tensor.wrap(nn.Linear(3, 3))
    for _ in range(ROUND):
        model(torch.ones(3)).sum().item()
    assert local.trace.policy.is_asleep
    loss = model(torch.ones(3)).sum()
    loss.backward()
    assert type(loss) is torch.Tensor
    assert all(lazy_tensor.is_lazy(p) for p in model.parameters())
    with lazy_tensor.lazy_mode():
        assert lazy_tensor.is_pending(model(torch.ones(3)))


def is_unseen(tensor: torch.Tensor) -> bool:
    """Whether ops on the tensor don't come to this package."""
    return not torch._C._dispatch_keys(tensor).has("Python")


def in_turns_with(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is recorded, and then some that are bypassed."""
    monkeypatch.setattr(Policy, "has_wrapped", False)
    for _ in range(2):
        with lazy_tensor.lazy_mode():
            step()
    monkeypatch.setattr(policy, "Site", QuickerAlone)
    local.trace.policy.reset()
    for _ in range(3):
        with lazy_tensor.lazy_mode():
            step()
    local.trace.policy.reset()


@needs_cpp
def test_ops_pass_an_optimizers_state_where_nothing_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trained(run: Any) -> tuple[list[bool], list[Any]]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        x = torch.randn(8, 4)
        passed: list[bool] = []

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            passed.append(all(map(is_unseen, optimizer.state[model.weight].values())))

        run(step)
        return passed, [*model.parameters(), *optimizer.state[model.weight].values()]

    def eagerly(step: Any) -> None:
        for _ in range(5):
            step()

    _, expected = trained(eagerly)
    passed, found = trained(lambda step: in_turns_with(step, monkeypatch))
    assert (passed[1], passed[-1]) == (False, True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@needs_cpp
def test_wrapped_tensors_are_seen_after_blocks_that_were_bypassed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy, "Site", QuickerAlone)
    monkeypatch.setattr(Policy, "has_wrapped", False)
    local.trace.policy.reset()
    x = torch.arange(3.0)
    state = torch.arange(3.0)
    for _ in range(9):
        with lazy_tensor.lazy_mode():
            state = state * x
    assert type(state) is torch.Tensor
    weight = lazy_tensor.wrap(torch.ones(3))
    float((weight * x).sum())
    assert lazy_tensor.is_pending(weight * x)
    local.trace.policy.reset()


def test_what_is_carried_from_block_to_block_becomes_plain_where_they_are_bypassed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Policy, "has_wrapped", False)
    state, x = torch.ones(3), torch.arange(3.0)
    with lazy_tensor.lazy_mode(record="always"):
        state = state + x
    monkeypatch.setattr(policy, "Site", QuickerAlone)
    local.trace.policy.reset()
    kinds = []
    for _ in range(6):
        with lazy_tensor.lazy_mode():
            state = state + x
        kinds.append(type(state))
    assert hits.learn is None or kinds[-1] is torch.Tensor
    assert state.tolist() == [1.0, 8.0, 15.0]
    local.trace.policy.reset()


@needs_cpp
@pytest.mark.parametrize("around", ["loop", "wrap"])
def test_a_training_loop_that_reads_nothing_is_timed_at_its_steps(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, around: str
) -> None:
    monkeypatch.setattr(Policy, "has_wrapped", around == "wrap")
    local.trace.policy.reset()
    model = nn.Linear(4, 2)
    if around == "wrap":
        lazy_tensor.wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x = torch.randn(8, 4)

    passed: list[bool] = []

    def step() -> bool:
        loss = model(x).square().mean()
        is_pending = lazy_tensor.is_pending(loss)
        loss.backward()
        clock.now_s += 2.0 if is_pending else 1.0
        optimizer.step()
        passed.append(all(map(is_unseen, optimizer.state[model.weight].values())))
        optimizer.zero_grad()
        return is_pending

    with lazy_tensor.lazy_mode() if around == "loop" else nullcontext():
        were_recorded = [step() for _ in range(UNREAD_STEPS + ROUND * (UNTIL_THEN // 4 + 4))]
    assert sum(were_recorded) > TRIALS
    assert not any(were_recorded[-ROUND:])
    assert passed[-1]
    local.trace.policy.reset()


@needs_cpp
@pytest.mark.parametrize("n_ops", [2, 12])
def test_a_loop_that_flushes_few_ops_again_and_again_is_bypassed(
    monkeypatch: pytest.MonkeyPatch, n_ops: int
) -> None:
    """No region of it ends: it writes its plain state by what it computes of a wrapped tensor."""
    monkeypatch.setattr(Policy, "has_wrapped", True)
    local.trace.policy.reset()
    force, state = lazy_tensor.wrap(torch.ones(4)), torch.zeros(4)

    def step() -> bool:
        change = force[1:3]
        for _ in range(n_ops - 1):
            change = change * 0.5
        is_seen = lazy_tensor.is_pending(change)
        state[1:3] = change
        return is_seen

    were_seen = [step() for _ in range(6000)]
    assert set(were_seen[-100:]) == {n_ops > 2}
    local.trace.policy.reset()


@pytest.mark.parametrize(("every", "ends_each"), [(UNREAD_STEPS, True), (UNREAD_STEPS - 1, False)])
def test_steps_end_regions_where_values_are_read_seldom(every: int, ends_each: bool) -> None:
    it = Policy()
    found: list[bool] = []
    for i in range(6 * every):
        found.append(it.ends_step())
        if i % every == 0:
            it.has_read = True
    assert found[2 * every :] == [ends_each] * (4 * every)


def test_a_pause_of_the_program_decides_nothing(clock: Clock, in_block: Policy) -> None:
    """The first timed round of each way has a pause in it, the faster one's a longer one."""
    it = in_block
    paused: set[bool] = set()
    for i in range(TRIALS + 8):
        is_seen = it.begin_round(may_choose=True)
        clock.now_s += 0.01 if is_seen else 0.03
        if i >= TRIALS and is_seen not in paused:
            paused.add(is_seen)
            clock.now_s += 2.0 if is_seen else 1.0
        it.add_reads(10)
        if is_seen:
            it.at_sync_point(n_recorded=5)
        it.end_round()
    (compared,) = it.compared()
    assert not compared.eager_is_better


def test_rounds_with_a_step_here_and_there_are_compared_by_their_reads(
    clock: Clock, in_block: Policy
) -> None:
    """As in reinforcement learning: many actions are read for an update."""
    it = in_block
    for i in range(TRIALS + COMPARED):
        is_seen = it.begin_round(may_choose=True)
        if i % 3 and not is_seen:
            it.ends_step()
        clock.now_s += 0.03 if is_seen else 0.02
        it.add_reads(10)
        if is_seen:
            it.at_sync_point(n_recorded=5)
        it.end_round()
    (compared,) = it.compared()
    assert compared.recorded_s == pytest.approx(0.003)
    assert compared.bypassed_s == pytest.approx(0.002)


def test_rounds_are_compared_by_their_steps(clock: Clock) -> None:
    """Two steps in each round, and in recorded ones many more reads."""
    it = Policy()
    it.begin_block("here")
    for _ in range(TRIALS + COMPARED):
        is_seen = it.begin_round(may_choose=True)
        for _ in range(2):
            it.ends_step()
            clock.now_s += 3.0 if is_seen else 2.0
        it.add_reads(12 if is_seen else 2)
        if is_seen:
            it.at_sync_point(n_recorded=5)
        it.end_round()
    (compared,) = it.compared()
    assert (compared.recorded_s, compared.bypassed_s) == (3.0, 2.0)
    assert compared.eager_is_better


@needs_cpp
def test_rounds_end_in_a_loop_that_is_asleep_and_has_an_optimizer(
    sleepy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of its steps it is asked whether values were read."""
    begun: list[Policy] = []
    begin_round = Policy.begin_round

    def noted(self: Policy, **options: Any) -> bool:
        begun.append(self)
        return begin_round(self, **options)

    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    with lazy_tensor.lazy_mode():
        fall_asleep(torch.ones(3))
        monkeypatch.setattr(Policy, "begin_round", noted)
        for _ in range(4 * ROUND):
            loss = model(torch.ones(3)).square().sum()
            loss.backward()
            optimizer.step()
            loss.item()
    assert len(begun) >= 4


def test_kernels_that_come_are_noticed_in_a_loop_that_is_bypassed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy, "Site", bypassed_rounds)
    tried: list[Site] = []
    monkeypatch.setattr(Site, "try_again", lambda self: tried.append(self))
    it = Policy()
    assert it.begin_block("here")
    assert not it.begin_round(may_choose=True)
    tried.clear()
    monkeypatch.setattr(Fusion, "n_adopted", Fusion.n_adopted + 1)
    it.at_sync_point(n_recorded=0)
    it.end_round()
    it.begin_round(may_choose=True)
    assert tried


@needs_cpp
def test_phases_with_steps_of_an_optimizer_and_phases_without_are_compared_apart(
    clock: Clock, in_block: Policy
) -> None:
    """Actions are read, which take longer if they are recorded; updates take half as long so."""
    it = in_block
    is_seen, ran = True, Counter[tuple[str, bool]]()

    def read() -> None:
        nonlocal is_seen
        if it.ends_round():
            it.end_round()
            is_seen = it.begin_round(may_choose=True)
        if is_seen:
            it.at_sync_point(n_recorded=5)

    for turn in range(40):
        for _ in range(4 * READS_WITHOUT):
            clock.now_s += 0.003 if is_seen else 0.001
            read()
            ran["action", is_seen] += turn >= 20
        for _ in range(3 * ROUND):
            for _ in range(4):
                clock.now_s += 0.001 if is_seen else 0.002
                read()
            it.ends_step()
            ran["update", is_seen] += turn >= 20
    assert ran["action", True] < 0.5 * ran["action", False]
    assert ran["update", False] < 0.7 * ran["update", True]


def test_blocks_with_few_rounds_are_compared_whole_and_longer_ones_by_rounds(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Policy, "native", NATIVE)
    for n_rounds, unit in ((1, BLOCKS), (5, READS)):
        it = Policy()
        for _ in range(TRIALS + COMPARED + 4):
            is_seen = it.begin_block("here")
            for _ in range(n_rounds * ROUND + 3):
                clock.now_s += 0.001
                if is_seen:
                    it.at_sync_point(n_recorded=5)
                    if it.ends_round():
                        it.end_round()
                        it.begin_round(may_choose=True)
            it.end_block()
        assert [one.unit for one in it.compared()] == [unit]


def test_blocks_of_which_a_part_is_ever_unknown_are_compared_too(clock: Clock) -> None:
    site = Site()
    for _ in range(TRIALS + 4):
        site.is_followed()
        is_seen = site.begin(may_choose=True)
        clock.now_s += 3.0 if is_seen else 1.0
        if is_seen:
            site.end(n_known=2, n_new=1, n_unknown=0)
    site.is_followed()
    assert site.compared is not None
    assert site.compared.eager_is_better
