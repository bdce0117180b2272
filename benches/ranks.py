"""Training on two ranks, processes that communicate by gloo, with torch's modules and with ours.

`python benches/ranks.py NAME SIDE SECONDS` trains for so long, from empty caches, and prints the
seconds of each step as JSON. NAME is `tensor_parallel`, `fully_shard` or `ddp`. SIDE is `torch`,
`block` (each step in `lazy_mode`) or `replay`. Docstrings of programs are text of a table.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

N_RANKS = 2
SIDES = ("torch", "block", "replay")
ASKS_EVERY = 10
"""Steps after which the ranks agree on whether time is up. All must do the same number of steps, or
one would wait for ever in a collective."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = self.down(torch.relu(self.up(x)))
        return x + moved


def tensor_parallel(own: ModuleType) -> tuple[nn.Module, torch.Tensor]:
    """four MLP blocks, 128 wide, batch 32, split by tensor parallelism"""
    mesh = dist.device_mesh.init_device_mesh("cpu", (N_RANKS,))
    model = nn.Sequential(*(Block(128) for _ in range(4)))
    for block in model:
        plan = {"up": own.ColwiseParallel(), "down": own.RowwiseParallel()}
        own.parallelize_module(block, mesh, plan)
    return model, torch.randn(32, 128)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    layers = [
        nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True) for _ in range(4)
    ]
    return nn.Sequential(*layers), torch.randn(8, 32, 128)


def fully_shard(own: ModuleType) -> tuple[nn.Module, torch.Tensor]:
    """a transformer of 4 layers, 128 wide, batch 8 of 32, by `fully_shard`"""
    model, x = transformer()
    mesh = dist.device_mesh.init_device_mesh("cpu", (N_RANKS,))
    for part in (*model.children(), model):
        own.fully_shard(part, mesh=mesh)
    return model, x


def ddp(own: ModuleType) -> tuple[nn.Module, torch.Tensor]:
    """the same transformer in torch's DistributedDataParallel"""
    model, x = transformer()
    return nn.parallel.DistributedDataParallel(model), x


PROGRAMS = {make.__name__: make for make in (tensor_parallel, fully_shard, ddp)}


def of_torch() -> ModuleType:
    """A stand-in for `lazy_tensor.sharding` that has torch's own functions by the same names."""
    from torch.distributed import fsdp
    from torch.distributed.tensor import parallel

    found = ModuleType("torchs")
    vars(found).update(vars(parallel), fully_shard=fsdp.fully_shard)
    return found


def times_of(name: str, side: str, seconds: float) -> list[float]:
    """Train for `seconds`. Returns the seconds of each step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mode: Callable[[], Any] = nullcontext
    own = of_torch()
    if side != "torch":
        import lazy_tensor
        from lazy_tensor import sharding

        own = sharding
        mode = lazy_tensor.lazy_mode if side == "block" else nullcontext
    model, x = PROGRAMS[name](own)
    optimizer = torch.optim.AdamW(model.parameters())
    update: Callable[[], Any] = optimizer.step

    def train() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        update()
        return loss.detach()

    step: Callable[[], Any] = train
    if side == "replay" and isinstance(model, nn.parallel.DistributedDataParallel):
        lazy_tensor.replay(model.module)  # DDP's own code can't be replayed
        update = lazy_tensor.replay(optimizer.step)
    elif side == "replay":
        step = lazy_tensor.replay(train)
    times_s: list[float] = []
    began_s = time.perf_counter()
    passed_s = torch.zeros(1)
    while float(passed_s) < seconds:
        for _ in range(ASKS_EVERY):
            step_began_s = time.perf_counter()
            with mode():
                step()
            times_s.append(time.perf_counter() - step_began_s)
        # rank 0's clock decides
        passed_s[0] = time.perf_counter() - began_s
        dist.broadcast(passed_s, 0)
    return times_s


def _rank(rank: int, name: str, side: str, seconds: float, store: str) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=N_RANKS)
    times_s = times_of(name, side, seconds)
    if rank == 0:
        print(json.dumps(times_s), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    name, side, seconds = sys.argv[1:]
    with tempfile.TemporaryDirectory() as caches:
        os.environ["LAZY_TENSOR_CACHE_DIR"] = caches
        arguments = (name, side, float(seconds), str(Path(caches, "store")))
        spawn(_rank, arguments, nprocs=N_RANKS)
