"""A step of Adam on the parameters of a transformer, tensor by tensor and foreach.

Gradients are given, so that the step alone is timed. `replayed` is the step in
`lazy_tensor.replay`, whose first calls are recorded. `fused` is eager's own fused kernel: it reads
and writes each element once, which is the floor. thunder accepts no `Optimizer`, so it is given the
function that updates all parameters. Page faults are those of a settled step. Writes
`results/optimizer.md`.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page
from timing import interleaved
from torch.optim.adam import adam
from workloads import refusal

import lazy_tensor

Step = Callable[[], object]
SIDES = ("eager", "lazy", "replayed", "compile")
CALLS_UNTIL_SETTLED = 6
COLUMNS = ("Adam", "parameters", "side", "first step", "settled step", "/ eager", "/ compile",
           "/ fused", "page faults")  # fmt: skip


def optimizer(quick: bool, **options: Any) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    width, depth = (32, 1) if quick else (256, 12)
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) / 100
    return torch.optim.Adam(parameters, lr=1e-3, **options)


def parameters_of(adam: torch.optim.Optimizer) -> list[torch.Tensor]:
    found: list[torch.Tensor] = adam.param_groups[0]["params"]
    return found


def thunder_step(optimizer: torch.optim.Optimizer, foreach: bool) -> Step:
    """The function that `Adam.step` calls, with the same options, compiled by thunder."""
    params = parameters_of(optimizer)
    grads = [p.grad for p in params]
    averages, squares = ([torch.zeros_like(p) for p in params] for _ in range(2))
    counts = [torch.zeros(()) for _ in params]

    def update(*lists: list[torch.Tensor]) -> None:
        params, grads, averages, squares, counts = lists
        with torch.no_grad():
            adam(
                params, grads, averages, squares, [], counts, foreach=foreach, amsgrad=False,
                beta1=0.9, beta2=0.999, lr=1e-3, weight_decay=0.0, eps=1e-8, maximize=False,
            )  # fmt: skip

    compiled = peers.compiled("thunder", update)
    return lambda: compiled(params, grads, averages, squares, counts)


def assert_equal(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    for mine, theirs in zip(parameters_of(one), parameters_of(other), strict=True):
        torch.testing.assert_close(mine, theirs)


def page_faults(step: Step) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.fixture(scope="module")
def notes() -> list[str]:
    return peers.notes(peers.PEERS)


@pytest.fixture(scope="module")
def rows(results_dir: Path, notes: list[str]) -> Iterator[list[list[str]]]:
    collected: list[list[str]] = []
    yield collected
    if len({row[0] for row in collected}) == 2:
        title = "A step of Adam on the parameters of a 12-layer, 256-wide transformer"
        (results_dir / "optimizer.md").write_text(page(title, COLUMNS, collected, notes))


@pytest.mark.parametrize("foreach", [False, True], ids=["tensor by tensor", "foreach"])
def bench_adam(
    benchmark: BenchmarkFixture, quick: bool, rows: list[list[str]], notes: list[str], foreach: bool
) -> None:
    optimizers = {name: optimizer(quick, foreach=foreach) for name in SIDES}
    optimizers["fused"] = optimizer(quick, fused=True)
    how: dict[str, Any] = {"compile": "off" if quick else "background"}
    steps: dict[str, Step] = {
        "eager": optimizers["eager"].step,
        "lazy": lazy_tensor.lazy_mode(**how)(optimizers["lazy"].step),
        "replayed": lazy_tensor.replay(optimizers["replayed"].step, **how),
        "fused": optimizers["fused"].step,
    }
    if not quick:
        steps["compile"] = torch.compile(optimizers["compile"].step)
    first_s = {name: _timed(step) for name, step in steps.items()}
    if not quick and peers.missing("thunder") is None:
        optimizers["thunder"] = optimizer(quick)
        step = thunder_step(optimizers["thunder"], foreach)
        try:
            first_s["thunder"] = _timed(step)
            steps["thunder"] = step
        except Exception as error:
            notes.append(f"thunder does not take it {_name(foreach)}: {refusal(error)}")
    # the first steps were timed as users have them; settled ones must have their kernels
    if not quick:
        how = {"compile": "blocking"}
        steps["lazy"] = lazy_tensor.lazy_mode(**how)(optimizers["lazy"].step)
    replayed = steps["replayed"] = lazy_tensor.replay(optimizers["replayed"].step, **how)
    for _ in range(CALLS_UNTIL_SETTLED):
        replayed()
    rounds = 2 if quick else 40
    timings = benchmark.pedantic(interleaved, args=(steps, rounds, 10), rounds=1, iterations=1)
    assert replayed.n_replayed > 0, replayed.obstacle
    assert_equal(optimizers["lazy"], optimizers["eager"])
    for name, step in steps.items():
        against = [
            f"{timings.ratio(name, other):.2f}×" if other in steps else "-"
            for other in ("eager", "compile", "fused")
        ]
        rows.append([
            _name(foreach),
            str(len(parameters_of(optimizers[name]))),
            name,
            f"{first_s[name] * 1e3:.0f} ms",
            f"{timings.spread(name).median_s * 1e3:.2f} ms",
            *against,
            f"{statistics.median(page_faults(step) for _ in range(5)):.0f}",
        ])  # fmt: skip


def _name(foreach: bool) -> str:
    return "foreach" if foreach else "tensor by tensor"


def _timed(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
