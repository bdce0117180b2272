"""`wrap` and `unwrap` of a tensor that has a graph keep it."""

import copy

import pytest
import torch
from torch import nn

from lazy_tensor import LazyTensor, is_lazy, lazy_mode, materialize, unwrap, wrap


def encoder_and_decoder():
    torch.manual_seed(0)
    return nn.Linear(4, 4), nn.Linear(4, 2)


def gradients(*modules):
    return [materialize(p.grad) for module in modules for p in module.parameters()]


def test_gradients_go_through_wrap():
    x = torch.randn(3, 4)
    expected = encoder_and_decoder()
    expected[1](expected[0](x).tanh()).square().sum().backward()
    encoder, decoder = encoder_and_decoder()
    h = wrap(encoder(x).tanh())
    assert is_lazy(h)
    decoder(h).square().sum().backward()
    for mine, theirs in zip(gradients(encoder, decoder), gradients(*expected), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert all(type(p.grad) is torch.Tensor for p in encoder.parameters())


def test_gradients_go_through_unwrap():
    x = torch.randn(3, 4)
    plain, _ = encoder_and_decoder()
    lazy = wrap(copy.deepcopy(plain))
    h = unwrap(lazy(x).tanh())
    assert type(h) is torch.Tensor
    h.square().sum().backward()
    plain(x).tanh().square().sum().backward()
    for mine, theirs in zip(gradients(lazy), gradients(plain), strict=True):
        torch.testing.assert_close(mine, theirs)
    with lazy_mode(record="always"):
        y = plain(x)
    assert isinstance(y, LazyTensor)
    assert unwrap(y).grad_fn is not None


def test_they_can_be_differentiated_twice():
    encoder, _ = encoder_and_decoder()
    x = torch.randn(3, 4)
    found = []
    for through in (wrap, lambda h: h):
        h = through(encoder(x).tanh())
        (g,) = torch.autograd.grad(h.square().sum(), encoder.weight, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), encoder.weight)[0])
    torch.testing.assert_close(materialize(found[0]), found[1])


@pytest.mark.parametrize("through", [wrap, lambda h: unwrap(wrap(h))])
def test_a_write_to_one_is_none_to_the_other(through):
    x = torch.ones(3, requires_grad=True)
    h = x.exp()
    other = through(h)
    other.mul_(2)
    assert torch.equal(h, x.exp())
    (other.sum() + h.sum()).backward()
    torch.testing.assert_close(materialize(x.grad), 3 * x.exp().detach())
    h.detach().zero_()
    assert torch.equal(materialize(other), 2 * x.exp().detach())


def test_the_graph_is_kept_under_no_grad():
    encoder, _ = encoder_and_decoder()
    h = encoder(torch.ones(1, 4))
    with torch.no_grad():
        assert wrap(h).requires_grad
