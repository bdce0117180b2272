"""How well the default chooses between recording and eager, for programs of many kinds.

Its time is compared with that of the better one of eager and `record="always"`. Writes
`results/choice.md`. `LAZY_CHOICE_S` sets the seconds for each side, 10 by default. That takes about
an hour, in which the machine must be left alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from choice import Chosen, all_chosen, mean_of
from choice_programs import PROGRAMS
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page

SECONDS = float(os.environ.get("LAZY_CHOICE_S", "10"))
TRIED = ("heat",)
"""The programs of a quick run."""


def bench_choice(benchmark: BenchmarkFixture, quick: bool, results_dir: Path) -> None:
    seconds, names = (1.0, TRIED) if quick else (SECONDS, tuple(PROGRAMS))

    def choose() -> None:
        found: list[Chosen] = []
        for one in all_chosen(names, seconds):
            found.append(one)
            (results_dir / "choice.md").write_text(told(found, seconds))

    benchmark.pedantic(choose, rounds=1, iterations=1)


def told(found: Sequence[Chosen], seconds: float) -> str:
    """The page on the programs so far. It is written after each one, so that a run that is cut
    short leaves a page."""
    rows = [
        [
            one.name, PROGRAMS[one.name][0], one.way, f"{one.eager_s * 1e3:.2f} ms",
            *(f"{x:.2f}" for x in (one.auto, one.always, one.regret, one.from_start)),
        ]
        for one in found
    ]  # fmt: skip
    columns = [
        "program", "", "block around", "eager's step", "default", 'record="always"', "regret",
        "from the start",
    ]  # fmt: skip
    regret, from_start = (
        f"{mean_of(ratios):.3f} in the geometric mean, {max(ratios):.2f} at most"
        for ratios in ([one.regret for one in found], [one.from_start for one in found])
    )
    notes = [
        f"{seconds:.0f} s a side, each a process from empty caches, in turns, one thread",
        "default, record: a settled step's time, eager's = 1, smaller is better",
        f"regret: the default's over the better of eager's and record's: {regret}",
        f"from the start: the same of all steps from the first on: {from_start}",
        "eager of sharded programs is torch's DTensor",
    ]
    return page("What the default chooses", columns, rows, notes)
