"""One side of a comparison with `torch.compile`, JAX and thunder: runs a program beside eager.

In: a program by its title, a side. Out: a `Measured`, or why the side doesn't accept the program.
`bench_compared.py` calls `measured` in a process of its own for each.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch
from compared_programs import PROGRAMS, RANDOM
from gain import turn_s

import lazy_tensor
from lazy_tensor.capture.replay import REPLAYS
from lazy_tensor.dispatch.run.compile_service import compiler
from lazy_tensor.examples.race.scenes import SIDES as FORMS

Values = list[np.ndarray[Any, np.dtype[np.float32]]]

OURS = ("lazy", "replay")
JAX, THUNDER = "jax.jit", "thunder"
SIDES = (*OURS, "torch.compile", JAX, THUNDER)
PEERS = {JAX: "jax", THUNDER: "thunder"}
"""Sides that may be missing, by the names that `peers` gives them."""

N_COMPARED = 8
"""Steps whose results are compared: the first ones."""
TOLERANCE = 1e-3
"""The largest difference from eager's results that is allowed, over the largest result."""
STANDARD_ERRORS = 6.0
"""Standard errors by which means of random results may differ."""
ONE_CORE = 1.1
"""Most seconds of processor time in a second if one core is used."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A side runs for `settles_s` before it is timed. Ours goes on until nothing is being compiled,
    but `at_most_s` at most. `rounds` are the turns of a side and of eager."""

    settles_s: float
    at_most_s: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Measured:
    """`ratio`: a settled step's time over eager's. `gap`: the largest difference of a result from
    eager's, over the largest of that result."""

    eager_s: float
    ratio: float
    first_s: float
    gap: float


def measured(title: str, side: str, how: Settings, caches: str) -> Measured | str:
    """Measure a program on a side, with its caches in the folder `caches`."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(caches, "inductor"))
    torch.set_num_threads(1)
    lazy_tensor.configure(cache_dir=Path(caches, "lazy_tensor"), warn=False)
    if side == JAX:
        use_one_core()
    ours = begun(title, side)
    began_s = time.perf_counter()
    try:
        results = ours()
    except Exception as error:
        if side not in PEERS:
            raise
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), ''):.120}"
    first_s = time.perf_counter() - began_s
    values = [copied(results), *(copied(ours()) for _ in range(N_COMPARED - 1))]
    settle(ours, side, how)
    # eager begins from the same seed, and its first steps are compared with ours
    eager = begun(title, "eager")
    gap = checked(title, values, [copied(eager()) for _ in values])
    if side == JAX:
        n_cores = cores_of(ours)
        assert n_cores < ONE_CORE, f"JAX uses {n_cores:.2f} cores, and eager one"
    turns = [(turn_s(ours), turn_s(eager)) for _ in range(how.rounds)]
    ratio = statistics.median(a / b for a, b in turns)
    return Measured(statistics.median(b for _, b in turns), ratio, first_s, gap)


def begun(title: str, side: str) -> Callable[[], Any]:
    """The program's step as the side runs it, with the same initial values on all sides."""
    torch.manual_seed(0)
    if side == JAX:
        import compared_jax

        return compared_jax.FORMS[title]()
    # thunder accepts no function that has backward and the optimizer inside
    if side == THUNDER:
        return PROGRAMS[title](FORMS["eager"], partial(peers.compiled, "thunder"))
    return PROGRAMS[title](FORMS[side], FORMS["eager"])


def use_one_core() -> None:
    """Bind the process to one core. XLA reads the flags when JAX is imported."""
    # the flags alone are not enough: `measured` checks the processor time
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def cores_of(step: Callable[[], object], seconds: float = 0.3) -> float:
    """Seconds of processor time that steps take in a second."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    while (passed_s := time.perf_counter() - began_s) < seconds:
        step()
    return (time.process_time() - cpu_s) / passed_s


def settle(step: Callable[[], object], side: str, how: Settings) -> None:
    """Do steps until the side has its kernels, or its time is over."""
    began_s = time.perf_counter()
    while (passed_s := time.perf_counter() - began_s) < how.at_most_s:
        if passed_s >= how.settles_s and not (side in OURS and may_improve()):
            return
        step()


def may_improve() -> bool:
    """Whether kernels are being built, or a replayed call may get a better plan."""
    return not compiler().wait(0) or any(one.may_improve() for one in REPLAYS)


def copied(results: Sequence[Any]) -> Values:
    """Copies of a side's results as arrays: a later step may write the results' memory."""
    return [
        one.detach().clone().numpy() if isinstance(one, torch.Tensor) else np.array(one)
        for one in results
    ]


def checked(title: str, ours: Sequence[Values], eagers: Sequence[Values]) -> float:
    """The largest difference from eager's results, over the largest of them.

    Raises AssertionError if it is more than rounding explains, or than chance does for `RANDOM`.
    """
    gap = max(
        float(np.abs(one - other).max() / np.abs(other).max())
        for mine, theirs in zip(ours, eagers, strict=True)
        for one, other in zip(mine, theirs, strict=True)
    )
    if gap > TOLERANCE and title == RANDOM:
        prices = [np.array([float(price) for (price,) in side]) for side in (ours, eagers)]
        error = np.sqrt(sum(one.var(ddof=1) / one.size for one in prices))
        apart = abs(prices[0].mean() - prices[1].mean())
        assert apart < STANDARD_ERRORS * error, f"{title}: {prices}"
    else:
        assert gap < TOLERANCE, f"{title}: results differ by {gap:.1e} of the largest"
    return gap
