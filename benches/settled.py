"""Runs a step until no better plan, or kernel, is to come.

In: a step that is replayed, or calls what is. Out: the step has settled, or time is up.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lazy_tensor.capture.replay import REPLAYS
from lazy_tensor.dispatch.run.compile_service import compiler

AT_MOST_S = 120.0
"""Seconds that a step is run at most."""


def settle(step: Callable[[], object]) -> None:
    deadline_s = time.perf_counter() + AT_MOST_S
    while time.perf_counter() < deadline_s:
        n_calls = {id(one): one.n_replayed + one.n_recorded for one in REPLAYS}
        step()
        called = [one for one in REPLAYS if one.n_replayed + one.n_recorded != n_calls.get(id(one))]
        if not any(one.may_improve() for one in called) and compiler().wait(0):
            return
