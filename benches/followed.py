"""The advice of a report on a program, and what following it gains.

In: a program of `advised.py` by its title. Out: a `Followed`. `bench_advice.py` runs it in a
process of its own.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from advised import Step, programs
from gain import turn_s

import lazy_tensor

ROUNDS = 11


@dataclass(frozen=True, slots=True)
class Followed:
    """`advice` is the report's, the largest share first. `gained`: the time of a step that follows
    it, over that of one that doesn't; None if nothing should be advised."""

    advice: list[str]
    gained: float | None


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
    """Do steps for `seconds`, and return `step`. The report is on the last third of that time."""
    # the counters are reset at the begin of each part
    for part_s in (seconds * 2 / 3, seconds / 3):
        lazy_tensor.reset_stats()
        until_s = time.perf_counter() + part_s
        while time.perf_counter() < until_s:
            step()
    return step
