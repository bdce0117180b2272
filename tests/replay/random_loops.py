"""Random modules in random training loops, eagerly and by `replay(model)`: they do the same.

`python tests/replay/random_loops.py [seconds] [first seed]` runs one after another, and prints each
seed at which they differ.
"""

from __future__ import annotations

import copy
import random
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lazy_tensor
from lazy_tensor import materialize, replay

WIDTH = 6
SIZES = (4, 4, 4, 3)
N_STEPS = 24
LARGE = 100.0
"""A loss from which training has gone wrong, and small differences grow."""


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, 0.5

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.scale * self.inner(x)
        return y


class Deciding(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x) if (x.detach().sum() > 0) else x * 2
        return y


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class Averaging(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class Writing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[:, 1:3] *= 2
        y[:, 0].add_(x[:, 5])
        return F.relu(y, inplace=True) - y.t().contiguous().t() / 3


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0]


class Squaring(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = Square.apply(x)
        return made.tanh()


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


LEAVES: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    lambda: nn.LayerNorm(WIDTH), lambda: nn.BatchNorm1d(WIDTH), lambda: nn.Dropout(0.3),
    nn.GELU, nn.Tanh, lambda: nn.Softmax(1), lambda: nn.ReLU(inplace=False), Noisy, Averaging,
    Writing, Squaring,
)  # fmt: skip
AROUND: tuple[Callable[[nn.Module], nn.Module], ...] = (
    Residual, Deciding, Checkpointed, nn.Sequential,
)  # fmt: skip


def layer(draw: random.Random, depth: int = 2) -> nn.Module:
    if depth and draw.random() < 0.35:
        inner = [layer(draw, depth - 1) for _ in range(draw.randint(1, 3))]
        return draw.choice(AROUND)(nn.Sequential(*inner))
    return draw.choice(LEAVES)()


