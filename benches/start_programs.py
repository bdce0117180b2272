"""Programs as people write them, timed from their first step on. Each step reads a number.

`python benches/start_programs.py NAME SIDE SECONDS` runs one in this process and prints the seconds
of its steps as JSON. SIDE is `eager`, or where laziness begins: a block around the `loop` or around
each `step`, or `wrap`. Docstrings of programs are text of tables.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIDES = ("eager", "loop", "step", "wrap")
Step = Callable[[], float]
Wrap = Callable[[Any], Any]


def adam(wrap: Wrap) -> Step:
    """`Adam.step` of 146 parameters, alone."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, nn.LayerNorm(256), enable_nested_tensor=False)
    parameters = list(wrap(model).parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer = torch.optim.Adam(parameters, lr=1e-4, foreach=False)

    def step() -> float:
        optimizer.step()
        return float(parameters[-1][0].detach())

    return step


def _two_blocks(wrap: Wrap, width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    layer = nn.TransformerEncoderLayer(
        width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
    )
    model = wrap(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def transformer(wrap: Wrap) -> Step:
    """Two blocks, 128 wide, AdamW."""
    model, optimizer = _two_blocks(wrap, 128)
    x = torch.randn(4, 64, 128)
    return lambda: _trained(model, optimizer, x)


def lengths(wrap: Wrap) -> Step:
    """The same with twenty lengths in turn."""
    model, optimizer = _two_blocks(wrap, 128)
    batches = itertools.cycle([torch.randn(4, 8 + 3 * i, 128) for i in range(20)])
    return lambda: _trained(model, optimizer, next(batches))


def mlp(wrap: Wrap) -> Step:
    """A multilayer perceptron, one batch, AdamW."""
    model = wrap(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
                               nn.Linear(128, 10)))  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(64, 64)
    return lambda: _trained(model, optimizer, x)


def changing(wrap: Wrap, width: int = 64) -> Step:
    """Sizes that are new at each step, 64 wide."""
    model = wrap(nn.Sequential(
        nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width)
    ))  # fmt: skip
    # more sizes than a run has steps, so that none comes twice
    sizes = itertools.cycle(torch.randperm(128 * 160).tolist())

    def step() -> float:
        model.zero_grad()
        n, m = divmod(next(sizes), 160)
        loss = model(torch.randn(4 + n, 1 + m, width)).square().mean()
        loss.backward()
        return float(loss.detach())

    return step


def changing_16(wrap: Wrap) -> Step:
    """The same, 16 wide."""
    return changing(wrap, 16)


def changing_256(wrap: Wrap) -> Step:
    """The same, 256 wide."""
    return changing(wrap, 256)


def runge_kutta(wrap: Wrap) -> Step:
    """Ten steps of RK4 for 4096 Lorenz systems in doubles."""
    start = wrap(torch.rand(4096, 3, dtype=torch.float64))

    def flow(state: Tensor) -> Tensor:
        x, y, z = state.unbind(1)
        return torch.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], 1)

    def step() -> float:
        state = start
        for _ in range(10):
            a = flow(state)
            b = flow(state + 0.005 * a)
            c = flow(state + 0.005 * b)
            d = flow(state + 0.01 * c)
            state = state + 0.01 / 6 * (a + 2 * b + 2 * c + d)
        return float(state.mean())

    return step


def conjugate_gradient(wrap: Wrap) -> Step:
    """A system of 512 unknowns, with a test for the end at each iteration."""
    root = torch.randn(512, 512, dtype=torch.float64) / 23
    matrix = wrap(root @ root.T + torch.eye(512, dtype=torch.float64))
    wanted = torch.randn(512, dtype=torch.float64)

    def step() -> float:
        x, rest = torch.zeros_like(wanted), wanted
        direction, error = rest, rest.dot(rest)
        while float(error) > 1e-10:
            product = matrix @ direction
            alpha = error / direction.dot(product)
            x = x + alpha * direction
            rest = rest - alpha * product
            before, error = error, rest.dot(rest)
            direction = rest + error / before * direction
        return float(x.sum())

    return step


