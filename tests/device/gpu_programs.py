"""Programs on a GPU: one of them, measured in every way to run it, in a process of its own.

`python tests/device/gpu_programs.py NAME` prints a line of JSON for each side as soon as it is
measured, a `Measured`. Kernel caches are where the environment says.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import lazy_tensor
from lazy_tensor.dispatch.run.compile_service import compiler
from lazy_tensor.examples.gpt import GPT, N_BYTES, GPTConfig

SIDES = ("eager", "lazy", "recorded", "replay", "graphs", "compile")
"""Eager; `lazy_mode` by default; the same with `record="always"`; `replay`; `replay` with CUDA
graphs; `torch.compile`."""
Step = Callable[[], Tensor]
Run = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
Begin = Callable[[str], Step]
"""Makes a program's step for a side: it computes, and gives a value that all sides agree on."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A side of a program: seconds of its first step, milliseconds of a settled one with the
    device's part and of the host alone, kernels and copies that it asks for, launches by the host,
    and the value of its fifth step."""

    side: str
    first_s: float
    step_ms: float
    host_ms: float
    n_kernels: int
    n_launches: int
    value: float
    bytes_per_s: float = 0.0
    longest: tuple[str, ...] = ()


def run_on(side: str) -> Run:
    """What makes a step run the way `side` says; for "compile" the program compiles its parts."""
    if side == "lazy":
        return lambda step: lazy_tensor.lazy_mode()(step)
    if side == "recorded":
        return lambda step: lazy_tensor.lazy_mode(record="always")(step)
    if side == "replay":
        return lambda step: lazy_tensor.replay(step)
    if side == "graphs":
        return lambda step: lazy_tensor.replay(step, cuda_graphs=True)
    return lambda step: step


def training(
    side: str, model: nn.Module, batch: tuple[Tensor, Tensor], *, autocast: bool = False
) -> Step:
    """A training step: cross-entropy, AdamW by its fused kernels."""
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True, capturable=True)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            logits = model(x)
        return F.cross_entropy(logits.float().flatten(0, -2), y.flatten())

    loss_of = torch.compile(loss_of) if side == "compile" else loss_of

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return partial(run_on(side)(step), *(part.cuda() for part in batch))


def tokens(n_classes: int, *size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(n_classes, size), torch.randint(n_classes, size)


def tiny_gpt(side: str) -> Step:
    """GPT, 4 layers, 128 wide, 4 x 64 tokens"""
    return training(side, GPT(GPTConfig(4, 4, 128, 64)), tokens(N_BYTES, 4, 64))


def gpt(side: str) -> Step:
    """GPT, 12 layers, 768 wide, 16 x 1024 tokens, bfloat16 by autocast"""
    model = GPT(GPTConfig(12, 12, 768, 1024))
    return training(side, model, tokens(N_BYTES, 16, 1024), autocast=True)


def llama(side: str) -> Step:
    """Llama, 8 layers, 1024 wide, 8 x 1024 tokens, bfloat16 by autocast"""
    sys.path.append(str(Path(__file__).parents[2] / "benches"))
    from llama import Llama, LlamaConfig

    config = LlamaConfig(8, 1024, n_heads=16, n_kv_heads=4, hidden=2816, context=1024)
    return training(side, Llama(config), tokens(config.vocabulary, 8, 1024), autocast=True)


class Residual(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(n_in, n_out, 1, stride, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n_out) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.norms[2](self.short(x)))


def resnet(side: str) -> Step:
    """ResNet, 8 blocks, 64 to 512 channels, 64 x 128 x 128"""
    blocks: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    widths = (64, 64, 128, 128, 256, 256, 512, 512)
    for n_in, n_out in zip((64, *widths), widths, strict=False):
        blocks.append(Residual(n_in, n_out, 1 if n_in == n_out else 2))
    blocks += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    batch = torch.randn(64, 3, 128, 128), torch.randint(10, (64,))
    return training(side, nn.Sequential(*blocks), batch)


def convolution(side: str) -> Step:
    """a convolution, GELU and their backward, 32 x 64 x 64 x 64"""
    layer = nn.Conv2d(64, 64, 3, padding=1).cuda()
    x = torch.randn(32, 64, 64, 64, device="cuda", requires_grad=True)
    loss_of = torch.compile(convolved) if side == "compile" else convolved

    def step() -> Tensor:
        layer.zero_grad()
        x.grad = None
        loss = loss_of(layer, x)
        loss.backward()
        return loss.detach()

    return run_on(side)(step)


def convolved(layer: nn.Module, x: Tensor) -> Tensor:
    return F.gelu(layer(x)).square().mean()


def residual(side: str) -> Step:
    """128 residual layers of 10 x 10, forward and backward"""
    weights = [torch.randn(10, 10).div(10).cuda().requires_grad_() for _ in range(128)]
    x = torch.randn(10, 10).cuda().requires_grad_()

    def stacked(x: Tensor, weights: list[Tensor]) -> Tensor:
        for weight in weights:
            x = x + weight @ torch.tanh(x)
        return x.square().mean()

    loss_of = torch.compile(stacked) if side == "compile" else stacked

    def step() -> Tensor:
        for tensor in (x, *weights):
            tensor.grad = None
        loss = loss_of(x, weights)
        loss.backward()
        return loss.detach()

    return run_on(side)(step)


def adam(side: str, *, foreach: bool) -> Step:
    parameters = [torch.randn(256, 256).cuda().requires_grad_() for _ in range(146)]
    for p in parameters:
        p.grad = torch.randn(256, 256).cuda()
    optimizer = torch.optim.Adam(parameters, foreach=foreach, capturable=True)
    update: Callable[[], object] = optimizer.step
    update = torch.compile(update) if side == "compile" else update

    def step() -> Tensor:
        update()
        return parameters[0].detach().sum()

    return run_on(side)(step)


def adam_loop(side: str) -> Step:
    """Adam, 146 parameters of 256 x 256, one by one"""
    return adam(side, foreach=False)


def adam_foreach(side: str) -> Step:
    """Adam, 146 parameters of 256 x 256, foreach"""
    return adam(side, foreach=True)


N, WIDTH = 16384, 4096


def norm_gelu(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, w.shape, w, w)) + y


def softmax(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return (x * 0.125 + y).softmax(-1)


def pointwise(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return ((x * 2 + y).sin().exp() * w - 1).tanh()


def chain(side: str, function: Callable[..., Tensor], dtype: torch.dtype, n: int, m: int) -> Step:
    x, y = (torch.randn(n, m).cuda().to(dtype) for _ in range(2))
    w = torch.randn(m).cuda().to(dtype)
    function = torch.compile(function) if side == "compile" else function
    return partial(run_on(side)(function), x, y, w)


CHAINS = {f.__name__: f for f in (norm_gelu, softmax, pointwise)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TRAINED = {
    f.__name__: f
    for f in (tiny_gpt, gpt, llama, resnet, convolution, residual, adam_loop, adam_foreach)
}
PROGRAMS: dict[str, Begin] = {
    **{
        f"{name} {dtype}": partial(chain, function=f, dtype=DTYPES[dtype], n=N, m=WIDTH)
        for name, f in CHAINS.items()
        for dtype in DTYPES
    },
    "pointwise 64": partial(chain, function=pointwise, dtype=torch.float32, n=64, m=64),
    **TRAINED,
}


def measured(name: str, side: str, seconds: float) -> Measured:
    """Run one side of a program for about `seconds` once its kernels are there."""
    torch.manual_seed(0)
    step = PROGRAMS[name](side)
    torch.cuda.synchronize()
    start = time.perf_counter()
    value = float(step().float().mean())
    first_s = time.perf_counter() - start
    for _ in range(4):
        value = float(step().float().mean())
    settle(step, side)
    step_s = timed(step, seconds / 2, waits=True)
    host_s = timed(step, seconds / 2, waits=False)
    n_kernels, n_launches, longest = asked(step)
    rate = 0.0
    if name not in TRAINED and name != "pointwise 64":
        rate = 3 * N * WIDTH * (4 if name.endswith("32") else 2) / step_s
    return Measured(
        side, first_s, step_s * 1e3, host_s * 1e3, n_kernels, n_launches, value, rate, longest
    )


def settle(step: Step, side: str) -> None:
    """Run until nothing is compiled or compared any more."""
    if side in ("eager", "compile"):
        timed(step, 0.3, waits=False)
        return
    timed(step, 1.2, waits=False)  # nothing is compiled before a program has worked for a second
    compiler().wait(60)
    timed(step, 2.5 if side == "lazy" else 0.5, waits=True)


def timed(step: Step, seconds: float, *, waits: bool) -> float:
    """The median second of a step; without `waits` the device is waited for every ten only."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found) < 5:
        n = 1 if waits else 10
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(n):
            step()
        if waits:
            torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / n)
    return statistics.median(found)


