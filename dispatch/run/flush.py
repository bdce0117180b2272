"""Runs what a trace has recorded: from state to plan, from plan to values.

In: a trace and a cause. Out: each live value has its data, or the failure that kept it from having
any. Called where a value is needed, at bounds, and at the end of the mode. `_Work.take` takes a
trace's content out of it; for a known plan C++ does (`native/flush.h`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter

import torch

from lazy_tensor.dispatch import settings, torch_private
from lazy_tensor.dispatch.ops.rules import run_at_once
from lazy_tensor.dispatch.plan.graph import Graph, graph_of
from lazy_tensor.dispatch.plan.interpret import MISJUDGED, OWN_STRIDES, interpret
from lazy_tensor.dispatch.plan.plan import Plan
from lazy_tensor.dispatch.run import hits, profiling, watch
from lazy_tensor.dispatch.run.failure import rescue, without_frames
from lazy_tensor.dispatch.run.plan_cache import add_tier, plan_of, with_remat
from lazy_tensor.dispatch.stats import STATS, FlushRecord
from lazy_tensor.dispatch.trie import memory_sharing, trace as traces
from lazy_tensor.dispatch.trie.recompile_reason import reason_of_miss
from lazy_tensor.dispatch.trie.trace import Pending, State, Trace, Value, live_values
from lazy_tensor.dispatch.user_frame import calling_module, user_line
from lazy_tensor.dispatch.wording import DISTRIBUTION_CHECK
from lazy_tensor.kernels.logs import FLUSHES, MISSES


def flush(trace: Trace, cause: str, *, quiet: bool = False) -> None:
    """Run all that `trace` has recorded. `cause` says why, for `stats()` and the log.

    Waits if another thread flushes the same trace. See `_flush` for `quiet` and for what is raised.
    """
    with trace.lock:
        if trace.state is not trace.root:
            work = _run_known(trace, cause)
            if work is not None:
                _flush(trace, cause, quiet, work)


def _run_orphan(trace: Trace) -> None:
    # the thread that recorded it is gone, so nobody could catch an error here: each value that
    # failed raises it where it is read
    with suppress(Exception):
        flush(trace, "its thread has ended", quiet=True)


traces.run_orphan.append(_run_orphan)


def _flush(trace: Trace, cause: str, quiet: bool, work: _Work) -> None:
    """Run all that `trace` has recorded, for `cause`. `work` is what `_run_known` has left to do.

    A `quiet` flush is one that the program doesn't ask for by reading a value: the end of the mode,
    a bound. `forbid="flush"` lets it pass. Raises what an op raised, with a note that says where
    the op was recorded and which values it got. Values that don't depend on it are computed, the
    others are marked as failed (see `failure`).
    """
    try:
        record = _begun(trace, cause, quiet=quiet)
        # both are read before the run, which empties the trace
        watched = watch.before_flush(trace)
        ends_region = trace.begun is trace.state if work.ends_region is None else work.ends_region
    except BaseException as error:  # an interrupt may come after C++ has taken the content
        _salvage(trace, work, work.error or error)
        raise
    n_built, now = STATS.counts["plans_built"], settings.current()
    try:
        if work.error is not None:  # of a plan that C++ has run
            STATS.counts["plans_reused"] += 1
            raise work.error
        _compute(trace, work, record.cause, ends_region)
    except BaseException as error:
        record.raised = type(error).__name__
        _salvage(trace, work, error)
        raise
    finally:
        record.seconds = perf_counter() - work.began_s
        watch.after_flush(watched, failed=bool(record.raised))
        record.was_built = STATS.counts["plans_built"] > n_built
        # `work.state` is None where an error came before anything was taken: nothing was flushed
        if work.state is not None:
            trace.remember(work.state)
            if work.state.n_ops:
                record.began_s, record.plan_s = work.began_s, work.planned_s - work.began_s
                run_s = perf_counter() - work.planned_s
                _note_flush(
                    trace, work.state, work.ran, record, run_s=run_s, ends_region=ends_region
                )
    if MISJUDGED:
        _distrust()
    if isinstance(work.ran, Plan) and "compile" in now.forbid:
        _refuse_compiling(work.ran, record.where)


def _begun(trace: Trace, cause: str, *, quiet: bool) -> FlushRecord:
    """The record of a flush that begins. It ends the capture that it interrupts, if any. Raises
    RuntimeError if an option forbids it."""
    where, now = user_line(), settings.current()
    if _checks_distribution(cause):
        cause = DISTRIBUTION_CHECK
    if not quiet and "flush" in now.forbid:
        raise RuntimeError(
            f"{cause} at {where} needs values that are pending, and forbid has 'flush'; "
            "move it out of the block, or call lazy_tensor.flush() first"
        )
    if trace.tape is not None:
        why = f"what was recorded is run ({cause})" if quiet else f"{cause} needs values"
        trace.tape.stop(f"{why} at {where}")
    record = FlushRecord(traces.local.thread.name, cause, where)
    record.first_new, record.grown_s = trace.first_new, trace.policy.grown_s
    return record


def _checks_distribution(cause: str) -> bool:
    """Whether a value is needed for a check of arguments in `torch.distributions`."""
    return cause == "bool()" and calling_module().startswith("torch.distributions.")


class _Work:
    """What a flush has taken out of the trace, and how far it has come.

    After an exception, `_salvage` tells from it what is left to do. So each field is set as soon as
    it is known. `pending` is the content of the trace, `state` the state where the trace stood.
    `alive` are the values that somebody holds. `ran` is the plan or graph that computes them, and
    `given` gets its results. `began_s` and `planned_s` are times by `perf_counter`.

    C++ makes one if its plan raises an `error`. Then it says whether the flush `ends_region`, which
    the trace doesn't tell any more.
    """

    __slots__ = ("alive", "began_s", "ends_region", "error", "given", "pending", "planned_s", "ran",
                 "state")  # fmt: skip

    def __init__(self) -> None:
        self.state: State | None = None
        self.pending: Pending | None = None
        self.alive: list[Value] = []
        self.ran: Plan | Graph | None = None
        self.given: list[Sequence[torch.Tensor]] = []
        self.error: BaseException | None = None
        self.ends_region: bool | None = None
        self.began_s = self.planned_s = perf_counter()

    def take(self, trace: Trace) -> Pending:
        """Take the trace's content out of it, and leave it empty.

        `reset` may run finalizers, which may record. It returns False then, and the larger content
        is taken.
        """
        while True:
            self.pending = pending = trace.pending()
            self.state = pending.state
            if trace.reset(pending):
                return pending


def _run_known(trace: Trace, cause: str) -> _Work | None:
    """Flush a trace in C++ if its plan has run before; None if that did all that a flush does.

    Else `_flush` goes on with the `_Work` that is returned. So it does where somebody looks (a
    profiler, a timer, a log), where an option forbids something, where new states were made, and
    where the trace won't go on at the same root: a change of settings or of inference mode needs
    `Trace.reset`.
    """
    now = settings.current()
    is_usual = (
        hits.native is not None
        and trace.first_new is None
        and not (now.forbid or trace.tape or watch.is_on())
        and not profiling.is_looked_at()
        and not FLUSHES.isEnabledFor(logging.INFO)
        and trace.goes_on_at(now)
        and not _checks_distribution(cause)
    )
    if not is_usual:
        return _Work()
    thread = traces.local.thread.name
    left: _Work | None = hits.native.flush_known(
        trace, now.plans_by, now.records_all, thread, cause
    )
    return left


hits.use(work_class=_Work, pending_class=Pending, add_tier=add_tier)


def _compute(trace: Trace, work: _Work, cause: str, ends_region: bool) -> None:
    """Compute the live values of a trace's content, by its plan or call by call."""
    pending = work.take(trace)
    ranges = profiling.take_ranges(trace)
    hits.start_if_compiled()  # torch's tables of kernels may only change between ops: as here
    if pending.state.n_ops == 0:  # leaves came in, but no op was recorded
        _settle(pending, work, ())
        return
    work.began_s = work.planned_s = perf_counter()
    work.alive = live_values(pending.values)
    live = tuple([value.slot.index for value in work.alive if value.slot is not None])
    work.ran = plan_of(
        pending, live, at_once=lambda: profiling.is_timing() or trace.policy.may_plan(ends_region)
    ) or with_remat(graph_of(pending.state.steps(), live))
    work.planned_s = perf_counter()
    with profiling.flush_shown(cause):
        _run(pending, work, ranges)


