"""Steps that repeat themselves: eager, in blocks, by `replay` and by `torch.compile`.

A replayed step first runs until its plan is final, which may be one that was compiled whole. A
second benchmark does 100,000 replayed calls in a row, in which memory must not grow. Writes
`results/replay.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_changing import resident_bytes
from pytest_benchmark.fixture import BenchmarkFixture
from residual import loss_of, step_with
from results_table import page
from settled import settle
from timing import interleaved
from torch import Tensor, nn
from torch.nn import functional as F

import lazy_tensor
from lazy_tensor.examples.gpt import GPT, GPTConfig

Step = Callable[[], Tensor]
Task = tuple[nn.Module, Tensor, Tensor]
"""A model, a batch, and the targets, which are numbers of classes."""

DEPTHS = (1, 2, 4, 16, 64, 128)
N_CALLS = 100_000


def residual_step(depth: int, side: str) -> Step:
    torch.manual_seed(0)
    weights = [torch.randn(10, 10).div(10).requires_grad_() for _ in range(depth)]
    x = torch.randn(10, 10).requires_grad_()
    loss = torch.compile(loss_of) if side == "compile" else loss_of
    step = _wrapped(lambda x, weights: step_with(loss, x, weights), side)
    return lambda: step(x, weights)


def model_step(make: Callable[[], Task], optimizer: Any, side: str) -> Step:
    """A training step of a model on one batch. On the side "compile" both model and optimizer are
    compiled."""
    torch.manual_seed(0)
    model, batch, targets = make()
    opt = optimizer(model.parameters())

    def loss_on(batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch).flatten(0, -2), targets.flatten())

    forward = torch.compile(loss_on) if side == "compile" else loss_on
    update = torch.compile(opt.step) if side == "compile" else opt.step

    def train(batch: Tensor) -> Tensor:
        opt.zero_grad()
        loss = forward(batch)
        loss.backward()
        update()
        return loss.detach()

    step = _wrapped(train, side)
    return lambda: step(batch)


def gpt(n_heads: int, width: int) -> Task:
    """A model that learns to return its input, four rows of 64 tokens."""
    tokens = torch.randint(0, 256, (4, 64))
    return GPT(GPTConfig(4, n_heads, width, 64)), tokens, tokens


def classes(n: int) -> Tensor:
    return torch.randint(0, 10, (n,))


def mlp() -> Task:
    layers = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    return nn.Sequential(*layers), torch.randn(32, 32), classes(32)


class Unrolled(nn.Module):
    """A GRU cell over 12 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(32, 64), nn.Linear(64, 10)

    def forward(self, x_NTC: Tensor) -> Any:
        h = x_NTC.new_zeros(len(x_NTC), 64)
        for x in x_NTC.unbind(1):
            h = self.cell(x, h)
        return self.out(h)


def gru() -> Task:
    return Unrolled(), torch.randn(16, 12, 32), classes(16)


def cnn() -> Task:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2048, 10),
    )  # fmt: skip
    return model, torch.randn(16, 3, 32, 32), classes(16)


