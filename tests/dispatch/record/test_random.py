"""Random ops draw in program order, so that lazy and eager give the same numbers, bit for bit."""

import pytest
import torch

from lazy_tensor import lazy_mode, materialize
from lazy_tensor.dispatch.run import hits
from lazy_tensor.mode import RecordingMode

DRAWS = {
    "rand": lambda x: torch.rand(3, 2),
    "randn": lambda x: torch.randn(5),
    "randint": lambda x: torch.randint(0, 9, (4,)),
    "normal": lambda x: torch.normal(0.5, 2.0, (3,)),
    "randn that wants a gradient": lambda x: torch.randn(5, requires_grad=True).detach(),
    "randperm": lambda x: torch.randperm(7),
    "rand_like": lambda x: torch.rand_like(x),
    "rand_like of a view": lambda x: torch.rand_like(x.t()[1:], dtype=torch.float64),
    "bernoulli of a number": lambda x: torch.bernoulli(x, 0.4),
    "randn_like": lambda x: torch.randn_like(x),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "multinomial": lambda x: torch.multinomial(x.abs() + 0.1, 2),
    "normal_": lambda x: (x * 2).normal_(),
    "uniform_ of a view": lambda x: (x * 2)[1:].uniform_(-1, 1),
    "exponential_": lambda x: torch.empty(4).exponential_(),
    "random_": lambda x: torch.zeros(4, dtype=torch.int64).random_(0, 50),
    "dropout": lambda x: torch.nn.functional.dropout(x + 1, 0.4),
    "native_dropout": lambda x: torch.native_dropout(x + 1, 0.4, True)[0],
    "dropout2d": lambda x: torch.nn.functional.dropout2d(x.view(1, 3, 4, 1), 0.5),
    "rrelu": lambda x: torch.nn.functional.rrelu(x, training=True),
    "init": lambda x: torch.nn.init.kaiming_uniform_(torch.empty(6, 5)),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_stream_is_eagers(draw):
    x = torch.randn(3, 4)

    def program():
        torch.manual_seed(5)
        y = x + 1
        first, second = draw(x), draw(y)
        return first, torch.rand(2), second, torch.get_rng_state()

    expected = program()
    for _ in range(3):
        with lazy_mode():
            result = program()
        for got, wanted in zip(materialize(result), expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    "draw", ["rand", "randint", "normal", "randn_like", "rand_like of a view", "a list"]
)
def test_what_reads_no_values_stays_below_python(monkeypatch, draw):
    if hits.native is None:
        pytest.skip(hits.status())
    seen = []
    dispatch = RecordingMode.__torch_dispatch__

    def noted(self, func, *args):
        seen.append(func)
        return dispatch(self, func, *args)

    monkeypatch.setattr(RecordingMode, "__torch_dispatch__", noted)
    make = {"a list": lambda x: torch.tensor([1.0, 2.0]), **DRAWS}[draw]
    x = torch.randn(3, 4)
    for n in range(3):
        with lazy_mode():
            y = x + 1
            seen.clear()
            made = make(y)
            assert n == 0 or not seen  # at first views miss
        assert materialize(made).numel()


def test_checkpoint_recomputes_the_same_dropout():
    from torch.utils.checkpoint import checkpoint

    layer = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.5), torch.nn.Tanh())
    x = torch.randn(4, 6, requires_grad=True)

    def gradient():
        torch.manual_seed(3)
        x.grad = None
        checkpoint(layer, x, use_reentrant=False).sum().backward()
        return x.grad

    expected = gradient()
    with lazy_mode():
        got = gradient()
    assert torch.equal(materialize(got), expected)
