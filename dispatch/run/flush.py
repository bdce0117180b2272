"""Runs what a trace has recorded: state to plan, plan to values.

In: a trace and a cause. Out: each live value has its data (or the failure that kept it from having
any). The only caller of plans, and the only place where a trace's content leaves it.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from lazy_tensor.dispatch import settings, torch_private
from lazy_tensor.dispatch.ops.rules import run_at_once
from lazy_tensor.dispatch.plan.foreach import taken_apart
from lazy_tensor.dispatch.plan.graph import Graph, graph_of, without_repeats
from lazy_tensor.dispatch.plan.interpret import MISJUDGED, OWN_STRIDES, interpret
from lazy_tensor.dispatch.plan.partition import Fusibility, units_of
from lazy_tensor.dispatch.plan.plan import Plan, Planner
from lazy_tensor.dispatch.plan.remat import rematerialized
from lazy_tensor.dispatch.run import hits, memory_sharing, profiling, watch
from lazy_tensor.dispatch.run.failure import rescue, without_frames
from lazy_tensor.dispatch.stats import STATS, FlushRecord
from lazy_tensor.dispatch.trie import trace as traces
from lazy_tensor.dispatch.trie.recompile_reason import reason_of_miss
from lazy_tensor.dispatch.trie.trace import (
    Node,
    Pending,
    State,
    Trace,
    Value,
    is_apart,
    live_values,
)
from lazy_tensor.dispatch.user_frame import user_line
from lazy_tensor.kernels import backend as backends
from lazy_tensor.kernels import cache as caches
from lazy_tensor.kernels.counters import Counters
from lazy_tensor.kernels.extension import program
from lazy_tensor.kernels.extension.pool import POOL
from lazy_tensor.kernels.logs import FLUSHES, MISSES
from lazy_tensor.kernels.segment import Call
from lazy_tensor.kernels.service.compile import Compiler

MOST_COMPILERS = 4
"""Compile services beside the process's own, one for each `cache_dir` in use; the oldest ends when
there is one more."""
_compilers: dict[str, Compiler] = {}
_counters = Counters()  # of all compile services
_compilers_lock = threading.RLock()


def compiler() -> Compiler:
    """The compile service for the `cache_dir` in force, made when first needed.

    A block that has a `cache_dir` of its own leaves the services of others alone.
    """
    now = settings.current()
    found = _compilers.get(now.cache_dir)
    return _new_compiler(now) if found is None else found


def _new_compiler(now: settings.Settings) -> Compiler:
    with _compilers_lock:
        if now.cache_dir not in _compilers:
            others = [one for one in _compilers if one != settings.of_process().cache_dir]
            if len(others) >= MOST_COMPILERS:
                _compilers.pop(others[0]).close()
            made = Compiler(
                maxsize=now.segment_cache_size,
                cache_dir=Path(now.cache_dir),
                counters=_counters,
                may_build=STATS.has_worked_long,
            )
            _compilers[now.cache_dir] = made
            atexit.register(made.end)
        return _compilers[now.cache_dir]


def _follow_settings(new: settings.Settings) -> None:
    found = _compilers.get(new.cache_dir)
    if found is not None:
        found.cache.resize(new.segment_cache_size)


def _forget_kernels() -> None:
    for one in list(_compilers.values()):
        one.cache.clear()


def _after_fork_in_child() -> None:
    global _compilers_lock
    _compilers_lock = threading.RLock()  # a thread that is gone may hold the parent's


settings.on_change(_follow_settings)
caches.on_clear(_forget_kernels)
os.register_at_fork(after_in_child=_after_fork_in_child)


def flush(trace: Trace, cause: str, *, quiet: bool = False) -> None:
    """Run all that `trace` has recorded, for `cause`; wait if another thread is doing so.

    See `_flush` for the rest.
    """
    with trace.lock:
        _flush(trace, cause, quiet)


def _run_orphan(trace: Trace) -> None:
    with suppress(Exception):  # what failed says so where it is read
        flush(trace, "its thread has ended", quiet=True)


traces.run_orphan.append(_run_orphan)


def _flush(trace: Trace, cause: str, quiet: bool) -> None:
    """Run all that `trace` has recorded, for `cause`.

    `quiet` flushes are nobody's surprise (a bound, leaving the mode): `forbid` lets them pass.
    Raises what an op raised, with a note that says where it was recorded and which values it got;
    what doesn't depend on it is computed, the rest marked failed (see `failure`).
    """
    if trace.state is trace.root:
        return
    where, now = user_line(), settings.current()
    if not quiet and "flush" in now.forbid:
        raise RuntimeError(
            f"{cause} at {where} needs values that are pending, and forbid has 'flush'; "
            "move it out of the block, or call lazy_tensor.flush() first"
        )
    if trace.tape is not None:
        trace.tape.stop(f"{cause} at {where} needs values")
    watched = watch.before_flush(trace)
    first_new, grown_s = trace.first_new, trace.policy.grown_s
    ends_stretch = trace.begun is trace.state
    work = _Work(perf_counter())
    n_built, raised = STATS.counts["plans_built"], ""
    try:
        if not _run_known(trace, work, now):
            _compute(trace, work, cause, ends_stretch)
    except BaseException as error:
        raised = type(error).__name__
        _salvage(trace, work, error)
        raise
    finally:
        seconds = perf_counter() - work.began_s
        watch.after_flush(watched, failed=bool(raised))
        plan = work.ran if isinstance(work.ran, Plan) else None
        if work.state is not None:
            trace.remember(work.state)
        if work.state is not None and work.state.n_ops:
            trace.policy.grown_s = 0.0
            run_s = perf_counter() - work.planned_s
            trace.policy.add_flush(seconds, run_s=run_s, ends_region=ends_stretch)
            record = FlushRecord(
                thread=traces.local.thread.name,
                cause=cause,
                where=where,
                n_ops=work.state.n_ops,
                began_s=work.began_s,
                seconds=seconds,
                plan_s=work.planned_s - work.began_s,
                grown_s=grown_s,
                raised=raised,
                state=work.state,
                first_new=first_new,
                was_built=STATS.counts["plans_built"] > n_built,
            )
            if plan is not None:
                note_plan(record, plan)
            if record.was_built:
                trace.policy.note_new_plan()
            _account(record)
    if plan is not None and not must_record(trace, now):
        trace.policy.note_kernels(plan)
    if MISJUDGED:
        _distrust()
    if plan is not None and "compile" in now.forbid:
        _refuse_compiling(plan, where)


class _Work:
    """What a flush has taken on, and how far it has come.

    `pending` is the content that it takes out of the trace, `alive` are the values that somebody
    holds, `ran` is what runs to compute them, and `given` has what it gave, once it has. `began_s`
    and `planned_s` are times by `perf_counter`. C++ notes where the trace stood in `state`, and
    only of a run that raises what it has `taken`: the fields of a `Pending`.
    """

    __slots__ = ("alive", "began_s", "given", "pending", "planned_s", "ran", "state", "taken")

    def __init__(self, began_s: float) -> None:
        self.state: State | None = None
        self.pending: Pending | None = None
        self.taken: tuple[Any, ...] | None = None
        self.alive: list[Value] = []
        self.ran: Plan | Graph | None = None
        self.given: list[Sequence[torch.Tensor]] = []
        self.began_s = self.planned_s = began_s

    def take(self, trace: Trace) -> Pending:
        """Take the trace's content out of it."""
        while True:
            self.pending = pending = trace.pending()
            self.state = pending.state
            if trace.reset(pending):
                return pending
            # a signal's handler has recorded, or flushed, since


