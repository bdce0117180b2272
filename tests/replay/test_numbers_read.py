"""Numbers that a call reads: returned, computed with, drawn, or deciding what it does."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lazy_tensor import lazy_mode, replay
from tests.replay.random_numbers import expression

pytestmark = pytest.mark.filterwarnings("ignore:.* goes on recording:UserWarning")

Step = Callable[[torch.Tensor], Any]


def training(drop: float) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """A training step: loss, scores, and the norm of the gradients."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(drop), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def trained(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = model(x)
        loss = F.cross_entropy(scores, x.argmax(-1) % 4)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach(), scores.detach(), norm

    return trained


def alone(trained, x):
    return trained(x)[0].item()


def as_a_float(trained, x):
    return float(trained(x)[0])


def two(trained, x):
    loss, _, norm = trained(x)
    return loss.item(), float(norm)


def in_a_dict(trained, x):
    loss, scores, _ = trained(x)
    return {"loss": loss.item(), "scores": scores}


def in_a_comprehension(trained, x):
    return [one.item() for one in trained(x) if one.dim() == 0]


def in_a_block(trained, x):
    with nullcontext():
        return trained(x)[0].item()


def by_turns(trained, x):
    loss, scores, norm = trained(x)
    first = loss.item()
    second = norm.item()
    return second, scores, first


def whole(trained, x):
    return int(trained(x)[1].argmax(-1).sum())


def twice(trained, x):
    loss = trained(x)[0]
    return loss.item(), loss.item()


def accuracy(scores, x):
    return (scores.argmax(-1) == x.argmax(-1) % 4).sum().item()


def by_another_function(trained, x):
    loss, scores, _ = trained(x)
    return [loss.item(), accuracy(scores, x)]


RETURNED = [alone, as_a_float, two, in_a_dict, in_a_comprehension, in_a_block, by_turns, whole,
            twice, by_another_function]  # fmt: skip


