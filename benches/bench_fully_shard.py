"""Host cost of `fully_shard`: a training step of a tiny GPT, and of 200 tiny modules.

The process group is a fake one of 4 ranks on the CPU, whose collectives do nothing. What is left is
the time of Python and the dispatcher. Sides: the model on one rank, lazily and eagerly; and sharded
over 4 ranks, by our `fully_shard` (recorded, or replayed) and by torch's. Writes
`results/fully_shard.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_record import forget_recording
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page
from timing import Timings, interleaved
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.nn import Linear, Module, Sequential, functional

import lazy_tensor
from lazy_tensor import sharding
from lazy_tensor.examples.gpt import GPT, N_BYTES, GPTConfig

N_ROWS = 4
N_MODULES = 200
SIDES = ("lazy", "sharded", "replayed", "eager", "torch's")
RATIOS = (
    ("sharded", "lazy"),
    ("torch's", "eager"),
    ("sharded", "torch's"),
    ("replayed", "torch's"),
)


@pytest.fixture(scope="module")
def rows(results_dir: Path) -> Iterator[list[list[str]]]:
    found: list[list[str]] = []
    yield found
    if len(found) == N_ROWS:
        title = "Host cost of `fully_shard` on 4 ranks, milliseconds"
        columns = ["", *SIDES, *(f"{one} / {other}" for one, other in RATIOS)]
        (results_dir / "fully_shard.md").write_text(page(title, columns, found))


def tiny_gpt() -> tuple[Module, Callable[[Any], Any], Callable[[Any], list[Any]]]:
    model = GPT(GPTConfig(n_layers=4, n_heads=4, width=128, context=64))
    tokens = torch.randint(0, N_BYTES, (4, 64))

    def loss_of(made: Any) -> Any:
        return functional.cross_entropy(made(tokens).flatten(0, 1), tokens.flatten())

    return model, loss_of, lambda made: [*made.blocks, made]


def many_modules() -> tuple[Module, Callable[[Any], Any], Callable[[Any], list[Any]]]:
    model = Sequential(*(Linear(8, 8) for _ in range(N_MODULES)))
    x = torch.randn(2, 8)
    return model, lambda made: made(x).sum(), lambda made: [*made, made]


def step_of(side: str, build: Any, mesh: Any, *, runs: bool) -> Callable[[], object]:
    """A side's training step. If it `runs`, so does what it recorded; else that is forgotten, and
    recording alone is timed. A replayed step always runs."""
    torch.manual_seed(0)
    model, loss_of, parts = build()
    if side in ("sharded", "replayed", "torch's"):
        shard: Any = torchs_fully_shard if side == "torch's" else sharding.fully_shard
        for part in parts(model):
            shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    # the first two steps run anyway, so that the optimizer has its state
    n_run = 2

    def eagerly() -> None:
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    def lazily() -> None:
        nonlocal n_run
        n_run -= 1
        with lazy_tensor.lazy_mode():
            eagerly()
            if runs or n_run >= 0:
                lazy_tensor.flush()
            else:
                forget_recording()

    if side == "replayed":
        return lazy_tensor.replay(eagerly)
    return lazily if side in ("lazy", "sharded") else eagerly


@pytest.mark.parametrize("name", ["a tiny GPT", f"{N_MODULES} linear layers"])
@pytest.mark.parametrize("what", ["recording a step", "a whole step"])
def bench_step(
    benchmark: BenchmarkFixture, quick: bool, rows: list[list[str]], mesh: Any, name: str, what: str
) -> None:
    build = tiny_gpt if "GPT" in name else many_modules
    runs = what == "a whole step"
    sides = [side for side in SIDES if runs or side != "replayed"]
    functions = {side: step_of(side, build, mesh, runs=runs) for side in sides}
    rounds, warmup = (2, 2) if quick else (40, 12)
    timings: Timings = benchmark.pedantic(
        interleaved, args=(functions, rounds, warmup), rounds=1, iterations=1
    )
    n_ms = {side: f"{timings.spread(side).median_s * 1e3:.2f}" for side in functions}
    ratios = {pair: f"{timings.ratio(*pair):.2f}×" for pair in RATIOS if pair[0] in functions}
    rows.append([
        f"{name}, {what}",
        *(n_ms.get(side, "–") for side in SIDES),
        *(ratios.get(pair, "–") for pair in RATIOS),
    ])  # fmt: skip
