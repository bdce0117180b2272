"""Eight programs by blocks, by `replay` and by `torch.compile`, each in a process of its own.

One thread, empty caches. A form first runs until it has its kernels. Then its steps and eager ones
take turns, because the machine's speed changes from minute to minute. Writes `results/gains.md`.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from apart import apart
from gain import COMPARED, Gain, gained
from gain_programs import ARRAYS, PROGRAMS
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page, seconds_text

from lazy_tensor.examples.race.scenes import SIDES

SETTLES_S, TRAINING_SETTLES_S, LAZY_TRAINING_S = 30.0, 40.0, 100.0
"""Seconds that a form runs before it is timed: array programs, training, and training by blocks,
which waits for most of its kernels."""
LEAST_STEPS = 50
"""Steps that a form does at least before it is timed: its first step may take all the seconds."""
ROUNDS = 15
"""Turns of a form and of eager."""


def bench_gains(benchmark: BenchmarkFixture, quick: bool, results_dir: Path) -> None:
    titles = list(PROGRAMS)[: 2 if quick else None]
    sides = [side for side in SIDES if side != "eager" and not (quick and side == "torch.compile")]
    gains: dict[str, dict[str, Gain]] = {title: {} for title in titles}

    def run() -> None:
        for title in titles:
            for side in sides:
                how = (0.2, 1, 1) if quick else (settles_s(title, side), LEAST_STEPS, ROUNDS)
                gains[title][side] = apart(gained, title, side, *how)

    benchmark.pedantic(run, rounds=1, iterations=1)
    rows = []
    for title, of in gains.items():
        row = [title, seconds_text(statistics.median(gain.eager_s for gain in of.values()))]
        for gain in of.values():
            row += [f"{gain.ratio:.2f}", seconds_text(gain.first_s), f"{gain.gap:.0e}"]
        rows.append(row)
    columns = ["program", "eager's step"]
    for side in sides:
        columns += [side, "its first step", "largest difference"]
    notes = [
        f"one thread, empty caches; a form runs for {SETTLES_S:.0f} s, where it trains "
        f"{TRAINING_SETTLES_S:.0f} s (by blocks, which wait for most kernels, "
        f"{LAZY_TRAINING_S:.0f} s), and {LEAST_STEPS} steps at least; then it and eager take "
        f"{ROUNDS} turns each",
        "its step over eager's, the median of the turns: smaller is better",
        "lazy: a block a step; replay, torch.compile: of the step's function, the optimizer in it",
        f"largest difference: from eager's value in the first {COMPARED} steps",
    ]
    (results_dir / "gains.md").write_text(page("What it gains", columns, rows, notes))


def settles_s(title: str, side: str) -> float:
    if title in ARRAYS:
        return SETTLES_S
    return LAZY_TRAINING_S if side == "lazy" else TRAINING_SETTLES_S
