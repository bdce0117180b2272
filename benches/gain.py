"""How much faster a form of a program is than eager, once it has its kernels.

In: a program of `gain_programs.py` by its title, a side. Out: a `Gain`. `bench_gains.py` runs it in
a process of its own.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from gain_programs import PROGRAMS

import lazy_tensor
from lazy_tensor.examples.race.scenes import SIDES, Step

ROUND_S = 0.3
"""Least seconds of a turn."""
COMPARED = 8
"""Steps whose values are compared with eager's: the first ones."""


@dataclass(frozen=True, slots=True)
class Gain:
    """`ratio`: a settled step's time over eager's. `gap`: the largest difference of a value from
    eager's."""

    eager_s: float
    ratio: float
    first_s: float
    gap: float


def gained(
    title: str, side: str, settles_s: float, least_steps: int, rounds: int, caches: str
) -> Gain:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(caches, "inductor"))
    torch.set_num_threads(1)
    lazy_tensor.configure(cache_dir=Path(caches, "lazy_tensor"), warn=False)
    torch.manual_seed(0)
    ours = PROGRAMS[title](SIDES[side])
    began_s = time.perf_counter()
    values = [ours()]
    first_s = time.perf_counter() - began_s
    n_steps = 1
    while n_steps < least_steps or time.perf_counter() - began_s < settles_s:
        value = ours()
        if n_steps < COMPARED:
            values.append(value)
        n_steps += 1
    # the same seed, so that eager begins with the same weights and draws the same numbers
    torch.manual_seed(0)
    eager = PROGRAMS[title](SIDES["eager"])
    gap = max(float((eager() - value).abs().max()) for value in values)
    turns = [(turn_s(ours), turn_s(eager)) for _ in range(rounds)]
    ratio = statistics.median(a / b for a, b in turns)
    return Gain(statistics.median(b for _, b in turns), ratio, first_s, gap)


def turn_s(step: Step) -> float:
    """Seconds of a step: the mean over a turn."""
    n_steps, began_s = 0, time.perf_counter()
    while (passed_s := time.perf_counter() - began_s) < ROUND_S:
        step()
        n_steps += 1
    return passed_s / n_steps
