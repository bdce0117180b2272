"""The programs of `bench_compared.py` in plain PyTorch; `compared_jax` has the same ones in JAX.

In: `run`, by which a side compiles or records the whole step, and `inner`, by which it does so with
the function that autograd differentiates. One of the two changes nothing. Out: a function that does
one step and returns its results. Docstrings of the forms are their titles.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gain_programs import Unrolled, training_step
from torch import Tensor, nn
from torch.nn import functional as F

from lazy_tensor.examples import gray_scott, monte_carlo
from lazy_tensor.examples.race.scenes import Run

Step = Callable[[], tuple[Tensor, ...]]
Begin = Callable[[Run, Run], Step]


def gray_scott_form(run: Run, inner: Run) -> Step:
    """Gray-Scott, a stencil on 1000 x 1000 cells"""
    u, v = gray_scott.start()
    advance = run(inner(gray_scott.step))

    def step() -> tuple[Tensor, ...]:
        nonlocal u, v
        u, v = advance(u, v)
        return u, v

    return step


def asian_option_form(run: Run, inner: Run) -> Step:
    """Monte Carlo, an Asian option from 1,000,000 paths"""
    price = run(inner(monte_carlo.price))
    return lambda: (price(),)


N_SYSTEMS, N_STEPS, DT = 4096, 10, 0.005
SIGMA, RHO, BETA = 10.0, 28.0, 8 / 3


def lorenz_start() -> Tensor:
    """Initial states, of shape `(3, systems)`."""
    return torch.randn(3, N_SYSTEMS) + torch.tensor([[0.0], [0.0], [25.0]])


def velocity(state: Tensor) -> Tensor:
    """E. N. Lorenz, Deterministic Nonperiodic Flow, 1963."""
    x, y, z = state
    return torch.stack((SIGMA * (y - x), x * (RHO - z) - y, x * y - BETA * z))


def runge_kutta(state: Tensor) -> Tensor:
    """Ten steps of the classical fourth-order method."""
    for _ in range(N_STEPS):
        k1 = velocity(state)
        k2 = velocity(state + DT / 2 * k1)
        k3 = velocity(state + DT / 2 * k2)
        k4 = velocity(state + DT * k3)
        state = state + DT / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return state


def lorenz_form(run: Run, inner: Run) -> Step:
    """ten Runge-Kutta steps of 4096 Lorenz systems"""
    state = lorenz_start()
    advance = run(inner(runge_kutta))

    def step() -> tuple[Tensor, ...]:
        nonlocal state
        state = advance(state)
        return (state,)

    return step


def residual_start() -> tuple[Tensor, Tensor, Tensor]:
    """An array, and the weight and bias of its layer norm."""
    return torch.randn(1024, 1024), 1 + torch.randn(1024) / 10, torch.randn(1024) / 10


def residual_loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    normalized = F.layer_norm(x, x.shape[-1:], weight, bias)
    return (x + F.gelu(normalized)).square().sum()


def residual_form(run: Run, inner: Run) -> Step:
    """layer norm, GELU and a residual on 1024 x 1024, forward and backward"""
    values = [value.requires_grad_() for value in residual_start()]
    loss_of = inner(residual_loss)

    def both_ways(*values: Tensor) -> tuple[Tensor, ...]:
        loss = loss_of(*values)
        grads = torch.autograd.grad(loss, values)
        return loss.detach(), *grads

    advance = run(both_ways)
    return lambda: advance(*values)


def mlp_start() -> tuple[nn.Module, Tensor, Tensor]:
    """A model and a batch."""
    widths = [64, 512, 512, 512, 10]
    layers: list[nn.Module] = []
    for n_in, n_out in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(n_in, n_out), nn.GELU()]
    return nn.Sequential(*layers[:-1]), torch.randn(64, 64), torch.randint(10, (64,))


def gru_start() -> tuple[nn.Module, Tensor, Tensor]:
    """A model and a batch of shape `(times, batch, width)`."""
    return Unrolled(128), torch.randn(32, 16, 128), torch.randint(10, (16,))


def trained(
    run: Run, inner: Run, model: nn.Module, optimizer: torch.optim.Optimizer, *batch: Tensor
) -> Step:
    """Training steps on one batch, whose result is the loss before the update."""
    train = run(training_step(inner(model), optimizer))
    return lambda: (train(*batch),)


ADAM_LR, BETAS, EPSILON = 1e-3, (0.9, 0.999), 1e-8
SGD_LR = 0.1


def mlp_form(run: Run, inner: Run) -> Step:
    """a training step of an MLP, 512 wide, Adam"""
    model, *batch = mlp_start()
    optimizer = torch.optim.Adam(model.parameters(), ADAM_LR, BETAS, EPSILON)
    return trained(run, inner, model, optimizer, *batch)


def gru_form(run: Run, inner: Run) -> Step:
    """a training step of a GRU cell over 32 steps, 128 wide, SGD"""
    model, *batch = gru_start()
    optimizer = torch.optim.SGD(model.parameters(), SGD_LR)
    return trained(run, inner, model, optimizer, *batch)


PROGRAMS: dict[str, Begin] = {
    form.__doc__ or "": form
    for form in (gray_scott_form, asian_option_form, lorenz_form, residual_form, mlp_form, gru_form)
}
RANDOM = asian_option_form.__doc__ or ""
"""The program in which sides draw other random numbers."""
