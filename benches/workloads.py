"""Training steps for benchmarks, and a run of one of them on one side in a process of its own.

`python benches/workloads.py '[NAME, SIDE, N_STEPS, OPTIONS]'` prints a `Report` as a line of JSON.
`bench_training.py` calls it; `bench_counts.py` uses the small models in `QUICK`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peers
import torch
import transformers
from memory import peak_bytes, start_peak
from torch import Tensor, nn
from torch.nn import functional as F

import lazy_tensor
from lazy_tensor.dispatch.run.compile_service import obtain_extensions
from lazy_tensor.examples.gpt import GPT, N_BYTES, GPTConfig

SIDES = ("eager", "lazy", "replay", *peers.PEERS)

Step = partial[Tensor]
Options = Mapping[str, Any]


class Loss(nn.Module):
    """A model and its loss as one module, which is what peers compile."""

    def __init__(self, model: nn.Module, n_classes: int) -> None:
        super().__init__()
        self.model = model
        self.n_classes = n_classes

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        result = self.model(x)
        logits: Tensor = result if isinstance(result, Tensor) else result.logits
        return F.cross_entropy(logits.reshape(-1, self.n_classes), y.flatten())


@dataclass(frozen=True, slots=True)
class Workload:
    """`make` returns a module; called on the tensors of `make_batch`, it returns the loss."""

    make: Callable[[], nn.Module]
    make_batch: Callable[[], tuple[Tensor, Tensor]]
    title: str


def _gpt(config: GPTConfig, batch: int) -> Workload:
    size = (batch, config.context)
    return Workload(
        lambda: Loss(GPT(config), N_BYTES),
        lambda: (torch.randint(0, N_BYTES, size), torch.randint(0, N_BYTES, size)),
        f"GPT, {config.n_layers} layers, {config.width} wide, {batch} x {config.context} tokens",
    )


def _resnet(width: int, n_images: int, pixels: int) -> Workload:
    options: Any = {"num_labels": 10}  # of the base class, which mypy doesn't see
    config = transformers.ResNetConfig(
        embedding_size=width, hidden_sizes=[width, 2 * width, 4 * width], depths=[2, 2, 2],
        layer_type="basic", **options,
    )  # fmt: skip
    return Workload(
        lambda: Loss(transformers.ResNetForImageClassification(config), 10),
        lambda: (torch.randn(n_images, 3, pixels, pixels), torch.randint(0, 10, (n_images,))),
        f"ResNet, 6 blocks, {width} to {4 * width} channels, {n_images} x {pixels} x {pixels}",
    )


def _llama(width: int, n_layers: int, batch: int, n_tokens: int) -> Workload:
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=n_layers,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=1000, use_cache=False,
    )  # fmt: skip
    size = (batch, n_tokens)
    return Workload(
        lambda: Loss(transformers.LlamaForCausalLM(config), 1000),
        lambda: (torch.randint(0, 1000, size), torch.randint(0, 1000, size)),
        f"transformers' Llama, {n_layers} layers, {width} wide, {batch} x {n_tokens} tokens",
    )


WORKLOADS: dict[str, Workload] = {
    "tiny GPT": _gpt(GPTConfig(4, 4, 128, 64), 4),
    "GPT": _gpt(GPTConfig(6, 6, 384, 256), 8),
    "ResNet": _resnet(32, 16, 64),
    "Llama": _llama(256, 4, 4, 128),
}
QUICK: dict[str, Workload] = {
    "tiny GPT": _gpt(GPTConfig(2, 2, 16, 8), 2),
    "GPT": _gpt(GPTConfig(3, 2, 16, 8), 2),
    "ResNet": _resnet(4, 2, 32),
    "Llama": _llama(16, 2, 2, 8),
}


def step_of(workload: Workload, side: str, options: Options) -> Step:
    """A training step as `side` runs it, with fused AdamW. It returns the loss before the update.

    If the side doesn't accept the model, its error comes here or at the first call.
    """
    torch.manual_seed(0)
    model = workload.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = workload.make_batch()
    loss_of: Callable[..., Tensor] = model
    update: Callable[[], object] = optimizer.step
    if side in peers.PEERS:
        loss_of = peers.compiled(side, model)
    if side == "compile":
        update = peers.compiled(side, optimizer.step)

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        update()
        return loss.detach()

    if side == "lazy":
        step = lazy_tensor.lazy_mode(**options)(step)
    if side == "replay":
        step = lazy_tensor.replay(step, **options)
    return partial(step, *batch)


@dataclass(frozen=True, slots=True)
class Report:
    """Losses and seconds of each step, and the peak of memory beyond what the process held before
    the model was built."""

    losses: list[float]
    seconds: list[float]
    peak_bytes: int


def run_alone(name: str, side: str, n_steps: int, options: Options, caches: Path) -> Report:
    """`run_here` in a process of its own, with its kernel caches under `caches`."""
    order = json.dumps([name, side, n_steps, dict(options)])
    child = subprocess.run(
        [sys.executable, __file__, order],
        env=in_caches(caches),
        capture_output=True,
        text=True,
        check=True,
    )
    return Report(**json.loads(child.stdout.splitlines()[-1]))


def in_caches(folder: Path | None) -> dict[str, str]:
    """The environment of this process, with all kernel caches under `folder` (None: unchanged)."""
    if folder is None:
        return dict(os.environ)
    return {
        **os.environ,
        "LAZY_TENSOR_CACHE_DIR": str(folder / "lazy_tensor"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def refusal(error: BaseException) -> str:
    """The first line of an error, short enough for a table."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first[:120]}"


def run_here(name: str, side: str, n_steps: int, options: Options, quick: bool = False) -> Report:
    """Do `n_steps` of a side in this process."""
    workload = (QUICK if quick else WORKLOADS)[name]
    if side == "thunder":
        peers.thunder()
    if side in ("lazy", "replay") and options.get("compile") == "blocking":
        # this run fills the caches for a later one, also with the package's own C++
        obtain_extensions()
    # before the model is built, so that its memory counts
    before = start_peak(torch.device("cpu"))
    losses: list[float] = []
    seconds: list[float] = []
    step = step_of(workload, side, options)
    for _ in range(n_steps):
        start = time.perf_counter()
        losses.append(step().item())
        seconds.append(time.perf_counter() - start)
    return Report(losses, seconds, max(0, peak_bytes(torch.device("cpu")) - before))


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(run_here(*json.loads(sys.argv[1])))))
