"""The ways to run one and the same training step: eagerly, lazily, compiled.

In: a recipe and the lazy options. Out: sides by name, each a function from a batch to its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import lazy_tensor
from lazy_tensor.cli.training import Recipe, Trainer

Step = Callable[[Tensor, Tensor], float]
Options = Mapping[str, str]
"""Options of `lazy_tensor.configure`, as the command line gave them."""


@dataclass(frozen=True, slots=True)
class Side:
    """A trainer and how its step is run; after `run` the device is idle."""

    name: str
    trainer: Trainer
    step: Step

    def run(self, tokens: Tensor, targets: Tensor) -> float:
        with self.trainer.random.active():
            loss = self.step(tokens, targets)
        if self.trainer.device.type == "cuda":
            torch.cuda.synchronize(self.trainer.device)
        return loss


def eager(recipe: Recipe, options: Options) -> Side:
    trainer = Trainer(recipe)
    return Side("eager", trainer, trainer.step)


def lazy(recipe: Recipe, options: Options) -> Side:
    """The unchanged step inside `lazy_mode`."""
    trainer = Trainer(recipe)

    def step(tokens: Tensor, targets: Tensor) -> float:
        with lazy_tensor.lazy_mode(**options):
            return trainer.step(tokens, targets)

    return Side("lazy", trainer, step)


def wrapped(recipe: Recipe, options: Options) -> Side:
    """The unchanged step on a wrapped model, with no mode around it."""
    lazy_tensor.configure(**options)
    trainer = Trainer(recipe)
    lazy_tensor.wrap(trainer.model)
    return Side("lazy", trainer, trainer.step)


def compiled(recipe: Recipe, options: Options) -> Side:
    """`torch.compile` on the model and on the optimizer's step."""
    trainer = Trainer(recipe)
    trainer.model.compile()
    # A float that the scheduler changes would recompile the optimizer's step each time.
    for group in trainer.optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    trainer.optimizer.step = torch.compile(trainer.optimizer.step)  # type: ignore[method-assign]
    return Side("torch.compile", trainer, trainer.step)


SIDES: dict[str, Callable[[Recipe, Options], Side]] = {
    "eager": eager,
    "lazy": lazy,
    "wrap": wrapped,
    "compile": compiled,
}
