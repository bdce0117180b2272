"""Programs with a known bottleneck, and the same programs with the change that `explain()` advises.

In: `follows`, whether the program has the change. Out: a function that does one step. Nothing helps
the last two programs, so nothing should be advised for them. `followed.py` runs them, and
`bench_advice.py` makes a table; the functions' docstrings are the titles of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

import torch
from gain_programs import training_step
from torch import Tensor, nn
from torch.nn import functional as F

import lazy_tensor
from lazy_tensor import lazy_mode

Step = Callable[[], Any]
WIDTH = 1000


@dataclass(frozen=True, slots=True)
class Advised:
    """`says` is a phrase that the first piece of advice must have, "" if there should be none.
    `change` says in the table what following it means."""

    begin: Callable[[bool], Step]
    says: str
    change: str


def norm_read_inside(follows: bool) -> Step:
    """diffusion on 1000 x 1000, a norm read in the middle of each step"""
    u, steps = torch.rand(WIDTH, WIDTH), count()

    def step() -> None:
        nonlocal u
        with lazy_mode():
            change = u.roll(1, 0) + u.roll(-1, 0) + u.roll(1, 1) + u.roll(-1, 1) - 4 * u
            if (not follows or next(steps) % 10 == 0) and change.abs().max().item() > 1e6:
                raise RuntimeError("it diverges")
            u = (u + 0.1 * change).clamp(0, 1)

    return step


def loss_read_inside(follows: bool) -> Step:
    """curve fitting by hand on 200,000 points, the loss read before the update"""
    x = torch.linspace(-1, 1, 200_000)
    y, weights, steps = (3 * x).sin(), torch.zeros(4), count()
    losses: list[float] = []

    def step() -> None:
        nonlocal weights
        with lazy_mode():
            error = weights[0] + x * (weights[1] + x * (weights[2] + x * weights[3])) - y
            if not follows or next(steps) % 10 == 0:
                losses.append(error.square().mean().item())
            grads = [(error * x**k).mean() for k in range(4)]
            weights = weights - 0.1 * torch.stack(grads)

    return step


def mask(follows: bool) -> Step:
    """the mean of what is above zero, by a boolean index, on 1,000,000 numbers"""
    x = torch.randn(WIDTH * WIDTH)

    def step() -> float:
        with lazy_mode():
            y = (x * 1.5 + 0.5).tanh()
            if follows:
                kept = y > 0
                mean = torch.where(kept, y.exp() - 1, 0.0).sum() / kept.sum()
            else:
                mean = (y[y > 0].exp() - 1).mean()
        return mean.item()

    return step


def lengths(follows: bool) -> Step:
    """a softmax of tables whose sizes are always new, by record="always\""""
    draw = Random(0)

    def step() -> float:
        n_rows, n_columns = draw.randrange(100, 400), draw.randrange(100, 400)
        x = torch.ones(n_rows, n_columns)
        if follows:
            x = F.pad(x, (0, -n_columns % 64, 0, -n_rows % 64), value=-1e9)
        with lazy_mode(record="always"):
            scores = ((x * 2 + 1).clamp(max=3) * 0.5).softmax(-1)
            found = (scores * scores).sum()
        return found.item()

    return step


def switched_off(follows: bool) -> Step:
    """a chain of twelve pointwise ops on 1000 x 1000, with compile="off\""""
    x = torch.rand(WIDTH, WIDTH)

    def step() -> float:
        with lazy_mode(compile="background" if follows else "off", record="always"):
            y = x
            for _ in range(4):
                y = (y * 1.01 + 0.1).sigmoid()
            found = y.sum()
        return found.item()

    return step


def roots(follows: bool) -> Step:
    """Newton's method for 20,000 cube roots, its end tested in each of 12 rounds"""
    y = torch.rand(20_000, dtype=torch.float64) + 0.5

    def step() -> float:
        x = y
        with lazy_mode(record="always"):
            for i in range(12):
                change = (x * x * x - y) / (3 * x * x)
                x = x - change
                if (not follows or i % 4 == 3) and change.abs().max().item() < 1e-18:
                    break
            return x.mean().item()

    return step


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], follows: bool
) -> Step:
    """Training steps, each in a block, or by `replay` if the program follows the advice."""
    train = training_step(model, optimizer)
    if follows:
        replayed = lazy_tensor.replay(train)
        return lambda: replayed(*batch).item()

    def step() -> float:
        with lazy_mode():
            loss = train(*batch)
        return loss.item()

    return step


class Unrolled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(64, 64), nn.Linear(64, 10)

    def forward(self, x_TBC: Tensor) -> Tensor:
        state = None
        for x_BC in x_TBC:
            state = self.cell(x_BC, state)
        assert state is not None
        out: Tensor = self.head(state[0])
        return out


def recurrent(follows: bool) -> Step:
    """an LSTM cell over 16 steps, Adam"""
    model = Unrolled()
    batch = torch.randn(16, 32, 64), torch.randint(10, (32,))
    return trained(model, torch.optim.Adam(model.parameters()), batch, follows)


def small_mlp(follows: bool) -> Step:
    """an MLP of six layers, 64 wide, AdamW"""
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    model = nn.Sequential(*layers)
    batch = torch.randn(32, 64), torch.randint(64, (32,))
    return trained(model, torch.optim.AdamW(model.parameters()), batch, follows)


def products(follows: bool) -> Step:
    """products of 700 x 700 matrices, nothing else"""
    a, b = torch.rand(700, 700), torch.rand(700, 700)

    def step() -> None:
        with lazy_mode():
            for _ in range(4):
                b.copy_(a @ b)
                b.div_(b.norm())

    return step


def convolutions(follows: bool) -> Step:
    """two convolutions of 64 channels on 56 x 56 pictures, without gradients"""
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1))
    x = torch.rand(4, 64, 56, 56)

    @torch.no_grad()
    def step() -> Tensor:
        with lazy_mode():
            return model(x)  # type: ignore[no-any-return]

    return step


def programs() -> Iterator[tuple[str, Advised]]:
    """The programs by their titles."""
    tenth, replay = "read every tenth time", "`replay` on the step"
    for begin, says, change in (
        (norm_read_inside, "change.abs().max().item()", tenth),
        (loss_read_inside, "error.square().mean().item()", tenth),
        (mask, "depends on values", "`torch.where` and a sum over the mask"),
        (lengths, "pad to a few sizes", "padded to multiples of 64"),
        (switched_off, 'compile="off"', "left out"),
        (roots, "change.abs().max().item()", "tested every fourth round"),
        (recurrent, "replay", replay),
        (small_mlp, "replay", replay),
        (products, "", ""),
        (convolutions, "", ""),
    ):
        yield begin.__doc__ or "", Advised(begin, says, change)
