"""Replays of steps that set their optimizer's rates themselves, against eager."""

import math
import types

import numpy as np
import pytest
import torch
from torch import nn, optim

import lazy_tensor
from lazy_tensor import replay

N = 24
OPTIMIZERS = {
    "adam": lambda p: optim.AdamW(p, lr=0.01),
    "fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p: optim.NAdam(p, lr=0.01, foreach=True),
    "sgd": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
}


pytestmark = pytest.mark.usefixtures("quiet")


class Trainer:
    """A model in two groups, which are learnt at different rates."""

    def __init__(self, make=OPTIMIZERS["sgd"]):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        first, _, second = self.model
        self.optimizer = make([
            {"params": first.parameters()}, {"params": second.parameters(), "lr": 0.02}
        ])  # fmt: skip
        self.n_steps = 0
        self.seen = 0.0

    def learn(self, x):
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @property
    def rates(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def agrees_with(self, eager):
        assert self.rates == eager.rates
        assert list(map(type, self.rates)) == list(map(type, eager.rates))
        for p, q in zip(self.model.parameters(), eager.model.parameters(), strict=True):
            assert torch.equal(lazy_tensor.materialize(p.detach()), q)
        assert (self.n_steps, self.seen) == (eager.n_steps, eager.seen)


def given(trainer, x, rate):
    for group in trainer.optimizer.param_groups:
        group["lr"] = rate
    return trainer.learn(x)


def computed(trainer, x, rate):
    trainer.n_steps += 1
    warm = min(1.0, trainer.n_steps / 10)
    rate = 0.1 * warm * (1 + math.cos(math.pi * trainer.n_steps / 100))
    trainer.optimizer.param_groups[0]["lr"] = rate
    trainer.optimizer.param_groups[1]["lr"] = rate / 2
    return trainer.learn(x)


def decays(trainer, x, rate):
    loss = trainer.learn(x)
    for group in trainer.optimizer.param_groups:
        group["lr"] *= 0.97
    return loss


def bounded(trainer, x, rate):
    for group in trainer.optimizer.param_groups:
        group["lr"] = max(group["lr"] * 0.97, 1e-3)
    return trainer.learn(x)


def returned(trainer, x, rate):
    trainer.optimizer.param_groups[0]["lr"] = rate
    return {"loss": trainer.learn(x), "rate": trainer.optimizer.param_groups[0]["lr"]}


def decayed_less(trainer, x, rate):
    for group in trainer.optimizer.param_groups:
        group["weight_decay"] = rate
    return trainer.learn(x)


SETTING = [given, computed, decays, bounded, returned, decayed_less]


def compared(step, make=OPTIMIZERS["sgd"], **options):
    """A replay of `step` that was called with eager beside it."""
    eager, lazy = Trainer(make), Trainer(make)
    replayed = replay(types.MethodType(step, lazy), backend="aten", **options)
    generator = torch.Generator().manual_seed(1)
    for i in range(2 * N):
        x = torch.randn(3, 4, generator=generator)
        rate = 0.1 / (i + 1) if i < N else 0.01
        expected, found = step(eager, x, rate), replayed(x, rate)
        if isinstance(expected, dict):
            assert found["rate"] == expected["rate"]
            assert type(found["rate"]) is type(expected["rate"])
            expected, found = expected["loss"], found["loss"]
        assert torch.equal(lazy_tensor.materialize(found), expected)
        lazy.agrees_with(eager)
    return replayed


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("step", [given, computed, decays, bounded, returned])
def test_rates_that_the_step_sets(step, name):
    replayed = compared(step, OPTIMIZERS[name], check_every=7)
    assert replayed.n_replayed >= N, replayed.obstacle


def test_other_numbers_of_groups():
    assert compared(decayed_less).n_replayed >= N


def read_by_name(trainer, x, rate):
    group = trainer.optimizer.param_groups[0]
    group["lr"] = group.get("lr") * 0.9
    return trainer.learn(x)


def made_a_tensor(trainer, x, rate):
    trainer.optimizer.param_groups[0]["lr"] *= 0.9
    return trainer.learn(x) + torch.tensor(trainer.optimizer.param_groups[0]["lr"])


def formatted(trainer, x, rate):
    trainer.optimizer.param_groups[0]["lr"] *= 0.9
    trainer.seen = float(f"{trainer.optimizer.param_groups[0]['lr']:.3f}")
    return trainer.learn(x)


def in_a_comprehension(trainer, x, rate):
    given(trainer, x, rate)
    trainer.seen = sum([group["lr"] for group in trainer.optimizer.param_groups])
    return trainer.learn(x) * trainer.seen


def all_of_a_group(trainer, x, rate):
    trainer.optimizer.param_groups[0]["lr"] *= 0.9
    copied = dict(trainer.optimizer.param_groups[0])
    return trainer.learn(x) * copied["lr"]


def by_update(trainer, x, rate):
    trainer.optimizer.param_groups[0].update(lr=rate)
    return trainer.learn(x)


def of_numpy(trainer, x, rate):
    trainer.optimizer.param_groups[0]["lr"] = float(np.exp(-trainer.rates[0]))
    return trainer.learn(x)


def branching(trainer, x, rate):
    for group in trainer.optimizer.param_groups:
        group["lr"] = group["lr"] * 0.9 if group["lr"] > 0.004 else 0.004
    return trainer.learn(x)


def from_a_loss(trainer, x, rate):
    loss = trainer.learn(x)
    trainer.optimizer.param_groups[0]["lr"] = 0.01 / (1 + loss.item())
    return loss


def isclose(trainer, x, rate):
    trainer.optimizer.param_groups[0]["lr"] = rate
    scale = 2.0 if math.isclose(trainer.optimizer.param_groups[0]["lr"], 0.01) else 1.0
    return trainer.learn(x) * scale


def twice(trainer, x, rate):
    given(trainer, x, rate)
    return decays(trainer, x, rate)


@pytest.mark.parametrize(
    "step",
    [read_by_name, made_a_tensor, formatted, in_a_comprehension, all_of_a_group, by_update,
     of_numpy, branching, from_a_loss, isclose, twice],
)  # fmt: skip
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_what_else_is_done_with_rates_is_eagers(step, name):
    """Such steps may be recorded each time; what they do is the same."""
    compared(step, OPTIMIZERS[name], check_every=0)


def test_a_scheduler_that_steps_outside():
    eager, lazy = Trainer(), Trainer()
    schedulers = [optim.lr_scheduler.StepLR(one.optimizer, 5, gamma=0.5) for one in (eager, lazy)]

    def step(trainer, x):
        loss = trainer.learn(x)
        trainer.optimizer.param_groups[1]["lr"] *= 0.99
        return loss

    replayed = replay(lambda x: step(lazy, x), backend="aten")
    for _ in range(2 * N):
        x = torch.randn(3, 4)
        assert torch.equal(lazy_tensor.materialize(replayed(x)), step(eager, x))
        for scheduler in schedulers:
            scheduler.step()
        lazy.agrees_with(eager)


def test_rates_are_numbers_when_the_step_raises():
    trainer = Trainer()

    def step(x):
        trainer.optimizer.param_groups[0]["lr"] *= 0.5
        trainer.learn(x)
        raise KeyError

    replayed = replay(step)
    for i in range(4):
        with pytest.raises(KeyError):
            replayed(torch.randn(3, 4))
        assert repr(trainer.rates[0]) == repr(0.01 * 0.5 ** (i + 1))


def test_a_dict_of_the_program_is_no_group():
    logs = {"lr": 0.0}

    def step(x, rate):
        logs["lr"] = rate
        return x * 2

    replayed = replay(step, check_every=0)
    for i in range(N):
        replayed(torch.ones(2), 0.1 * (i // 8))
        assert logs == {"lr": 0.1 * (i // 8)}
    assert replayed.n_replayed > 0, replayed.obstacle
