"""A residual stack of 10 x 10 products, in a process of its own, for `bench_depth.py`.

`python benches/residual.py SIDE DEPTH` prints a JSON object with the loss, the seconds of the first
step and of a settled one, and the number of kernels that were compiled.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import peers
import torch
from peers import PEERS
from torch import Tensor

import lazy_tensor
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.run.compile_service import compiler

N_STEPS = 40


def loss_of(x: Tensor, weights: list[Tensor]) -> Tensor:
    for weight in weights:
        x = x + weight @ torch.tanh(x)
    return x.square().mean()


def step_with(
    loss_of: Callable[[Tensor, list[Tensor]], Tensor], x: Tensor, weights: list[Tensor]
) -> Tensor:
    """Do forward and backward. Returns the loss."""
    for tensor in (x, *weights):
        tensor.grad = None
    loss = loss_of(x, weights)
    loss.backward()
    return loss.detach()


def steps_of(side: str) -> Callable[[Tensor, list[Tensor]], Tensor]:
    """The step as "eager", "lazy", "lazy, blocking" or one of `PEERS` runs it."""
    if side in PEERS:
        compiled = peers.compiled(side, loss_of)
        return lambda x, weights: step_with(compiled, x, weights)
    if side == "eager":
        return lambda x, weights: step_with(loss_of, x, weights)
    waits = side.endswith("blocking")
    in_mode = lazy_tensor.lazy_mode(compile="blocking" if waits else "background")
    return in_mode(lambda x, weights: step_with(loss_of, x, weights))


def main(side: str, depth: int) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(10, 10).div(10).requires_grad_() for _ in range(depth)]
    x = torch.randn(10, 10).requires_grad_()
    if side == "thunder":
        # imported here, so that the first step doesn't count it as compiling
        peers.thunder()
    step = steps_of(side)
    seconds: list[float] = []
    for i in range(N_STEPS):
        # settled steps are recorded in C++, as in a program that has run for a while
        if i == 1 and side.startswith("lazy"):
            hits.start(compiler().disk)
        start = time.perf_counter()
        loss = step(x, weights).item()
        seconds.append(time.perf_counter() - start)
    print(json.dumps({
        "loss": loss,
        "first_s": seconds[0],
        "settled_s": statistics.median(seconds[N_STEPS // 2 :]),
        "compiled": lazy_tensor.stats()["compiled"],
    }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
