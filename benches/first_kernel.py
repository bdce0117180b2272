"""When a program has its first kernel, and what its steps take until then.

In: a number of threads, and whether another process keeps as many busy. Out: a `FirstKernel`.
`bench_first_kernel.py` runs it in a process of its own.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import lazy_tensor
from lazy_tensor.examples.race.scenes import SCENES, SIDES, Step
from lazy_tensor.kernels.service.fusion import Fusion

BUSY = """
import sys, torch
torch.set_num_threads(int(sys.argv[1]))
x = torch.rand(2000, 2000)
while True:
    x.sin()
"""
BEGINS_S = 5.0
"""Seconds for the other process to import torch, before anything is timed."""


@dataclass(frozen=True, slots=True)
class FirstKernel:
    """All in seconds. `eager_s`: a step in eager. `came_s`: until the first kernel, or `limit_s` if
    there was none. `before_s`, `longest_s`: the median and the longest step until then. `after_s`:
    the median step after it."""

    eager_s: float
    came_s: float
    before_s: float
    longest_s: float
    after_s: float


def first_kernel(n_threads: int, is_busy: bool, limit_s: float, caches: str) -> FirstKernel:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(caches, "inductor"))
    torch.set_num_threads(n_threads)
    lazy_tensor.configure(cache_dir=Path(caches, "lazy_tensor"), warn=False)
    scene = SCENES["gray_scott"]
    others = []
    if is_busy:
        others.append(subprocess.Popen([sys.executable, "-c", BUSY, str(n_threads)]))
        time.sleep(BEGINS_S)
    try:
        eager = [step_s(step) for step in [scene.begin(SIDES["eager"])] * 20]
        step = scene.begin(SIDES["lazy"])
        began_s = time.perf_counter()
        # until the first kernel, and two seconds more for the steps after it
        came_s, before, after = limit_s, list[float](), list[float]()
        while (passed_s := time.perf_counter() - began_s) < min(limit_s, came_s + 2):
            (before if came_s == limit_s else after).append(step_s(step))
            if came_s == limit_s and Fusion.n_adopted:
                came_s = passed_s
    finally:
        for other in others:
            other.kill()
            other.wait()
    return FirstKernel(
        statistics.median(eager), came_s, statistics.median(before), max(before),
        statistics.median(after or before),
    )  # fmt: skip


def step_s(step: Step) -> float:
    began_s = time.perf_counter()
    step()
    return time.perf_counter() - began_s
