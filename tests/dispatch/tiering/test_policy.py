"""When a program is recorded: what it did before soon is, what it never repeats isn't."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import lazy_tensor
from lazy_tensor.dispatch import settings, stats
from lazy_tensor.dispatch.record import sync_points
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.stats import STATS
from lazy_tensor.dispatch.tiering import policy
from lazy_tensor.dispatch.tiering.sites import GOES_ON, LISTENS
from lazy_tensor.dispatch.trie.recompile_reason import FIRST_TIME
from lazy_tensor.dispatch.trie.trace import local

N_OPS = 100


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded but what was seen before, which C++ knows."""
    if hits.native is None:
        pytest.skip("it is not used here")
    monkeypatch.setattr(policy, "FIRST_CALLS", 0)
    lazy_tensor.cache_clear()
    local.trace.policy.reset()


@pytest.fixture
def says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program is told at its first sync point that nothing came twice, if nothing did."""
    monkeypatch.setattr(sync_points, "_was_said", False)
    monkeypatch.setattr(stats, "SAYS_SO_AFTER_S", 0.0)
    lazy_tensor.reset_stats()


LOOPS_FROM, N_KEPT = 4096, 1 << 17
"""As in `native/past.h`."""


@pytest.fixture
def past() -> Any:
    if hits.native is None:
        pytest.skip("it is not used here")
    return hits.native.Past()


def test_a_region_is_known_when_it_comes_again(past: Any) -> None:
    first, other = range(30), range(100, 130)
    known = []
    for region in (first, other, first, other, other, first):
        for call in region:
            past.note(call)
        known.append(past.at_sync_point())
    assert known == [False, False, True, True, True, True]
    assert not past.at_sync_point()  # an empty one says nothing


def test_calls_are_known_from_the_first_behind_a_sync_point(past: Any) -> None:
    for region in ((2, 4, 6), (8, 10, 12)):
        for call in region:
            past.note(call)
        past.at_sync_point()
    seen = []
    for call in (8, 10, 20, 6):
        past.note(call)
        seen.append(past.is_known())
    assert seen == [True, True, False, False]


def test_a_loop_without_sync_points_comes_round_where_its_first_calls_come_again(
    past: Any,
) -> None:
    for n_calls, n_turn in ((100, 300), (7, 252), (1, 248)):
        past.at_sync_point()
        rounds, ends = [], []
        for i in range(LOOPS_FROM + 2000):
            if past.note(1000 * n_calls + i % n_calls):
                rounds.append(i)
            if past.ends_turn():
                ends.append(i)
        assert LOOPS_FROM <= ends[0] + 1 < LOOPS_FROM + n_calls
        assert {b - a for a, b in itertools.pairwise(ends)} == {n_turn}
        assert rounds == ends[1:]  # the turn before had begun the same way


def test_what_came_before_a_loop_is_no_part_of_it(past: Any) -> None:
    for call in range(5):
        past.note(1_000_000 + call)
    ends = []
    for i in range(9 * LOOPS_FROM + 2000):
        past.note(1 + i % 36)
        if past.ends_turn():
            ends.append(i)
    assert {b - a for a, b in itertools.pairwise(ends)} == {252}


def test_regions_are_told_apart_whatever_their_hashes(past: Any) -> None:
    """Those of twenty lengths, in any order."""
    for seed in range(10):
        chance = random.Random(seed)
        regions = [[chance.getrandbits(62) for _ in range(201)] for _ in range(20)]
        for i in range(4):
            chance.shuffle(regions)
            for region in regions:
                for call in region:
                    past.note(call)
                    assert past.is_known() is (i > 0)
                past.at_sync_point()


def test_what_is_long_past_is_forgotten(past: Any) -> None:
    chance = random.Random(0)
    for call in (2, 4, 6):
        past.note(call)
    past.at_sync_point()
    for _ in range(2 * N_KEPT):
        past.note(chance.getrandbits(62))
    past.at_sync_point()
    past.note(2)
    assert not past.is_known()


def step(x: torch.Tensor) -> float:
    for i in range(N_OPS):
        x = x * 0.5 + i % 7
    return float(x.sum())


def recorded(run: Callable[[], Any]) -> int:
    """How many ops `run` records."""
    before = lazy_tensor.stats()["ops"]
    run()
    n: int = lazy_tensor.stats()["ops"] - before
    return n


def in_block(x: torch.Tensor) -> None:
    with lazy_tensor.lazy_mode():
        found = step(x)
    assert found == step(x)


FORMS = ("a block a step", "a block around the loop", "wrap")


def passes(form: str, n: int, one: Callable[[Any], Any], argument: Any) -> list[int]:
    """The ops that each of `n` passes records."""
    if form == "wrap":
        argument = lazy_tensor.wrap(argument)
    with lazy_tensor.lazy_mode() if form == FORMS[1] else nullcontext():
        counts = []
        for _ in range(n):
            with lazy_tensor.lazy_mode() if form == FORMS[0] else nullcontext():
                counts.append(recorded(lambda: one(argument)))
        return counts


@pytest.mark.parametrize("form", FORMS)
def test_a_loop_is_recorded_from_the_third_pass_on(scarce: None, form: str) -> None:
    counts = passes(form, 6, step, torch.randn(8))
    assert counts[0] == 0
    assert all(count >= 2 * N_OPS for count in counts[3:])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("foreach", [False, True])
def test_training_runs_its_plan_soon(scarce: None, form: str, foreach: bool) -> None:
    """Adam reads a step count of each parameter, which ends nothing, and makes its state first."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    x = torch.randn(5, 4)
    optimizers: list[torch.optim.Optimizer] = []
    seen: list[dict[str, Any]] = []

    def train(model: nn.Module) -> None:
        seen.append(lazy_tensor.stats())
        if not optimizers:
            optimizers.append(torch.optim.Adam(model.parameters(), foreach=foreach))
        optimizers[0].zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizers[0].step()
        assert loss.item() >= 0

    counts = passes(form, 10, train, model)
    assert min(counts[3:]) > 30
    assert len(set(counts[6:])) == 1
    built, reused = zip(
        *((one.get("plans_built", 0), one.get("plans_reused", 0)) for one in seen), strict=True
    )
    for i in range(3, 9):  # each pass from the fourth on runs a plan, and soon no new one
        assert built[i + 1] + reused[i + 1] > built[i] + reused[i]
    assert built[9] == built[6]


