"""Plans that are compiled whole, of captured calls and in the mode: the same results as eager's."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazy_tensor
from lazy_tensor import lazy_mode, materialize, replay
from lazy_tensor.capture import captured_call
from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.plan import plan as plans, second_tier
from lazy_tensor.dispatch.run.compile_service import compiler
from lazy_tensor.dispatch.stats import STATS

Step = Callable[[torch.Tensor], Any]
SETTINGS: dict[str, Any] = {"backend": "inductor", "compile": "background"}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Plans are compiled whole at once, and taken if they give the same."""
    monkeypatch.setattr(captured_call, "TIER_AFTER_S", 0.0)
    monkeypatch.setattr(plans, "TIER_FROM_S", 0.0)
    monkeypatch.setattr(second_tier, "GAINS", math.inf)


def captured(step: Any) -> Any:
    (known,) = step._signatures.values()
    (found,) = known.captured
    return found


def is_whole(call: Any) -> bool:
    return any(fusion.backend.name == "inductor whole" for fusion in call.plan.fusions)


def settled(step: Any, run: Callable[[], Any]) -> Any:
    """The captured call of `step`, which `run` calls, when its plan is chosen."""
    for _ in range(8):
        run()
        if step.n_replayed > 1:
            break
    assert step.n_replayed > 1, step.obstacle
    assert compiler().wait(300)
    for _ in range(2 * second_tier.N_ROUNDS + 3):
        run()
    call = captured(step)
    assert call.plan.tier is None
    return call


def linear() -> Step:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16))

    @torch.no_grad()
    def step(x: torch.Tensor) -> Any:
        return model(x).softmax(-1) * 2

    return step


def training(optimizer: Any, **options: Any) -> Step:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))
    steps = optimizer(model.parameters(), **options)

    def step(x: torch.Tensor) -> Any:
        steps.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        steps.step()
        return loss.detach()

    return step


def convolutions() -> Step:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(32, 16),
    )  # fmt: skip
    steps = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(x: torch.Tensor) -> Any:
        steps.zero_grad()
        loss = model(x.repeat(1, 4).view(8, 1, 8, 8)).square().mean()
        loss.backward()
        steps.step()
        return loss.detach()

    return step


def language() -> Step:
    table, out = nn.Embedding(16, 16), nn.Linear(16, 16)
    parameters = [*table.parameters(), *out.parameters()]
    steps = torch.optim.AdamW(parameters, lr=0.01, fused=True)

    def step(x: torch.Tensor) -> Any:
        steps.zero_grad()
        tokens = (x.abs() * 7).long() % 16
        h = table(tokens)
        heads = h.view(8, 16, 2, 8).transpose(1, 2)
        h = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        scores = out(h.transpose(1, 2).reshape(8, 16, 16))
        loss = F.cross_entropy(scores.view(-1, 16), tokens.view(-1))
        loss.backward()
        steps.step()
        return loss.detach()

    return step