@pytest.mark.parametrize("drop", [0.0, 0.5])
@pytest.mark.parametrize("program", RETURNED)
def test_a_number_that_is_only_returned_may_differ(program, drop):
    steps: list[Any] = []
    for _ in range(2):
        torch.manual_seed(1)
        steps.append(training(drop))
    eager, step = (functools.partial(program, one) for one in steps)
    replayed = replay(step, check_every=5)
    for i in range(24):
        x = torch.randn(6, 8)
        torch.manual_seed(i)
        expected = eager(x)
        torch.manual_seed(i)
        found = replayed(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert type(found) is type(expected)
    assert replayed.n_replayed > 8, replayed.obstacle


def mean_accuracy(trained, x):
    scores = trained(x)[1]
    return accuracy(scores, x) / len(x), 100.0 * accuracy(scores, x) / x.size(0)


def rounded_loss(trained, x):
    loss, _, norm = trained(x)
    return dict(loss=round(loss.item(), 3), both=abs(norm.item()) - loss.item(), n=len(x))


def over_parts(trained, x):
    total, n_right = 0.0, 0
    for part in x.chunk(3):
        loss, scores, _ = trained(part)
        total += loss.item() * part.size(0)
        n_right += accuracy(scores, part)
    return total / len(x), n_right


def clipped(trained, x):
    loss, scores, norm = trained(x)
    return (scores * 2 if norm.item() > 1.0 else scores), min(norm.item(), 1.0), loss.item()


def until_it_is_small(trained, x):
    n_steps = 0
    while n_steps < 2:
        loss = trained(x)[0].item()
        n_steps += 1
        if loss < 0.9:
            break
    return n_steps, loss, -loss if loss else 1


COMPUTED = [mean_accuracy, rounded_loss, over_parts, clipped, until_it_is_small]


@pytest.mark.parametrize("program", COMPUTED)
def test_python_may_compute_with_a_number(program):
    test_a_number_that_is_only_returned_may_differ(program, 0.0)


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


def all_small(x):
    return all(one.abs() < 2 for one in x)


def ordered(x):
    return sorted(map(float, (x.sum(), 3 - x.sum())))


def magnitude(x):
    return math.fabs(x.sum() - 3)


def larger(x):
    return max(x.sum(), x.sum() * 0 + 5) * 1, True


def zero_for_some(x):
    over = (x > 1.5).sum().item()
    return over if x.sum() > 3 else 0


def thrown_away(x):
    x.sum().item()
    return x * 2, 0.0


SCALES: dict[str, float] = {}


def handled(x):
    loss = x.sum().item()
    try:
        scale = SCALES["scale"]
    except KeyError:
        scale = 1.0 if loss > 3 else 0.5
    return loss, x * scale


def evaluated(x):
    loss = x.sum().item()
    return loss, eval("loss > 3")


def listed(x):
    return [2 * one for one in x.tolist()], (x * 2).tolist()


def decided_by_a_list(x):
    return x * 2 if (x * 2).tolist()[0] > 3 else x * 3


def listed_behind_a_write(x):
    x.add_(1)
    return (x * 1).tolist()


def sorted_later(x):
    values = (x * torch.tensor([1.0, -1.0])).tolist()
    first = values[0]
    values.sort()
    return x * first


def by_a_variable(x, float=math.fabs):
    return float(x.sum() - 3)


def in_lists_of_one(x):
    return [x * 2, [x * 3], {"x": x + 1}], [(x,), x.sum().item()]


USED = [nan_raises, compared, said, rounded, summed, written_later, beside_a_constant, of_two_equal,
        or_else, all_small, ordered, magnitude, larger, zero_for_some, thrown_away, handled,
        evaluated, listed, decided_by_a_list, listed_behind_a_write, sorted_later, by_a_variable,
        in_lists_of_one]  # fmt: skip


def divided(x):
    ratio = x.sum().item() / x.prod().item()
    x.add_(1)
    return x * 2, ratio


def divided_last(x):
    x.mul_(2)
    return x.sum().item() // (x > 0).sum().item(), x * 2


def to_a_power(x):
    return x.sum().item() ** 0.5, (-2) ** (x > 1).sum().item(), x.sum().item() % 3


def scaled_by_a_number(x):
    return x.sum().item() * x


def with_large_numbers(x):
    n = x.long().sum().item() + 2**53
    return n + 1, n * n % 7, -n, 2**40 * n == n


def of_nan(x):
    value = (x / x).sum().item()
    return value != value, max(value, 1.0), min(0.5, value), float("inf") - value


def written_and_computed(x):
    total = x.sum()
    before = total.item()
    total.zero_()
    return before * 2, total


def the_same_twice(x):
    n = x.sum().item()
    return [n, n + 1, n], {"n": n, "x": x + 1}


def beyond_floats(x):
    return x.long().sum().item() % 10**400, x.sum().item() < 10**400


def squared_often(x):
    n = x.sum().item() / 7
    for _ in range(12):
        n = n * n
    return n


def caught_division(x):
    try:
        ratio = x.sum().item() / x.prod().item()
    except ZeroDivisionError:
        ratio = -1.0
    return x * 2, ratio


def evaluated_model(x):
    model = torch.nn.ReLU()
    return model.eval()(x).sum().item() / 3


USED += [caught_division, beyond_floats, evaluated_model, divided, divided_last, to_a_power,
         scaled_by_a_number, with_large_numbers, of_nan, written_and_computed,
         the_same_twice, squared_often]  # fmt: skip


@pytest.mark.parametrize("program", USED)
def test_other_numbers_are_eagers_at_each_call(program):
    step = replay(program, check_every=4)
    for i in (0, 0, 0, 5, 5, 5, 1, 2, 1, 2, 3, 0, 0, math.nan, 5, 1, -4, 1, 2, 2, 2):
        x = torch.full((2,), float(i))
        try:
            expected = program(x.clone())
        except ArithmeticError as error:
            with pytest.raises(type(error)):
                step(x)
            continue
        assert repr(step(x)) == repr(expected)


def random_program(seed: int) -> tuple[str, Step]:
    """A function that computes with numbers that it reads, and returns or compares the outcome."""
    draw = random.Random(seed)
    lines = ["def program(x, scale=2.5):", "    a, n = x.sum().item(), (x > 0).sum().item()"]
    known = ["a", "n", "1.5", "3", "len(x)", "x.size(0)", "a", "n"]

    def value(depth: int) -> str:
        return expression(draw, known, depth, ["+", "-", "*", "/", "//", "%", "+", "-", "*"])

    for i in range(draw.randint(1, 4)):
        if draw.random() < 0.3:
            sign = draw.choice(["<", ">=", "==", "!="])
            lines.append(f"    if {value(2)} {sign} {value(1)}:")
            lines.append(f"        x = x {draw.choice('+-*')} {i + 1}")
        elif draw.random() < 0.2:
            lines.append("    x = x * 2 + 1")
            lines.append(f"    b{i} = x.amax().item()")
            known.append(f"b{i}")
        else:
            lines.append(f"    v{i} = {value(3)}")
            known.append(f"v{i}")
    lines.append(f"    return {value(2)}, dict(x=x * 2, v={value(1)}), [{known[-1]}]")
    text = "\n".join(lines)
    found: dict[str, Any] = {}
    exec(text, found)
    return text, found["program"]


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_that_compute_with_numbers(seed):
    text, program = random_program(seed)
    step = replay(program, check_every=7)
    for i in range(24):
        x = torch.randint(-2, 3, (3,), generator=torch.Generator().manual_seed(i // 2 % 7)).float()
        try:
            expected = program(x.clone())
        except (ArithmeticError, ValueError) as error:
            with pytest.raises(type(error)):
                step(x)
            continue
        assert repr(step(x)) == repr(expected), text


def right(x):
    found = (x > 0).sum()
    return found.item(), x.shape[0]


def losses(x):
    return x.sum().item(), (x * x).sum().item(), 0.0


def three(x):
    return x[0].item(), x[1].item(), x[2].item()


@pytest.mark.parametrize("program", [right, losses, three])
def test_numbers_that_are_equal_now_and_then_are_no_error(program):
    """Where a call is recorded again, and compared with the captured one."""
    step = replay(program, check_every=2)
    for i in range(60):
        x = torch.randint(0, 2 + (i > 20), (4,)).float()
        assert step(x) == program(x)
    assert step.n_replayed > 8, step.obstacle


def test_a_list_that_is_only_returned_may_differ():
    step = replay(lambda x: (x.sort().values.tolist(), x * 2))
    for _ in range(8):
        x = torch.randn(2000)
        values, doubled = step(x)
        assert values == x.sort().values.tolist()
        assert torch.equal(doubled, x * 2)
    assert step.n_replayed > 3, step.obstacle


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
