"""Numbers that a call keeps in Python for the next one: counters, the best loss so far, sums."""

from __future__ import annotations

import copy
import math
import operator
import random
import sys
from typing import Any

import pytest
import torch
from torch import nn

from lazy_tensor import replay
from tests.replay.random_numbers import expression

pytestmark = pytest.mark.filterwarnings("ignore:.* goes on recording:UserWarning")

N_CALLS = 60


class Training:
    """Calls of `step` are replayed. `inner` is another object, `out` an array of its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.n = self.bad = 0
        self.best, self.total, self.scale = math.inf, 0.0, 1.0
        self.is_low = False
        self.inner = Inner()

    def step(self, x):
        raise NotImplementedError

    def trained(self, x):
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def numbers(self) -> list[Any]:
        return [self.n, self.bad, self.best, self.total, self.scale, self.inner.n, self.is_low]


class Inner:
    def __init__(self) -> None:
        self.n = 0

    def count(self):
        self.n += 1


class Counts(Training):
    def step(self, x):
        self.n += 1
        return self.trained(x)


class Logs(Training):
    def step(self, x):
        loss = self.trained(x)
        self.n += 1
        return loss.item() if self.n % 10 == 0 else None


class Stops(Training):
    """Early stopping."""

    def step(self, x):
        loss = self.trained(x).item()
        if loss < self.best:
            self.best = loss
            self.bad = 0
        else:
            self.bad += 1
        return loss, self.bad > 3


class Averages(Training):
    def step(self, x):
        self.total = 0.9 * self.total + 0.1 * self.trained(x).item()
        self.n += 1
        return self.total / (1 - self.n), self.total


class StartsAnew(Training):
    def step(self, x):
        self.n += 1
        if self.n == 4:
            self.n = 0
        return self.trained(x) * 2


class OfAnother(Training):
    def step(self, x):
        self.inner.count()
        self.inner.count()
        return self.trained(x), self.inner.n


class CountsOutcomes(Training):
    """No branch: a replay computes neither the loss nor its gradient twice."""

    def step(self, x):
        loss = self.trained(x)
        self.n += loss.item() > 0.1
        self.is_low = self.n > 3 and loss.item() < 0.05
        return self.is_low, not self.is_low, loss.item() != loss.item()


class KeepsABool(Training):
    def step(self, x):
        self.is_low = self.is_low or self.n > 20
        self.n += 1
        return self.trained(x) if self.is_low else self.trained(x) * 2


class ByAHook(Training):
    def __init__(self) -> None:
        super().__init__()
        self.model.register_forward_hook(self.counted)

    def counted(self, *_):
        self.n += 1

    def step(self, x):
        return self.trained(x)


@pytest.mark.parametrize(
    "cls",
    [Counts, Logs, Stops, Averages, StartsAnew, OfAnother, CountsOutcomes, KeepsABool, ByAHook],
    ids=lambda c: c.__name__,
)
def test_numbers_may_be_kept(cls):
    n_replayed, obstacle = compared(cls)
    assert n_replayed > N_CALLS // 3, obstacle


class TimesTensors(Training):
    def step(self, x):
        self.n += 1
        return self.trained(x) * self.n


class NumberTimesATensor(Training):
    def step(self, x):
        self.n += 1
        return (self.n // 20) * self.trained(x)


class Says(Training):
    def step(self, x):
        self.n += 1
        return f"{self.n // 10}", self.trained(x)


class GetsByName(Training):
    def step(self, x):
        self.n += 1
        return getattr(self, "n") // 10, self.trained(x)  # noqa: B009


class HasAProperty(Training):
    @property
    def rate(self):
        return self.n / 10

    def step(self, x):
        self.n += 1
        return self.trained(x) * self.rate


class GivesToAFunction(Training):
    def step(self, x):
        self.n += 1
        return self.trained(x) + torch.full((), self.n // 30)


class PutsElsewhere(Training):
    def step(self, x):
        self.n += 1
        self.inner.n = self.n
        self.scale = self.inner.n
        return self.trained(x)


class CopiesItself(Training):
    def step(self, x):
        self.n += 1
        return self.trained(x), copy.copy(self).n // 10


class ChangesItsType(Training):
    def step(self, x):
        self.n += 1
        self.total = self.total + 1 if self.n % 3 else int(self.n)
        return self.trained(x)


class SetsNone(Training):
    extra: float | None = 0.0

    def step(self, x):
        self.n += 1
        self.extra = None if self.n % 5 else 1.5
        return self.trained(x)


class Raises(Training):
    def step(self, x):
        self.n += 1
        self.total = 1 / (self.n % 7)
        return self.trained(x)


class CallsItself(Training):
    def step(self, x, depth=2):
        self.n += 1
        if depth:
            return self.trained(x) * self.step(x, depth - 1)
        return self.n // 10


class ScalesNowAndThen(Training):
    """`scale` is stored, but stays the same for many calls, in which an op gets it."""

    def step(self, x):
        self.n += 1
        if self.n % 12 == 0:
            self.scale *= 0.5
        return self.trained(x) * self.scale


class Empties(Training):
    def step(self, x):
        self.best = self.trained(x).item() if self.n else 0
        self.n = 1 - self.n
        return self.best


class Catches(Training):
    def step(self, x):
        self.n += 1
        try:
            self.total = 1 / (self.n % 7)
        except ZeroDivisionError:
            self.total = -1.0
        return self.trained(x)


class ReadsByAPattern(Training):
    def step(self, x):
        self.n += 1
        match self:
            case Training(n=k):
                return self.trained(x) * (k // 20)


GET = operator.attrgetter("n")


class ReadsByAnObject(Training):
    def step(self, x):
        self.n += 1
        return self.trained(x) * (GET(self) // 20)


class IsCalledByAnother(Training):
    def __init__(self, depth=1) -> None:
        super().__init__()
        self.child = IsCalledByAnother(depth - 1) if depth else None

    def step(self, x):
        self.n += 1
        if self.child is None:
            return self.n // 20
        return self.trained(x) * self.child.step(x)


class SharesItsName(Training):
    """`total` is a number here, and a tensor in another object."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Shared()

    def step(self, x):
        self.total = 0.5 if self.total > 0.7 else self.total + 0.1
        return self.other.total * self.total * self.trained(x)


