"""Runs plans under observation: by torch's profiler, or by the timers of `explain(fn)`.

In: a plan about to run. Out: a function that runs it, each step inside an observer if somebody
looks. Else a flush pays for two checks alone. Called by `flush` and by captured calls.

Ranges of the user's (`record_function`) hold ops at the time of recording. The ops run later, so
the ranges are noted with the trace and opened again around the steps that run them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch.profiler import record_function

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.ops.request import Request
from lazy_tensor.dispatch.plan.plan import Given, Plan, Step
from lazy_tensor.dispatch.tiering.sites import settled_s
from lazy_tensor.dispatch.trie.trace import State, Trace
from lazy_tensor.kernels.service.fusion import Fusion

_NOTHING: AbstractContextManager[Any] = nullcontext()
Run = Callable[[list[torch.Tensor], list[complex], Given], None]


class _Timing(threading.local):
    steps_s: list[float] | None = None
    """Seconds of each step of the plan that ran last; None while nobody wants them."""


_timing = _Timing()


@contextmanager
def timing() -> Iterator[None]:
    """Time each step of the plans that this thread runs, and wait for the GPU after each."""
    before, _timing.steps_s = _timing.steps_s, []
    try:
        yield
    finally:
        _timing.steps_s = before


def is_timing() -> bool:
    """Whether somebody wants each step's time."""
    return _timing.steps_s is not None


def is_looked_at() -> bool:
    """Whether a flush is timed or profiled, or a range of the user's was noted or is open.

    C++ runs known plans only where this is False: it doesn't observe steps, nor take ranges.
    """
    open_ = _open
    is_timed = _timing.steps_s is not None
    return is_timed or torch_private.is_profiled() or bool(open_.noted or open_.names)


def times_s() -> tuple[float, ...]:
    """Seconds that each step of the last plan took; empty if it was not timed."""
    return tuple(_timing.steps_s or ())


def run_of(plan: Plan, state: State | None = None, noted: Noted | None = None) -> Run:
    """The function that runs the plan: `plan.run`, or `plan.run_observed` if somebody looks.

    `state` is where its trace ended, `noted` are the user's ranges in it.
    """
    if is_timing():
        _timing.steps_s = []
        return partial(plan.run_observed, around=_timed)
    if torch_private.is_profiled():
        ranges = _ranges(state, noted or [])
        return partial(plan.run_observed, around=lambda i: _shown(plan.steps[i], ranges))
    # a plan that isn't checked yet has to compare its results with the recorded metadata
    return plan.run if plan.is_checked else plan.run_observed


def note_range(trace: Trace, request: Request) -> None:
    """Note where in a trace a range of the user's begins or ends: `record_function("forward")`.

    The range isn't part of the trie: a profiled step must run the same plan as others.
    """
    if not torch_private.is_profiled():
        # ranges that began under a profiler which has stopped are forgotten
        _open.names.clear()
        _open.noted.clear()
        return
    if request.op is torch_private.RANGE_BEGINS:
        _open.names.append(request.args[0])
        _open.noted.append((trace.state, request.args[0]))
    elif _open.names:
        _open.names.pop()
        _open.noted.append((trace.state, None))


Noted = list[tuple["State", "str | None"]]
"""The states behind which a range began, with its name, or the innermost one ended, with None."""


def take_ranges(trace: Trace) -> Noted:
    """The ranges of a trace that was just taken out.

    Those that haven't ended go on in the next trace: they are noted again at its root, where the
    trace stands now.
    """
    noted = _open.noted
    if not (noted or _open.names):
        return noted
    _open.noted = [(trace.state, name) for name in _open.names]
    return noted


class _Open(threading.local):
    """The user's ranges: the `names` of those open now, and what is `noted` for the trace."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.noted: Noted = []


_open = _Open()


def _ranges(state: State | None, noted: Noted) -> dict[int, tuple[str, ...]]:
    """For each recorded call, by `id`, the names of the ranges around it, outermost first."""
    found: dict[int, tuple[str, ...]] = {}
    names: tuple[str, ...] = ()
    behind: dict[int, list[str | None]] = {}
    for where, name in noted:
        behind.setdefault(id(where), []).append(name)
    for one in [] if state is None else state.path():
        if one.step is not None:
            found[id(one.step)] = names
        for name in behind.get(id(one), ()):
            names = names[:-1] if name is None else (*names, name)
    return found


def flush_shown(cause: str) -> AbstractContextManager[Any]:
    """A context that shows a flush as a range of the profiler, if that is on."""
    if torch_private.is_profiled():
        return record_function(f"lazy_tensor flush: {cause}")
    return _NOTHING


@contextmanager
def _timed(_: int) -> Iterator[None]:
    start = perf_counter()
    try:
        yield
        settled_s()
    finally:
        if _timing.steps_s is not None:
            _timing.steps_s.append(perf_counter() - start)


@contextmanager
def _shown(step: Step, ranges: dict[int, tuple[str, ...]]) -> Iterator[None]:
    """The profiler's ranges around a step: the user's, and one that names a segment.

    Single calls need none: torch's profiler shows ops itself. A segment whose calls come from
    several ranges is shown in that of the first.
    """
    names = next((ranges[id(node)] for node in step.nodes if id(node) in ranges), ())
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(record_function(name))
        if step.fusion is not None:
            stack.enter_context(record_function(name_of(step.fusion)))
        yield


def name_of(fusion: Fusion) -> str:
    """A segment's name in a profile: `segment mul, add, relu (inductor)`."""
    ops = [call.op.overloadpacket.__name__ for call in fusion.segment.calls]
    listed = ", ".join(ops[:MOST_NAMED])
    if len(ops) > MOST_NAMED:
        listed += f" and {len(ops) - MOST_NAMED} more"
    runs = fusion.backend.name if fusion.status == "ready" else "op by op"
    return f"lazy_tensor segment {listed} ({runs})"


MOST_NAMED = 6