def _salvage(trace: Trace, work: _Work, error: BaseException) -> None:
    """After `error`, give each value its data, or the error as its `failure`.

    The error may have come anywhere in the flush. The invariant: each value that was taken out of
    the trace gets data or a failure, and none keeps a slot in a trace that goes on. If nothing has
    run yet, the trace is run call by call.
    """
    pending = work.pending
    if pending is None:
        return  # nothing was taken, or all is done
    if trace.has(pending):  # the error came before the trace was emptied
        trace.reset()
    left = live_values(pending.values)
    failure = error
    try:
        if work.given:  # all has run; the error came while the results were handed out
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
    """Interpret a trace of which nothing has run.

    Returns the values by slot, and the error that values without data get.
    """
    live = tuple([value.slot.index for value in left if value.slot is not None])
    work.alive, work.ran = left, graph_of(pending.state.steps(), live)
    if len(pending.leaves) != len(work.ran.leaves):
        # Whoever runs a trace empties its list of leaves. So it has run, and its results are lost.
        return {}, error
    try:
        results = interpret(work.ran, pending.leaves, pending.scalars)
    except BaseException as raised:
        return rescue(raised, work.ran, pending.scalars) or {}, raised
    return dict(zip(live, results, strict=True)), error


def must_record(trace: Trace, options: settings.Settings | None = None) -> bool:
    """Whether ops must be recorded whatever that costs.

    The options in force, or those given, may say so (see `Settings.records_all`). So does a tape,
    which an op that runs at once would stop.
    """
    return (options or settings.current()).records_all or trace.tape is not None


