"""`replay(state=...)`: calls depend on their arguments and on the state that is named."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from lazy_tensor import replay

pytestmark = pytest.mark.usefixtures("quiet")


def calls(step: Any, n: int, *args: Any) -> list[torch.Tensor]:
    return [step(*args).clone() for _ in range(n)]


def test_other_python_is_constant():
    factors = {"a": 2.0}
    step = replay(lambda x: x * factors["a"], state=())
    x = torch.ones(3)
    calls(step, 4, x)
    assert step.n_replayed
    factors["a"] = 3.0
    n_recorded = step.n_recorded
    torch.testing.assert_close(step(x), x * 2)
    assert step.n_recorded == n_recorded


@dataclass
class Agent:
    model: torch.nn.Module
    rate: float = 0.5
    seen: list[int] = field(default_factory=list)


class Slotted:
    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = 0.5


def changes() -> list[Any]:
    def train(agent: Agent) -> None:
        agent.model.eval()

    def rate(agent: Agent) -> None:
        agent.rate = 0.25

    def unread(agent: Agent) -> None:
        agent.seen.append(1)

    def attribute(agent: Agent) -> None:
        agent.model.added = 1  # type: ignore[assignment]

    def parameter(agent: Agent) -> None:
        agent.model.weight = torch.nn.Parameter(torch.zeros(4, 4))

    def hook(agent: Agent) -> None:
        agent.model.register_forward_hook(lambda *_: None)

    return [train, rate, unread, attribute, parameter, hook]


@pytest.mark.parametrize("change", changes(), ids=lambda change: change.__name__)
def test_what_is_named_is_looked_at_as_a_whole(change):
    agent = Agent(torch.nn.Linear(4, 4))

    @torch.no_grad()
    def step(x: torch.Tensor) -> Any:
        return agent.model(x) * agent.rate

    replayed, x = replay(step, state=[agent]), torch.ones(2, 4)
    calls(replayed, 4, x)
    assert replayed.n_replayed
    n_recorded = replayed.n_recorded
    change(agent)
    torch.testing.assert_close(replayed(x), step(x))
    assert replayed.n_recorded == n_recorded + 1


def test_slots_of_what_is_named_count():
    held = Slotted()
    step, x = replay(lambda x: x * held.rate, state=held), torch.ones(3)
    calls(step, 4, x)
    assert step.n_replayed
    held.rate = 0.25
    torch.testing.assert_close(step(x), x / 4)


def test_an_argument_is_looked_at_as_a_whole():
    held = Slotted()
    step, x = replay(lambda held, x: x * held.rate, state=()), torch.ones(3)
    calls(step, 4, held, x)
    assert step.n_replayed
    held.rate = 0.25
    torch.testing.assert_close(step(held, x), x / 4)


def test_what_cannot_be_watched_does_not_stand_in_the_way():
    data, numbers = np.zeros((100, 100)), itertools.cycle([1, 2])
    model = torch.nn.Linear(4, 4)

    @torch.no_grad()
    def step(x: torch.Tensor) -> Any:
        if data is None:
            next(numbers)
        return model(x)

    x = torch.ones(2, 4)
    watched, named = replay(step), replay(step, state=[model])
    calls(watched, 6, x)
    calls(named, 6, x)
    assert not watched.n_replayed
    assert named.n_replayed


def train(replays: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    x, y = torch.randn(16, 8), torch.randn(16, 1)

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run: Any = replay(step, state=[model, optimizer]) if replays else step
    losses = []
    for i in range(40):
        losses.append(run(x + i).clone())
        schedule.step()
    assert not replays or run.n_replayed > 10
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def test_a_training_step_equals_eager():
    for now, eager in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(now, eager, rtol=0, atol=0)


def test_other_tensors_are_read_and_written_as_they_are():
    weight, total = torch.randn(32, 4), torch.zeros(32)

    def step(x: torch.Tensor) -> Any:
        total.add_(x.sum())
        return weight @ x

    replayed, x = replay(step, state=()), torch.ones(4)
    before = total._version
    for i in range(8):
        weight.mul_(2)
        torch.testing.assert_close(replayed(x), weight @ x)
        torch.testing.assert_close(total, torch.full((32,), 4.0 * (i + 1)))
    assert replayed.n_replayed
    assert total._version == before + 8


def test_a_tensor_made_from_data_at_each_call_is_no_constant():
    data = np.arange(40.0, dtype=np.float32)
    step = replay(lambda x: x + torch.from_numpy(data.copy()), state=())
    x = torch.ones(40)
    for _ in range(8):
        data += 1
        torch.testing.assert_close(step(x), x + torch.from_numpy(data))
    assert not step.n_replayed


def test_what_is_left_where_no_state_leads_is_an_obstacle():
    held: dict[str, torch.Tensor] = {}

    def step(x: torch.Tensor) -> None:
        held["last"] = x * 2

    replayed = replay(step, state=())
    for i in range(6):
        replayed(torch.full((3,), float(i)))
        torch.testing.assert_close(held["last"], torch.full((3,), 2.0 * i))
    assert not replayed.n_replayed
    assert "outlives it where replay can't see it" in replayed.obstacle


def test_a_generator_that_is_named_draws_as_in_eager():
    def drawn(replays: bool) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)

        def step(x: torch.Tensor) -> Any:
            return x + torch.rand(3, generator=generator)

        run: Any = replay(step, state=[generator]) if replays else step
        found = calls(run, 8, torch.zeros(3))
        assert not replays or run.n_replayed
        return found

    for now, eager in zip(drawn(True), drawn(False), strict=True):
        torch.testing.assert_close(now, eager, rtol=0, atol=0)


def test_a_copy_has_a_copy_of_the_state():
    held = Slotted()
    step = copy.deepcopy(replay(torch.exp, state=[held]))
    assert step._made_with["state"][0] is not held


def test_a_module_may_have_state_beside_it():
    model, held = torch.nn.Linear(4, 4), Slotted()
    model.register_forward_hook(lambda module, args, out: out * held.rate)
    replay(model, state=[held])
    x = torch.ones(2, 4)
    eager = torch.nn.functional.linear(x, model.weight, model.bias)
    with torch.no_grad():
        for _ in range(8):
            torch.testing.assert_close(model(x), eager * 0.5)
        held.rate = 0.25
        for _ in range(8):
            torch.testing.assert_close(model(x), eager * 0.25)


@pytest.mark.parametrize("state", [1, "model", 0.5, torch.float32, True, ["model"]])
def test_what_cannot_change_is_no_state(state):
    with pytest.raises(TypeError, match=r"replay\(\): state=.* can't change; name modules"):
        replay(torch.exp, state=state)
