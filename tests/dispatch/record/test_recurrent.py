"""Recurrent layers are recorded and replayed: oneDNN's, and those whose results become views."""

import pytest
import torch
from torch import nn

import lazy_tensor
from lazy_tensor import is_pending, lazy_mode, materialize, replay

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")

KINDS = {
    "lstm": lambda: nn.LSTM(6, 5),
    "lstm, batch first": lambda: nn.LSTM(6, 5, batch_first=True),
    "two layers, both ways": lambda: nn.LSTM(6, 5, 2, dropout=0.3, bidirectional=True),
    "with projections": lambda: nn.LSTM(6, 5, proj_size=3),
    "gru": lambda: nn.GRU(6, 5, batch_first=True),
    "rnn": lambda: nn.RNN(6, 5, batch_first=True, nonlinearity="relu"),
}


def trained(make, form, n=12):
    """Losses of a training, and what an evaluation gives then."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x):
        optimizer.zero_grad()
        loss = (model(x)[0] - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def evaluated(x):
        with torch.no_grad():
            return model(x)[0]

    step, evaluated = form(step), form(evaluated)
    losses = [step(torch.randn(3, 4, 6)) for _ in range(n)]
    model.eval()
    losses += [evaluated(torch.randn(3, 4, 6)).sum() for _ in range(n)]
    return materialize(losses)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("form", ["block", "replay"])
def test_recurrent_layers_train_as_in_eager(make, form):
    expected = trained(make, lambda step: step)
    replayed = []

    def replay_it(step):
        replayed.append(replay(step))
        return replayed[-1]

    got = trained(make, lazy_mode(record="always") if form == "block" else replay_it)
    assert all(map(torch.equal, got, expected))
    for step in replayed:
        assert step.n_replayed > 0, step.obstacle


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_training_step_is_one_flush(make):
    model = make()
    model(torch.randn(3, 4, 6))[0].sum().backward()
    for _ in range(2):
        lazy_tensor.reset_stats()
        with lazy_mode(record="always"):
            model.zero_grad()
            model(torch.randn(3, 4, 6))[0].sum().backward()
    assert lazy_tensor.stats()["flush_causes"] == {"exit": 1}


def test_a_layer_recorded_for_backward_runs_where_no_gradients_are_wanted():
    model, x = nn.LSTM(6, 5), torch.randn(3, 4, 6)
    (expected,) = torch.autograd.grad(model(x)[0].sum(), [*model.parameters()][0])
    for _ in range(3):
        with lazy_mode(record="always"):
            y = model(x)[0]
            with torch.no_grad():
                lazy_tensor.flush()
            (got,) = torch.autograd.grad(y.sum(), [*model.parameters()][0])
        assert torch.equal(materialize(got), expected)


def test_a_layer_recorded_without_gradients_runs_where_they_are_wanted():
    model, x = nn.LSTM(6, 5), torch.randn(3, 4, 6)
    with torch.no_grad():
        expected = model(x)[0]
    for n in range(3):
        with lazy_mode(record="always"):
            with torch.no_grad():
                y = model(x)[0]
            assert is_pending(y) or n == 0  # it runs once for these sizes
        # the layer for training may round otherwise
        assert torch.equal(materialize(y), expected)


VIEWS = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "swapdims_": lambda x: x.swapdims_(0, 1),
    "squeeze_": lambda x: x.squeeze_(),
    "squeeze_ of a dim": lambda x: x.squeeze_(0),
    "unsqueeze_": lambda x: x.unsqueeze_(-1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("wanted", [False, True], ids=["plain", "with gradients"])
def test_what_becomes_a_view_of_itself_stays_pending(view, wanted):
    start = torch.rand(1, 3)

    def program():
        x = start.clone().requires_grad_(wanted)
        y = x * 2
        alias, part = y.detach(), y[:, 1:]
        returned = view(y)
        assert returned is y
        y.mul_(3)
        z = (y * torch.arange(3.0).reshape(y.shape)).sum()
        grads = torch.autograd.grad(z, x) if wanted else ()
        seen = y.shape, y.stride(), y._version, alias.shape, part.shape
        return seen, [one.detach() for one in (y, alias, part, z, *grads)]

    seen, expected = program()
    for _ in range(3):
        with lazy_mode(record="always"):
            got_seen, got = program()
            assert is_pending(got[0])
        assert got_seen == seen
        assert all(map(torch.equal, materialize(got), expected))


def test_what_a_replayed_function_was_given_becomes_no_view():
    step = replay(lambda x: x.t_().clone())
    x = torch.rand(2, 3)
    for n in range(6):
        shape = x.shape
        assert torch.equal(materialize(step(x)), x)
        assert x.shape == shape[::-1], n