def test_the_element_of_a_parameter_that_is_read_ends_a_pass(scarce: None) -> None:
    """It is of no dimensions and was written in place, as step counts are."""
    for form in FORMS:

        def step(parts: Any) -> None:
            with torch.no_grad():
                for _ in range(10):
                    parts[0].mul_(1.5).sub_(0.5)
            assert float(parts[0][0].detach()) == 1.0

        counts = passes(form, 8, step, nn.ParameterList([torch.ones(4)]))
        assert min(counts[3:]) >= 20, form


def test_a_loop_without_a_sync_point_runs_one_plan(scarce: None) -> None:
    x = torch.randn(16)
    with lazy_tensor.lazy_mode(), torch.no_grad():
        y = x
        for _ in range(2000):
            y = (y * 0.5 + x).tanh() - 0.25
        flushes = lazy_tensor.stats()["flushes"]
        built = lazy_tensor.stats()["plans_built"]
        for _ in range(400):
            y = (y * 0.5 + x).tanh() - 0.25
    assert lazy_tensor.stats()["flushes"] - flushes >= 400 * 4 // 512
    assert lazy_tensor.stats()["plans_built"] <= built + 1  # what is left at the end
    expected = x
    for _ in range(2400):
        expected = (expected * 0.5 + x).tanh() - 0.25
    assert torch.equal(y, expected)


def test_sizes_that_come_again_in_any_order_are_recorded(scarce: None) -> None:
    chance = random.Random(0)
    batches = [torch.randn(8 + i) for i in range(20)]
    counts = []
    for _ in range(4):
        chance.shuffle(batches)
        counts.append(sum(recorded(lambda x=x: in_block(x)) for x in batches))  # type: ignore[misc]
    assert counts[0] == 0
    assert counts[-1] >= 20 * 2 * N_OPS


def test_what_never_comes_again_is_not_recorded(scarce: None) -> None:
    assert sum(recorded(lambda n=n: in_block(torch.randn(8 + n))) for n in range(60)) < 60  # type: ignore[misc]


def test_something_else_in_between_is_no_new_beginning(scarce: None) -> None:
    """As an evaluation every now and then."""
    x, other = torch.randn(8), torch.randn(3, 3)
    for i in range(20):
        if i % 5 == 4:
            with lazy_tensor.lazy_mode():
                assert float((other @ other).sum()) is not None
        count = recorded(lambda: in_block(x))
        assert i < 3 or i % 5 == 4 or i == 5 or count >= 2 * N_OPS, i


def test_at_first_a_little_is_recorded_all_the_same() -> None:
    lazy_tensor.cache_clear()
    with lazy_tensor.lazy_mode():
        assert lazy_tensor.is_pending(torch.ones(3) + 1)


@lazy_tensor.lazy_mode()
def is_seen(x: torch.Tensor) -> bool:
    """A step, and whether `lazy_mode` sees it."""
    seen = _get_current_dispatch_mode() is not None
    found = step(x)
    if not seen:
        assert type(x + 1) is torch.Tensor
        assert found == step(x)
    return seen


def bypass() -> None:
    """Go on with what never repeats itself until it is bypassed."""
    sizes = itertools.count(8)
    assert [is_seen(torch.randn(next(sizes))) for _ in range(LISTENS + 1)] == [True] * LISTENS + [
        False
    ]


