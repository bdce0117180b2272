"""A fusion: one distinct segment, and the best callable there is for it at this moment.

In: a segment, a backend, and later the kernel that `service.compile` obtained. Out: `run`, which
plans call at every flush. It decides what runs: op-by-op replay, the kernel, or both in turn to
compare.
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
"""Runs after which the kernel and op-by-op replay are timed against each other again."""


class Fusion:
    """One distinct segment: what runs it now, and why.

    `run(tensors, scalars)` is replaced as the fusion changes, so look it up at every call. `status`
    is 'aten' (op by op, nothing asked for), 'queued', 'compiling', 'measuring' (kernel and replay
    run in turn), 'ready' (the kernel runs), 'slower' (it lost against replay), 'declined' (no
    kernel is for it) or 'failed'; `reason` says more, first of all which backends couldn't make its
    kernel before `backend` was asked. `on_disagreement` is told of a kernel whose results differ
    from replay's, and says what to add to the warning. `ahead` is an artifact that was built before
    it was asked for, behind the digest of its source. `spent_s` is what runs op by op took.
    `n_adopted` counts kernels that came. `program` is what C++ runs in place of `run`, where that
    does nothing else; `writes`: the segment writes its inputs.

    A function that runs the segment puts its outputs into a variable `results` at once, and uses
    the name for nothing else. `failure` looks whether an interrupt came before or after that.
    """

    n_adopted: ClassVar[int] = 0

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
        self.n_runs = 0
        self.spent_s = 0.0
        self.member: Member | None = None
        self.ahead: tuple[str, bytes] | None = None
        self._passed = ""
        self.threshold = 0
        self.measure = False
        self._counters = counters
        self._verify_every = verify_every
        self._on_disagreement = on_disagreement
        self.program: Program | None = None
        self.measure_again: Callable[[], None] = lambda: None
        self.writes = bool(segment.written)
        self.run = self._first_run

    @property
    def run(self) -> Kernel:
        return self._run

    @run.setter
    def run(self, run: Kernel) -> None:
        self._run, self.program = run, None

    def _runs(self, kernel: Kernel, *, measure_after: int = 0) -> None:
        """Let C++ call `kernel` in place of `run`, if it can."""
        if is_program(kernel):
            kernel.measure_after(measure_after)
            self.program = kernel

    @cached_property
    def aten(self) -> Kernel:
        """Op-by-op replay of the segment."""
        return compile_aten(self.segment)

    @property
    def source(self) -> Segment:
        """What is compiled for the fusion: its segment, or a generic one that serves others too."""
        generic = None if self.member is None else self.member.family.generic
        return self.segment if generic is None else generic

    def run_op_by_op(self, reason: str = "") -> None:
        """Settle on replay for good."""
        self.status, self.reason = "aten", self._passed + reason
        self.run = self._first_run

    def count_runs(self, at_threshold: Callable[[Fusion], None] | None = None) -> None:
        """Run op by op and count; call `at_threshold(self)` when that makes `threshold` runs."""

        def run(tensors: Tensors, scalars: Scalars) -> Sequence[torch.Tensor]:
            self.n_runs += 1
            if at_threshold is not None and self.n_runs >= self.threshold and self.status == "aten":
                at_threshold(self)
            began_s = perf_counter()
            results = aten(tensors, scalars)
            self.spent_s += perf_counter() - began_s
            return results

        aten = self.aten
        self.run = run
        if at_threshold is not None and self.n_runs >= self.threshold:
            at_threshold(self)

    def adopt(self, kernel: Kernel, origin: str) -> None:
        """Run `kernel` from now on, or find out first whether it is faster, if `measure` is set."""
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
            self.run = self._guarded(kernel)
            self._runs(kernel)

    def pass_on(self, backend: Backend, reason: str) -> None:
        """Have another backend make the kernel, as the present one can't."""
        self._passed += f"{self.backend.name}: {reason}; {backend.name}: "
        self.backend, self.member = backend, None

    def give_up(self, reason: str) -> None:
        """Run op by op for good, which is no failure."""
        self.run_op_by_op(reason)
        self.status = "declined"

    def fail(self, reason: str) -> None:
        """Run op by op for good; the next run warns, in the thread of whoever runs it."""
        self.status, self.reason = "failed", self._passed + reason
        COMPILES.info("%s has no kernel: %s", self, self.reason)
        self._counters.add("failed")
        self.run = self._warn_and_run

    def _first_run(self, tensors: Tensors, scalars: Scalars) -> Sequence[torch.Tensor]:
        # generates the replay function only for a fusion that does run op by op
        self._run_by_aten()
        results = self.run(tensors, scalars)
        return results  # noqa: RET504

    def _run_by_aten(self) -> None:
        self.run = self.aten
        self._runs(self.aten)

    def _measure(self, kernel: Kernel) -> None:
        def decide(kernel_s: float, aten_s: float) -> None:
            faster = kernel_s < aten_s
            self.status = "ready" if faster else "slower"
            times = f"kernel {kernel_s * 1e6:.1f} us, op by op {aten_s * 1e6:.1f} us"
            self.reason = self._passed + times
            COMPILES.info("%s: %s", self, times)
            self._counters.add("adopted" if faster else "slower")
            self.run = self._until_recheck(guarded if faster else self.aten, kernel)
            self._runs(kernel if faster else self.aten, measure_after=RECHECK_EVERY)

        guarded = self._guarded(kernel)
        self.measure_again = partial(self._measure, kernel)
        self.status = "measuring"
        self.run = Trial(guarded, self.aten, decide)

    def _until_recheck(self, best: Kernel, kernel: Kernel) -> Kernel:
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
        """`kernel`, with the error that eager execution raises in place of its own.

        Not one that writes its inputs: it may have done so already, and replay would write twice.
        """
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
                    raise  # the kernel may have written already: replay would write twice
                failure = error
            results = self.aten(tensors, scalars)
            if failure is not None:
                # it may be short of memory this once: no reason to keep others from the kernel
                self._dropped(f"it raised {failure!r}, op-by-op execution does not")
            return results

        return run

    def _disagreed(self, reason: str, tensors: Tensors, scalars: Scalars) -> None:
        told = self._on_disagreement
        self._dropped(reason, "" if told is None else told(self, reason, (tensors, scalars)))

    def _dropped(self, reason: str, advice: str = "") -> None:
        self.status, self.reason = "failed", self._passed + reason
        self._counters.add("disagreed")
        self._run_by_aten()
        self._warn(f"disagreed with op-by-op execution and was dropped: {reason}{advice}")

    def _warn_and_run(self, tensors: Tensors, scalars: Scalars) -> Sequence[torch.Tensor]:
        self._run_by_aten()
        self._warn(f"can't be compiled by {self.backend.name!r} and runs op by op: {self.reason}")
        results = self.run(tensors, scalars)
        return results  # noqa: RET504

    def __repr__(self) -> str:
        ops = [str(call.op) for call in self.segment.calls]
        shown = ", ".join(ops[:4]) + (", ..." if len(ops) > 4 else "")
        return f"segment {self.segment.digest[:12]} ({len(ops)} ops: {shown})"

    def _warn(self, what: str) -> None:
        warnings.warn(f"{self!r} {what}", stacklevel=3)
