"""Small tensors that a replayed function makes from Python's numbers: new ones at each call."""

import pytest
import torch

import lazy_tensor
from lazy_tensor import replay


def added(x):
    t = torch.tensor([1.0, 2.0])
    t.add_(x.sum())
    return t


def summed(x):
    total = torch.tensor([0.0])
    for row in x:
        total[0] += row.sum()
    return total


def counted(x):
    t = x.new_tensor([1, 2])
    t += x.sum().long()
    return t, t * 2, t[0]


def viewed(x):
    t = torch.tensor([1.0, 2.0])
    return t[0], x * t


def detached(x):
    t = torch.tensor([1.0, 2.0])
    return t.detach(), x * t


def shared(x):
    t = torch.tensor([1.0, 2.0])
    return t, t[1:], x * t


def drawn(x):
    t = torch.tensor([1.0, 2.0])
    return t.normal_() + x


@pytest.mark.parametrize("program", [added, summed, counted, viewed, detached, shared, drawn])
def test_like_eager_at_each_call(program):
    step = replay(program)
    for i in range(8):
        x = torch.full((2,), float(i)) if program is not summed else torch.full((2, 2), float(i))
        torch.manual_seed(i)
        found = step(x)
        torch.manual_seed(i)
        expected = program(x)
        if isinstance(found, torch.Tensor):
            found, expected = (found,), (expected,)
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(lazy_tensor.materialize(mine), theirs)
        # what the caller does to a result stays in this call, and shows in what shares its memory
        found[0].add_(10)
        expected[0].add_(10)
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(lazy_tensor.materialize(mine), theirs)
    assert step.n_replayed > 0, step.obstacle


@pytest.mark.filterwarnings("ignore:replay.* goes on recording")
def test_tensors_are_swapped_at_each_call():
    a, b = torch.zeros(3), torch.full((3,), 100.0)

    def program(x):
        torch.utils.swap_tensors(a, b)
        a.add_(x)
        return a * 1

    step = replay(program)
    for i in range(6):
        x = torch.ones(3)
        assert step(x).tolist() == [100.0 * (i % 2 == 0) + i // 2 + 1] * 3
