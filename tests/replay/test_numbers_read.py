"""Numbers that a call reads: some are only returned, some decide what it does, some are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lazy_tensor import lazy_mode, replay

pytestmark = pytest.mark.filterwarnings("ignore:.* goes on recording:UserWarning")

Step = Callable[[torch.Tensor], Any]


def training(drop: float, give: Callable[..., Any]) -> Step:
    """A training step that returns what `give` makes of its loss and scores."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(drop), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> Any:
        scores = model(x)
        loss = F.cross_entropy(scores, x.argmax(-1) % 4)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return give(loss, scores, norm)

    return step


def in_a_block(loss, scores, norm):
    with nullcontext():
        return loss.item()


def by_turns(loss, scores, norm):
    first = loss.item()
    second = norm.item()
    return second, scores.detach(), first


RETURNED: dict[str, Callable[..., Any]] = {
    "alone": lambda loss, scores, norm: loss.item(),
    "float": lambda loss, scores, norm: float(loss.detach()),
    "two": lambda loss, scores, norm: (loss.item(), float(norm)),
    "dict": lambda loss, scores, norm: {"loss": loss.item(), "scores": scores.detach()},
    "comprehension": lambda loss, scores, norm: [one.item() for one in (loss, norm)],
    "in a block": in_a_block,
    "by turns": by_turns,
    "whole": lambda loss, scores, norm: int(scores.argmax(-1).sum()),
    "twice": lambda loss, scores, norm: (loss.item(), loss.item()),
}


@pytest.mark.parametrize("drop", [0.0, 0.5])
@pytest.mark.parametrize("name", RETURNED)
def test_a_number_that_is_only_returned_may_differ(name, drop):
    steps: list[Any] = []
    for _ in range(2):
        torch.manual_seed(1)
        steps.append(training(drop, RETURNED[name]))
    eager, replayed = steps[0], replay(steps[1], check_every=5)
    for i in range(24):
        x = torch.randn(6, 8)
        torch.manual_seed(i)
        expected = eager(x)
        torch.manual_seed(i)
        found = replayed(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        if name != "dict" and name != "by turns":
            assert type(found) is type(expected)
    assert replayed.n_replayed > 8, replayed.obstacle


def nan_raises(x):
    loss = x.sum().item()
    if math.isnan(loss):
        raise FloatingPointError
    return loss


def compared(x):
    loss = x.sum().item()
    return x * 2 if loss > 1 else x * 3


def said(x):
    return f"{x.sum().item():.2f}"


def rounded(x):
    return round(x.sum().item(), 1)


def summed(x):
    return x.sum().item() + 1


def written_later(x):
    total = x.sum()
    before = total.item()
    total.zero_()
    return before, total


def beside_a_constant(x):
    return (x.sum() * 0 + 1).item(), 1.0, x * 2


def of_two_equal(x):
    return x.sum().item(), (x.sum() + x.amax() * 0).item()


def or_else(x):
    return x.sum().item() or 7.0


USED = [nan_raises, compared, said, rounded, summed, written_later, beside_a_constant, of_two_equal,
        or_else]  # fmt: skip


@pytest.mark.parametrize("program", USED)
def test_other_numbers_are_eagers_at_each_call(program):
    step = replay(program)
    for i in (1, 2, 1, 2, 3, 0, 0, 0, math.nan, 5, 1):
        x = torch.full((2,), float(i))
        try:
            expected = program(x)
        except FloatingPointError:
            with pytest.raises(FloatingPointError):
                step(x)
            continue
        assert repr(step(x)) == repr(expected)


def test_the_value_of_state_may_be_returned_as_a_number():
    def program(total: torch.Tensor) -> Step:
        def step(x: torch.Tensor) -> Any:
            total.add_(x.sum())
            return total.item()

        return step

    eager, replayed = program(torch.zeros(())), replay(program(torch.zeros(())))
    for i in range(8):
        x = torch.full((2,), float(i))
        assert replayed(x) == eager(x)
    assert replayed.n_replayed > 3, replayed.obstacle


def test_a_number_drawn_may_be_returned():
    step = replay(lambda x: (torch.rand(()).item(), x + torch.rand(2)))
    for i in range(8):
        torch.manual_seed(i)
        first, second = torch.rand(()).item(), torch.ones(2) + torch.rand(2)
        torch.manual_seed(i)
        found = step(torch.ones(2))
        assert found[0] == first
        assert torch.equal(found[1], second)
    assert step.n_replayed > 3, step.obstacle


def coin(x):
    y = F.dropout(x, 0.5) + torch.rand(4)
    return (y + torch.randn(4)) if y.sum() > 4 else y * torch.rand(4)


@pytest.mark.parametrize("check_every", [0, 3])
@pytest.mark.parametrize("mode", [nullcontext, lazy_mode])
def test_what_is_drawn_may_decide(mode, check_every):
    """Where it decides otherwise than before, the same numbers are drawn again."""
    step = replay(coin, check_every=check_every)
    torch.manual_seed(3)
    expected = [coin(torch.ones(4)) for _ in range(60)]
    after = torch.get_rng_state()
    torch.manual_seed(3)
    with mode():
        found = [step(torch.ones(4)) for _ in range(60)]
    assert torch.equal(torch.get_rng_state(), after)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
    assert step.n_replayed > 20, step.obstacle


def test_samples_that_distributions_check_are_no_obstacle():
    step = replay(lambda x: torch.distributions.Normal(x, 1.0).rsample().sum())
    for i in range(8):
        torch.manual_seed(i)
        expected = torch.distributions.Normal(torch.ones(3), 1.0).rsample().sum()
        torch.manual_seed(i)
        assert torch.equal(step(torch.ones(3)), expected)
    assert step.n_replayed > 3, step.obstacle


def test_a_function_that_another_replay_calls_returns_its_number_to_that():
    inner = replay(lambda x: x.sum().item())
    outer = replay(lambda x: x * 2 if inner(x) > 3 else x * 3)
    for i in (0, 1, 0, 1, 2, 3, 0, 2):
        x = torch.full((2,), float(i))
        assert torch.equal(outer(x), x * 2 if 2 * i > 3 else x * 3)