def _run_known(trace: Trace, work: _Work, now: settings.Settings) -> bool:
    """Run a trace's content in C++, if its plan has run before and nobody looks."""
    if hits.native is None or profiling.is_looked_at() or not trace.goes_on_at(now):
        return False
    try:
        return bool(hits.native.run_known(trace, now.plans_by, work))
    finally:
        STATS.counts["plans_reused"] += work.ran is not None


def _compute(trace: Trace, work: _Work, cause: str, ends_stretch: bool) -> None:
    """Compute what is alive of a trace's content, by its plan or call by call."""
    pending = work.take(trace)
    ranges = profiling.take_ranges(trace)
    hits.start_if_compiled()
    if pending.state.n_ops == 0:
        _settle(pending, work, ())
        return
    work.began_s = work.planned_s = perf_counter()
    work.alive = live_values(pending.values)
    live = tuple([value.slot.index for value in work.alive if value.slot is not None])
    work.ran = plan_of(
        pending,
        live,
        at_once=lambda: profiling.is_timing() or trace.policy.may_plan(ends_stretch),
    ) or _with_remat(graph_of(pending.state.steps(), live))
    work.planned_s = perf_counter()
    if isinstance(work.ran, Plan):
        ask_for_pool(work.ran)
    with profiling.flush_shown(cause):
        _run(pending, work, ranges)


