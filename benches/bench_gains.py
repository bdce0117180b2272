"""What each form of laziness gains: eight programs, four sides, each in a process of its own.

One thread, empty caches, one process after another. Writes `results/gains.md`.
"""

from __future__ import annotations

from pathlib import Path

from gain_programs import ARRAYS, PROGRAMS
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page, seconds_text

from lazy_tensor.cli.scenes import SIDES
from lazy_tensor.cli.turn import Turn, difference, run_turn

SECONDS, TRAINING_S, EAGER_S = 30, 60, 8
LEAST_STEPS = 50
"""Some first steps take longer than all the seconds."""


def bench_gains(benchmark: BenchmarkFixture, quick: bool, results_dir: Path) -> None:
    titles = list(PROGRAMS)[: 2 if quick else None]
    turns: dict[str, dict[str, Turn]] = {title: {} for title in titles}
    sides = [side for side in SIDES if not (quick and side == "torch.compile")]

    def run() -> None:
        for title in titles:
            for side in sides:
                seconds, least = (0.2, 1) if quick else (seconds_of(title, side), LEAST_STEPS)
                turn = run_turn(PROGRAMS[title], side, seconds, least_steps=least)
                turns[title][side] = turn
                assert not turn.error, (title, side, turn.error)

    benchmark.pedantic(run, rounds=1, iterations=1)
    rows = [[title, *cells(of)] for title, of in turns.items()]
    columns = ["program", "eager's step"]
    for side in sides[1:]:
        columns += [side, "its first step", "largest difference"]
    notes = [
        "one thread, empty caches; one process after another: arrays "
        f"{SECONDS} s, training {TRAINING_S} s, eager {EAGER_S} s, {LEAST_STEPS} steps at least",
        "settled step over eager's, smaller is better: medians of the last fifth of the steps",
        "lazy: a block a step; replay, torch.compile: of the step's function, the optimizer in it",
    ]
    (results_dir / "gains.md").write_text(page("What it gains", columns, rows, notes))


def seconds_of(title: str, side: str) -> int:
    if side == "eager":
        return EAGER_S
    return SECONDS if title in ARRAYS else TRAINING_S


def cells(turns: dict[str, Turn]) -> list[str]:
    eager, *others = turns.values()
    found = [seconds_text(eager.settled_s())]
    for turn in others:
        gap = difference(eager, turn)
        found += [
            f"{turn.settled_s() / eager.settled_s():.2f}",
            seconds_text(turn.times_s[0]),
            "" if gap is None else f"{gap:.0e}",
        ]
    return found
