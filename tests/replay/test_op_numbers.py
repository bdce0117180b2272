"""Ops get numbers: arguments, and such as a call keeps, the program sets, or tensors hold."""

from __future__ import annotations

import fractions
import functools
import math
import random
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from lazy_tensor import replay
from tests.replay.random_numbers import expression

pytestmark = pytest.mark.filterwarnings("ignore:.* goes on recording:UserWarning")

N_CALLS = 50
BASE = 0.5


class Program:
    """Calls of `step` are replayed. `scale` and `n` are numbers of its own, `weight` is trained."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight: Any = nn.Parameter(torch.randn(4))
        self.scale, self.n = 2.0, 0

    def step(self, x, k, i):
        raise NotImplementedError

    def between(self, i):
        """What the program does between calls."""

    def trained(self, loss):
        (gradient,) = torch.autograd.grad(loss, self.weight)
        with torch.no_grad():
            self.weight -= 0.1 * gradient
        return loss.detach()


class WeightedLoss(Program):
    def step(self, x, k, i):
        return self.trained((x * self.weight).square().mean() + k * self.weight.abs().sum())


class Annealed(Program):
    def step(self, x, k, i):
        return self.trained((x * self.weight).square().mean() * min(1.0, i / 20))


class Cosine(Program):
    def step(self, x, k, i):
        rate = 0.5 * (1 + math.cos(math.pi * i / 200)) / math.sqrt(i + 1)
        return self.trained((x * self.weight).square().mean() * rate)


class Temperature(Program):
    def step(self, x, k, i):
        self.scale = max(0.5, self.scale * 0.99)
        return self.trained(((x * self.weight) / self.scale).softmax(0).square().sum())


class ByHand(Program):
    """Adam without an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.square = torch.zeros(4), torch.zeros(4)

    def step(self, x, k, i):
        (gradient,) = torch.autograd.grad((x * self.weight).square().mean(), self.weight)
        self.n += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(gradient, alpha=0.1)
            self.square.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
            root = (self.square / (1 - 0.99**self.n)).sqrt() + 1e-8
            self.weight.addcdiv_(self.mean / (1 - 0.9**self.n), root, value=-0.01 / self.n)
        return gradient


class RunningMean(Program):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(4)

    def step(self, x, k, i):
        self.n += 1
        self.mean += (x - self.mean) / self.n
        return self.mean * 2


class Lerps(Program):
    """Its gradient gets one less the number, and a power's one less than the exponent."""

    def step(self, x, k, i):
        return self.trained(torch.lerp(self.weight.abs() ** (1 + k), x, k / 10).square().sum())


class FromOutside(Program):
    def between(self, i):
        self.scale = 1 / (1 + i)

    def step(self, x, k, i):
        return self.trained((x * self.weight).square().mean() * self.scale)


class OfAGlobal(Program):
    def between(self, i):
        global BASE
        BASE = 0.5 + i

    def step(self, x, k, i):
        return x * BASE


class Clipped(Program):
    """The number is read from a tensor."""

    def step(self, x, k, i):
        norm = x.norm().item()
        return self.trained((x * self.weight).square().mean() * (1.0 / (norm + 1e-6)))


class ByName(Program):
    def step(self, x, k, i):
        return F.leaky_relu(x, k / 100), torch.clamp(x, max=k), x > k, k < x


class OfInts(Program):
    """The number is an int, with which tensors of ints stay such."""

    def step(self, x, k, i):
        n = (x * 10).long()
        return n * i, i - n, n // (i + 1), n == i, (n + i).float() / (i + 1)


class WhereItIsFinite(Program):
    def step(self, x, k, i):
        loss = (x * self.weight).square().mean()
        return self.trained(loss) if math.isfinite(loss.item()) else None


SETTLED = [WeightedLoss, Annealed, Cosine, Temperature, ByHand, RunningMean, Lerps, FromOutside,
           OfAGlobal, Clipped, ByName, OfInts, WhereItIsFinite]  # fmt: skip


class Times:
    """A class of the user's, which does more with a number than to compute with it."""

    def __init__(self, value):
        self.value = value

    def __mul__(self, other):
        return self.value * (2 if other > 20 else 1) * len(str(other))

    __rmul__ = __mul__


class Repeats:
    def __init__(self, text):
        self.text = text

    def __add__(self, n):
        return "".join(self.text for _ in range(n))


class TimesAnObject(Program):
    factor, repeated = Times(3.0), Repeats("ab")

    def step(self, x, k, i):
        return x * (self.factor * i), x * (k * self.factor), self.repeated + i


