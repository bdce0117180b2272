"""Sequence lengths that vary: twenty of them in each pass through a data set, a small transformer.

The first pass shows what new lengths cost. Later passes show what kernels with symbolic sizes gain.
Writes `results/lengths.md` and its plot.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import plots
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page
from torch import Tensor
from workloads import refusal

import lazy_tensor

N_LENGTHS, N_PASSES = 20, 8


def model_of(width: int) -> Any:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def step_of(model: Any, peer: str = "") -> Callable[[Tensor], float]:
    """A function that does forward and backward and returns the loss. `peer` compiles forward."""
    forward = peers.compiled(peer, model) if peer else model

    def step(x: Tensor) -> float:
        model.zero_grad()
        loss = forward(x).square().mean()
        loss.backward()
        return float(loss.detach())

    return step


def replayed(
    model: Any, compile: lazy_tensor.dispatch.options.Compile
) -> Callable[[Tensor], float]:
    """The same by `replay`."""

    @lazy_tensor.replay(compile=compile, sizes="any")
    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return lambda x: float(step(x))


def bench_lengths(benchmark: BenchmarkFixture, quick: bool, results_dir: Path) -> None:
    width, n_passes = (16, 2) if quick else (128, N_PASSES)
    batches = [torch.randn(4, 8 + 3 * i, width) for i in range(N_LENGTHS)]
    mode = lazy_tensor.lazy_mode(compile="off" if quick else "background")
    sides: dict[str, Callable[[Tensor], float]] = {
        "eager": step_of(model_of(width)),
        "lazy": mode(step_of(model_of(width))),
        "replay": replayed(model_of(width), "off" if quick else "background"),
    }
    notes = peers.notes(peers.PEERS)
    for peer in () if quick else peers.present(peers.PEERS):
        try:
            step_of(model_of(width), peer)(batches[0])
        except Exception as error:
            notes.append(f"{peer} does not take it: {refusal(error)}")
        else:
            # the call above was a trial: the peer is timed with its compiling
            torch.compiler.reset()
            sides[peer] = step_of(model_of(width), peer)
    # what torch does once in a process is on no side's account
    sides["eager"](batches[0])
    seconds: dict[str, list[float]] = {name: [] for name in sides}

    def run() -> None:
        for _ in range(n_passes):
            losses: dict[str, list[float]] = {}
            for name, step in sides.items():
                start = time.perf_counter()
                losses[name] = [step(x) for x in batches]
                seconds[name].append(time.perf_counter() - start)
                torch.testing.assert_close(losses[name], losses["eager"], rtol=1e-4, atol=1e-5)

    # as in a program that begins: nothing is known, and nothing was measured
    lazy_tensor.cache_clear()
    lazy_tensor.reset_stats()
    benchmark.pedantic(run, rounds=1, iterations=1)
    columns = ("pass", *sides, *(f"{name} / eager" for name in sides if name != "eager"))
    rows = [
        [
            str(i + 1),
            *(f"{seconds[name][i] * 1e3:.0f} ms" for name in sides),
            *(f"{seconds[n][i] / seconds['eager'][i]:.2f}×" for n in sides if n != "eager"),
        ]
        for i in range(n_passes)
    ]
    counts = lazy_tensor.stats()
    title = (
        f"{N_LENGTHS} sequence lengths, 2 layers, {width} wide, training; "
        f"{counts['compiled']} kernels compiled"
    )
    (results_dir / "lengths.md").write_text(page(title, columns, rows, notes))
    if not quick:
        ms = {str(i + 1): {side: seconds[side][i] * 1e3 for side in sides} for i in range(n_passes)}
        plots.lines(results_dir / "lengths.png", title, "pass", {"milliseconds a pass": ms})
