"""Training on two ranks over gloo, from empty caches, by this package and by torch's own modules.

Sides take turns, with three runs each. Writes `results/ranks.md`. `LAZY_RANKS_S` sets the seconds
of a run, 20 by default. That takes about ten minutes, in which the machine must be left alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from pytest_benchmark.fixture import BenchmarkFixture
from ranks import PROGRAMS, SIDES
from results_table import page

SECONDS = float(os.environ.get("LAZY_RANKS_S", "20"))
N_RUNS = 3
LAST = 0.2
"""The share of a run's steps that count as settled: the last ones."""


def run(name: str, side: str, seconds: float) -> list[float]:
    """The seconds of each step of a run, in processes of its own (`ranks.py`)."""
    command = [sys.executable, str(Path(__file__).with_name("ranks.py")), name, side, str(seconds)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    times_s: list[float] = json.loads(answer.stdout)
    return times_s


def settled_s(times_s: list[float]) -> float:
    return median(times_s[-max(round(LAST * len(times_s)), 1) :])


def bench_ranks(benchmark: BenchmarkFixture, quick: bool, results_dir: Path) -> None:
    seconds, n_runs = (1.0, 1) if quick else (SECONDS, N_RUNS)
    names = ("tensor_parallel",) if quick else tuple(PROGRAMS)

    def runs_of(name: str) -> dict[str, list[list[float]]]:
        found: dict[str, list[list[float]]] = {side: [] for side in SIDES}
        for _ in range(n_runs):
            for side in SIDES:
                found[side].append(run(name, side, seconds))
        return found

    def all_runs() -> dict[str, dict[str, list[list[float]]]]:
        return {name: runs_of(name) for name in names}

    found = benchmark.pedantic(all_runs, rounds=1, iterations=1)
    rows = []
    for name, sides in found.items():
        settled = {side: median(map(settled_s, runs)) for side, runs in sides.items()}
        step = {
            side: median(sum(times_s) / len(times_s) for times_s in runs)
            for side, runs in sides.items()
        }
        rows.append([
            name, PROGRAMS[name].__doc__ or "", f"{settled['torch'] * 1e3:.1f} ms",
            *(f"{settled[side] / settled['torch']:.2f}" for side in SIDES[1:]),
            *(f"{step[side] / step['torch']:.2f}" for side in SIDES[1:]),
        ])  # fmt: skip
    columns = [
        "program", "", "torch's settled step", "in a block", "by `replay`", "whole run in blocks",
        "whole run by `replay`",
    ]  # fmt: skip
    notes = [
        f"two ranks, each a process of one thread, over gloo; AdamW; {seconds:.0f} s a run, from "
        f"empty caches; medians of {n_runs} runs of each side, in turns",
        "in a block, by `replay`: the time of a settled step (of the last fifth), torch's = 1; "
        "whole run: of all steps from the first on",
    ]
    (results_dir / "ranks.md").write_text(page("Two ranks over gloo", columns, rows, notes))
