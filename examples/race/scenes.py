"""The demo's scenes: a program of `examples/` each, and its sides.

A *side* is a way to run a program: eager, lazy, by `replay` or by `torch.compile`. In: a scene and
a side by name. Out: a function that does one step, and returns the value to compare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import lazy_tensor
from lazy_tensor.examples import gpt, gray_scott, monte_carlo

Run = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Turns a function into the one that a side runs."""
Step = Callable[[], Tensor]
"""Does one step, and returns a value that must be equal on all sides."""
Begin = Callable[[Run], Step]
"""Sets a program up. It must be a function of a module, so that it can be sent to another process.
"""

SIDES: dict[str, Run] = {
    "eager": lambda function: function,
    "lazy": lambda function: lazy_tensor.lazy_mode()(function),
    "replay": lambda function: lazy_tensor.replay(function),
    "torch.compile": lambda function: torch.compile(function),
}


@dataclass(frozen=True, slots=True)
class Scene:
    """A program, the sides that run it by default, and the seconds that each side runs.

    `marks_s` are times, in seconds, at which the table counts the steps done. `is_picture`: the
    value of a step is an image, not a number.
    """

    title: str
    sides: tuple[str, ...]
    seconds: float
    marks_s: tuple[float, ...]
    begin: Begin
    is_picture: bool = False


def _gray_scott(run: Run) -> Step:
    u, v = gray_scott.start()
    advance = run(gray_scott.step)

    def step() -> Tensor:
        nonlocal u, v
        u, v = advance(u, v)
        pattern: Tensor = v
        return pattern

    return step


def _monte_carlo(run: Run) -> Step:
    torch.manual_seed(0)
    price = run(monte_carlo.price)
    return lambda: torch.tensor(price().item())


def _gpt(run: Run) -> Step:
    torch.manual_seed(0)
    config = gpt.GPTConfig(n_layers=2, n_heads=4, width=32, context=32)
    model = gpt.GPT(config)
    train = run(gpt.train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3)))
    data = gpt.batches(gpt.library_text(), 4, config.context)
    return lambda: torch.tensor(train(*next(data)).item())


SCENES: dict[str, Scene] = {
    "gray_scott": Scene(
        "Gray-Scott, a stencil on 1000 x 1000 cells",
        ("eager", "lazy", "torch.compile"),
        20.0,
        (5.0, 10.0, 20.0),
        _gray_scott,
        is_picture=True,
    ),
    "monte_carlo": Scene(
        "Monte Carlo, a price from 1,000,000 paths",
        ("eager", "lazy"),
        2.0,
        (2.0,),
        _monte_carlo,
    ),
    "gpt": Scene(
        "GPT, training, 2 layers, 32 wide",
        ("eager", "replay"),
        3.0,
        (3.0,),
        _gpt,
    ),
}
