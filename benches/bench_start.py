"""Programs as people write them, timed from their first step on, in processes with empty caches.

Writes `results/start.md` and its picture. `LAZY_TENSOR_START_S` sets the seconds of a process, 60
by default. Sides run one after another, so the machine must be left alone meanwhile.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from statistics import mean, median

import plots
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page
from start_programs import PROGRAMS, SIDES, run_apart

SECONDS = float(os.environ.get("LAZY_TENSOR_START_S", "60"))
TRIED = ("runge_kutta", "mlp")
"""The programs of a quick run."""
N_BEFORE, N_WINDOW = 3, 10
"""First steps that don't count for the worst window, and steps in a window."""


def cells(times: list[float], eager: list[float]) -> list[str]:
    """Steps done over eager's; the last fifth's median and the worst window of ten over eager's
    median."""
    usual = median(eager)
    last = times[-max(len(times) // 5, 1) :]
    windows = [mean(times[i : i + N_WINDOW]) for i in range(N_BEFORE, len(times) - N_WINDOW + 1)]
    worst = max(windows, default=math.nan)
    return [
        f"{len(times) / len(eager):.2f}×", f"{median(last) / usual:.2f}×", f"{worst / usual:.1f}×"
    ]  # fmt: skip


def bench_start(benchmark: BenchmarkFixture, quick: bool, results_dir: Path) -> None:
    seconds, names = (1.0, TRIED) if quick else (SECONDS, tuple(PROGRAMS))
    threads = torch.get_num_threads()
    times: dict[str, dict[str, list[float]]] = {name: {} for name in names}

    def run() -> None:
        for name in names:
            for side in SIDES:
                times[name][side] = run_apart(name, side, seconds, threads)

    benchmark.pedantic(run, rounds=1, iterations=1)
    rows = [
        [
            name, (PROGRAMS[name].__doc__ or "").strip(), f"{median(of['eager']) * 1e3:.2f} ms",
            *(cell for side in SIDES[1:] for cell in cells(of[side], of["eager"])),
        ]
        for name, of in times.items()
    ]  # fmt: skip
    columns = [
        "program", "", "eager's step",
        *(f"{side}: {what}" for side in SIDES[1:] for what in ("steps", "last fifth", "worst ten")),
    ]  # fmt: skip
    notes = [
        f"{seconds:.0f} s a process, one process after another",
        "loop: a block around the loop; step: a block around each step; wrap: no block",
        "steps: done in that time, eager = 1, more is better; last fifth: its median step, eager's "
        "median = 1; worst ten: the longest ten steps in a row after the third, the same",
    ]
    (results_dir / "start.md").write_text(page("From the first step on", columns, rows, notes))
    if not quick:
        plots.over_time(results_dir / "start.png", f"steps over {seconds:.0f} s", times)