def _salvage(trace: Trace, work: _Work, error: BaseException) -> None:
    """After `error`, give each value its data, or the error as the failure that it raises if read.

    Whatever raised, and wherever: no value that was taken may stay with neither, or with its place
    in a trace that goes on. What has not run is run call by call: the program is past it.
    """
    if work.taken is not None:
        work.pending = Pending(*work.taken)
    pending = work.pending
    if pending is None:
        return  # nothing was taken, or all is done
    if trace.has(pending):
        trace.reset()
    left = live_values(pending.values)
    failure = error
    try:
        if work.given:
            _settle(pending, work, work.given[0])
            return
        with torch_private.kernels_only():
            computed = None if work.ran is None else rescue(error, work.ran, pending.scalars)
            if computed is None:
                computed, failure = _computed_by_calls(pending, work, left, error)
        for value in left:
            if value.slot is not None:
                value.data = computed.get(value.slot.index)
        _share_with_plain(pending, work)
    finally:
        failure = without_frames(failure)
        for value in left:
            if value.slot is not None and value.data is None:
                value.failure = failure
        _release(pending.values, pending.leaf_values)


def _computed_by_calls(
    pending: Pending, work: _Work, left: list[Value], error: BaseException
) -> tuple[dict[int, torch.Tensor], BaseException]:
    """What a trace of which nothing has run computes, by slot; and what the rest failed by."""
    live = tuple([value.slot.index for value in left if value.slot is not None])
    work.alive, work.ran = left, graph_of(pending.state.steps(), live)
    if len(pending.leaves) != len(work.ran.leaves):
        return {}, error  # it has run, and what it gave is lost
    try:
        results = interpret(work.ran, pending.leaves, pending.scalars)
    except BaseException as raised:
        return rescue(raised, work.ran, pending.scalars) or {}, raised
    return dict(zip(live, results, strict=True)), error


def must_record(trace: Trace, options: settings.Settings | None = None) -> bool:
    """Whether ops are recorded whatever that costs: by the options in force (see `Settings`), or
    these; or for a tape."""
    return (options or settings.current()).records_all or trace.tape is not None


def note_plan(record: FlushRecord, plan: Plan) -> None:
    """Have a record in the flush log tell of the plan that has just run."""
    record.steps, record.peak_bytes = plan.steps, plan.peak_bytes
    record.statuses, record.reasons = plan.told()
    record.steps_s = profiling.times_s()


def _run(pending: Pending, work: _Work, ranges: profiling.Noted) -> None:
    ran = work.ran
    assert ran is not None, "it was planned"
    # what was recorded outside inference mode, or autocast, may be computed inside
    counted = pending.leaves if pending.state.counts_writes else ()
    with torch_private.kernels_only(), POOL.using(), torch_private.versions_kept(counted):
        if isinstance(ran, Plan):
            is_new, n_own_strides = not ran.is_checked, len(OWN_STRIDES)
            run = profiling.run_of(ran, pending.state, ranges)
            run(pending.leaves, pending.scalars, work.given)
            ran.is_checked = True
            if is_new and len(OWN_STRIDES) > n_own_strides:
                pending.state.plans = {}  # the next one lays these ops' results out
        else:
            work.given.append(interpret(ran, pending.leaves, pending.scalars))
    _settle(pending, work, work.given[0])


