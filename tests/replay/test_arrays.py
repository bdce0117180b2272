"""Replayed calls that read memory of arrays: each reads what lies there when it begins."""

import copy

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazy_tensor
from lazy_tensor import replay

RANDOM = numpy.random.default_rng(0)


def batch(*size: int) -> torch.Tensor:
    return torch.from_numpy(RANDOM.standard_normal(size).astype(numpy.float32))


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


def training_step(model: nn.Module):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_a_training_step_gets_its_batches_from_numpy():
    batches = [(batch(4, 3, 8, 8), torch.from_numpy(RANDOM.integers(0, 5, 4))) for _ in range(12)]
    eager = training_step(classifier())
    expected = [eager(*xy) for xy in batches]
    step = replay(training_step(classifier()))
    assert torch.equal(torch.stack([step(*xy) for xy in batches]), torch.stack(expected))
    assert step.n_replayed >= 6


def test_a_module_gets_its_batches_from_numpy():
    eager, replayed = classifier(), classifier()
    replay(replayed)
    lazy_tensor.reset_stats()
    for _ in range(12):
        x = batch(4, 3, 8, 8)
        for model in (eager, replayed):
            model.zero_grad()
            model(x).square().sum().backward()
        grads = [[p.grad for p in model.parameters()] for model in (eager, replayed)]
        torch.testing.assert_close(*grads, rtol=0, atol=0)
    assert lazy_tensor.stats()["replayed"] >= 6


def of_views(x):
    return (x.t() @ x[:, :3]).sum(0) + x[1:3].mean() + x.unfold(0, 2, 2).sum()


def test_views_of_an_argument_are_of_the_next_one_the_next_time():
    step = replay(of_views)
    whole = batch(20, 6)
    for i in range(12):
        x = whole[i : i + 6]  # somewhere else in its memory each time
        assert torch.equal(step(x), of_views(x.clone()))
    assert step.n_replayed >= 6


WHOLE = batch(20)


def of_two(x, y):
    return x[1:] * 2 + y[:2]


def of_one_and_a_global(x, y):
    return x[1:] * 2 + y[:2] + WHOLE[:2]


@pytest.mark.filterwarnings("ignore:replay:UserWarning")
@pytest.mark.parametrize("function", [of_two, of_one_and_a_global])
def test_views_of_tensors_that_share_an_array_are_of_the_right_one(function):
    step = replay(function)
    for i in (1, 1, 1, 1, 5, 3, 8, 2):
        x, y = WHOLE[i : i + 3], WHOLE[2 * i + 1 : 2 * i + 4]
        assert torch.equal(step(x, y), function(x.clone(), y.clone()))


def test_the_same_plan_runs_on_tensors_that_own_their_memory():
    step = replay(of_views)
    for i in range(12):
        x = batch(6, 6)
        given = x.clone() if i % 3 == 2 else x
        assert torch.equal(step(given), of_views(x.clone()))
    assert step.n_replayed


def test_what_a_call_gave_stays_as_it_was():
    array = numpy.zeros(4)
    tensor = torch.from_numpy(array)
    step = replay(lambda: tensor * 1)
    found = []
    for i in range(8):
        array[:] = i
        found.append(step())
    assert [one.tolist() for one in found] == [[float(i)] * 4 for i in range(8)]
    assert step.n_replayed >= 4


def written_between(array, tensor):
    first = (tensor * 2).sum()
    array[:] = array + 1
    return first + (tensor * 3).sum()


def written_before(array, tensor):
    array[:] = 0
    return (tensor * 3 + 1).sum()


@pytest.mark.filterwarnings("ignore:replay:UserWarning")
@pytest.mark.parametrize("function", [written_between, written_before])
def test_a_function_that_writes_its_array_sees_its_writes(function):
    def results(change):
        array = numpy.zeros(4)
        tensor = torch.from_numpy(array)
        step = change(lambda: function(array, tensor))
        found = []
        for i in range(10):
            if i >= 7:
                array[:] = 7
            found.append(step().item())
        return found

    assert results(replay) == results(lambda step: step)


@pytest.mark.filterwarnings("ignore:replay:UserWarning")
def test_a_write_to_an_argument_reaches_its_array():
    step = replay(lambda x: x.mul_(2).sum())
    for _ in range(6):
        array = numpy.ones(4)
        assert step(torch.from_numpy(array)).item() == 8
        assert array.tolist() == [2.0] * 4
    assert not step.n_replayed


def test_a_tensor_that_is_made_of_an_array_inside_is_no_argument():
    array = numpy.ones(64)
    step = replay(lambda: (torch.from_numpy(array) * 2).sum())
    with pytest.warns(UserWarning, match="memory of an array or a file that replay can't find"):
        assert [step().item() for _ in range(6)] == [128.0] * 6


def test_gradients_of_arguments_reach_them():
    step = replay(lambda x: (x * x).sum().backward())
    for _ in range(8):
        x = batch(4)
        expected = 2 * x.clone()
        x.requires_grad_()
        step(x)
        torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)


def test_a_copied_replay_reads_its_own_arguments():
    step = replay(of_views)
    for _ in range(6):
        step(batch(6, 6))
    other = copy.deepcopy(step)
    x = batch(6, 6)
    assert torch.equal(other(x), of_views(x.clone()))