class Shared:
    def __init__(self) -> None:
        self.total = torch.full((2,), 3.0)


class SetsALibrarys(Training):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.p = nn.Dropout(1.0), 1.0

    def step(self, x):
        self.n += 1
        self.p = 1.0 if self.n < 20 else 0.0
        self.drop.p = self.p
        return self.drop(x) * self.trained(x)


class HasASetter(Training):
    def __init__(self) -> None:
        super().__init__()
        self.other = Rooted()

    def step(self, x):
        self.n += 1
        self.other.n = self.n
        return self.trained(x) * self.other.root


class Rooted:
    root = 0.0

    @property
    def n(self):
        return int(self.root)

    @n.setter
    def n(self, value):
        self.root = math.sqrt(value // 20)


class LargeNumbers(Training):
    def step(self, x):
        self.n = self.n * 1000 + 1
        self.total = self.n % 7
        self.bad = 10**400
        return self.trained(x), self.total < 10**400


class LeavesNumbersAnywhere(Training):
    shared = 0

    def step(self, x):
        self.n += 1
        LeavesNumbersAnywhere.shared = self.n
        made = Inner()
        made.n = self.n
        self.inner = made
        return self.trained(x), copy.copy(self).n, LeavesNumbersAnywhere.shared


class StoresUnseen(Training):
    def step(self, x):
        self.n += 1
        sys.modules[__name__].N_UNSEEN = self.n  # type: ignore[attr-defined]
        return self.trained(x)

    def numbers(self):
        return [*super().numbers(), N_UNSEEN]


N_UNSEEN = 0


@pytest.mark.parametrize(
    "cls",
    [StoresUnseen, Catches, ReadsByAPattern, ReadsByAnObject, IsCalledByAnother, SharesItsName,
     SetsALibrarys, HasASetter, LargeNumbers, LeavesNumbersAnywhere, TimesTensors,
     NumberTimesATensor, Says, GetsByName, HasAProperty, GivesToAFunction, PutsElsewhere,
     CopiesItself, ChangesItsType, SetsNone, Raises, CallsItself, ScalesNowAndThen, Empties],
    ids=lambda c: c.__name__,
)  # fmt: skip
def test_other_uses_are_eagers(cls):
    compared(cls)


def compared(cls, **options) -> tuple[int, str]:
    """Compare the calls of a class with eager's: what they return, and what they leave."""
    eager, lazy = cls(), cls()
    step = replay(lazy.step, check_every=20, **options)
    for i in range(N_CALLS):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(i))
        try:
            expected = eager.step(x)
        except ZeroDivisionError:
            with pytest.raises(ZeroDivisionError):
                step(x)
            assert lazy.n == eager.n
        else:
            assert repr(step(x)) == repr(expected)
        assert list(map(repr, lazy.numbers())) == list(map(repr, eager.numbers()))
        assert list(map(type, lazy.numbers())) == list(map(type, eager.numbers()))
    assert torch.equal(lazy.model.weight, eager.model.weight)
    return step.n_replayed, step.obstacle


class Evaluates(Training):
    """Flags that each call sets, as it finds them or not."""

    def step(self, x):
        self.model.eval()
        self.is_low, self.text = True, "evaluated"
        loss = self.trained(x).item()
        self.model.train(loss < 0)
        return loss

    text = ""


def test_flags_may_be_set():
    n_replayed, obstacle = compared(Evaluates)
    assert n_replayed > N_CALLS // 2, obstacle


