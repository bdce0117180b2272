"""An ordinary program gets no warnings; in debug mode each op runs where it is called."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from lazy_tensor import configure, is_lazy, is_pending, lazy_mode, materialize, stats, wrap
from tests.invariants.compare import WAYS, assert_agrees, assert_same


def training_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def new_model():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.1))
    return model, torch.optim.AdamW(model.parameters(), 0.1)


@pytest.mark.parametrize("way", WAYS)
def test_training_warns_of_nothing(way):
    model, optimizer = new_model()
    x = torch.rand(3, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            if way == "wrap":
                training_step(wrap(model), optimizer, x)
            else:
                with lazy_mode():
                    training_step(model, optimizer, x)
    assert [str(warning.message) for warning in caught] == []


@pytest.mark.parametrize("way", WAYS)
def test_a_warning_that_eager_gives_is_given_at_the_users_line(way):
    def program(x):
        with pytest.warns(UserWarning, match="target size") as caught:
            torch.nn.functional.mse_loss(x + 1, x[:1])
        return str(caught[0].message), caught[0].lineno

    assert_agrees(way, program, torch.rand(3, 4))


@pytest.fixture
def debug():
    configure(debug=True)  # the suite's fixture puts the settings back


@pytest.mark.parametrize("way", WAYS)
def test_debug_gives_eagers_results(way, debug):
    def program(x):
        y = x + 1
        y[0].mul_(2)
        w = x.detach().requires_grad_()
        (w * y).exp().sum().backward()
        return y, w.grad, y.tolist()

    assert_agrees(way, program, torch.rand(3, 4))


@pytest.mark.parametrize("way", WAYS)
def test_debug_trains_bit_equal(way, debug):
    x = torch.rand(3, 4)
    model, optimizer = new_model()
    expected = [training_step(model, optimizer, x) for _ in range(3)]
    other, optimizer = new_model()
    if way == "wrap":
        got = [training_step(wrap(other), optimizer, x) for _ in range(3)]
    else:
        with lazy_mode():
            got = [training_step(other, optimizer, x) for _ in range(3)]
    assert got == expected
    assert_same(dict(materialize(other.state_dict())), dict(model.state_dict()))


def test_debug_runs_each_op_where_it_is_called(debug):
    x = wrap(torch.arange(3.0))
    y = x + 1
    assert is_lazy(y)
    assert not is_pending(y)
    y.mul_(2)
    assert not is_pending(y)
    assert stats()["flushes"] == 0


def test_debug_raises_the_errors_of_values_at_the_users_line(debug):
    x = wrap(torch.arange(3.0))
    with pytest.raises(IndexError) as raised:
        x[torch.tensor([9])]
    assert any(str(entry.path) == __file__ for entry in raised.traceback)


def test_debug_for_a_block_ends_with_it():
    x = wrap(torch.arange(3.0))
    with lazy_mode(debug=True):
        assert not is_pending(x + 1)
    assert is_pending(x + 1)


PROGRAM = """
import torch, lazy_tensor
with lazy_tensor.lazy_mode():
    y = torch.ones(3) + 1
    print(lazy_tensor.is_lazy(y), lazy_tensor.is_pending(y), y.tolist())
"""


def test_debug_is_asked_for_by_the_environment():
    environment = {**os.environ, "LAZY_TENSOR_DEBUG": "1", "LAZY_TENSOR_COMPILE": "off"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "True False [2.0, 2.0, 2.0]", done.stderr
