"""`torch.func` transforms, compiled functions and subclasses inside the mode."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)
from torch.fx.experimental.proxy_tensor import make_fx

from tests.invariants.compare import WAYS, assert_agrees

each_way = pytest.mark.parametrize("way", WAYS)


def f(x):
    return (x.sin() * x).sum()


def per_row(x):
    return vmap(lambda row: row.cumsum(0) * row[0])(x)


def nested_vmap(x):
    return vmap(vmap(lambda a: a.sin() + 1))(x)


def vmap_of_other_dims(x):
    return vmap(torch.dot, in_dims=(1, 1))(x, x * 2), vmap(torch.sin, out_dims=1)(x)


def gradient(x):
    g, (again, value) = grad(f)(x), grad_and_value(f)(x)
    return g, again, value


def per_sample_gradients(x):
    return vmap(grad(f))(x)


def forward_derivative(x):
    return jvp(lambda a: a.exp() * 2, (x,), (x * 0.5,))


def backward_derivative(x):
    out, pull = vjp(lambda a: a.exp() * 2, x)  # type: ignore[misc]
    return out, pull(x)


def jacobians(x):
    return jacrev(lambda a: a.sin() * a.sum())(x[0]), jacfwd(lambda a: a.tanh())(x[0])


def tangents_of_numbers(x):
    found = []
    for primal in (x, x[0, 0], x.double()[0, 1]):
        for function in (
            lambda t: t.clone().mul_(2.5), lambda t: t * 2.5, lambda t: t.clone().div_(3),
            lambda t: torch.where(t > 0.5, t, 1.0), lambda t: t.clone().sub_(1) / 3,
        ):  # fmt: skip
            with forward_ad.dual_level():
                dual = function(forward_ad.make_dual(primal, primal + 1))
                found += [part.clone() for part in forward_ad.unpack_dual(dual)]
    return found


def second_derivatives(x):
    return hessian(f)(x[0]), grad(lambda a: grad(f)(a).sum())(x)


def linearized(x):
    out, push = linearize(torch.sin, x)
    return out, push(x)


def with_closure(x):
    y = x * 2
    return grad(lambda a: (a * y).sum())(x), vmap(lambda row: row + y[0])(x)


def module_as_function(x):
    model = torch.nn.Linear(4, 3)
    parameters = {"weight": x.sum() * torch.ones(3, 4), "bias": x[0, :3] * 2}
    loss = lambda p: functional_call(model, p, (x,)).square().sum()  # noqa: E731
    return grad(loss)(parameters)


def ensemble(x):
    torch.manual_seed(3)
    models = [torch.nn.Linear(4, 2) for _ in range(3)]
    parameters, buffers = stack_module_state(models)
    call = lambda p, b: functional_call(models[0], (p, b), (x,))  # noqa: E731
    return vmap(call)(parameters, buffers).detach()


def random_in_vmap(x):
    torch.manual_seed(3)
    return vmap(lambda row: row + torch.rand(4), randomness="different")(x)


PROGRAMS = [
    per_row, nested_vmap, vmap_of_other_dims, gradient, per_sample_gradients, forward_derivative,
    tangents_of_numbers, backward_derivative, jacobians, second_derivatives, linearized,
    with_closure, module_as_function, ensemble, random_in_vmap,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@each_way
def test_transform_agrees(program, way):
    assert_agrees(way, program, torch.rand(3, 4) + 0.25)


@each_way
def test_make_fx_traces_the_ops_and_no_constants(way):
    def program(x):
        traced = make_fx(lambda t: t.sin() + t)(x)
        return traced(x * 2)

    assert_agrees(way, program, torch.rand(3, 4))


def compiled_body(x, factor):
    y = x.sin() * factor
    if y.shape[0] > 2:
        y = y + 1
    return y, y.sum()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@each_way
def test_compiled_function_agrees(backend, way):
    torch._dynamo.reset()
    compiled = torch.compile(compiled_body, backend=backend)

    def program(x):
        y, total = compiled(x * 2, 3)
        return y * 2, total + 1

    assert_agrees(way, program, torch.rand(3, 4))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@each_way
def test_compiled_function_gives_gradients(backend, way):
    torch._dynamo.reset()
    compiled = torch.compile(compiled_body, backend=backend)

    def program(x):
        x = x.detach().requires_grad_()
        compiled(x, 3)[1].backward()
        return x.grad

    assert_agrees(way, program, torch.rand(3, 4))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@each_way
def test_compiled_function_that_writes_its_input_agrees(backend, way):
    torch._dynamo.reset()

    @torch.compile(backend=backend)
    def write(x):
        x.mul_(3)
        return x + 1

    def program(x):
        y = x + 1
        before = y * 2
        after = write(y)
        return before, after, y, write(x), x

    assert_agrees(way, program, torch.rand(3, 4))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_module_trains_as_in_eager(backend):
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    state = {name: t.clone() for name, t in model.state_dict().items()}
    compiled = torch.compile(model, backend=backend)

    def program(x):
        model.load_state_dict(state)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = compiled(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert_agrees("mode", program, torch.rand(5, 4))


@each_way
def test_control_flow_operator_agrees(way):
    def program(x):
        y = x + 1
        return torch.cond(y.sum() > 5, lambda a: a.sin(), lambda a: a.cos(), (y,))

    assert_agrees(way, program, torch.rand(3, 4))