def test_blocks_of_what_never_repeats_itself_are_bypassed(scarce: None) -> None:
    before = lazy_tensor.stats().get("unrecorded_blocks", 0)
    bypass()
    assert lazy_tensor.stats()["unrecorded_blocks"] == before + 1
    lazy_tensor.reset_stats()
    assert not is_seen(torch.randn(7))
    told = str(lazy_tensor.explain()).splitlines()  # behind what other tests have replayed
    headline = next(line for line in told if " of the program" in line)
    assert "0% recorded (0 regions); 100% run as in eager, as hardly anything came" in headline


def test_what_waits_for_its_kernels_is_recorded_new_or_not(scarce: None, says_so: None) -> None:
    for n in (3, 4, 5):
        with lazy_tensor.lazy_mode(compile="blocking", record="always"):
            y = torch.randn(n) * 2
            assert lazy_tensor.materialize(y).shape == (n,)
    assert lazy_tensor.stats()["regions_s"]["new"] == 0.0


def test_a_program_that_is_not_recorded_is_told_once(scarce: None, says_so: None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lazy_tensor.configure(warn=False)
        is_seen(torch.randn(3))
        is_seen(torch.randn(4))
        assert not caught
        lazy_tensor.configure(warn=True)
        is_seen(torch.randn(5))
        is_seen(torch.randn(6))
    (one,) = caught
    assert "hardly anything in it comes twice" in str(one.message)
    assert "configure(warn=False)" in str(one.message)


def test_a_program_is_told_that_the_cpp_is_missing_once_that_is_certain(
    says_so: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hits, "native", None)
    monkeypatch.setattr(hits, "loaded", None)
    monkeypatch.setattr(hits.EXTENSION, "status", "compiling")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sync_points.say_so()
    monkeypatch.setattr(hits.EXTENSION, "status", "it can't be compiled: no compiler")
    with pytest.warns(UserWarning, match="no compiler") as warned:
        sync_points.say_so()
    assert 'record="always"' in str(warned[0].message)


def test_blocks_run_as_in_eager_while_the_cpp_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hits, "native", None)
    monkeypatch.setattr(hits, "loaded", None)
    monkeypatch.setattr(hits.EXTENSION, "status", "compiling")
    with lazy_tensor.lazy_mode():
        assert _get_current_dispatch_mode() is None
    with lazy_tensor.lazy_mode(record="always"):
        assert _get_current_dispatch_mode() is not None


@pytest.mark.parametrize(
    ("before", "end"),
    [(FIRST_TIME, "s did not. "), ("size of dim 0 went 3 -> 4", "did not; what was new lately: s")],
)
def test_the_warning_names_a_difference_or_leaves_it_out(
    monkeypatch: pytest.MonkeyPatch, says_so: None, before: str, end: str
) -> None:
    told: list[Any] = [before, FIRST_TIME]
    monkeypatch.setattr(sync_points, "reason_of_miss", lambda new, _: told[new])
    for i in range(2):
        record: Any = SimpleNamespace(first_new=i, state=None)
        STATS.log.append(record)
    with pytest.warns(UserWarning, match="hardly anything") as warned:
        sync_points.say_so()
    STATS.log.clear()
    assert end in str(warned[0].message)
    assert FIRST_TIME not in str(warned[0].message)


def test_a_warning_that_is_an_error_leaves_nothing_half_done(scarce: None, says_so: None) -> None:
    x = torch.zeros(3)

    def block() -> None:
        with lazy_tensor.lazy_mode(max_segment_ops=77):
            x.add_(1)

    with pytest.raises(UserWarning, match="hardly anything"):
        block()
    assert x.tolist() == [1.0] * 3
    assert settings.current().max_segment_ops != 77
    with lazy_tensor.lazy_mode(record="always"):
        assert lazy_tensor.is_pending(x + 1)


def test_another_block_is_not(scarce: None) -> None:
    bypass()
    with lazy_tensor.lazy_mode():
        assert _get_current_dispatch_mode() is not None
    assert lazy_tensor.lazy_mode(max_segment_ops=999)(is_seen.__wrapped__)(torch.randn(8))  # type: ignore[attr-defined]


def test_what_wants_to_see_the_calls_sees_them_there(scarce: None) -> None:
    """A function in `replay`, and one that is explained, within a block that is bypassed."""
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
    n_bypassed = sum(not block(torch.randn(8 + i)) for i in range(2 * LISTENS))
    assert n_bypassed > 10
    assert replayed.n_replayed > 0, replayed.obstacle


def test_a_program_that_begins_to_repeat_itself_is_recorded(scarce: None) -> None:
    bypass()
    x = torch.randn(500)
    for _ in range(GOES_ON + 5):
        is_seen(x)
    assert recorded(lambda: is_seen(x)) >= N_OPS


def test_programs_that_never_repeat_are_listened_to_less_and_less(scarce: None) -> None:
    lazy_tensor.configure(warn=False)  # a slow machine takes the ten seconds after which it is said
    sizes = itertools.count(8)
    seen = [is_seen(torch.randn(next(sizes))) for _ in range(20 * LISTENS)]
    assert 0 < sum(seen) <= 5 * LISTENS
