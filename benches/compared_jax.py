"""The programs of `compared_programs` in JAX: pure functions under `jax.jit`, optimizers by hand.

In: nothing. Out: `FORMS`, by the same titles. Each program begins with PyTorch's initial values. A
step waits until all its results are computed, because JAX runs in the background. Only a process
that measures JAX imports this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from compared_programs import (
    ADAM_LR,
    BETA,
    BETAS,
    DT,
    EPSILON,
    N_STEPS,
    PROGRAMS,
    RHO,
    SGD_LR,
    SIGMA,
    gru_start,
    lorenz_start,
    mlp_start,
    residual_start,
)
from jax import Array, lax, random
from torch import Tensor

from lazy_tensor.examples import gray_scott, monte_carlo

Step = Callable[[], tuple[Array, ...]]
Arrays = dict[str, Array]


def array(tensor: Tensor) -> Array:
    """A copy of the tensor's value."""
    return jnp.array(tensor.detach().numpy())


def laplacian(z: Array) -> Array:
    around = jnp.roll(z, 1, 0) + jnp.roll(z, -1, 0) + jnp.roll(z, 1, 1) + jnp.roll(z, -1, 1)
    return around - 4 * z


@jax.jit
def gray_scott_step(u: Array, v: Array) -> tuple[Array, Array]:
    reaction = u * v * v
    return (
        u + 0.16 * laplacian(u) - reaction + gray_scott.FEED * (1 - u),
        v + 0.08 * laplacian(v) + reaction - (gray_scott.FEED + gray_scott.KILL) * v,
    )


def gray_scott_form() -> Step:
    u, v = map(array, gray_scott.start())

    def step() -> tuple[Array, ...]:
        nonlocal u, v
        u, v = jax.block_until_ready(gray_scott_step(u, v))
        return u, v

    return step