def policy_gradient(wrap: Wrap) -> Step:
    """An action each step, drawn and read; an update every 32."""
    policy = wrap(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    chances: list[Tensor] = []

    def step() -> float:
        logits = policy(torch.from_numpy(np.random.default_rng(len(chances)).random(4, np.float32)))
        drawn = torch.distributions.Categorical(logits=logits)
        action = drawn.sample()
        chances.append(drawn.log_prob(action))
        if len(chances) == 32:
            optimizer.zero_grad()
            (-torch.stack(chances).mean()).backward()
            optimizer.step()
            chances.clear()
        return float(action)

    return step


def generate(wrap: Wrap) -> Step:
    """A token a step from a small GPT, greedily; texts of 48 tokens."""
    from lazy_tensor.examples.gpt import GPT, N_BYTES, GPTConfig

    model = wrap(GPT(GPTConfig(n_layers=2, n_heads=4, width=128, context=64)).eval())
    tokens: list[int] = []

    @torch.no_grad()
    def step() -> float:
        if len(tokens) >= 48:
            tokens.clear()
        tokens.append(len(tokens) % N_BYTES)
        return float(model(torch.tensor([tokens]))[0, -1].argmax())

    return step


def wgan_gp(wrap: Wrap) -> Step:
    """A critic with gradient penalty, and a generator every fifth step."""
    generator = wrap(nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64)))
    critic = wrap(nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-4)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-4)
    count = itertools.count()

    def step() -> float:
        real, fake = torch.randn(64, 64), generator(torch.randn(64, 16)).detach()
        mixed = torch.lerp(real, fake, torch.rand(64, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(2, 1) - 1).square().mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        if next(count) % 5 == 4:
            of_generator.zero_grad()
            (-critic(generator(torch.randn(64, 16))).mean()).backward()
            of_generator.step()
        return float(loss.detach())

    return step


def array(wrap: Wrap) -> Step:
    """Forty pointwise ops on NumPy's memory, 512 x 512 doubles."""
    a, b = (wrap(torch.from_numpy(np.random.default_rng(i).random((512, 512)))) for i in (0, 1))

    def step() -> float:
        y = a
        for i in range(20):
            y = y * b + a / (1 + i)
            y = y.tanh() if i % 5 == 0 else y
        return float(y[0, 0])

    return step


def sea_water(wrap: Wrap) -> Step:
    """The density of sea water at 2^20 places, NumPy's doubles."""
    random = np.random.default_rng(0)
    salt, celsius, bar = (
        wrap(torch.from_numpy(random.uniform(low, high, 1 << 20)))
        for low, high in ((0, 42), (-2, 40), (0, 1000))
    )
    return lambda: float(density(salt, celsius, bar).mean())


def density(s: Tensor, t: Tensor, p: Tensor) -> Tensor:
    """The density in kg/m^3, from practical salinity, degrees Celsius and bar above one atmosphere.

    UNESCO's equation of state of 1980: Fofonoff and Millard, Algorithms for computation of
    fundamental properties of seawater, 1983. It gives 1059.82037 for 40, 40 and 1000.
    """
    s_1_5 = s * s.sqrt()
    at_surface = (
        _polynomial(t, 999.842594, 6.793952e-2, -9.09529e-3, 1.001685e-4, -1.120083e-6, 6.536332e-9)
        + _polynomial(t, 8.24493e-1, -4.0899e-3, 7.6438e-5, -8.2467e-7, 5.3875e-9) * s
        + _polynomial(t, -5.72466e-3, 1.0227e-4, -1.6546e-6) * s_1_5
        + 4.8314e-4 * s * s
    )
    bulk = (
        _polynomial(t, 19652.21, 148.4206, -2.327105, 1.360477e-2, -5.155288e-5)
        + _polynomial(t, 54.6746, -0.603459, 1.09987e-2, -6.167e-5) * s
        + _polynomial(t, 7.944e-2, 1.6483e-2, -5.3009e-4) * s_1_5
    )
    linear = (
        _polynomial(t, 3.239908, 1.43713e-3, 1.16092e-4, -5.77905e-7)
        + _polynomial(t, 2.2838e-3, -1.0981e-5, -1.6078e-6) * s
        + 1.91075e-4 * s_1_5
    )
    square = (
        _polynomial(t, 8.50935e-5, -6.12293e-6, 5.2787e-8)
        + _polynomial(t, -9.9348e-7, 2.0816e-8, 9.1697e-10) * s
    )
    return at_surface / (1 - p / (bulk + p * (linear + p * square)))


def _polynomial(x: Tensor, *coefficients: float) -> Tensor:
    """By Horner's rule; the coefficient of the lowest power comes first."""
    found = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        found = (found + coefficient) * x
    return found + coefficients[0]


def image(wrap: Wrap) -> Step:
    """Ten pointwise ops on a picture of 512 x 512 in three colours, of NumPy's memory."""
    pictures = itertools.cycle(
        [wrap(torch.from_numpy(np.random.default_rng(i).random((3, 512, 512), np.float32)))
         for i in range(4)]
    )  # fmt: skip

    def step() -> float:
        x = next(pictures)
        x = ((x - 0.45) / 0.22).clamp(-2, 2)
        x = torch.sigmoid(x * 1.5) ** 0.9
        x = torch.where(x > 0.5, x * 1.1, x * 0.9)
        return float(x.mean())

    return step


def life(wrap: Wrap) -> Step:
    """A generation of the game of life, 256 x 256."""
    world = [wrap((torch.rand(1, 1, 256, 256) < 0.4).float())]
    kernel = torch.ones(1, 1, 3, 3)
    kernel[0, 0, 1, 1] = 0

    def step() -> float:
        neighbours = F.conv2d(F.pad(world[0], (1, 1, 1, 1), "circular"), kernel)
        world[0] = ((neighbours == 3) | ((neighbours == 2) & (world[0] > 0))).float()
        return float(world[0].sum())

    return step


PROGRAMS: dict[str, Callable[[Wrap], Step]] = {
    make.__name__: make
    for make in (
        adam, transformer, lengths, mlp, changing_16, changing, changing_256, runge_kutta,
        conjugate_gradient, policy_gradient, generate, wgan_gp, array, sea_water, image, life,
    )
}  # fmt: skip


def run(name: str, side: str, seconds: float) -> list[float]:
    """Run a program for `seconds`. Returns the seconds of each step."""
    torch.manual_seed(0)
    block: Callable[[], Any] = nullcontext
    wrap: Wrap = _as_it_is
    if side != "eager":
        import lazy_tensor

        block = nullcontext if side == "wrap" else lazy_tensor.lazy_mode
        wrap = lazy_tensor.wrap if side == "wrap" else _as_it_is
    around_loop, around_step = (nullcontext, block) if side == "step" else (block, nullcontext)
    step = PROGRAMS[name](wrap)
    times: list[float] = []
    end = time.perf_counter() + seconds
    with around_loop():
        while (began := time.perf_counter()) < end:
            with around_step():
                step()
            times.append(time.perf_counter() - began)
    return times


def _as_it_is(value: Any) -> Any:
    return value


def run_apart(name: str, side: str, seconds: float, threads: int) -> list[float]:
    """`run` in a process of its own with empty caches. If it fails, raises RuntimeError with the
    last line of its stderr."""
    with tempfile.TemporaryDirectory() as caches:
        done = subprocess.run(
            [sys.executable, __file__, name, side, str(seconds)],
            env={
                **os.environ, "OMP_NUM_THREADS": str(threads), "LAZY_TENSOR_CACHE_DIR": caches,
                "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
            },
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{name}, {side}: {done.stderr.strip().splitlines()[-1:]}")
    return [float(seconds) for seconds in json.loads(done.stdout.splitlines()[-1])]


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], sys.argv[2], float(sys.argv[3]))))
