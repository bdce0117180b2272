"""No effect is lost or done twice: exceptions and Ctrl-C between record and flush."""

import signal

import pytest
import torch

from lazy_tensor import flush, lazy_mode, materialize, wrap
from lazy_tensor.dispatch.trace import local
from lazy_tensor.treatments import is_active

ERRORS = [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit]
each_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)


@each_error
def test_what_was_recorded_before_an_exception_in_the_block_is_computed(error):
    x, kept = torch.zeros(3), []

    def program():
        with lazy_mode():
            x.add_(1)
            kept.append(x * 2)
            raise error

    for n in (1, 2, 3):
        with pytest.raises(error):
            program()
        assert x.tolist() == [float(n)] * 3
        assert kept[-1].tolist() == [2.0 * n] * 3


@each_error
def test_the_mode_is_left_after_an_exception(error):
    with pytest.raises(error), lazy_mode(), lazy_mode(max_segment_ops=50):
        raise error
    assert type(torch.ones(2) + 1) is torch.Tensor
    assert not is_active()


def test_a_signal_in_the_block_spares_what_was_recorded():
    x = torch.zeros(3)

    @lazy_mode()
    def program():
        x.add_(1)
        signal.raise_signal(signal.SIGINT)
        x.add_(1)

    with pytest.raises(KeyboardInterrupt):
        program()
    assert x.tolist() == [1.0] * 3


def test_the_blocks_own_exception_is_not_hidden_by_one_at_the_exit():
    @lazy_mode()
    def program(x):
        x[torch.tensor([9])]
        raise ValueError("mine")

    with pytest.raises(IndexError) as raised:
        program(torch.ones(3))
    assert str(raised.value.__context__) == "mine"


def test_an_exception_in_a_nested_block_leaves_the_outer_one_recording():
    @lazy_mode()
    def program(y):
        y.mul_(3)
        raise ValueError("mine")

    with lazy_mode():
        y = torch.ones(3) + 1
        with pytest.raises(ValueError, match="mine"):
            program(y)
        z = y + 1
        assert local.trace.state is not local.trace.root
    assert materialize((y, z))[1].tolist() == [7.0] * 3


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("mine")


def refuse(_):
    raise ValueError("mine")


def by_tensor_hook(x):
    y = x * 2
    y.register_hook(refuse)
    return y


def by_function(x):
    return Refuses.apply(x * 2)


def by_accumulate_hook(x):
    x.register_post_accumulate_grad_hook(refuse)
    return x * 2


def by_module_hook(x):
    layer = torch.nn.Identity()
    layer.register_full_backward_hook(lambda *_: refuse(None))
    return layer(x * 2)


@pytest.mark.parametrize(
    "break_backward",
    [by_tensor_hook, by_function, by_accumulate_hook, by_module_hook],
    ids=lambda f: f.__name__,
)
def test_an_exception_in_backward_reaches_the_user_and_spares_the_rest(break_backward):
    x, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    with lazy_mode():
        kept = other * 5
        kept.sum().backward()
        with pytest.raises(ValueError, match="mine"):
            break_backward(x).sum().backward()
        doubled = other * 2
    assert kept.tolist() == [5.0] * 3
    assert doubled.tolist() == [2.0] * 3
    assert other.grad is not None
    assert other.grad.tolist() == [5.0] * 3


def test_an_exception_in_a_saved_tensor_hook_spares_the_rest():
    x = torch.ones(3, requires_grad=True)
    with lazy_mode():
        with (
            pytest.raises(ValueError, match="mine"),
            torch.autograd.graph.saved_tensors_hooks(refuse, lambda t: t),
        ):
            x.exp()
        y = x * 2
        y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3


def test_a_generator_left_halfway_leaves_the_mode():
    def numbers():
        with lazy_mode():
            x = torch.zeros(2)
            while True:
                x = x + 1
                yield x

    stream = numbers()
    next(stream)
    second = next(stream)
    stream.close()
    assert second.tolist() == [2.0, 2.0]
    assert type(torch.ones(2) + 1) is torch.Tensor


def test_an_effect_is_not_repeated_by_later_flushes():
    x = wrap(torch.zeros(3))
    x.add_(1)
    for _ in range(3):
        flush()
    assert x.tolist() == [1.0] * 3
