"""A fusion: one distinct segment, and the callable that runs it now.

In: a segment, a backend, and later the kernel that `service.compile` obtained. Out: `run`, which
plans call at every flush: op-by-op replay, the kernel, or both in turn to measure or compare them.
In *replay*, aten runs the segment's calls one by one, as eager execution does.
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
"""Runs after which kernel and replay are timed again: the slower one may have become faster."""


class Fusion:
    """One distinct segment, the callable that runs it now, and the reason for that.

    `run(tensors, scalars)` is replaced as the fusion changes, so look it up at every call.

    `status` is one of:
    - 'aten': runs op by op, and no kernel was asked for
    - 'queued', 'compiling': runs op by op until its kernel is ready
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
    """The number of kernels adopted so far. When it grows, `tiering.policy` times blocks again."""

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
        # an artifact that is built but not adopted yet, behind the digest of its source
        self.ahead: tuple[str, bytes] | None = None
        # whether the segment may be so simple that `loops` can build its kernel
        self.may_be_simple = True
        # the beginning of `reason`: the backends that had no kernel, each with its own reason
        self._history = ""
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
        """Run `run` from now on.

        If `native` is a program, C++ runs it instead, and calls `measure_again` after
        `measure_after` runs; 0 means never.
        """
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
        self.status, self.reason = "aten", self._history + reason
        self._use(self._first_run)

    def count_runs(self, at_threshold: Callable[[Fusion], None] | None = None) -> None:
        """Run op by op and count the runs.

        From run `threshold` on, each run calls `at_threshold(self)` while the status is 'aten'.
        """

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
        # runs counted before this call may be enough: those while the disk was read
        if at_threshold is not None and self.n_runs >= self.threshold:
            at_threshold(self)

    def adopt(self, kernel: Kernel, origin: str) -> None:
        """Run `kernel` from now on; if `measure` is set, only once it has measured faster."""
        COMPILES.info("%s has a kernel of %s, %s", self, self.backend.name, origin)
        self.reason = self._history + origin
        Fusion.n_adopted += 1
        if self._verify_every:
            kernel = Verified(
                kernel, self.aten, self.segment, self._verify_every, self._reject, self._counters
            )
        if self.measure:
            self._measure(kernel)
        else:
            self.status = "ready"
            self._use(self._with_fallback(kernel), kernel)

    def pass_on(self, backend: Backend, reason: str) -> None:
        """Let another backend make the kernel, because the current one can't."""
        self._history += f"{self.backend.name}: {reason}; {backend.name}: "
        # the artifact in `ahead` is of the backend before
        self.backend, self.member, self.ahead = backend, None, None

    def give_up(self, reason: str) -> None:
        """Run op by op from now on, because no backend has a kernel: no failure, no warning."""
        self.run_op_by_op(reason)
        self.status = "declined"

    def fail(self, reason: str) -> None:
        """Run op by op from now on, because the build failed.

        The next run warns, in the program's own thread.
        """
        self.status, self.reason = "failed", self._history + reason
        COMPILES.info("%s has no kernel: %s", self, self.reason)
        self._counters.add("failed")
        self._use(self._warn_and_run)

    def _first_run(self, tensors: Tensors, scalars: Scalars) -> Sequence[torch.Tensor]:
        # the replay program is made only now: a fusion with a kernel on disk may never need it
        self._use(self.aten, self.aten)
        results = self.run(tensors, scalars)
        return results  # noqa: RET504

    def _measure(self, kernel: Kernel) -> None:
        """Run `kernel` and replay in turn, then keep the faster one until the next recheck."""

        def decide(kernel_s: float, aten_s: float) -> None:
            faster = kernel_s < aten_s
            self.status = "ready" if faster else "slower"
            times = f"kernel {kernel_s * 1e6:.1f} us, op by op {aten_s * 1e6:.1f} us"
            self.reason = self._history + times
            COMPILES.info("%s: %s", self, times)
            self._counters.add("adopted" if faster else "slower")
            # `run` counts to the recheck. Where C++ runs `program` instead, C++ counts.
            run = self._until_recheck(safe_kernel if faster else self.aten, kernel)
            self._use(run, kernel if faster else self.aten, measure_after=RECHECK_EVERY)

        safe_kernel = self._with_fallback(kernel)
        self.measure_again = partial(self._measure, kernel)
        self.status = "measuring"
        self._use(Trial(safe_kernel, self.aten, decide))

    def _until_recheck(self, best: Kernel, kernel: Kernel) -> Kernel:
        """`best`, which measures `kernel` against replay again after `RECHECK_EVERY` runs."""
        n_left = RECHECK_EVERY

        def run(tensors: Tensors, scalars: Scalars) -> Sequence[torch.Tensor]:
            nonlocal n_left
            results = best(tensors, scalars)
            n_left -= 1
            if n_left == 0:
                self._measure(kernel)
            return results

        return run

    def _with_fallback(self, kernel: Kernel) -> Kernel:
        """`kernel`, with replay as its fallback if it raises.

        Replay raises eager's exception in place of the kernel's own. If replay doesn't raise, the
        kernel is dropped. A kernel that writes its inputs has no fallback: it may have written
        already, and replay would write a second time.
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
                # Only this process drops the kernel. Others may still use it: the cause may pass,
                # such as too little memory.
                self._drop(f"it raised {failure!r}, op-by-op execution does not")
            return results

        return run

    def _reject(self, reason: str, tensors: Tensors, scalars: Scalars) -> None:
        """Drop a kernel in all processes, because its results were wrong on these inputs."""
        report = self._on_disagreement
        self._drop(reason, "" if report is None else report(self, reason, (tensors, scalars)))

    def _drop(self, reason: str, advice: str = "") -> None:
        """Drop the kernel in this process, with a warning."""
        self.status, self.reason = "failed", self._history + reason
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
        first_ops = ", ".join(ops[:4]) + (", ..." if len(ops) > 4 else "")
        return f"segment {self.segment.digest[:12]} ({len(ops)} ops: {first_ops})"

    def _warn(self, what: str) -> None:
        warnings.warn(f"{self!r} {what}", stacklevel=3)
