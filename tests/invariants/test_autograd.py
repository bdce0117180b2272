"""Autograd on lazy tensors: hooks, functions of the user's own, double backward."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tests.invariants.compare import WAYS, assert_agrees

each_way = pytest.mark.parametrize("way", WAYS)


def leaf(x):
    return x.detach().requires_grad_()


def tensor_hook(x):
    y = x * 2
    y.register_hook(lambda g: g * 3)
    y.sin().sum().backward()
    return x.grad


def hook_that_removes_itself(x):
    seen = []
    handle = x.register_hook(lambda g: seen.append(g))
    (x * 2).sum().backward()
    handle.remove()
    (x * 3).sum().backward()
    return seen, x.grad


def post_accumulate_hook(x):
    seen = []
    x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad + 1))
    x.exp().sum().backward()
    return seen


def optimizer_in_backward(x):
    def step(p):
        p.data.add_(p.grad, alpha=-0.1)
        p.grad = None

    x.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        x.square().sum().backward()
    return x


def hook_that_writes_the_gradient(x):
    y = x * 2
    y.register_hook(lambda g: g.clamp_(max=0.5))
    y.exp().sum().backward()
    return x.grad


def node_hook(x):
    y = x.sin()
    y.grad_fn.register_hook(lambda inputs, outputs: (inputs[0] * 2,))
    y.sum().backward()
    return x.grad


def retained_gradient(x):
    y = x * 2
    y.retain_grad()
    y.exp().sum().backward()
    return y.grad, x.grad


def double_backward(x):
    (g,) = torch.autograd.grad(x.sin().pow(3).sum(), x, create_graph=True)
    g.square().sum().backward()
    return g, x.grad


def third_derivative(x):
    y = (x.exp() * x.sin()).sum()  # prod's backward differs for subclasses, in C++
    for _ in range(3):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y


def hessian_vector_product(x):
    return torch.autograd.functional.hvp(lambda t: (t**3).sum(), x, torch.ones_like(x))


def gradient_penalty(x):
    w = torch.arange(12.0).view(4, 3).div(12).requires_grad_()
    (g,) = torch.autograd.grad((x @ w).tanh().sum(), x, create_graph=True)
    (g.norm(2) - 1).square().backward()
    return w.grad, x.grad


def accumulated(x):
    for i in range(3):
        (x * i).sum().backward()
    return x.grad


def with_graph_kept(x):
    y = x.exp().sum()
    y.backward(retain_graph=True)
    y.backward()
    return x.grad


def gradient_set_to_zero(x):
    x.exp().sum().backward()
    x.grad.zero_()
    x.sin().sum().backward()
    return x.grad


class Cube(torch.autograd.Function):
    """Saves an input, an output, and one tensor that is neither."""

    @staticmethod
    def forward(ctx, x):
        y = x**3
        ctx.save_for_backward(x, y, x * 3)
        ctx.factor = 2
        return y

    @staticmethod
    def backward(ctx, grad):
        x, _, tripled = ctx.saved_tensors
        return grad * tripled * x


class Doubled(torch.autograd.Function):
    """Writes its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Rounded(torch.autograd.Function):
    """Has an output without gradient, and an unused one."""

    @staticmethod
    def forward(ctx, x):
        whole, rest = x.round(), x - x.round()
        ctx.mark_non_differentiable(whole)
        ctx.set_materialize_grads(False)
        return whole, rest

    @staticmethod
    def backward(ctx, _, grad):
        return None if grad is None else grad * 5


def function_with_saved_tensors(x):
    Cube.apply(x).sum().backward()
    return x.grad


def function_twice_differentiated(x):
    (g,) = torch.autograd.grad(Cube.apply(x).sum(), x, create_graph=True)
    g.sum().backward()
    return x.grad


def function_in_place(x):
    y = x + 1
    z = Doubled.apply(y)
    z.exp().sum().backward()
    return y, z, x.grad


def function_with_partial_gradients(x):
    whole, rest = Rounded.apply(x)
    (rest * 2).sum().backward()
    return whole, whole.requires_grad, x.grad


def saved_tensors_moved(x):
    with saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
        y = x.exp() * x.sin()
    y.sum().backward()
    return x.grad


def saved_on_cpu(x):
    with torch.autograd.graph.save_on_cpu():
        y = x.exp().sin()
    y.sum().backward()
    return x.grad


def view_and_write_in_graph(x):
    y = x * 2
    y[0].mul_(3)
    y.view(-1)[3:5] += x.view(-1)[:2]
    y.sin().sum().backward()
    return y, x.grad


def detached_part(x):
    y = x.sin()
    (y.detach() * y).sum().backward()
    return x.grad


def switched_grad_mode(x):
    with torch.no_grad():
        y = x * 2
        with torch.enable_grad():
            z = x * 3
    return y.requires_grad, z.requires_grad, torch.autograd.grad(z.sum(), x)


PROGRAMS = [
    tensor_hook, hook_that_removes_itself, post_accumulate_hook, optimizer_in_backward,
    hook_that_writes_the_gradient, node_hook, retained_gradient, double_backward, third_derivative,
    hessian_vector_product, gradient_penalty, accumulated, with_graph_kept, gradient_set_to_zero,
    function_with_saved_tensors, function_twice_differentiated, function_in_place,
    function_with_partial_gradients, saved_tensors_moved, saved_on_cpu, view_and_write_in_graph,
    detached_part, switched_grad_mode,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@each_way
def test_gradients_are_eagers(program, way):
    assert_agrees(way, lambda x: program(leaf(x)), torch.rand(3, 4) + 0.5)


def scaled(_: nn.Module, gradients: Any) -> Any:
    return (gradients[0] * 3,)


def kept(gradients: Any, seen: list[torch.Tensor]) -> None:
    seen.append(gradients[0] + 0)


@each_way
def test_module_hooks_see_and_change_what_they_do_in_eager(way):
    def program(x):
        layer = nn.Linear(4, 2)
        seen: list[torch.Tensor] = []
        with torch.no_grad():
            layer.weight.fill_(0.25)
            layer.bias.fill_(0.5)
        layer.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        layer.register_forward_hook(lambda m, args, out: out + args[0].sum())
        layer.register_full_backward_pre_hook(scaled)
        layer.register_full_backward_hook(lambda m, ins, outs: kept(outs, seen))
        x = leaf(x)
        layer(x).sum().backward()
        return seen, x.grad, layer.weight.grad

    assert_agrees(way, program, torch.rand(3, 4))
