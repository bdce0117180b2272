"""Replays of calls that give numbers to functions of the user's, against eager."""

import functools
import math
import struct
import types

import numpy as np
import pytest
import torch
from torch import nn, optim

import lazy_tensor
from lazy_tensor import replay

N = 40
WARM_UP = 10


pytestmark = pytest.mark.usefixtures("quiet")


def rate_at(i):
    if i < WARM_UP:
        return 0.01 * (i + 1) / WARM_UP
    if i > 3 * WARM_UP:
        return 1e-4
    share = (i - WARM_UP) / (2 * WARM_UP)
    return 1e-4 + 0.5 * (1 + math.cos(math.pi * share)) * (0.01 - 1e-4)


def set_rate(optimizer, rate):
    for group in optimizer.param_groups:
        group["lr"] = rate


def share_at(i):
    return min(1.0, i / 20)


def twice_the_share(i):
    return 2 * share_at(i)


def mixed(a, b, share):
    return a * share + b * (1 - share)


def itself(number):
    return number


def compared(step):
    """A replay of `step`, which was called with eager beside it."""

    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        return model, optim.AdamW(model.parameters(), lr=0.01)

    eager, lazy = made(), made()
    replayed = replay(types.MethodType(step, lazy), backend="aten", check_every=7)
    for i in range(2 * N):
        x = torch.randn(3, 4)
        expected, found = step(eager, x, i), replayed(x, i)
        assert torch.equal(lazy_tensor.materialize(found), expected)
        rates = [optimizer.param_groups[0]["lr"] for _, optimizer in (eager, lazy)]
        assert rates[0] == rates[1]
        assert type(rates[0]) is type(rates[1])
        for p, q in zip(eager[0].parameters(), lazy[0].parameters(), strict=True):
            assert torch.equal(lazy_tensor.materialize(q.detach()), p)
    return replayed


def learn(both, x, scale=1.0):
    model, optimizer = both
    optimizer.zero_grad()
    loss = model(x).square().mean() * scale
    loss.backward()
    optimizer.step()
    return loss.detach()


def scheduled(both, x, i):
    rate = rate_at(i)
    for group in both[1].param_groups:
        group["lr"] = rate
    return learn(both, x)


def scheduled_by_functions(both, x, i):
    set_rate(both[1], rate_at(i))
    return learn(both, x)


def weighed(both, x, i):
    y = both[0](x)
    return learn(both, x) + mixed(y.mean(), y.amax(), share_at(i)).detach()


def scaled(both, x, i):
    return learn(both, x, twice_the_share(i))


def handed_back(both, x, i):
    return learn(both, x * itself(i / 2))


@pytest.mark.parametrize("step", [scheduled, scheduled_by_functions, weighed, scaled, handed_back])
def test_numbers_are_followed_into_functions(step):
    replayed = compared(step)
    assert replayed.n_replayed >= N, replayed.obstacle


def formatted(number):
    return float(f"{number:.2f}")


def by_struct(number):
    return struct.unpack("d", struct.pack("d", number))[0]


def by_numpy(number):
    return float(np.sqrt(number))


def in_a_list(number):
    SEEN.append(number)
    return SEEN[-1]


SEEN: list[float] = []


def a_pair(number):
    return number, 2 * number


def recursive(number):
    return number if number < 2 else recursive(number - 1) + 1


def generated(number):
    yield number


def of_any(*numbers):
    return numbers[0] / 2


@functools.lru_cache(None)
def cached(number):
    return number / 2


def by_default(number, other=3.0):
    return number * other


@torch.no_grad()
def decorated(number):
    return number / 2


def of_a_tensor(number):
    return torch.tensor(float(number))


halved = lambda number: number / 2  # noqa: E731


@pytest.mark.parametrize(
    "given",
    [formatted, by_struct, by_numpy, in_a_list, lambda i: a_pair(i)[1], recursive,
     lambda i: next(generated(i)), of_any, cached, by_default, lambda i: by_default(i, other=i),
     decorated, of_a_tensor, halved, lambda i: by_default(number=i)],
)  # fmt: skip
def test_what_else_functions_do_with_numbers_is_eagers(given):
    """Such calls may be recorded each time; what they do is the same."""
    global made_of
    made_of = given

    def step(both, x, i):
        return learn(both, x, made_of(i % 9))

    compared(step)


def shares(n):
    def made_of(i):
        return min(1.0, i / n)

    return made_of


made_of = shares(20)


def test_a_function_that_is_another_one_later():
    global made_of
    made_of = shares(20)

    def step(x, i):
        return x * made_of(i)

    replayed = replay(step, backend="aten", check_every=0)
    for i in range(N):
        if i == N // 2:
            made_of = shares(40)
        x = torch.randn(3)
        assert torch.equal(lazy_tensor.materialize(replayed(x, i)), step(x, i))
    assert replayed.n_replayed > N // 2, replayed.obstacle