class TimesAList(Program):
    def step(self, x, k, i):
        return x * len([0] * i), x * len(i * "a")


class OfNumPy(Program):
    def step(self, x, k, i):
        scales = numpy.ones(2) * k
        more = numpy.float64(2.0) * k
        return x * float(scales[1]), x * float(more), x * (1 if more > 50 else 2), numpy.exp(k / 99)


class OfFractions(Program):
    def step(self, x, k, i):
        return x * float(fractions.Fraction(1, 3) * k), x * (fractions.Fraction(1, 3) + i > 10)


class ByAFunctionOfItsOwn(Program):
    def scaled(self, x, k):
        return x * (1 if math.floor(k) % 20 < 10 else 2)

    def step(self, x, k, i):
        return self.scaled(x, k), self.scaled(k=k * 2, x=x)


class NamedAsAnOp(Program):
    def clamp(self, k):
        return round(k) % 7

    def step(self, x, k, i):
        return x * self.clamp(k)


class AsASize(Program):
    def step(self, x, k, i):
        return x[: i % 3], x.repeat(1 + i % 2), torch.full((1 + i % 3,), k), x.roll(i)


class AsAConstant(Program):
    def step(self, x, k, i):
        return x + torch.tensor([k, 1.0]).sum(), torch.tensor(k)


class Prints(Program):
    def step(self, x, k, i):
        return f"{k:.2f}", "%d" % i, str(k), x * k  # noqa: UP031


class Dropped(Program):
    def step(self, x, k, i):
        torch.manual_seed(1)
        return F.dropout(x, (i % 10) / 10)


class Draws(Program):
    def step(self, x, k, i):
        return x + torch.empty(4).uniform_(0, 1 + i), torch.normal(float(i), 0.0, (2,))


class Raises(Program):
    def step(self, x, k, i):
        return x * (1 / (30 - i)) if i != 30 else None


class KeepsElsewhere(Program):
    seen: dict[float, Any] = {}

    def step(self, x, k, i):
        known = self.seen.get(k, x)
        return known * k, i in range(20), [x, -x][i % 2]


class ChangesItsType(Program):
    def between(self, i):
        self.scale = 2 if i % 9 == 0 else 1.0 / (1 + i)

    def step(self, x, k, i):
        return x * self.scale, (x * 10).long() * self.scale


class IsTheSameForAWhile(Program):
    def step(self, x, k, i):
        factor, other = (k, 2 * k) if i > 12 else (2.0, 4.0)
        return x * max(2.0, k / 10), x * factor + other, x * min(k, 3.0)


OTHERS = [TimesAnObject, TimesAList, OfNumPy, OfFractions, ByAFunctionOfItsOwn, NamedAsAnOp,
          AsASize, AsAConstant, Prints, Dropped, Draws, Raises, KeepsElsewhere, ChangesItsType,
          IsTheSameForAWhile]  # fmt: skip


def compared(make: Any, text: str = "") -> Any:
    """Compare the calls of a program with eager's: what they return, and what they leave."""
    eager, lazy = make(), make()
    step = replay(lazy.step, check_every=20)
    for i in range(N_CALLS):
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        given = {"k": 0.5 + i, "i": i} if make is ByName else {}
        args = () if given else (0.5 + i, i)
        eager.between(i)
        torch.manual_seed(i)
        try:
            expected = eager.step(x, *args, **given)
        except (ArithmeticError, ValueError, RuntimeError) as error:
            lazy.between(i)
            with pytest.raises(type(error)):
                step(x, *args, **given)
        else:
            lazy.between(i)
            torch.manual_seed(i)
            found = step(x, *args, **given)
            assert repr(found) == repr(expected), text
            tensors = [pytree.tree_leaves(one) for one in (found, expected)]
            for one, other in zip(*tensors, strict=True):
                if isinstance(other, torch.Tensor):
                    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert repr((lazy.n, lazy.scale)) == repr((eager.n, eager.scale)), text
        assert torch.equal(lazy.weight.nan_to_num(), eager.weight.nan_to_num()), text
    return step


@pytest.mark.parametrize("make", SETTLED, ids=lambda one: one.__name__)
def test_ops_get_the_numbers_of_each_call(make):
    step = compared(make)
    assert step.n_replayed > N_CALLS // 2, step.obstacle


@pytest.mark.parametrize("make", OTHERS, ids=lambda one: one.__name__)
def test_other_uses_are_eagers(make):
    compared(make)


