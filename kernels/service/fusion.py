"""A fusion: one distinct segment, and the callable that runs it now.

In: a segment, a backend, and later the kernel that `service.compile` obtained. Out: `run`, which
plans call at every flush. It is op-by-op replay, the kernel, or both in turn to measure or compare
them. Replay means that aten runs the segment's calls one by one, as eager execution does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from time import perf_counter
from typing import ClassVar, Literal

import torch

from lazy_tensor.kernels.backend import Backend, Busy, Kernel, Prepared
from lazy_tensor.kernels.backends.aten import compile_aten
from lazy_tensor.kernels.counters import Counters
from lazy_tensor.kernels.extension.program import Program, is_program
from lazy_tensor.kernels.logs import COMPILES
from lazy_tensor.kernels.segment import Segment
from lazy_tensor.kernels.service.families import Member
from lazy_tensor.kernels.service.trial import Trial
from lazy_tensor.kernels.service.verify import Tensors, Verified

Status = Literal[
    "aten", "queued", "compiling", "measuring", "ready", "slower", "declined", "failed"
]
Scalars = Sequence[float]
OnDisagreement = Callable[["Fusion", str, tuple[Tensors, Scalars]], str]

RECHECK_EVERY = 10_000
"""Runs after which kernel and replay are timed again, since the slower one may be faster by now."""


class Fusion:
    """One distinct segment, the callable that runs it now, and the reason for that.

    `run(tensors, scalars)` is replaced as the fusion changes, so look it up at every call.

    `status` is one of:
    - 'aten': runs op by op, and no kernel was asked for
    - 'queued', 'compiling': runs op by op until its kernel comes
    - 'measuring': kernel and replay run in turn
    - 'ready': the kernel runs
    - 'slower': the kernel lost against replay, which runs
    - 'declined': no backend has a kernel for it; replay runs
    - 'failed': the build failed, or the kernel was wrong; replay runs

    `reason` says more. It begins with the backends that failed or declined before `backend`.

    A function that runs the segment assigns its outputs to a local variable `results` at once, and
    uses that name for nothing else. After Ctrl-C `dispatch.run.failure` looks at the frames: if
    `results` is set, the segment has run, and must not be run again.
    """

    n_adopted: ClassVar[int] = 0
    """Kernels that all fusions got so far. After new ones `tiering.policy` times blocks again."""

    def __init__(
        self,
        segment: Segment,
        backend: Backend,
        counters: Counters,
        verify_every: int = 0,
        on_disagreement: OnDisagreement | None = None,
    ) -> None:
        self.segment = segment
        self.backend = backend
        self.status: Status = "aten"
        self.reason = ""
        # runs op by op, counted until `threshold`, at which a kernel is asked for
        self.n_runs = 0
        # seconds of runs op by op; `Jobs` builds first where most time goes
        self.spent_s = 0.0
        # set if the kernel is a generic one of its family
        self.member: Member | None = None
        # digest of the source and the artifact that was built together with others'
        self.ahead: tuple[str, bytes] | None = None
        # whether the segment may be so simple that its kernel is there soon
        self.may_be_simple = True
        # text for `reason`: the backends that had no kernel, each with its own reason
        self._passed = ""
        self.threshold = 0
        # whether a kernel must measure faster than replay to be used
        self.measure = False
        self._counters = counters
        self._verify_every = verify_every
        # called with a wrong kernel's reason and inputs; returns text for the warning
        self._on_disagreement = on_disagreement
        # what C++ runs in place of `run`, if `run` would only call it; None if Python must run
        self.program: Program | None = None
        # C++ calls it when `program` has run as often as `measure_after` said
        self.measure_again: Callable[[], None] = lambda: None
        # read by C++: after a kernel raised, a segment that writes its inputs is not run again
        self.writes = bool(segment.written)
        self.run: Kernel = self._first_run

    def _use(self, run: Kernel, native: Kernel | None = None, *, measure_after: int = 0) -> None:
        """Run `run` from now on. C++ runs `native` in its place, if that is a program, and calls
        `measure_again` at run `measure_after`; 0 means never."""
        # C++ prefers `program`: a stale one would hide the new `run`
        self.run, self.program = run, None
        if is_program(native):
            native.measure_after(measure_after)
            self.program = native

    @cached_property
    def aten(self) -> Kernel:
        """Op-by-op replay of the segment."""
        return compile_aten(self.segment)

    @property
    def source(self) -> Segment:
        """The segment to compile: its own, or its family's generic one."""
        return self.segment if self.member is None else self.member.source

    def run_op_by_op(self, reason: str) -> None:
        """Run op by op from now on, without asking for a kernel."""
        self.status, self.reason = "aten", self._passed + reason
        self._use(self._first_run)

    def count_runs(self, at_threshold: Callable[[Fusion], None] | None = None) -> None:
        """Run op by op and count the runs; from run `threshold` on call `at_threshold(self)` at
        each run, until the status is no longer 'aten'."""

        def run(tensors: Tensors, scalars: Scalars) -> Sequence[torch.Tensor]:
            self.n_runs += 1
            if at_threshold is not None and self.n_runs >= self.threshold and self.status == "aten":
                at_threshold(self)
            began_s = perf_counter()
            results = aten(tensors, scalars)
            seconds = perf_counter() - began_s
            self.spent_s += seconds
            if self.member is not None:
                self.member.family.spent_s += seconds
            return results

        aten = self.aten
        self._use(run)
        # runs counted before this call may suffice: those while the disk was looked at
        if at_threshold is not None and self.n_runs >= self.threshold:
            at_threshold(self)

    def adopt(self, kernel: Kernel, origin: str) -> None:
        """Run `kernel` from now on, or measure first whether it is faster, if `measure` is set."""
        COMPILES.info("%s has a kernel of %s, %s", self, self.backend.name, origin)
        self.reason = self._passed + origin
        Fusion.n_adopted += 1
        if self._verify_every:
            kernel = Verified(
                kernel, self.aten, self.segment, self._verify_every, self._disagreed, self._counters
            )
        if self.measure:
            self._measure(kernel)
        else:
            self.status = "ready"
            self._use(self._guarded(kernel), kernel)

    def pass_on(self, backend: Backend, reason: str) -> None:
        """Let another backend make the kernel, because the present one can't."""
        self._passed += f"{self.backend.name}: {reason}; {backend.name}: "
        # `ahead` holds an artifact of the backend that is left, for the same segment
        self.backend, self.member, self.ahead = backend, None, None

    def give_up(self, reason: str) -> None:
        """Run op by op from now on, because no backend has a kernel: no failure, no warning."""
        self.run_op_by_op(reason)
        self.status = "declined"

    def fail(self, reason: str) -> None:
        """Run op by op from now on, because the build failed.

        The next run warns, in the program's own thread.
        """
        self.status, self.reason = "failed", self._passed + reason
        COMPILES.info("%s has no kernel: %s", self, self.reason)
        self._counters.add("failed")
        self._use(self._warn_and_run)

    def _first_run(self, tensors: Tensors, scalars: Scalars) -> Sequence[torch.Tensor]:
        # makes the replay program only now, as a fusion whose kernel comes first never needs it
        self._use(self.aten, self.aten)
        results = self.run(tensors, scalars)
        return results  # noqa: RET504

    def _measure(self, kernel: Kernel) -> None:
        """Run `kernel` and replay in turn, then keep the faster one until the next recheck."""

        def decide(kernel_s: float, aten_s: float) -> None:
            faster = kernel_s < aten_s
            self.status = "ready" if faster else "slower"
            times = f"kernel {kernel_s * 1e6:.1f} us, op by op {aten_s * 1e6:.1f} us"
            self.reason = self._passed + times
            COMPILES.info("%s: %s", self, times)
            self._counters.add("adopted" if faster else "slower")
            # Python counts to the recheck in `run`. Where C++ runs `program` instead, it counts.
            run = self._until_recheck(guarded if faster else self.aten, kernel)
            self._use(run, kernel if faster else self.aten, measure_after=RECHECK_EVERY)

        guarded = self._guarded(kernel)
        self.measure_again = partial(self._measure, kernel)
        self.status = "measuring"
        self._use(Trial(guarded, self.aten, decide))

    def _until_recheck(self, best: Kernel, kernel: Kernel) -> Kernel:
        """`best`, which measures `kernel` against replay again after `RECHECK_EVERY` runs."""
        left = RECHECK_EVERY

        def run(tensors: Tensors, scalars: Scalars) -> Sequence[torch.Tensor]:
            nonlocal left
            results = best(tensors, scalars)
            left -= 1
            if left == 0:
                self._measure(kernel)
            return results

        return run

    def _guarded(self, kernel: Kernel) -> Kernel:
        """`kernel`, followed by replay where it raises.

        Replay raises eager's exception in place of the kernel's own. If replay doesn't raise, the
        kernel is dropped. A kernel that writes its inputs is not followed by replay: it may have
        written already, and replay would write a second time.
        """
        # A Prepared kernel needs the wrapper for its Busy, raised before it writes anything. A
        # Verified one may have a Prepared one inside.
        if self.segment.written and not isinstance(kernel, (Prepared, Verified)):
            return kernel

        def run(tensors: Tensors, scalars: Scalars) -> Sequence[torch.Tensor]:
            try:
                results = kernel(tensors, scalars)
                return results  # noqa: RET504
            except Busy:
                failure = None
            except Exception as error:
                if self.segment.written:
                    raise
                failure = error
            results = self.aten(tensors, scalars)
            if failure is not None:
                # not `_disagreed`, which keeps other processes from the kernel too: the error may
                # have a passing cause, such as too little memory
                self._dropped(f"it raised {failure!r}, op-by-op execution does not")
            return results

        return run

    def _disagreed(self, reason: str, tensors: Tensors, scalars: Scalars) -> None:
        """Drop a kernel whose results were wrong on these inputs, in all processes."""
        told = self._on_disagreement
        self._dropped(reason, "" if told is None else told(self, reason, (tensors, scalars)))

    def _dropped(self, reason: str, advice: str = "") -> None:
        """Drop the kernel in this process, with a warning."""
        self.status, self.reason = "failed", self._passed + reason
        self._counters.add("disagreed")
        self._use(self.aten, self.aten)
        self._warn(f"disagreed with op-by-op execution and was dropped: {reason}{advice}")

    def _warn_and_run(self, tensors: Tensors, scalars: Scalars) -> Sequence[torch.Tensor]:
        self._use(self.aten, self.aten)
        self._warn(f"can't be compiled by {self.backend.name!r} and runs op by op: {self.reason}")
        results = self.run(tensors, scalars)
        return results  # noqa: RET504

    def __repr__(self) -> str:
        ops = [str(call.op) for call in self.segment.calls]
        shown = ", ".join(ops[:4]) + (", ..." if len(ops) > 4 else "")
        return f"segment {self.segment.digest[:12]} ({len(ops)} ops: {shown})"

    def _warn(self, what: str) -> None:
        warnings.warn(f"{self!r} {what}", stacklevel=3)
