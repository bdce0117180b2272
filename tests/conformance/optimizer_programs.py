"""Programs made of one configuration of an optimizer: steps of training a small model.

In: an `OptimizerInfo` and the arguments for its optimizer. Out: `Program`s by the name of the
variant, which says when the optimizer is made and whether its state is saved and loaded between
steps.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.conformance.spread import seed
from tests.conformance.ways import Program

N_STEPS = 4


def configurations(info: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each of the database's configurations, in each implementation for the CPU."""
    flags = [f for f in info.supported_impls if f != "differentiable"]
    if "cpu" not in info.supports_fused_on:
        flags = [f for f in flags if f != "fused"]
    for given in info.optim_inputs_func(device="cpu"):
        yield "plain", {**given.kwargs, **dict.fromkeys(flags, False)}
        for flag in flags:
            yield flag, {**given.kwargs, **dict.fromkeys(flags, False), flag: True}


def programs_of(info: Any, options: dict[str, Any]) -> Iterator[tuple[str, Program]]:
    """By variant: the optimizer made before the model is lazy, after, and loaded in between."""

    def made(model: nn.Module) -> Any:
        # options hold tensors (`lr`), which an optimizer may write
        return info.optim_cls(model.parameters(), **copy.deepcopy(options))

    def model() -> nn.Module:
        seed()
        if info.only_supports_sparse_grads:
            return nn.Sequential(nn.Embedding(7, 6, sparse=True))
        if info.optim_cls is torch.optim.Muon:  # takes matrices only
            return nn.Sequential(
                nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)
            )
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))

    def with_optimizer() -> Any:
        trained = model()
        return trained, made(trained), batch(info)

    yield "made before", Program(with_optimizer, lambda given: train(*given))
    yield (
        "made after",
        Program(
            lambda: (model(), batch(info)), lambda given: train(given[0], made(given[0]), given[1])
        ),
    )
    yield (
        "loaded",
        Program(
            lambda: (model(), batch(info)),
            lambda given: train_and_load(given[0], made, given[1]),
        ),
    )


def batch(info: Any) -> torch.Tensor:
    if info.only_supports_sparse_grads:
        return torch.tensor([1, 4, 4, 2])
    return torch.linspace(-1, 1, 24).view(4, 6)


def train(model: nn.Module, optimizer: Any, x: torch.Tensor, n_steps: int = N_STEPS) -> Any:
    """`n_steps` steps; the losses, gradients, parameters and the optimizer's state."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        n_steps = 1  # of up to 20 iterations
    losses = [optimizer.step(closure) for _ in range(n_steps)]
    parameters = list(model.parameters())
    return losses, [p.grad for p in parameters], parameters, optimizer.state_dict()


def train_and_load(model: nn.Module, made: Any, x: torch.Tensor) -> Any:
    """Training in two halves: the second with a new optimizer, its state read from a file."""
    optimizer = made(model)
    first = train(model, optimizer, x, N_STEPS // 2)
    seen = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), first)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer = made(model)
    optimizer.load_state_dict(torch.load(file))
    return seen, train(model, optimizer, x, N_STEPS - N_STEPS // 2)