def note_plan(record: FlushRecord, plan: Plan) -> None:
    """Describe the plan that has just run in a record of the flush log."""
    record.steps, record.peak_bytes, record.tier = plan.steps, plan.peak_bytes, plan.tier_says
    record.statuses, record.reasons = plan.told()
    record.steps_s = profiling.times_s()


def _run(pending: Pending, work: _Work, ranges: profiling.Noted) -> None:
    ran = work.ran
    assert ran is not None, "it was planned"
    # Ops were recorded below autograd and autocast. The flush may come within an autocast block or
    # inference mode, which must not change what the kernels do. Leaves whose writes autograd has
    # counted at recording keep that count.
    counted = pending.leaves if pending.state.counts_writes else ()
    with torch_private.kernels_only(), torch_private.versions_kept(counted):
        if isinstance(ran, Plan):
            is_new, n_own_strides = not ran.is_checked, len(OWN_STRIDES)
            run = profiling.run_of(ran, pending.state, ranges)
            run(pending.leaves, pending.scalars, work.given)
            ran.is_checked = True
            # The first run showed ops that choose other strides than was recorded. Results were
            # corrected in this run. A plan built anew has the strides in its instructions.
            if is_new and len(OWN_STRIDES) > n_own_strides:
                pending.state.plans = {}
        else:
            work.given.append(interpret(ran, pending.leaves, pending.scalars))
    _settle(pending, work, work.given[0])


def _settle(pending: Pending, work: _Work, results: Sequence[torch.Tensor]) -> None:
    """Give the live values their data, and release their slots."""
    for value, data in zip(work.alive, results, strict=True):
        value.data = data
    _share_with_plain(pending, work)
    _release(work.alive, pending.leaf_values)


def _share_with_plain(pending: Pending, work: _Work) -> None:
    """Mark values that are views of plain tensors as sharing memory with them.

    Outside the mode, nobody records ops on the plain tensor, so they may change the value at any
    time (see `memory_sharing`).
    """
    ran = work.ran
    if ran is None or not (ran.parts_of_leaves and pending.plain):
        return
    plain = {ran.root[slot.index] for slot in pending.plain.values()}
    for place, owner in ran.parts_of_leaves:
        data = work.alive[place].data
        if owner in plain and data is not None:
            memory_sharing.share(data)


def _release(*values: list[Value]) -> None:
    """Forget the values' slots in the trace that was taken."""
    for some in values:
        for value in some:
            value.slot = value.leaf = None


def _distrust() -> None:
    """Have ops whose meta functions were wrong run at once from now on.

    The tries of all threads are dropped: their states hold the wrong metadata.
    """
    with suppress(KeyError):  # by `pop` when the set is empty: another thread may pop, too
        while True:
            op = MISJUDGED.pop()
            STATS.fallbacks[op, "its meta function was wrong"] += 1
            run_at_once(op)
    traces.forget_all()


def _refuse_compiling(plan: Plan, where: str) -> None:
    """Raise if a segment of the plan has no kernel yet (`forbid="compile"`).

    Called after the run, which was op by op: no value is lost.
    """
    for fusion in plan.fusions:
        if fusion.status in ("aten", "queued", "compiling"):
            ops = ", ".join(str(call.op) for call in fusion.segment.calls)
            raise RuntimeError(
                f"the trace flushed at {where} has a segment without a kernel ({ops}), and forbid "
                "has 'compile'; run it once without, or with compile='off'"
            )


def _note_flush(
    trace: Trace,
    state: State,
    ran: Plan | Graph | None,
    record: FlushRecord,
    *,
    run_s: float,
    ends_region: bool,
) -> None:
    """Complete the record of a flush that ran what led to `state`, and account for it.

    `run_s` are the seconds that the plan took, or the ops.
    """
    record.state, record.n_ops = state, state.n_ops
    policy = trace.policy
    policy.grown_s = 0.0
    record.gap_s = policy.add_flush(
        record.began_s, record.seconds, state.n_ops, run_s=run_s, ends_region=ends_region
    )
    if isinstance(ran, Plan):
        note_plan(record, ran)
        ran.spent_s += run_s
        if ran.spent_s >= ran.tier_from_s:
            add_tier(ran, state)
        # where all must be recorded, blocks aren't bypassed while their kernels are built
        if not must_record(trace):
            policy.note_kernels(ran)
    if record.was_built:
        policy.add_plan(record.plan_s)
    _account(record)


def _account(record: FlushRecord) -> None:
    """Add a flush to `stats()`, to the flush log and to the loggers."""
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