def recurrent() -> Step:
    cell = nn.GRUCell(16, 16)
    steps = torch.optim.SGD(cell.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> Any:
        steps.zero_grad()
        h = torch.zeros(8, 16)
        for _ in range(4):
            h = cell(x, h)
        loss = h.square().sum()
        loss.backward()
        steps.step()
        return loss.detach()

    return step


def in_place() -> Step:
    total, ring = torch.zeros(16, 16), torch.zeros(4, 8, 16)
    weight, square = torch.randn(16, 16), torch.zeros(16, 16)

    @torch.no_grad()
    def step(x: torch.Tensor) -> Any:
        y = x @ weight
        ring[1].copy_(y)
        ring[2:] += 1
        torch.mm(y.t(), y, out=square)
        total.add_(square).tanh_()
        torch.exp(total, out=square)
        return (total + square) @ ring.sum(0).t()

    return step


PROGRAMS: dict[str, Callable[[], Step]] = {
    "linear": linear,
    "sgd": lambda: training(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": lambda: training(torch.optim.AdamW, lr=0.01),
    "adam foreach": lambda: training(torch.optim.Adam, lr=0.01, foreach=True),
    "convolutions": convolutions,
    "language": language,
    "recurrent": recurrent,
    "in place": in_place,
}


def beside_eager(name: str, made_lazy: Callable[[Step], Step]) -> tuple[Step, Callable[[], None]]:
    """A program made lazy, and a function that runs it and eager on other values each time, and
    compares."""
    x = torch.randn(8, 16)
    torch.manual_seed(1)
    eager = PROGRAMS[name]()
    torch.manual_seed(1)
    step = made_lazy(PROGRAMS[name]())
    number = 0

    def both() -> None:
        nonlocal number
        number += 1
        given = x * (1 + number / 100)
        torch.manual_seed(number)
        expected = eager(given)
        torch.manual_seed(number)
        torch.testing.assert_close(materialize(step(given)), expected, rtol=1e-3, atol=1e-4)

    return step, both


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_plan_that_is_compiled_whole_gives_what_eager_gives(name):
    step, both = beside_eager(name, lambda function: replay(function, **SETTINGS))
    assert is_whole(settled(step, both))
    for _ in range(4):
        both()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_plan_of_the_mode_gives_what_eager_gives(name):
    _, both = beside_eager(name, lazy_mode(record="always", **SETTINGS))
    for number in range(8 + 2 * second_tier.N_ROUNDS + 6):
        both()
        if number == 8:
            assert compiler().wait(300)
    fusions = [step.fusion for step in STATS.log[-1].steps or () if step.fusion is not None]
    assert any(fusion.backend.name == "inductor whole" for fusion in fusions)
    assert "compiled whole" in str(lazy_tensor.explain())


def test_results_are_new_memory_at_each_call():
    step, x = replay(linear(), **SETTINGS), torch.randn(8, 16)
    settled(step, lambda: step(x))
    one = step(x)
    before = one.clone()
    step(x + 1)
    assert torch.equal(one, before)


def test_sizes_of_their_own_have_plans_of_their_own():
    function = linear()
    step = replay(function, **SETTINGS)
    for n in (8, 3):
        x = torch.randn(n, 16)
        for _ in range(4):
            step(x)
    assert compiler().wait(300)
    for n in (8, 3):
        x = torch.randn(n, 16)
        for _ in range(2 * second_tier.N_ROUNDS + 4):
            torch.testing.assert_close(step(x), function(x))


def test_a_plan_that_gives_something_else_is_not_used(monkeypatch):
    monkeypatch.setattr(second_tier, "difference", lambda *_: "something else")
    function, x = linear(), torch.randn(8, 16)
    step = replay(function, **SETTINGS)
    call = settled(step, lambda: torch.testing.assert_close(step(x), function(x)))
    assert not is_whole(call)


def test_a_plan_that_cannot_be_compiled_whole_goes_on(monkeypatch):
    def fail(*_: object) -> None:
        raise NotImplementedError("of this kind")

    monkeypatch.setattr(second_tier, "whole_units", fail)
    function, x = linear(), torch.randn(8, 16)
    for _ in range(4):
        with lazy_mode(record="always", **SETTINGS):
            result = function(x)
        torch.testing.assert_close(materialize(result), function(x))
    assert "of this kind" in str(lazy_tensor.explain())


def test_a_plan_that_writes_much_is_not_copied(monkeypatch):
    monkeypatch.setattr(second_tier, "MOST_COPIED", 0)
    step, x = replay(in_place(), **SETTINGS), torch.randn(8, 16)
    call = settled(step, lambda: step(x))
    assert not is_whole(call)
    assert "too much" in call.plan.tier_says


def test_what_raises_in_it_keeps_later_writes_from_happening():
    """Of calls too that no kernel takes, which could run before it."""
    table, total = torch.randn(8, 16), torch.ones(5)

    def program(places: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(places, table).tanh().exp()
        total.cumsum_(0)
        return rows.sum()

    step, places = replay(program, **SETTINGS), torch.arange(4)
    call = settled(step, lambda: step(places))
    assert is_whole(call)
    before = total.clone()
    with pytest.raises(IndexError):
        step(places + 6)
    assert torch.equal(total, before)


def test_an_error_in_a_plan_that_begins_with_a_library_call_is_eagers():
    table = torch.randn(8, 16)

    def program(places: torch.Tensor) -> torch.Tensor:
        product = (table @ table.T).tanh()
        return product.sum() + F.embedding(places, table).exp().sum()

    step, places = replay(program, **SETTINGS), torch.arange(4)
    assert is_whole(settled(step, lambda: step(places)))
    with pytest.raises(IndexError) as expected:
        program(places + 6)
    with pytest.raises(IndexError, match=re.escape(str(expected.value))) as raised:
        step(places + 6)
    assert any("aten.embedding" in note for note in raised.value.__notes__)


def test_a_first_run_that_raises_compares_nothing(monkeypatch):
    """The next one does."""
    compared = []
    monkeypatch.setattr(second_tier, "difference", lambda *_: compared.append(1))
    is_there = second_tier.SecondTier._is_there
    monkeypatch.setattr(second_tier.SecondTier, "_is_there", lambda *_: False)
    table = torch.randn(8, 16)

    def program(places: torch.Tensor) -> torch.Tensor:
        return (F.embedding(places, table) @ table.T).tanh().exp().sum()

    step, places = replay(program, **SETTINGS), torch.arange(4)
    for _ in range(4):
        step(places)
    assert captured(step).plan.tier is not None
    assert compiler().wait(300)
    monkeypatch.setattr(second_tier.SecondTier, "_is_there", is_there)
    with pytest.raises(IndexError):
        step(places + 6)
    assert not compared
    for _ in range(2 * second_tier.N_ROUNDS + 3):
        step(places)
    assert compared


def test_a_slower_plan_is_not_used(monkeypatch):
    monkeypatch.setattr(second_tier, "GAINS", 0.0)
    step, x = replay(linear(), **SETTINGS), torch.randn(8, 16)
    assert not is_whole(settled(step, lambda: step(x)))


@pytest.mark.parametrize(
    "options", [{"backend": "aten"}, {"compile": "off"}, {"compile": "blocking"}]
)
def test_only_kernels_in_the_background_are_compiled_whole(options):
    step, x = replay(linear(), **{**SETTINGS, **options}), torch.randn(8, 16)
    for _ in range(6):
        step(x)
    assert step.n_replayed
    assert captured(step).plan.tier is None


def test_deterministic_algorithms_are_not_compiled_whole():
    step, x = replay(linear(), **SETTINGS), torch.randn(8, 16)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(6):
            step(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert step.n_replayed
    assert captured(step).plan.tier is None


def test_an_error_in_it_leaves_what_was_computed(monkeypatch):
    step, x = replay(linear(), **SETTINGS), torch.randn(8, 16)
    call = settled(step, lambda: step(x))
    assert is_whole(call)
    with pytest.raises(RuntimeError):
        step(torch.randn(8, 16, dtype=torch.complex64))
    torch.testing.assert_close(step(x), linear_again(step, x))


def linear_again(step: Any, x: torch.Tensor) -> Any:
    return step.__replayed__(x)


def test_settings_in_force_when_the_call_was_captured_count():
    assert settings.current().compile == "off"  # of these tests
    step, x = replay(linear(), **SETTINGS), torch.randn(8, 16)
    assert is_whole(settled(step, lambda: step(x)))


def test_an_optimizer_of_many_parameters_is_one_kernel():
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(24)])
    torch.manual_seed(1)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    steps = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    expected = [p.detach().clone() for p in model.parameters()]

    def step(_: torch.Tensor) -> None:
        steps.step()

    replayed, x = replay(step, **SETTINGS), torch.zeros(())
    assert is_whole(settled(replayed, lambda: replayed(x)))
    n_calls = replayed.n_replayed + replayed.n_recorded
    momentum, moved = 0.0, 0.0
    for _ in range(n_calls):
        momentum = 0.9 * momentum + 1
        moved += 0.1 * momentum
    for p, before in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.detach(), before - moved * p.grad, rtol=1e-3, atol=1e-3)
