"""Plans that run under observation: torch's profiler, and the timers of `explain(fn)`.

In: a plan about to run. Out: its function, or one each of whose steps runs inside what observes it.
Where nobody looks, a flush pays for two questions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch.profiler import record_function

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.plan import Plan, Step
from lazy_tensor.kernels.fusion import Fusion

_NOTHING: AbstractContextManager[Any] = nullcontext()


class _Timing(threading.local):
    steps_s: list[float] | None = None
    """Of the plan that ran last, while somebody wants to know."""


_timing = _Timing()


@contextmanager
def timing() -> Iterator[None]:
    """Time each step of the plans that this thread runs; on a GPU wait for each."""
    before, _timing.steps_s = _timing.steps_s, []
    try:
        yield
    finally:
        _timing.steps_s = before


def is_timing() -> bool:
    """Whether somebody wants each step's time."""
    return _timing.steps_s is not None


def times_s() -> tuple[float, ...]:
    """Seconds that each step of the last plan took, if it was timed."""
    return tuple(_timing.steps_s or ())


def function_of(plan: Plan) -> Callable[[list[torch.Tensor], list[complex]], Any]:
    """`plan.function`, observed if anybody wants to see."""
    if is_timing():
        _timing.steps_s = []
        return lambda leaves, scalars: plan.observed(leaves, scalars, _timed)
    if torch_private.is_profiled():
        steps = [_shown(plan, step) for step in plan.steps]
        return lambda leaves, scalars: plan.observed(leaves, scalars, steps.__getitem__)
    return plan.function


def flush_shown(cause: str) -> AbstractContextManager[Any]:
    """A range of the profiler for a flush."""
    if torch_private.is_profiled():
        return record_function(f"lazy_tensor flush: {cause}")
    return _NOTHING


@contextmanager
def _timed(_: int) -> Iterator[None]:
    start = perf_counter()
    try:
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    finally:
        if _timing.steps_s is not None:
            _timing.steps_s.append(perf_counter() - start)


def _shown(plan: Plan, step: Step) -> AbstractContextManager[Any]:
    """A range of the profiler for a segment; other calls show themselves."""
    return _NOTHING if step.fusion is None else record_function(name_of(step.fusion))


def name_of(fusion: Fusion) -> str:
    """A segment's name in a profile: `segment mul, add, relu (inductor)`."""
    ops = [call.op.overloadpacket.__name__ for call in fusion.segment.calls]
    listed = ", ".join(ops[:MOST_NAMED])
    if len(ops) > MOST_NAMED:
        listed += f" and {len(ops) - MOST_NAMED} more"
    runs = fusion.backend.name if fusion.status == "ready" else "op by op"
    return f"lazy_tensor segment {listed} ({runs})"


MOST_NAMED = 6
