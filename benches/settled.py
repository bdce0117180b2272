"""Runs a step until its plans and kernels are final.

In: a step that is replayed, or that calls replayed functions. Out: nothing; the step has settled,
or its time is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lazy_tensor.capture.replay import REPLAYS
from lazy_tensor.dispatch.run.compile_service import compiler

AT_MOST_S = 120.0
"""Most seconds that a step is run."""


def settle(step: Callable[[], object]) -> None:
    """Call `step` until no plan of a replayed function that it calls may improve, and no kernel is
    being built."""
    deadline_s = time.perf_counter() + AT_MOST_S
    while time.perf_counter() < deadline_s:
        # other replayed functions of the process are not this step's
        n_calls = {id(one): one.n_replayed + one.n_recorded for one in REPLAYS}
        step()
        called = [one for one in REPLAYS if one.n_replayed + one.n_recorded != n_calls.get(id(one))]
        if not any(one.may_improve() for one in called) and compiler().wait(0):
            return