def test_traced_numbers_outlive_no_call():
    trainer, kept = LeavesNumbersAnywhere(), list[Any]()

    def step(x):
        trainer.n += 1
        kept[:] = [trainer.n]
        counted.n = trainer.n  # type: ignore[attr-defined]
        error = ValueError()
        error.n = trainer.n  # type: ignore[attr-defined]
        if trainer.n % 3 == 0:
            raise error
        return error

    replayed = replay(step)
    for i in range(1, 20):
        try:
            error = replayed(torch.ones(2))
        except ValueError as caught:
            error = caught
        assert type(error.n) is int
        assert error.n == i
        assert list(map(type, kept)) == [int]
        assert type(counted.n) is int  # type: ignore[attr-defined]


def test_a_number_may_be_set_from_outside():
    trainer = Logs()
    step = replay(trainer.step, check_every=0)
    for _ in range(30):
        step(torch.ones(3, 4))
    n_replayed = step.n_replayed
    trainer.n = 100
    assert step(torch.ones(3, 4)) is None
    assert trainer.n == 101
    assert step.n_replayed > n_replayed
    trainer.n = 109
    assert isinstance(step(torch.ones(3, 4)), float)
    trainer.n = 2.5  # type: ignore[assignment]
    step(torch.ones(3, 4))
    assert trainer.n == 3.5


N_GLOBAL = 0


def counted(x):
    global N_GLOBAL
    N_GLOBAL += 1
    return x + 1


def counted_twice(x):
    global N_GLOBAL
    N_GLOBAL += 1
    return counted(x) * 2


def test_variables_outside_of_the_function():
    n_own = 0

    def step(x):
        nonlocal n_own
        n_own += 1
        return counted_twice(x), n_own, N_GLOBAL

    replayed, before = replay(step), N_GLOBAL
    for i in range(1, N_CALLS):
        _, own, n_global = replayed(torch.ones(2))
        assert (n_global, own) == (before + 2 * i, i)
        assert (N_GLOBAL, n_own) == (before + 2 * i, i)
    assert replayed.n_replayed > N_CALLS // 2, replayed.obstacle


class CountingModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.n_calls = 0

    def forward(self, x):
        self.n_calls += 1
        return self.linear(x) if self.n_calls % 6 else x * 2


def test_a_module_that_counts():
    torch.manual_seed(0)
    eager = CountingModule()
    lazy = copy.deepcopy(eager)
    replay(lazy)
    for _ in range(N_CALLS):
        x = torch.randn(3, 4, requires_grad=True)
        expected, found = eager(x), lazy(x)
        assert torch.equal(found, expected)
        assert lazy.n_calls == eager.n_calls
        expected.sum().backward()
        found.sum().backward()


def random_class(seed: int) -> tuple[str, type[Training]]:
    """A class whose `step` computes with numbers that it keeps, draws at random what."""
    draw = random.Random(seed)
    known = ["self.n", "self.bad", "self.total", "loss", "2.5", "3", "len(x)", "self.is_low"]

    def value(depth: int) -> str:
        return expression(draw, known, depth, ["+", "-", "*", "%"])

    lines = ["class Drawn(Training):", "    def step(self, x):", "        loss = x.sum().item()"]
    for _ in range(draw.randint(1, 4)):
        name = draw.choice(["n", "bad", "total"])
        change = draw.choice([
            f"self.{name} += 1", f"self.{name} = {value(2)}", f"self.{name} -= {value(1)}",
            f"self.is_low = {value(1)} > {value(1)}", f"self.{name} += {value(1)} == {value(1)}",
            f"x = x * {value(1)}" if draw.random() < 0.3 else f"self.{name} = 0",
        ])  # fmt: skip
        if draw.random() < 0.4:
            lines.append(f"        if {value(2)} {draw.choice(['<', '>=', '=='])} {value(1)}:")
            lines.append("    " * 3 + change)
        else:
            lines.append("    " * 2 + change)
    lines.append(f"        return x * 2, {value(1)}, [{draw.choice(known[:3])}]")
    text = "\n".join(lines)
    found: dict[str, Any] = {"Training": Training}
    exec(text, found)
    return text, found["Drawn"]


@pytest.mark.parametrize("seed", range(20))
def test_random_steps_that_keep_numbers(seed):
    text, cls = random_class(seed)
    eager, lazy = cls(), cls()
    step = replay(lazy.step, check_every=9)
    for i in range(40):
        x = torch.randint(-2, 3, (3,), generator=torch.Generator().manual_seed(i // 2 % 5)).float()
        try:
            expected = eager.step(x)
        except (ArithmeticError, ValueError) as error:
            with pytest.raises(type(error)):
                step(x)
        else:
            assert repr(step(x)) == repr(expected), text
        assert list(map(repr, lazy.numbers())) == list(map(repr, eager.numbers())), text
