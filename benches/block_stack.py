"""A stack of transformer blocks, trained on one side in a process of its own, for `bench_remat.py`.

`python block_stack.py '{"side": ..., "layers": ..., ...}'` takes an `Order` as JSON and prints a
`Report` as a line of JSON.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from memory import peak_bytes, start_peak
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lazy_tensor

HEADS = 4


@dataclass(frozen=True, slots=True)
class Order:
    """What to run. `side` is "eager" or "lazy"; `options` are those of `lazy_mode`; `checkpoints`:
    each block is under `torch.utils.checkpoint`."""

    side: str
    checkpoints: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    layers: int = 32
    width: int = 256
    tokens: int = 256
    batch: int = 4
    steps: int = 6


@dataclass(frozen=True, slots=True)
class Report:
    """Median seconds of a settled step, the peak of memory above that before the first step, and a
    hash of losses and gradients, equal if all are equal bit for bit."""

    seconds: float
    peak_bytes: int
    digest: str


class Block(nn.Module):
    """A pre-norm block: attention and a gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        result: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return result


class Stack(nn.Module):
    """Blocks one after another. With `checkpoints`, each repeats its forward in backward."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(order.width) for _ in range(order.layers)])
        self.checkpoints = order.checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


def run(order: Order) -> Report:
    """The main function of the child process."""
    torch.manual_seed(0)
    model = Stack(order)
    x = torch.randn(order.batch, order.tokens, order.width)

    def step() -> float:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return float(loss)

    if order.side == "lazy":
        step = lazy_tensor.lazy_mode(**order.options)(step)
    # the model is built already: the peak is that of activations, gradients and temporaries
    before = start_peak(x.device)
    losses, seconds = [], []
    for _ in range(order.steps):
        start = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
    peak = peak_bytes(x.device) - before
    digest = hashlib.sha256(repr(losses).encode())
    for parameter in model.parameters():
        assert parameter.grad is not None
        digest.update(lazy_tensor.materialize(parameter.grad).numpy().tobytes())
    return Report(statistics.median(seconds[order.steps // 2 :]), peak, digest.hexdigest()[:16])


def run_apart(order: Order) -> Report:
    """`run` in a child process. Raises CalledProcessError; the child's own error is on stderr."""
    child = subprocess.run(
        [sys.executable, str(Path(__file__)), json.dumps(dataclasses.asdict(order))],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Report(**json.loads(child.stdout.splitlines()[-1]))


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(run(Order(**json.loads(sys.argv[1]))))))