class Net(nn.Module):
    """Layers, and a head that gives several results."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.body = nn.Sequential(*[layer(draw) for _ in range(draw.randint(2, 5))])
        self.a, self.b = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)
        if draw.random() < 0.3:
            self.b.weight = next(
                (m.weight for m in self.body.modules() if isinstance(m, nn.Linear)), self.b.weight
            )

    def forward(self, x: Tensor, twice: bool = False) -> dict[str, Any]:
        x = self.body(x)
        return {"a": self.a(x), "rest": [self.b(x) * (2 if twice else 1), x.argmax(1)]}


def doubled(_module: Any, _args: Any, result: dict[str, Any]) -> dict[str, Any]:
    return {**result, "a": result["a"] * 2}


class Loop:
    """A training loop; what happens in it is drawn by `draw`, alike for all loops of a seed."""

    def __init__(self, model: nn.Module, draw: random.Random) -> None:
        self.model, self.draw = model, draw
        self.optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        self.hooks: list[Any] = []

    def loss_of(self, x: Tensor) -> Tensor:
        draw = self.draw
        if draw.random() < 0.1:
            x = x.requires_grad_()
        # what is repeated ends early in eager, before it writes buffers
        if draw.random() < 0.1 and not list(self.model.buffers()):
            out = checkpoint(self.model, x * 1, use_reentrant=False)
        else:
            out = self.model(x, twice=draw.random() < 0.2)
        which = draw.random()
        loss: Tensor = out["a"].square().mean()
        if which < 0.15:
            loss = F.relu(out["rest"][0], inplace=True).mean()
        elif which < 0.3:
            loss = loss + out["rest"][0].abs().mean()
        return loss

    def event(self) -> None:
        draw, model = self.draw, self.model
        parameters = list(model.parameters())
        happens = draw.randrange(12)
        if happens == 0:
            model.train(draw.random() < 0.6)
        elif happens == 1:
            parameter = draw.choice(parameters)
            parameter.requires_grad_(not parameter.requires_grad)
        elif happens == 2:
            with torch.no_grad():
                draw.choice(parameters).mul_(0.9)
        elif happens == 3:
            state = {name: value * 0.99 if value.is_floating_point() else value
                     for name, value in model.state_dict().items()}  # fmt: skip
            model.load_state_dict(state)
        elif happens == 4 and not self.hooks:
            self.hooks.append(model.register_forward_hook(doubled))
        elif happens == 5 and self.hooks:
            self.hooks.pop().remove()
        elif happens == 6:
            for module in model.modules():
                if isinstance(module, Residual):
                    module.scale = draw.choice((0.5, 0.25))
        elif happens == 7:
            parameter = draw.choice(parameters)
            parameter.data = parameter.data.clone()
        elif happens == 8:
            with torch.no_grad():
                model(torch.ones(4, WIDTH))
        elif happens == 9:
            self.optimizer.param_groups[0]["lr"] *= 0.9
        elif happens == 10:
            draw.choice(parameters).grad = None

    def step(self, i: int) -> list[Any]:
        torch.manual_seed(i)
        draw = self.draw
        if draw.random() < 0.25:
            self.event()
        if draw.random() < 0.8:
            self.optimizer.zero_grad(set_to_none=draw.random() < 0.7)
        size = SIZES[i % len(SIZES)] if draw.random() < 0.3 else 4
        losses = [self.loss_of(torch.randn(size, WIDTH)) for _ in range(draw.choice((1, 1, 1, 2)))]
        found: list[Any] = []
        total = sum(losses)
        assert isinstance(total, Tensor)
        if total.requires_grad and total.abs() < LARGE:
            if draw.random() < 0.1:
                total.backward(retain_graph=True)
            total.backward()
            self.optimizer.step()
            found.append(total.detach().clone())
        found += [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        return [*found, *[value.clone() for value in self.model.state_dict().values()],
                torch.random.get_rng_state()]  # fmt: skip


def outcome(model: nn.Module, seed: int) -> tuple[list[list[Any]], str]:
    """What each step gave, and how the loop ended."""
    loop, found = Loop(model, random.Random(seed)), []
    for i in range(N_STEPS):
        try:
            found.append([materialize(one) if one is not None else None for one in loop.step(i)])
        except Exception as error:
            return found, str(error)
    return found, ""


def difference(seed: int) -> tuple[str, int]:
    """Where a replayed module does something else than an eager one, "" for nowhere; and how many
    of its calls were replayed."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = Net(draw)
    twin = replay(copy.deepcopy(model), compile="off")
    if draw.random() < 0.3:
        replay(draw.choice(list(twin.modules())), compile="off")
    expected, ended = outcome(model, seed)
    got, ended_too = outcome(twin, seed)
    n_replayed = sum(
        part._compiled_call_impl.forward.n_replayed  # type: ignore[attr-defined]
        for part in twin.modules()
        if part._compiled_call_impl is not None
    )
    for i, (one, other) in enumerate(zip(expected, got, strict=False)):
        for j, pair in enumerate(zip(one, other, strict=True)):
            if not is_close(*pair):
                return f"step {i}, value {j}", n_replayed
    is_refused = "has to be recorded" in ended_too  # not done, and not in silence
    if bool(ended) is not bool(ended_too) and not is_refused:
        return f"it ended by {ended!r}, replayed by {ended_too!r}", n_replayed
    return "", n_replayed


def is_close(a: Tensor | None, b: Tensor | None) -> bool:
    """What reaches a parameter by several ways may be added up in another order."""
    if a is None or b is None:
        return a is b
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    first, began_s, n_replayed = seed, time.monotonic(), 0
    warnings.simplefilter("ignore")
    lazy_tensor.configure(warn=False)
    while time.monotonic() - began_s < seconds:
        found, n = difference(seed)
        n_replayed += n
        if found:
            print(f"seed {seed}: {found}", flush=True)
        seed += 1
    print(f"{seed - first} loops, {n_replayed} replayed calls")


if __name__ == "__main__":
    main()