def ask_for_pool(plan: Plan) -> None:
    """Have the memory of large results used again, once that pays."""
    if plan.is_pooled and not POOL.is_asked_for:
        compiler().keep_memory(settings.current().compile, may_compile=STATS.has_worked_long())


def begin_hits() -> None:
    """Have calls taken below Python from now on, if what does so is on disk or was compiled, which
    begins when the program has run for a while: it can't be begun with when several threads record.
    """
    if not hits.EXTENSION.is_asked_for:
        hits.EXTENSION.ask_disk(compiler().disk)
        if STATS.has_worked_long():
            ask_for_hits()
    hits.start_if_compiled()


def obtain_extensions() -> None:
    """Have the C++ that helps compiled now, so that it lies on disk."""
    disk = compiler().disk
    hits.start(disk)
    program.ask_for(disk, may_compile=True, wait=True)
    POOL.ask_for(disk, wait=True)


def ask_for_hits() -> None:
    """Have what takes hits below Python compiled in the background."""
    if settings.current().compile != "off":
        hits.EXTENSION.ask_for(compiler().disk, wait=False)


def _settle(pending: Pending, work: _Work, results: Sequence[torch.Tensor]) -> None:
    for value, data in zip(work.alive, results, strict=True):
        value.data = data
    _share_with_plain(pending, work)
    _release(work.alive, pending.leaf_values)


def _share_with_plain(pending: Pending, work: _Work) -> None:
    """Note which values are views of plain tensors, whose ops nobody records outside the mode."""
    ran = work.ran
    if ran is None or not (ran.parts_of_leaves and pending.plain):
        return
    plain = {ran.root[slot.index] for slot in pending.plain.values()}
    for place, owner in ran.parts_of_leaves:
        data = work.alive[place].data
        if owner in plain and data is not None:
            memory_sharing.share(data)


def _release(*values: list[Value]) -> None:
    """Forget the values' places in the trace that was taken."""
    for some in values:
        for value in some:
            value.slot = value.leaf = None


def _with_remat(graph: Graph) -> Graph:
    interval = settings.current().remat_interval
    return rematerialized(graph, interval) if interval else graph


def plan_of(pending: Pending, live: tuple[int, ...], *, at_once: Callable[[], bool]) -> Plan | None:
    """The plan for a state and its live values; None at first sight, when one may not pay, unless
    it is wanted `at_once`; and where there can't be one."""
    state, now = pending.state, settings.current()
    key = (live, now.plans_by)
    plan: Plan | None = None if state.plans is None else state.plans.get(key)
    if plan is NO_PLAN:
        return None
    if plan is not None:
        STATS.counts["plans_reused"] += 1
        return plan
    seen_before = state.plans is not None
    plans = state.plans  # another thread may clear the caches meanwhile
    if plans is None or len(plans) >= MAX_PLANS_OF_A_STATE:
        plans = state.plans = {}
    if not (seen_before or now.compile == "blocking" or at_once()) or not may_plan():
        return None
    try:
        plan = build_plan(pending, live)
    except Exception as error:
        # The trace can still be run call by call; losing its values for a plan would be worse.
        STATS.counts["plans_failed"] += 1
        warnings.warn(
            f"a trace of {state.n_ops} ops can't be planned and runs op by op: {error!r}; "
            "please report it",
            stacklevel=2,
        )
        plans[key] = NO_PLAN
        return None
    plan.is_checked = seen_before  # by `interpret`, else when it runs
    plans[key] = plan
    STATS.counts["plans_built"] += 1
    return plan


def may_plan(*, at_once: bool = False) -> bool:
    """Whether plans can be made; if not, ask for the C++ that runs them, when kernels are too or
    `at_once`."""
    now = settings.current()
    return program.are_there() or program.ask_for(
        compiler().disk,
        may_compile=now.compile == "blocking"
        or (now.compile != "off" and (at_once or STATS.has_worked_long())),
        wait=now.compile == "blocking",
    )


