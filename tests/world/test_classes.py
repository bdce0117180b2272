"""Tensors of other classes made of lazy ones: parameters of derived classes, lazy modules."""

import pytest
import torch
from torch import nn

from lazy_tensor import is_lazy, lazy_mode, wrap
from lazy_tensor.dispatch.trie.trace import local
from tests.invariants.compare import WAYS, assert_same, lazily


class Tagged(nn.Parameter):
    """As `diffusers`' and `peft`'s quantized parameters are made."""

    tag: int

    def __new__(cls, data=None, requires_grad=True, tag=3):
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.tag = tag
        return self


class Derived(nn.Parameter):
    pass


class Mine(torch.Tensor):
    pass


def gradient(parameter):
    return parameter.grad.tolist()


@pytest.fixture(params=WAYS)
def x(request):
    """A computed-later tensor of three twos."""
    if request.param == "wrap":
        yield wrap(torch.ones(3)) * 2
        return
    with lazy_mode():
        yield torch.ones(3) * 2


def test_parameters_are_copied_by_their_class(x):
    p = nn.Parameter(x)
    q = type(p)(x + 1, requires_grad=False)
    assert isinstance(q, nn.Parameter)
    assert q.tolist() == [3.0, 3.0, 3.0]
    assert not q.requires_grad
    assert type(p)(p.data, requires_grad=True).requires_grad
    assert isinstance(type(p)(x, requires_grad=p.requires_grad, **p.__dict__), nn.Parameter)


def test_subclasses_are_made(x):
    made = torch.Tensor._make_subclass(nn.Parameter, x, True)
    assert isinstance(made, nn.Parameter)
    assert made.requires_grad
    assert torch.Tensor._make_subclass(torch.Tensor, x).tolist() == [2.0, 2.0, 2.0]
    tagged = Tagged(x)
    assert type(tagged) is Tagged
    assert tagged.tag == 3
    (tagged * 2).sum().backward()
    assert gradient(tagged) == [2.0, 2.0, 2.0]
    assert type(Derived(x)) is Derived


def test_derived_classes_are_made_of_tensors(x):
    plain = torch.ones(3)
    with lazy_mode():
        assert type(Mine(plain)) is Mine
        assert type(Mine(x)) is Mine
        assert Mine(x).tolist() == [2.0, 2.0, 2.0]
        assert torch.Tensor([1.0, 2.0]).tolist() == [1.0, 2.0]
    # no block sees what is made of a lazy tensor, as in a block whose ops run as in eager
    assert Mine(x * 3).tolist() == [6.0, 6.0, 6.0]


def test_a_buffer_of_a_lazy_tensor(x):
    assert nn.Buffer(x * 2).tolist() == [4.0, 4.0, 4.0]


def test_uninitialized_parameters_become_parameters():
    with lazy_mode():
        p = nn.UninitializedParameter()
        p.materialize((2, 3))
        assert not isinstance(p, nn.UninitializedParameter)
        p.data.fill_(1.0)
        assert p.sum().item() == 6
        b = nn.UninitializedBuffer()
        b.materialize((2, 3))
        b.fill_(2.0)
        assert b.sum().item() == 12


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.LazyLinear(4), (2, 3)), (lambda: nn.LazyConv2d(2, 1), (1, 2, 3, 3)),
        (lambda: nn.LazyBatchNorm1d(), (4, 3)),
    ],
)  # fmt: skip
def test_modules_that_learn_their_shapes(make, shape):
    def program():
        torch.manual_seed(0)
        model, x = make(), torch.rand(shape)
        loss = model(x).square().sum()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    assert_same(lazily("mode", program), program())


@pytest.mark.recorded
def test_a_parameter_where_recording_has_stopped():
    with lazy_mode():
        x = torch.ones(3) * 2
        assert is_lazy(x)
        x.tolist()
        policy = local.trace.policy
        policy.cold = 1
        p = nn.Parameter(x)
        q = nn.Parameter(x.detach())
        (p * q).sum().backward()
        policy.cold = 0
        assert gradient(p) == [2.0, 2.0, 2.0]
        assert gradient(q) == [2.0, 2.0, 2.0]


def test_subclasses_are_made_inside_transforms(x):
    def scaled(z):
        return (z * x.as_subclass(Mine)).as_subclass(torch.Tensor)

    assert torch.vmap(scaled)(torch.ones(2, 3)).tolist() == [[2.0] * 3] * 2
    assert torch.func.grad(lambda z: scaled(z).sum())(torch.ones(3)).tolist() == [2.0] * 3


def test_gradients_pass_through_subclasses_made_inside_transforms(x):
    p = torch.ones(3, requires_grad=True)
    y = p * x
    torch.vmap(lambda z: z * y.as_subclass(Mine))(torch.ones(2, 3)).sum().backward()
    assert gradient(p) == [4.0] * 3


@pytest.mark.parametrize("shapes", [((2, 1), (1, 3)), (2, (3, 1)), ((),), ()], ids=str)
def test_broadcast_shapes_gives_a_size_in_a_block(shapes):
    expected = torch.broadcast_shapes(*shapes)
    with lazy_mode():
        got = torch.broadcast_shapes(*shapes)
    assert (type(got), got) == (type(expected), expected)


class Slope(torch.Tensor):
    """Each op on such a tensor gives its slope, for which its handler asks autograd."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        with torch.overrides.enable_reentrant_dispatch():
            x = args[0].held.detach().requires_grad_()
            func(x, *args[1:]).sum().backward()
        return x.grad


def test_another_class_may_use_autograd_in_its_handler():
    def slopes():
        plain, needing = Slope(torch.ones(3) * 2), Slope(torch.ones(2).requires_grad_())
        return plain.square(), needing.exp(), needing.requires_grad_().square()

    expected = slopes()
    assert expected[0].tolist() == [4.0, 4.0, 4.0]
    with lazy_mode(record="always"):
        found = slopes()
    for one, other in zip((*found, *slopes()), expected * 2, strict=True):
        assert_same(one, other)
