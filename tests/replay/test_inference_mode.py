"""Replayed functions that enter `torch.inference_mode`."""

import pytest
import torch
from torch import nn

from lazy_tensor import replay

FIRST = nn.Linear(4, 8)
MODEL = nn.Sequential(FIRST, nn.GELU(), nn.Linear(8, 3))


@torch.inference_mode()
def decorated(x):
    return MODEL(x).softmax(-1)


def in_a_block(x):
    with torch.inference_mode():
        return MODEL(x).softmax(-1)


@torch.inference_mode()
def numbers(x):
    scores = MODEL(x)
    return scores.amax().item(), scores.argmax(-1).sum().item()


def read_behind(x):
    with torch.inference_mode():
        total = MODEL(x).sum()
    return total.item()


@pytest.mark.parametrize("program", [decorated, in_a_block, numbers, read_behind])
@pytest.mark.parametrize("check_every", [0, 4])
def test_all_of_a_call_may_run_in_it(program, check_every):
    step = replay(program, check_every=check_every)
    for _ in range(12):
        x = torch.randn(5, 4)
        torch.testing.assert_close(step(x), program(x), rtol=0, atol=0)
    assert step.n_replayed > 3, step.obstacle


def before(x):
    y = x * 2
    with torch.inference_mode():
        return MODEL(y)


def behind(x):
    with torch.inference_mode():
        y = MODEL(x)
    return y + 1


def twice(x):
    with torch.inference_mode():
        y = MODEL(x)
    with torch.inference_mode():
        return y + 1


def nested(x):
    with torch.inference_mode():
        y = MODEL(x)
        with torch.inference_mode(False):
            z = x * 2
        y = y + z.mean()
    return y * z.mean()


def loop(x):
    for _ in range(3):
        with torch.inference_mode():
            y = MODEL(x)
        x = x + y.mean()
    return x


def read_between(x):
    with torch.inference_mode():
        best = MODEL(x).argmax(-1)
        n = int(best.max())
    return x[:, 0] + n, best


def learns_between(x):
    with torch.inference_mode():
        target = MODEL(x).softmax(-1)
    weight = torch.ones(4, 3, requires_grad=True)
    loss = (x @ weight - target.clone()).square().mean()
    loss.backward()
    return weight.grad


@pytest.mark.parametrize(
    "program", [before, behind, twice, nested, loop, read_between, learns_between]
)
@pytest.mark.parametrize("check_every", [0, 4])
def test_parts_of_a_call_may_run_in_it(program, check_every):
    step, x = replay(program, check_every=check_every), torch.randn(5, 4)
    for _ in range(12):
        torch.testing.assert_close(step(x), program(x), rtol=0, atol=0)
    assert step.n_replayed > 3, step.obstacle


def writes_behind(x):
    with torch.inference_mode():
        y = MODEL(x)
    return y.add_(1)


def saves_behind(x):
    with torch.inference_mode():
        y = MODEL(x)
    weight = torch.ones(3, requires_grad=True)
    (y * weight).sum().backward()
    return weight.grad


@pytest.mark.parametrize("program", [writes_behind, saves_behind])
def test_what_eager_refuses_outside_of_it_is_refused(program):
    step, x = replay(program), torch.randn(5, 4)
    for call in (program, step, step, step, step):
        with pytest.raises(RuntimeError, match="Inplace update|Inference tensors cannot"):
            call(x)


def test_gradients_that_are_made_outside_of_it_can_be_written():
    model = nn.Linear(4, 3)

    def learn(x):
        with torch.inference_mode(False), torch.enable_grad():
            model(x).square().mean().backward()

    step, x = replay(learn), torch.ones(2, 4)
    with torch.inference_mode():
        for _ in range(6):
            model.zero_grad()
            step(x)
    assert model.weight.grad is not None
    model.weight.grad.mul_(0.5)


def test_a_parameter_is_what_it_is_now():
    step = replay(decorated)
    for _ in range(6):
        step(torch.ones(2, 4))
    with torch.no_grad():
        FIRST.weight.mul_(2)
    assert torch.equal(step(torch.ones(2, 4)), decorated(torch.ones(2, 4)))
    assert step.n_replayed > 3, step.obstacle
