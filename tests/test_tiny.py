"""The first five seconds: a dozen whole-path checks."""

import torch

import lazy_tensor
from lazy_tensor import is_lazy, is_pending, lazy_mode, materialize, unwrap, wrap


def test_ops_in_the_mode_are_pending_until_it_is_left():
    x = torch.randn(3, 4)
    with lazy_mode(backend="aten"):
        y = (x + 1).relu()
        assert is_lazy(y)
        assert is_pending(y)
        assert y.shape == (3, 4)
    assert not is_pending(y)
    torch.testing.assert_close(materialize(y), (x + 1).relu(), rtol=0, atol=0)


def test_wrapped_tensors_record_without_a_mode():
    x = torch.randn(3, 4)
    y = wrap(x) * 2
    assert is_pending(y)
    assert type(unwrap(y)) is torch.Tensor
    assert torch.equal(unwrap(y), x * 2)


def test_wrap_keeps_parameter_objects():
    model = torch.nn.Linear(3, 4)
    before = list(model.parameters())
    assert wrap(model) is model
    assert all(p is q and is_lazy(p) for p, q in zip(before, model.parameters(), strict=True))
    assert unwrap(model) is model
    assert all(type(p) is torch.nn.Parameter for p in before)


def test_item_gives_a_float():
    with lazy_mode(backend="aten"):
        assert type(torch.ones(3).sum().item()) is float


def test_every_public_name_is_there():
    for name in lazy_tensor.__all__:
        assert hasattr(lazy_tensor, name)
