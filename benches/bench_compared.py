"""Six programs by lazy-tensor, `torch.compile`, JAX and lightning-thunder, each beside eager.

Each side runs in a process of its own, with one thread and empty caches. It first runs until it has
its kernels; then its steps and eager ones take turns. Results are compared with eager's. Writes
`results/compared.md`.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import peers
from apart import apart
from compared import N_COMPARED, OURS, PEERS, SIDES, Measured, Settings, measured
from compared_programs import PROGRAMS, RANDOM
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page, seconds_text

OURS_SETTLE = Settings(settles_s=20.0, at_most_s=40.0, rounds=5)
PEERS_SETTLE = Settings(settles_s=1.0, at_most_s=1.0, rounds=5)
"""Peers have all their kernels after the first step."""
QUICK = Settings(settles_s=0.2, at_most_s=0.2, rounds=1)
QUICK_TITLE = list(PROGRAMS)[0]


def bench_compared(benchmark: BenchmarkFixture, quick: bool, results_dir: Path) -> None:
    titles = [QUICK_TITLE] if quick else list(PROGRAMS)
    sides = [side for side in SIDES if peers.missing(PEERS.get(side, side)) is None]
    if quick:
        # it compiles for a minute
        sides.remove("torch.compile")
    found: dict[str, dict[str, Measured]] = {title: {} for title in titles}
    refused: list[str] = []

    def run() -> None:
        for title in titles:
            for side in sides:
                how = QUICK if quick else OURS_SETTLE if side in OURS else PEERS_SETTLE
                one = apart(measured, title, side, how)
                if isinstance(one, Measured):
                    found[title][side] = one
                else:
                    refused.append(f"{side} does not accept {title}: {one}")

    benchmark.pedantic(run, rounds=1, iterations=1)
    rows = []
    for title, of in found.items():
        row = [title, seconds_text(statistics.median(one.eager_s for one in of.values()))]
        for side in sides:
            got = of.get(side)
            row += [f"{got.ratio:.2f}", seconds_text(got.first_s)] if got else ["-", "-"]
        rows.append(row)
    columns = ["program", "eager's step"]
    for side in sides:
        columns += [side, "its first step"]
    # sides draw other random numbers in `RANDOM`: `checked` compares its means
    exact = [one for title, of in found.items() if title != RANDOM for one in of.values()]
    notes = [
        *peers.notes(tuple(PEERS.values())),
        f"one thread, empty caches; lazy and replay run for {OURS_SETTLE.settles_s:.0f} s, and up "
        f"to {OURS_SETTLE.at_most_s:.0f} s while kernels are being built, the others for "
        f"{PEERS_SETTLE.settles_s:.0f} s after the first step; then a side and eager take "
        f"{OURS_SETTLE.rounds} turns each",
        "a step's time over eager's, the median of the turns: smaller is better",
        "lazy: a block a step; replay, torch.compile: of the step's function, the optimizer in it",
        "jax.jit: of the whole step, optimizers by hand; float32; the process is bound to one "
        "core, its compiler too",
        "thunder: of the step's function, or of the model alone where the step trains",
        f"in the first {N_COMPARED} steps results differ from eager's by "
        f"{max(one.gap for one in exact):.0e} of the largest at most; Monte Carlo draws other "
        "numbers by torch.compile and jax.jit, with means that agree within their standard errors",
        *refused,
    ]
    title = "Beside torch.compile, JAX and thunder"
    (results_dir / "compared.md").write_text(page(title, columns, rows, notes))
