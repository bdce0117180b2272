"""Programs of many kinds, which `choice.py` runs to see whether the default chooses well.

`python benches/choice_programs.py NAME WAY RECORD` runs one in this process. For each number of
seconds that comes as a line of stdin, it does steps for so long, and prints their number and their
seconds. WAY is where laziness begins: a block around the `loop` or around each `step`, or `wrap`.
RECORD is `eager`, or the value of the option `record`. Docstrings of programs are text of a table.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import start_programs
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

WAYS = ("step", "loop", "wrap")
RECORDS = ("eager", "auto", "always")


@dataclass(frozen=True, slots=True)
class Side:
    """What a program uses of a library: `wrap`, and the module that has `DTensor`."""

    wrap: Callable[[Any], Any]
    sharding: ModuleType


Step = Callable[[], object]
Begin = Callable[[Side], Step]


def norms(side: Side) -> Step:
    """RMS norm, SwiGLU and softmax on 256 x 1024, and a read"""
    x, gain = side.wrap(torch.randn(256, 1024)), side.wrap(torch.randn(1024))

    def step() -> float:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain
        return float(torch.softmax(F.silu(y) * y.sigmoid() + x, -1)[0, 0])

    return step


def k_means(side: Side) -> Step:
    """three rounds of k-means on 4096 x 16"""
    points = side.wrap(torch.randn(4096, 16))
    centres = [points[:8].clone()]

    def step() -> object:
        for _ in range(3):
            nearest = torch.cdist(points, centres[0]).argmin(1)
            members = F.one_hot(nearest, 8).to(points.dtype)
            centres[0] = members.T @ points / members.sum(0).clamp_min(1)[:, None]
        return centres[0]

    return step


def heat(side: Side) -> Step:
    """heat on 400 x 400, by rolls"""
    state = [side.wrap(torch.randn(400, 400))]

    def step() -> object:
        a = state[0]
        around = a.roll(1, 0) + a.roll(-1, 0) + a.roll(1, 1) + a.roll(-1, 1)
        state[0] = a + 0.1 * (around - 4 * a)
        return state[0]

    return step


def _training(optimizer: torch.optim.Optimizer, loss_of: Callable[[], torch.Tensor]) -> Step:
    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def lstm(side: Side) -> Step:
    """an LSTM cell unrolled ten times, SGD"""
    cell = side.wrap(nn.LSTMCell(24, 48))
    optimizer = torch.optim.SGD(cell.parameters(), lr=1e-2)
    x = torch.randn(10, 8, 24)

    def loss() -> torch.Tensor:
        h = c = torch.zeros(8, 48)
        for part in x:
            h, c = cell(part, (h, c))
        return h.square().mean()

    return _training(optimizer, loss)


def dropout(side: Side) -> Step:
    """an MLP 512 wide with layer norm and dropout, Adam"""
    model = side.wrap(
        nn.Sequential(
            nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 512)
        )
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(64, 512)

    return _training(optimizer, lambda: F.smooth_l1_loss(model(x).tanh(), x))


def cnn(side: Side) -> Step:
    """two convolutions with batch norm, momentum, its loss read every tenth step"""
    model = side.wrap(
        nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(32, 10),
        )
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    train = _training(optimizer, lambda: F.cross_entropy(model(images), labels))
    n_steps = 0

    def step() -> object:
        nonlocal n_steps
        n_steps += 1
        loss: Any = train()
        return loss.item() if n_steps % 10 == 0 else None

    return step


def indexed(side: Side) -> Step:
    """twelve pointwise ops on a row of a data set, another each step, and a read"""
    data = side.wrap(torch.randn(1000, 1000))
    n_steps = 0

    def step() -> float:
        nonlocal n_steps
        n_steps += 1
        x = data[n_steps * 37 % 1000]
        y = (x.sin() * x + x.cos()) * 0.5 - x.abs().sqrt()
        return float((y.tanh() * y + y.sigmoid()).exp().mean())

    return step


def nbody(side: Side) -> Step:
    """gravity among 256 bodies, their states from NumPy"""
    random = np.random.default_rng(0)
    place = side.wrap(torch.from_numpy(random.normal(size=(256, 3)).astype("float32")))
    speed = side.wrap(torch.from_numpy(random.normal(size=(256, 3)).astype("float32")))
    state = [place, speed]

    def step() -> object:
        place, speed = state
        apart = place[None] - place[:, None]
        near = (apart.square().sum(-1) + 1e-2).rsqrt()
        speed = speed + 1e-3 * (apart * near.pow(3)[..., None]).sum(1)
        state[:] = place + 1e-3 * speed, speed
        return state[0]

    return step


def bootstrap(side: Side) -> Step:
    """means of a hundred resamples of 10,000 numbers, their spread read"""
    sample = side.wrap(torch.randn(10_000))

    def step() -> float:
        picks = torch.randint(10_000, (100, 10_000))
        return float(sample[picks].mean(1).std())

    return step


def attention(side: Side) -> Step:
    """six layers of causal attention by hand, 4 heads, 128 tokens, without gradients"""
    weights = side.wrap(torch.randn(6, 3, 4, 32, 32) / 32**0.5)
    tokens = torch.randn(4, 128, 32)
    mask = torch.ones(128, 128, dtype=torch.bool).tril()

    def step() -> float:
        x = tokens
        for layer in weights:
            q, k, v = (x @ weight for weight in layer)
            scores = (q @ k.transpose(-1, -2) / 32**0.5).masked_fill(~mask, -torch.inf)
            x = x + scores.softmax(-1) @ v
        return float(x.mean())

    return step


def mesh() -> Any:
    if not dist.is_initialized():
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    return dist.device_mesh.init_device_mesh("cpu", (4,))


def sharded_adds(side: Side) -> Step:
    """a hundred adds of sharded tensors, and a read; eager is torch's DTensor"""
    local = torch.randn(4, 16)
    x = side.sharding.DTensor.from_local(local, mesh(), [side.sharding.Shard(0)], run_check=False)

    @torch.no_grad()
    def step() -> float:
        y = x
        for _ in range(100):
            y = y + x
        return float(y.to_local()[0, 0])

    return step


