"""The demo's training step, small and medium: eager, lazy and torch.compile side by side.

Step time is taken in this process, in turns; first step and peak memory in a process of each side's
own, with caches of its own. Writes `results/training.md` and `results/training_medium.md`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page
from timing import interleaved
from torch import Tensor

from lazy_tensor.cli.probe import Probe, probe
from lazy_tensor.cli.race import relative_difference
from lazy_tensor.cli.sides import SIDES, Side
from lazy_tensor.cli.summary import bytes_text, compared, range_text, seconds_text
from lazy_tensor.cli.text import batches, load_text
from lazy_tensor.cli.training import Recipe

CHECKED_STEPS = 3
MAX_RELATIVE_DIFFERENCE = 1e-3
N_ROWS = 6


@pytest.fixture(scope="module", params=["small", "medium"])
def recipe(smoke: bool, request: pytest.FixtureRequest) -> Recipe:
    if smoke:
        return Recipe(size="tiny", batch=2, steps=4)
    return Recipe(size=request.param, steps=40 if request.param == "small" else 12)


@pytest.fixture(scope="module")
def options(smoke: bool) -> dict[str, str]:
    """Of the lazy side where kernels must be complete when timing begins; first steps take none."""
    return {"compile": "off" if smoke else "blocking"}


@pytest.fixture(scope="module")
def names(smoke: bool) -> list[str]:
    """A smoke run leaves out torch.compile, which takes a minute and is not ours to test."""
    return ["eager", "lazy"] if smoke else ["eager", "lazy", "compile"]


@pytest.fixture(scope="module")
def rows(results_dir: Path, names: list[str], recipe: Recipe) -> Iterator[list[list[str]]]:
    """Rows of the result page, written when all benchmarks of this file have added theirs."""
    collected: list[list[str]] = []
    yield collected
    if len(collected) == N_ROWS:
        config = recipe.model_config
        model = f"{config.n_layers} layers, {config.width} wide"
        title = f"Training step of a GPT: {model}, batch {recipe.batch} of {config.context} bytes"
        name = "training.md" if recipe.size == "small" else f"training_{recipe.size}.md"
        (results_dir / name).write_text(page(title, ["", *names], collected))


def bench_step_time(
    benchmark: BenchmarkFixture,
    names: list[str],
    recipe: Recipe,
    options: dict[str, str],
    rows: list[list[str]],
) -> None:
    sides = {name: SIDES[name](recipe, options) for name in names}
    stream = batches_of(recipe)
    check_losses_agree(sides, stream)
    batch = next(stream)
    steps = {name: partial(side.run, *batch) for name, side in sides.items()}
    n_rounds = recipe.steps
    timings = benchmark.pedantic(
        interleaved, args=(steps, n_rounds, max(2, n_rounds // 8)), rounds=1, iterations=1
    )

    spreads = [timings.spread(name) for name in names]
    ratios = [f"{timings.ratio(name, 'eager'):.3f}×" for name in names]
    rows.append(["step, median", *(seconds_text(s.median_s) for s in spreads)])
    rows.append(["step, p10 to p90", *map(range_text, spreads)])
    rows.append(["step against eager, median of rounds", *ratios])
    benchmark.extra_info.update(zip(names, ratios, strict=True))


def bench_first_step_and_memory(
    benchmark: BenchmarkFixture,
    names: list[str],
    recipe: Recipe,
    options: dict[str, str],
    rows: list[list[str]],
    tmp_path: Path,
) -> None:
    def measure() -> list[tuple[Probe, Probe]]:
        return [cold_and_warm(name, recipe, options, tmp_path / name) for name in names]

    pairs = benchmark.pedantic(measure, rounds=1, iterations=1)
    cold, warm = zip(*pairs, strict=True)
    rows.append(["first step, empty caches", *compared([p.seconds[0] for p in cold], seconds_text)])
    rows.append(["first step, full caches", *compared([p.seconds[0] for p in warm], seconds_text)])
    rows.append(["peak memory", *compared([p.peak_bytes for p in warm], bytes_text)])


def batches_of(recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    context = recipe.model_config.context
    return batches(load_text(recipe.text, context), recipe.batch, context, recipe.seed)


def check_losses_agree(sides: dict[str, Side], stream: Iterator[tuple[Tensor, Tensor]]) -> None:
    for tokens, targets in islice(stream, CHECKED_STEPS):
        losses = {name: side.run(tokens, targets) for name, side in sides.items()}
        for name, loss in losses.items():
            difference = relative_difference(losses["eager"], loss)
            assert difference < MAX_RELATIVE_DIFFERENCE, f"{name}: {losses}"


def cold_and_warm(
    side: str, recipe: Recipe, options: dict[str, str], caches: Path
) -> tuple[Probe, Probe]:
    """A short run that finds no caches, then one that finds those of a run with all kernels."""
    env = {
        **os.environ,
        "LAZY_TENSOR_CACHE_DIR": str(caches / "lazy_tensor"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }
    short = replace(recipe, steps=min(recipe.steps, 8))
    cold = probe(side, short, {}, env)
    probe(side, short, options, env)
    return cold, probe(side, short, {}, env)
