"""An exception anywhere in a flush: each value is right afterwards, or failed by that exception.

It comes at each line that a flush runs in this package, one after the other, as a warning under
`-W error` does, or a disk that is full; and wherever Python looks for signals, as Ctrl-C does.
"""

from __future__ import annotations

import inspect
import itertools
import linecache
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, cast

import pytest
import torch

from lazy_tensor import configure, lazy_mode, materialize, wrap
from lazy_tensor.dispatch.plan.interpret import interpret, run_node
from lazy_tensor.dispatch.plan.plan import Plan
from lazy_tensor.dispatch.run.compile_service import compiler
from lazy_tensor.dispatch.run.flush import flush
from lazy_tensor.dispatch.trie.trace import local
from lazy_tensor.kernels.service.trial import Trial


class Injected(BaseException):
    pass


class InjectedError(RuntimeError):
    pass


RUNS_OPS = {interpret.__code__, run_node.__code__, Plan.run.__code__, Plan.run_observed.__code__}


def is_computing(frame: FrameType | None) -> bool:
    """Whether the frame is of recorded ops that run, or below such a frame."""
    while frame is not None:
        if frame.f_code in RUNS_OPS:
            return True
        frame = frame.f_back
    return False


def is_with(frame: FrameType) -> bool:
    """Whether a `with` stands on the line. Leaving it is a line, too, where no signal comes: what
    is raised there keeps a lock for ever."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith("with ")


class RaisesAt:
    """Raises `error` at the line number `n` that a flush runs; counts these lines.

    An `Exception` among the ops that run is an op that failed, after which eager would have stopped
    (`test_errors_at_the_flush.py`). So only what isn't one is raised there.
    """

    def __init__(self, n: int, error: type[BaseException]) -> None:
        self.n, self.error = n, error
        self.n_lines = 0
        self.where = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "call":
            if not frame.f_globals.get("__name__", "").startswith("lazy_tensor."):
                return None
            return None if issubclass(self.error, Exception) and is_computing(frame) else self
        if event == "line" and not is_with(frame):
            self.n_lines += 1
            if self.n_lines == self.n:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                raise self.error
        return self


class RaisesAfter(RaisesAt):
    """Raises where a signal's handler does: the `n`th time that a call in C is over, or a function
    begins."""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        is_ours = frame.f_globals.get("__name__", "").startswith("lazy_tensor.")
        made = frame.f_code.co_filename == "<kernel>"
        is_generator = bool(frame.f_code.co_flags & inspect.CO_GENERATOR)  # one that is closed, too
        if (is_ours or made) and event in ("call", "c_return") and not is_generator:
            self.n_lines += 1
            if self.n_lines == self.n:
                self.where = f"{event} {frame.f_code.co_filename}:{frame.f_lineno}"
                sys.setprofile(None)
                raise self.error


class Program:
    """Ops on plain and lazy tensors, in place, on views and not; nothing of it is flushed."""

    def __init__(self, is_lazy: bool) -> None:
        base = torch.linspace(-1, 1, 12).reshape(3, 4)
        self.plain = base.clone()
        lazy = base.clone() * 2
        self.lazy = wrap(lazy) if is_lazy else lazy
        self.made: list[torch.Tensor] = []

    def run(self) -> None:
        a = self.plain * 2 + 1
        self.plain.add_(1)
        b = a[1:].sin()
        self.lazy.mul_(3)
        c = (a @ self.lazy.t()).relu()
        self.lazy.view(-1)[2:5].sub_(0.5)
        a.mul_(0.5)
        d = c.sum() + self.plain.exp().mean()
        self.plain.mul_(1.5)
        self.made = [a, b, c, d, self.lazy]


def flushed(
    n: int, error: type[BaseException], kind: type[RaisesAt] = RaisesAt
) -> tuple[Program, RaisesAt]:
    """The program, run and flushed with an exception at the flush's line `n`."""
    program, raises = Program(is_lazy=True), kind(n, error)
    put = sys.setprofile if kind is RaisesAfter else sys.settrace
    signal.signal(signal.SIGUSR1, cast(Any, raises))  # its frame is one of a handler
    with lazy_mode():
        program.run()
        put(raises)
        try:
            flush(local.trace, "test")
        except (Injected, InjectedError, UserWarning):
            pass  # of what can't be planned is warned, and warnings are errors here
        finally:
            put(None)
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    return program, raises