def tensor_parallel(side: Side) -> Step:
    """a tensor-parallel MLP, forward, backward and SGD; eager is torch's DTensor"""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    if side.sharding.__name__.startswith("torch."):
        import torch.distributed.tensor.parallel as parallel
    else:
        parallel = side.sharding
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    parallel.parallelize_module(model, mesh(), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(8, 32)

    return _training(optimizer, lambda: model(x).square().mean())


def _of_start(make: Callable[[Any], Step], side: Side) -> Step:
    return make(side.wrap)


SHARDED = (sharded_adds, tensor_parallel)
OWN: tuple[Begin, ...] = (
    norms, k_means, heat, lstm, dropout, cnn, indexed, nbody, bootstrap, attention, *SHARDED
)  # fmt: skip
PROGRAMS: dict[str, tuple[str, Begin]] = {
    begin.__name__: (begin.__doc__ or "", begin) for begin in OWN
} | {
    name: ((make.__doc__ or "").strip(), partial(_of_start, make))
    for name, make in start_programs.PROGRAMS.items()
}


def ways_of(name: str) -> tuple[str, ...]:
    """Where laziness may begin in a program. Sharded ones have no `wrap`: their tensors are lazy
    already."""
    return WAYS[:2] if name in {begin.__name__ for begin in SHARDED} else WAYS


def run(name: str, way: str, record: str) -> None:
    """Do steps of the program for as many seconds as stdin says, line by line."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    block: Callable[[], Any] = nullcontext
    if record == "eager":
        side = Side(lambda value: value, torch.distributed.tensor)
    else:
        import lazy_tensor
        import lazy_tensor.sharding

        lazy_tensor.configure(record="always" if record == "always" else "auto", warn=False)
        wrap = lazy_tensor.wrap if way == "wrap" else lambda value: value
        side = Side(wrap, lazy_tensor.sharding)
        block = nullcontext if way == "wrap" else lazy_tensor.lazy_mode
    around_loop, around_step = (nullcontext, block) if way == "step" else (block, nullcontext)
    step = PROGRAMS[name][1](side)
    with around_loop():
        for line in sys.stdin:
            n_steps, began_s = 0, time.perf_counter()
            while (passed_s := time.perf_counter() - began_s) < float(line):
                with around_step():
                    step()
                n_steps += 1
            print(json.dumps([n_steps, passed_s]), flush=True)


if __name__ == "__main__":
    import torch.distributed.tensor

    run(*sys.argv[1:])