def _distrust() -> None:
    """Run ops whose meta functions were wrong at once from now on, and forget what was recorded, by
    all threads."""
    with suppress(KeyError):  # when it is empty: another thread may be here too
        while True:
            op = MISJUDGED.pop()
            STATS.fallbacks[op, "its meta function was wrong"] += 1
            run_at_once(op)
    traces.forget_all()


def _refuse_compiling(plan: Plan, where: str) -> None:
    """Raise if a segment of the plan has no kernel yet. It was run op by op: nothing is lost."""
    for fusion in plan.fusions:
        if fusion.status in ("aten", "queued", "compiling"):
            ops = ", ".join(str(call.op) for call in fusion.segment.calls)
            raise RuntimeError(
                f"the trace flushed at {where} has a segment without a kernel ({ops}), and forbid "
                "has 'compile'; run it once without, or with compile='off'"
            )


NO_PLAN: Any = object()
"""Stands for a plan that could not be built."""
MAX_PLANS_OF_A_STATE = 8
"""Sets of live values, times settings, for which one state keeps plans."""


def build_plan(pending: Pending, live: tuple[int, ...]) -> Plan:
    now = settings.current()
    graph = graph_of(pending.state.steps(), live)
    backend_on = cache(chosen_backend)
    devices = {spec.device.type for spec in graph.spec.values()}
    fuses = now.compile != "off" and any(backend_on(d).name != "aten" for d in devices)
    graph = _with_remat(without_repeats(taken_apart(graph) if fuses else graph))
    fusible = Fusibility(graph, backend_on) if fuses else None
    units = units_of(graph, fusible)

    def fusion_of(segment: Any) -> Any:
        return compiler().fusion_of(
            segment,
            backend_on(segment.device.type),
            mode=now.compile,
            threshold=now.compile_threshold,
            verify_every=now.verify_every,
            waits=False,
        )

    with torch_private.no_modes():  # a backend may use ops, which are none of the program's
        plan = Planner(graph, pending.scalars, fusible).plan(units, fusion_of)
        if now.compile == "blocking":
            compiler().finish(plan.fusions)
    return plan


def chosen_backend(device_type: str) -> backends.Backend:
    return backends.choose(settings.current().backend, device_type)


DIRECT = "collectives that nobody sees"
"""In force while something communicates below Python: collectives are then issued at once."""


HANDS_OVER_FROM_OPS = 512
"""Recorded ops from which a device other than the CPU is given them at the next op that ends a
segment: it waits for no more than these to be recorded, 1 to 2 ms. Each flush costs the host: from
64 ops on, a training step took it 2.6 times eager's time, from 512 on 1.8
(`benches/bench_nvfuser_host.py`)."""


def closes_segment(node: Node, n_ops: int) -> bool:
    """Whether recording `node`, with which the trace has `n_ops`, hands it to the device at once
    (see `flush_policy`)."""
    if node.issues and is_apart(DIRECT):
        return True
    policy = settings.current().flush_policy
    if policy == "at_materialization" or node.view_of is not None:
        return False
    device = "cpu"
    for spec in node.specs:
        if spec is not None:
            device = spec.device.type
            break
    if policy == "auto" and (device == "cpu" or n_ops < HANDS_OVER_FROM_OPS):
        return False
    call = Call(node.facts.op, node.args, node.kwargs, node.specs)
    return chosen_backend(device).refuses(call) is not None


def _account(record: FlushRecord) -> None:
    counts = STATS.counts
    counts["ops"] += record.n_ops
    counts["flushes"] += 1
    STATS.causes[record.cause] += 1
    STATS.flush_s += record.seconds
    STATS.add_work(record.began_s, record.seconds)
    counts["segments"] += len(record.statuses)
    STATS.log.append(record)
    if record.first_new is not None and MISSES.isEnabledFor(logging.INFO):
        MISSES.info("%s: %s", record.where, reason_of_miss(record.first_new, record.state))
    if FLUSHES.isEnabledFor(logging.INFO):
        FLUSHES.info(
            "%s: %s: %d ops, %d segments, %.2f ms%s",
            record.where, record.cause, record.n_ops, len(record.statuses), record.seconds * 1e3,
            f", raised {record.raised}" if record.raised else "",
        )  # fmt: skip
