"""Training steps of whole models: eager, in blocks, by `replay`, and by peers.

Settled steps are timed in this process, in turns. Processes of their own measure the first step,
with empty caches and with full ones, and the peak of memory. Writes `results/training.md` and its
plot.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import peers
import plots
import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import bytes_text, page, seconds_text
from timing import interleaved
from workloads import QUICK, SIDES, WORKLOADS, Report, Step, refusal, run_alone, run_here, step_of

from lazy_tensor.capture.replay import Replay

COLUMNS = ("model", "side", "settled step", "/ eager", "first step, empty caches",
           "first step, full caches", "peak memory", "/ eager")  # fmt: skip
N_CHECKED = 3
MAX_RELATIVE_DIFFERENCE = 2e-3
"""Of the loss after a few steps from eager's. Compilers compute in another order."""


@dataclass(slots=True)
class Results:
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)
    first_s: dict[str, dict[str, float]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def sides(quick: bool) -> tuple[str, ...]:
    """All sides; a quick run has no peers, which take minutes and are not ours to test."""
    return SIDES[:3] if quick else peers.present(SIDES)


@pytest.fixture(scope="module")
def results(results_dir: Path) -> Iterator[Results]:
    found = Results()
    yield found
    if len(found.ratios) == len(WORKLOADS):  # none in a quick run
        text = page(
            "Training steps, fused AdamW", COLUMNS, found.rows, peers.notes(SIDES) + found.notes
        )
        (results_dir / "training.md").write_text(text)
        panels = {"settled step / eager": found.ratios, "first step, seconds": found.first_s}
        plots.bars(results_dir / "training.png", "Training steps", panels)


@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*[Pp]rofiler")  # the compiler's
@pytest.mark.filterwarnings("ignore:replay")  # what it stumbles over is noted
@pytest.mark.parametrize("name", WORKLOADS)
def bench_training(
    benchmark: BenchmarkFixture,
    quick: bool,
    sides: tuple[str, ...],
    results: Results,
    tmp_path: Path,
    name: str,
) -> None:
    workload = (QUICK if quick else WORKLOADS)[name]
    options = {"compile": "off" if quick else "blocking"}
    alone = {"compile": "off"} if quick else {}
    steps: dict[str, Step] = {}
    losses: dict[str, float] = {}
    for side in sides:
        try:
            step = step_of(workload, side, options)
            losses[side] = [step().item() for _ in range(N_CHECKED)][-1]
            steps[side] = step
        except Exception as error:
            if side not in peers.PEERS:
                raise
            results.notes.append(f"{side} does not take {workload.title}: {refusal(error)}")
    for side, loss in losses.items():
        assert abs(loss / losses["eager"] - 1) < MAX_RELATIVE_DIFFERENCE, (side, losses)

    rounds, warmup = (2, 2) if quick else (24, 4)
    timings = benchmark.pedantic(interleaved, args=(steps, rounds, warmup), rounds=1, iterations=1)
    replayed = getattr(steps["replay"], "func", None)
    if isinstance(replayed, Replay) and not replayed.n_replayed:
        obstacle = re.sub(r"\S*/site-packages/", "", replayed.obstacle)
        results.notes.append(f"replay records every step of {workload.title}: {obstacle}")
    # first steps with empty caches (cold), then with caches that a blocking run has filled (warm)
    cold, warm = {}, {}
    for side in steps:
        if quick:
            cold[side] = warm[side] = run_here(name, side, 2, alone, quick)
            continue
        caches = tmp_path / side
        cold[side] = run_alone(name, side, 6, alone, caches)
        run_alone(name, side, 3, options, caches)
        warm[side] = run_alone(name, side, 6, alone, caches)
    if quick:
        return
    results.ratios[name] = {side: timings.ratio(side, "eager") for side in steps}
    results.first_s[name] = {side: report.seconds[0] for side, report in cold.items()}
    peaks = {side: report.peak_bytes for side, report in warm.items()}
    for side in steps:
        results.rows.append([
            workload.title if side == "eager" else "",
            side,
            seconds_text(timings.spread(side).median_s),
            f"{results.ratios[name][side]:.2f}×",
            *(_first_text(reports, side) for reports in (cold, warm)),
            bytes_text(peaks[side]),
            f"{peaks[side] / peaks['eager']:.2f}×",
        ])  # fmt: skip
    benchmark.extra_info.update(results.ratios[name])


def _first_text(reports: dict[str, Report], side: str) -> str:
    mine, eagers = (reports[of].seconds[0] for of in (side, "eager"))
    return f"{seconds_text(mine)}  {mine / eagers:.2f}×"