def first_sight() -> None:
    local.trace.forget()


def planned() -> None:
    local.trace.forget()
    flushed(0, Injected)


def known() -> None:
    """The plan is there from the line before."""


def counted() -> None:
    """Segments run op by op, and are counted until their kernels are asked for."""
    for fusion in list(compiler()._fusions):
        fusion.status = "aten"
        fusion.count_runs()


def measured() -> None:
    """A kernel runs, or its ops, in turns, and the time is taken."""
    for fusion in list(compiler()._fusions):
        if not isinstance(fusion.run, Trial):
            fusion._use(Trial(fusion.run, fusion.aten, lambda *_: None))


class Tier(NamedTuple):
    """How the flush runs: what comes before each one, the options, and the distance of the lines at
    which it is ended (all of them with `--full`)."""

    prepare: Callable[[], None]
    options: dict[str, Any]
    every: int = 1


TIERS = {
    "interpreted": Tier(first_sight, {}, 5),
    "planned at first sight": Tier(first_sight, {"compile": "blocking"}, 23),
    "planned": Tier(planned, {}, 23),
    "known plan": Tier(known, {}),
    "op by op": Tier(counted, {"backend": "inductor", "compile": "background"}),
    "kernels": Tier(known, {"backend": "inductor", "compile": "blocking"}),
    "kernels beside op by op": Tier(measured, {"backend": "inductor", "compile": "blocking"}),
}


def lost(program: Program, expected: Program, error: type[BaseException]) -> tuple[list[str], int]:
    """What is wrong after the flush; and how many values failed by `error`."""
    wrong, n_failed = [], 0
    if not torch.allclose(program.plain, expected.plain, rtol=1e-6):
        wrong.append("the plain tensor")
    for i, (got, right) in enumerate(zip(program.made, expected.made, strict=True)):
        try:
            same = torch.allclose(materialize(got * 1), right, rtol=1e-5, atol=1e-6)
        except error:
            n_failed += 1
        except Exception as raised:
            wrong.append(f"value {i}: {raised!r}")
        else:
            if not same:
                wrong.append(f"value {i}")
    return wrong, n_failed


@pytest.mark.parametrize(
    ("kind", "error"),
    [(RaisesAt, Injected), (RaisesAt, InjectedError), (RaisesAfter, Injected)],
    ids=["at a line", "an error at a line", "after a call"],
)
@pytest.mark.parametrize("tier", TIERS)
def test_an_exception_anywhere_in_a_flush_loses_no_value(tier, kind, error, pytestconfig):
    prepare, options, every = TIERS[tier]
    every = 1 if pytestconfig.getoption("--full") else every
    configure(record="always", **options)
    expected = Program(is_lazy=False)
    expected.run()
    for _ in range(3):
        flushed(0, error, kind)
    n_failed, losses = 0, []
    for n in itertools.count(1, every):
        prepare()
        program, raises = flushed(n, error, kind)
        if not raises.where:
            break
        wrong, failed = lost(program, expected, error)
        n_failed += failed
        losses += [f"{raises.where}: {', '.join(wrong)}"] if wrong else []
        assert local.trace.state is local.trace.root
    assert not losses, "\n".join(losses)
    print(f"{tier}: {n - 1} lines, one in {every} of them; {n_failed} values failed, none lost")
    assert n > 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in finalizers
@pytest.mark.parametrize("tier", TIERS)
def test_ctrl_c_at_any_time_in_a_flush_loses_no_value(tier, interrupted_after):
    """By a signal, between two instructions of a plan, too. What a kernel of Python's gave may be
    lost with it, and then says so."""
    prepare, options, _ = TIERS[tier]
    configure(record="always", **options)
    expected = Program(is_lazy=False)
    expected.run()
    for _ in range(3):
        flushed(0, Injected)
    n_interrupted = 0
    for delay_us in range(5, 600, 5):
        prepare()
        program = Program(is_lazy=True)
        with lazy_mode():
            program.run()
            n_interrupted += interrupted_after(delay_us, lambda: flush(local.trace, "test"))
        wrong, n_failed = lost(program, expected, BaseException)
        assert not wrong, delay_us
        assert not n_failed or "backend" in options, delay_us
        assert local.trace.state is local.trace.root
    assert n_interrupted
