"""What `explain()` advises on programs with a known bottleneck, and what following it gains.

By default, one thread, empty caches, a process each. Writes `results/advice.md`.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from advised import Step, programs
from apart import apart
from gain import turn_s
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page

import lazy_tensor

SETTLES_S, ROUNDS = 30.0, 11


@dataclass(frozen=True, slots=True)
class Followed:
    """`advice` is the report's, largest first; `gained`: a step's time that follows it, over that
    of one that doesn't."""

    advice: list[str]
    gained: float | None


def bench_advice(benchmark: BenchmarkFixture, quick: bool, results_dir: Path) -> None:
    titles = [title for title, _ in programs()][: 1 if quick else None]
    seconds = 0.5 if quick else SETTLES_S
    found: dict[str, Followed] = {}

    def run() -> None:
        found.update((title, apart(followed, title, seconds)) for title in titles)

    benchmark.pedantic(run, rounds=1, iterations=1)
    table = dict(programs())
    rows = [
        [
            title, one.advice[0].replace("|", "\\|") if one.advice else "nothing",
            table[title].change or "nothing", "" if one.gained is None else f"{one.gained:.2f}",
        ]
        for title, one in found.items()
    ]  # fmt: skip
    notes = [
        f"default settings, one thread, empty caches; each form runs for {seconds:.0f} s",
        "gained: a step's time after the change over that before, the median of turns",
    ]
    columns = ["program", "what would help most", "the change", "gained"]
    (results_dir / "advice.md").write_text(page("What the report advises", columns, rows, notes))
    if not quick:
        wrong = [title for title, one in found.items() if not is_right(table[title].says, one)]
        assert not wrong, f"other advice than what helps: {wrong}"


def is_right(says: str, one: Followed) -> bool:
    """Whether what helps is advised first; or nothing, where nothing helps."""
    return says in one.advice[0] if says and one.advice else not says and not one.advice


def followed(title: str, seconds: float, caches: str) -> Followed:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(caches, "inductor"))
    torch.set_num_threads(1)
    lazy_tensor.configure(cache_dir=Path(caches, "lazy_tensor"), warn=False)
    program = dict(programs())[title]
    before = settled(program.begin(False), seconds)
    advice = [str(one) for one in lazy_tensor.explain().advice]
    if not program.says:
        return Followed(advice, None)
    after = settled(program.begin(True), seconds)
    turns = [turn_s(after) / turn_s(before) for _ in range(ROUNDS)]
    return Followed(advice, statistics.median(turns))


def settled(step: Step, seconds: float) -> Step:
    """`step`, which has run for so long; the report is on the last third of it."""
    for part_s in (seconds * 2 / 3, seconds / 3):
        lazy_tensor.reset_stats()
        until_s = time.perf_counter() + part_s
        while time.perf_counter() < until_s:
            step()
    return step