def random_program(seed: int) -> tuple[str, Any]:
    """A class whose `step` gives numbers to ops: drawn at random, which and how."""
    draw = random.Random(seed)
    known = ["k", "i", "self.n", "self.scale", "2.5", "3", "BASE", "y.sum().item()"]

    def value(depth: int) -> str:
        form = draw.choice(["{}"] * 4 + ["math.sin({})", "math.tanh({})", "max({}, 0.5)"])
        return form.format(expression(draw, known, depth, ["+", "-", "*"]))

    ops = ["y * {}", "{} * y", "y - {}", "{} - y", "y + {}", "y / (abs({}) + 1)",
           "torch.add(y, x, alpha={})", "y.clamp(max={})", "torch.where(y > {}, y, x)",
           "F.leaky_relu(y, {})", "y.mul({})", "y.lerp(x, {})", "torch.tanh(y) ** 2 * {}",
           "y.masked_fill(y > 0, {})", "y if {} > 3 else -y", "(y > {}).float() + x",
           "y.round().long() * {} + x"]  # fmt: skip
    lines = ["class Drawn(Program):", "    def step(self, x, k, i):", "        y = x * self.weight"]
    for _ in range(draw.randint(1, 5)):
        change = draw.choice([
            "y = " + draw.choice(ops).format(value(2)), "y = " + draw.choice(ops).format(value(1)),
            "self.n += 1", f"self.scale = math.tanh({value(2)})", "i += 1", f"k = {value(1)}",
        ])  # fmt: skip
        is_branch = draw.random() < 0.2
        if is_branch:
            lines.append(f"        if {value(1)} {draw.choice(['<', '>='])} {value(1)}:")
        lines.append("    " * (2 + is_branch) + change)
    if draw.random() < 0.5:
        loss = "(y.float() / 9).tanh().square().mean()"
        lines.append(f"        return self.trained({loss}), {value(1)}")
    else:
        lines.append("        return y.detach()")
    if draw.random() < 0.3:
        lines += ["    def between(self, i):", f"        self.{draw.choice(['scale', 'n'])} = i"]
    text = "\n".join(lines)
    found: dict[str, Any] = {"Program": Program, "math": math, "torch": torch, "F": F, "BASE": 1.5}
    exec(text, found)
    return text, found["Drawn"]


@pytest.mark.parametrize("seed", range(20))
def test_random_programs_that_give_numbers_to_ops(seed):
    text, make = random_program(seed)
    compared(make, text)


class Turned:
    turn = 1 / (1 + 1j)

    def of_a_constant(self, x, k):
        return x * (1j * k)

    def of_an_attribute(self, x, k):
        return x * (self.turn * k)

    def of_an_argument(self, x, k, turn):
        return x * (turn * k)

    def made_inside(self, x, k):
        return x * (complex(2.0) + k)


@pytest.mark.parametrize(
    "name", ["of_a_constant", "of_an_attribute", "of_an_argument", "made_inside"]
)
def test_a_number_on_the_right_of_a_complex_one(name: str) -> None:
    """`complex` reads what stands on its right, and doesn't ask it."""
    program, x = getattr(Turned(), name), torch.arange(4.0)
    step = replay(program, check_every=0)
    more = (complex(0, 1),) if name == "of_an_argument" else ()
    for i in range(12):
        k = 1.0 if i < 8 else float(i)
        assert torch.equal(step(x, k, *more), program(x, k, *more))


def test_a_function_of_math_that_raises_is_left_to_the_function() -> None:
    def step(x, k):
        try:
            root = math.sqrt(k)
        except ValueError:
            root = 0.0
        return x * root

    replayed, x = replay(step), torch.ones(2)
    for k in (*map(float, range(1, 12)), -1.0, 12.0):
        assert torch.equal(replayed(x, k), step(x, k))
    assert replayed.n_replayed > 0


def test_a_partial_of_a_decorated_function() -> None:
    @torch.no_grad()
    def step(x, k):
        return x * k

    replayed = replay(functools.partial(step, k=2.0))
    for i in range(6):
        assert torch.equal(replayed(torch.full((2,), float(i))), torch.full((2,), 2.0 * i))
    assert replayed.n_replayed > 0, replayed.obstacle


def test_a_number_that_a_composite_op_checks_is_checked() -> None:
    replayed, x = replay(lambda x, q: x.quantile(q)), torch.arange(3.0)
    for q in (0.5, 0.25, 0.75, 0.1, 0.2, 0.6, 0.7):
        assert torch.equal(replayed(x, q), x.quantile(q))
    with pytest.raises(RuntimeError, match="range"):
        replayed(x, -0.25)