@partial(jax.jit, static_argnames=("n_paths", "n_dates"))
def price(key: Array, n_paths: int = 1_000_000, n_dates: int = 4) -> tuple[Array, Array]:
    """A price, and the random key for the next price."""
    dt = monte_carlo.YEARS / n_dates
    drift = (monte_carlo.RATE - monte_carlo.VOLATILITY**2 / 2) * dt
    deviation = monte_carlo.VOLATILITY * math.sqrt(dt)
    key, *keys = random.split(key, n_dates + 1)
    up = down = total_up = total_down = jnp.zeros(n_paths // 2)
    for one in keys:
        z = random.normal(one, (n_paths // 2,))
        up, down = up + (drift + deviation * z), down + (drift - deviation * z)
        total_up, total_down = total_up + jnp.exp(up), total_down + jnp.exp(down)
    mean_up, mean_down = (monte_carlo.SPOT * t / n_dates for t in (total_up, total_down))
    payoff = jax.nn.relu(mean_up - monte_carlo.STRIKE) + jax.nn.relu(mean_down - monte_carlo.STRIKE)
    return math.exp(-monte_carlo.RATE * monte_carlo.YEARS) * payoff.mean() / 2, key


def asian_option_form() -> Step:
    key = random.key(0)

    def step() -> tuple[Array, ...]:
        nonlocal key
        value, key = jax.block_until_ready(price(key))
        return (value,)

    return step


def velocity(state: Array) -> Array:
    x, y, z = state
    return jnp.stack((SIGMA * (y - x), x * (RHO - z) - y, x * y - BETA * z))


@jax.jit
def runge_kutta(state: Array) -> Array:
    def step(_: int, state: Array) -> Array:
        k1 = velocity(state)
        k2 = velocity(state + DT / 2 * k1)
        k3 = velocity(state + DT / 2 * k2)
        k4 = velocity(state + DT * k3)
        return state + DT / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    last: Array = lax.fori_loop(0, N_STEPS, step, state)
    return last


def lorenz_form() -> Step:
    state = array(lorenz_start())

    def step() -> tuple[Array, ...]:
        nonlocal state
        state = jax.block_until_ready(runge_kutta(state))
        return (state,)

    return step


def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    mean = x.mean(-1, keepdims=True)
    variance = x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * weight + bias


@jax.jit
@partial(jax.value_and_grad, argnums=(0, 1, 2))
def residual_loss(x: Array, weight: Array, bias: Array) -> Array:
    normalized = layer_norm(x, weight, bias)
    return jnp.square(x + jax.nn.gelu(normalized, approximate=False)).sum()


def residual_form() -> Step:
    values = list(map(array, residual_start()))

    def step() -> tuple[Array, ...]:
        loss, grads = jax.block_until_ready(residual_loss(*values))
        return loss, *grads

    return step


def cross_entropy(logits: Array, labels: Array) -> Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()


Layers = list[tuple[Array, Array]]
AdamState = tuple[Array, Layers, Layers]
"""The number of steps, and the running means of the gradients and of their squares."""


def mlp_loss(layers: Layers, x: Array, labels: Array) -> Array:
    *hidden, (last_weight, last_bias) = layers
    for weight, bias in hidden:
        x = jax.nn.gelu(x @ weight + bias, approximate=False)
    return cross_entropy(x @ last_weight + last_bias, labels)


# parameters and state are donated: JAX may write the new ones into their memory, as PyTorch does
@partial(jax.jit, donate_argnums=(0, 1))
def adam_step(
    layers: Layers, state: AdamState, x: Array, labels: Array
) -> tuple[Array, Layers, AdamState]:
    loss, grads = jax.value_and_grad(mlp_loss)(layers, x, labels)
    count, means, squares = state
    beta1, beta2 = BETAS
    count = count + 1
    means = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, means, grads)
    squares = jax.tree.map(lambda s, g: beta2 * s + (1 - beta2) * g * g, squares, grads)

    def moved(parameter: Array, mean: Array, square: Array) -> Array:
        root = jnp.sqrt(square / (1 - beta2**count)) + EPSILON
        new: Array = parameter - ADAM_LR * mean / (1 - beta1**count) / root
        return new

    return loss, jax.tree.map(moved, layers, means, squares), (count, means, squares)


def mlp_form() -> Step:
    model, x, labels = mlp_start()
    # weights are (in, out) here; a bias has one dimension, which `.T` leaves as it is
    parameters = [array(parameter).T for parameter in model.parameters()]
    layers = list(zip(parameters[::2], parameters[1::2], strict=True))
    means, squares = (jax.tree.map(jnp.zeros_like, layers) for _ in range(2))
    state = jnp.zeros(()), means, squares
    batch = array(x), array(labels)

    def step() -> tuple[Array, ...]:
        nonlocal layers, state
        loss, layers, state = jax.block_until_ready(adam_step(layers, state, *batch))
        return (loss,)

    return step


def gru_loss(of: Arrays, x_TBC: Array, labels: Array) -> Array:
    def cell(h_BC: Array, x_BC: Array) -> tuple[Array, None]:
        from_x = x_BC @ of["cell.weight_ih"].T + of["cell.bias_ih"]
        from_h = h_BC @ of["cell.weight_hh"].T + of["cell.bias_hh"]
        (x_reset, x_keep, x_new), (h_reset, h_keep, h_new) = (
            jnp.split(one, 3, axis=-1) for one in (from_x, from_h)
        )
        keep = jax.nn.sigmoid(x_keep + h_keep)
        new = jnp.tanh(x_new + jax.nn.sigmoid(x_reset + h_reset) * h_new)
        return (1 - keep) * new + keep * h_BC, None

    h_BC, _ = lax.scan(cell, jnp.zeros_like(x_TBC[0]), x_TBC)
    return cross_entropy(h_BC @ of["head.weight"].T + of["head.bias"], labels)


@partial(jax.jit, donate_argnums=0)
def sgd_step(parameters: Arrays, x: Array, labels: Array) -> tuple[Array, Arrays]:
    loss, grads = jax.value_and_grad(gru_loss)(parameters, x, labels)
    return loss, jax.tree.map(lambda p, g: p - SGD_LR * g, parameters, grads)


def gru_form() -> Step:
    model, x, labels = gru_start()
    parameters = {name: array(parameter) for name, parameter in model.named_parameters()}
    batch = array(x), array(labels)

    def step() -> tuple[Array, ...]:
        nonlocal parameters
        loss, parameters = jax.block_until_ready(sgd_step(parameters, *batch))
        return (loss,)

    return step


FORMS: dict[str, Callable[[], Step]] = dict(
    zip(
        PROGRAMS,
        (gray_scott_form, asian_option_form, lorenz_form, residual_form, mlp_form, gru_form),
        strict=True,
    )
)
