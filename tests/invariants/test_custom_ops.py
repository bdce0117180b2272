"""Ops of the user's own: what no schema of torch's tells about them."""

import pytest
import torch

from lazy_tensor import lazy_mode
from tests.invariants.compare import WAYS, assert_agrees

each_way = pytest.mark.parametrize("way", WAYS)


@torch.library.custom_op("lazy_tensor_invariants::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled.register_fake
def _(x):
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, grad: grad * 2)


@torch.library.custom_op("lazy_tensor_invariants::add_to", mutates_args={"x"})
def add_to(x: torch.Tensor, amount: float) -> None:
    x += amount


@torch.library.custom_op("lazy_tensor_invariants::fill_both", mutates_args={"first", "second"})
def fill_both(first: torch.Tensor, second: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    first.copy_(by)
    second.copy_(by * 2)
    return by * 3


@torch.library.custom_op("lazy_tensor_invariants::by_numpy", mutates_args=())
def by_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() + 1)


@torch.library.custom_op("lazy_tensor_invariants::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0.5]


def without_writes(x):
    y = doubled(x + 1)
    return y, y + x


def in_a_graph(x):
    x = x.detach().requires_grad_()
    doubled(x.sin()).sum().backward()
    return x.grad


def write_to_pending(x):
    y = x + 1
    before = y * 2
    add_to(y, 3.0)
    return before, y, y * 2


def write_to_input(x):
    before = x * 2
    add_to(x, 3.0)
    return before, x, x * 2


def write_to_view(x):
    y = x + 1
    add_to(y[1], 3.0)
    add_to(y.t()[0], 5.0)
    return y, y.sum()


def several_writes(x):
    a, b = x * 0, x * 0
    c = fill_both(a, b, x + 1)
    return a + b, c, a, b


def write_recorded_after(x):
    y = x + 1
    add_to(y, 3.0)
    y.mul_(2)
    add_to(y, 1.0)
    return y


def through_numpy(x):
    return by_numpy(x * 2) * 2


def shape_from_values(x):
    return positive(x * 1.0).sum()


PROGRAMS = [
    without_writes, in_a_graph, write_to_pending, write_to_input, write_to_view, several_writes,
    write_recorded_after, through_numpy, shape_from_values,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@each_way
def test_custom_op_agrees(program, way):
    assert_agrees(way, program, torch.rand(3, 4))


def test_torchs_checks_of_an_op_pass():
    with lazy_mode():
        torch.library.opcheck(doubled, (torch.ones(3),))
        torch.library.opcheck(doubled, (torch.ones(3) * 2,))


def test_a_custom_op_that_raises_does_so_at_the_users_line():
    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("mine")

    op = torch.library.custom_op("lazy_tensor_invariants::refuse", refuse, mutates_args=())
    with lazy_mode():
        y = torch.ones(3) + 1
        with pytest.raises(ValueError, match="mine"):
            op(y)
        z = y + 1
    assert z.tolist() == [3.0] * 3