class Loop:
    """A training step of an MLP with what loops do beside it: a schedule, counts, the accuracy, and
    early stopping if the loss has not fallen for some steps."""

    def __init__(self, side: str) -> None:
        torch.manual_seed(0)
        model, self.batch, self.targets = mlp()
        self.parameters = list(model.parameters())
        self.optimizer = FUSED_ADAMW(self.parameters)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10_000)
        self.model = torch.compile(model) if side == "compile" else model
        self.update = torch.compile(self.optimizer.step) if side == "compile" else None
        self.n_steps = self.n_clipped = self.n_bad = 0
        self.best, self.accuracy = math.inf, 0.0

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        scores = self.model(self.batch)
        loss = F.cross_entropy(scores, self.targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
        (self.update or self.optimizer.step)()
        self.scheduler.step()
        self.n_steps += 1
        self.n_clipped += norm.item() > 1.0
        n_right = (scores.argmax(-1) == self.targets).sum().item()
        self.accuracy = 0.9 * self.accuracy + 0.1 * n_right / len(self.targets)
        value = loss.item()
        if value < self.best:
            self.best, self.n_bad = value, 0
        else:
            self.n_bad += 1
        return loss.detach()


class ByHand:
    """A training step of an MLP whose ops get other numbers each time: a temperature, the weight of
    a penalty, and Adam without an optimizer."""

    def __init__(self, side: str) -> None:
        torch.manual_seed(0)
        model, self.batch, self.targets = mlp()
        self.parameters = list(model.parameters())
        self.means = [torch.zeros_like(one) for one in self.parameters]
        self.squares = [torch.zeros_like(one) for one in self.parameters]
        self.model = torch.compile(model) if side == "compile" else model
        self.n_steps, self.temperature = 0, 2.0

    def step(self) -> Tensor:
        self.n_steps += 1
        self.temperature = max(0.5, 0.999 * self.temperature)
        scores = self.model(self.batch) / self.temperature
        penalty = torch.stack([one.square().sum() for one in self.parameters]).sum()
        loss = F.cross_entropy(scores, self.targets)
        loss = loss + 1e-4 * min(1.0, self.n_steps / 1000) * penalty
        gradients = torch.autograd.grad(loss, self.parameters)
        state = zip(self.parameters, gradients, self.means, self.squares, strict=True)
        with torch.no_grad():
            for one, gradient, mean, square in state:
                mean.lerp_(gradient, 0.1)
                square.lerp_(gradient.square(), 0.001)
                root = (square / (1 - 0.999**self.n_steps)).sqrt() + 1e-8
                one.addcdiv_(mean / (1 - 0.9**self.n_steps), root, value=-1e-3)
        return loss.detach()


def loop_step(side: str) -> Step:
    return _wrapped(Loop(side).step, side)


def by_hand_step(side: str) -> Step:
    return _wrapped(ByHand(side).step, side)


def _wrapped(function: Callable[..., Any], side: str) -> Callable[..., Any]:
    backend = "aten" if side.endswith("aten") else "auto"
    if side.startswith("replay"):
        return lazy_tensor.replay(function, backend=backend)
    if side.startswith("lazy"):
        return lazy_tensor.lazy_mode(backend=backend, compile="blocking")(function)
    return function


PROGRAMS: dict[str, Callable[[str], Step]] = {
    f"residual stack, {depth} layers, 10 x 10": partial(residual_step, depth) for depth in DEPTHS
}
FUSED_ADAMW = partial(torch.optim.AdamW, fused=True)
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
LOOP_OF_SGD = partial(torch.optim.SGD, lr=0.1, foreach=False)
TASKS: dict[str, tuple[Callable[[], Task], Any]] = {
    "GPT, 4 layers, 128 wide, 64 tokens, fused AdamW": (partial(gpt, 4, 128), FUSED_ADAMW),
    "GPT, 4 layers, 16 wide, 64 tokens, SGD by loop": (partial(gpt, 2, 16), LOOP_OF_SGD),
    "MLP 32-64-64-10, 32 rows, fused AdamW": (mlp, FUSED_ADAMW),
    "GRU cell unrolled 12 times, 64 wide, SGD": (gru, SGD),
    "CNN with batch norms, 16 images of 32 x 32, SGD": (cnn, SGD),
}
PROGRAMS |= {name: partial(model_step, *task) for name, task in TASKS.items()}
PROGRAMS["the MLP, its loop with a schedule, counts and early stopping"] = loop_step
PROGRAMS["the MLP, a temperature, an annealed penalty, Adam by hand"] = by_hand_step
SIDES = ("eager", "lazy", "replay", "replay, aten", "compile")


@pytest.fixture(scope="module")
def rows(results_dir: Path) -> Iterator[list[list[str]]]:
    collected: list[list[str]] = []
    yield collected
    if len(collected) == len(PROGRAMS):
        columns = ("step", "eager", *(f"{side} / eager" for side in SIDES[1:]))
        text = page("Steps that repeat themselves, settled", columns, collected)
        (results_dir / "replay.md").write_text(text)


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*[Pp]rofiler")  # the compiler's
@pytest.mark.parametrize("name", PROGRAMS)
def bench_replay(
    benchmark: BenchmarkFixture, quick: bool, rows: list[list[str]], name: str
) -> None:
    sides = SIDES[:4] if quick else SIDES
    steps = {side: PROGRAMS[name](side) for side in sides}
    # bit-equal with the backend aten, which runs eager's kernels; kernels round otherwise
    losses = {side: [step().item() for _ in range(4)][-1] for side, step in steps.items()}
    assert losses["replay, aten"] == losses["eager"]
    assert all(abs(loss / losses["eager"] - 1) < 1e-4 for loss in losses.values())
    if not quick:
        settle(steps["replay"])
    rounds, warmup = (2, 1) if quick else (60, 20)
    timings = benchmark.pedantic(interleaved, args=(steps, rounds, warmup), rounds=1, iterations=1)
    ratios = {side: timings.ratio(side, "eager") for side in sides[1:]}
    rows.append([
        name,
        f"{timings.spread('eager').median_s * 1e3:.2f} ms",
        *(f"{ratio:.2f}×" for ratio in ratios.values()),
    ])  # fmt: skip
    benchmark.extra_info.update(ratios)


def bench_many_calls(benchmark: BenchmarkFixture, quick: bool) -> None:
    model = torch.nn.Linear(4, 4)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(2, 4)

    @lazy_tensor.replay
    def step() -> Tensor:
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        result: Tensor = loss.detach()
        return result

    n_calls = 200 if quick else N_CALLS
    resident: list[int] = []

    def run() -> None:
        for i in range(n_calls):
            step()
            if i % (n_calls // 10) == 0:
                resident.append(resident_bytes())

    benchmark.pedantic(run, rounds=1, iterations=1)
    # the first tenth has the calls that are recorded, and the making of the plan
    growth = resident[-1] - resident[1]
    # Calls that check a replay are recorded. They come after random gaps: about seven in 200 calls,
    # 35 in 100,000.
    assert step.n_replayed > n_calls * 0.9
    if not quick:
        assert growth < 1 << 20, f"memory grew by {growth} bytes in {n_calls} calls"
    benchmark.extra_info["growth_bytes"] = growth