def asked(step: Step) -> tuple[int, int, tuple[str, ...]]:
    """Kernels, copies and fills that a step asks the device for, the host's launches, and what took
    the device longest."""
    torch.cuda.synchronize()
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True
    ) as found:
        step()
        torch.cuda.synchronize()
    names = [event.name for event in found.events()]
    on_device = [
        event
        for event in found.events()
        if str(event.device_type) == "DeviceType.CUDA"
        and not event.name.startswith(("lazy_tensor ", "Optimizer."))  # ranges, not kernels
    ]
    launches = [n for n in names if n.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch"))]
    times: dict[str, tuple[int, float]] = {}
    for event in on_device:
        n, us = times.get(event.name, (0, 0.0))
        times[event.name] = n + 1, us + event.device_time_total
    total = f"{sum(us for _, us in times.values()):.0f} us in all"
    first = sorted(times.items(), key=lambda item: -item[1][1])[:10]
    told = [f"{us:.0f} us in {n} of {name[:90]}" for name, (n, us) in first]
    return len(on_device), len(launches), (total, *told)


def copy_bytes_per_s(n_bytes: int = 1 << 29) -> float:
    """Bytes read and written in a second by a copy on the device."""
    source = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * n_bytes / timed(lambda: target.copy_(source), 0.5, waits=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[*PROGRAMS, "copy"])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--sides", nargs="*", default=SIDES)
    options = parser.parse_args()
    if options.name == "copy":
        print(json.dumps({"bytes_per_s": copy_bytes_per_s()}), flush=True)
        return
    for side in options.sides:
        try:
            found: dict[str, Any] = dataclasses.asdict(
                measured(options.name, side, options.seconds)
            )
        except Exception as error:  # told in its place; the other sides are measured
            first = next(iter(str(error).splitlines()), "")
            found = {"side": side, "error": f"{type(error).__name__}: {first[:300]}"}
        print(json.dumps(found), flush=True)
    statuses: dict[str, int] = {}
    for fusion in list(compiler()._fusions):
        key = f"{fusion.backend.name} {fusion.status}"
        statuses[key] = statuses.get(key, 0) + 1
    reasons = sorted({f.reason for f in list(compiler()._fusions) if f.status == "failed"})
    print(json.dumps({"fusions": statuses, "failed": reasons[:5]}), flush=True)
    for fusion in list(compiler()._fusions):
        print(repr(fusion), fusion.status, fusion.reason, fusion.n_runs)
    print(str(lazy_tensor.explain())[-6000:])


if __name__ == "__main__":
    main()
