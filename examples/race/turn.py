"""One side's turn in the demo, in a process of its own with one thread and empty caches.

In: a program, a side, seconds. Out: a `Turn`. The process sends the times of its steps through a
pipe while it runs, and its values at the end, to be compared with those of other sides.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import lazy_tensor
from lazy_tensor.examples.race.scenes import SIDES, Begin, Step
from lazy_tensor.kernels import available_backends
from lazy_tensor.reports.flushes import amount

EVERY_S = 0.2
"""Seconds between two messages of the process."""
Values = dict[int, NDArray[np.float32]]
"""Values of steps, by the step's number, which starts with 1."""


@dataclass(slots=True)
class Turn:
    """What one side has done.

    `ends_s` are the times at which its steps ended, in seconds from the begin of the first one.
    `values` are the results of some steps, `last` is that of the last one. `why` is a sentence on
    what made it fast. `error` says what ended it, "" if it came to its end.
    """

    ends_s: list[float] = field(default_factory=list)
    values: Values = field(default_factory=dict)
    last: NDArray[np.float32] | None = None
    why: str = ""
    error: str = ""

    @property
    def times_s(self) -> list[float]:
        """The seconds of each step."""
        return [b - a for a, b in zip([0.0, *self.ends_s], self.ends_s, strict=False)]

    def settled_s(self) -> float:
        """The median of the last fifth of its steps, in seconds."""
        times = self.times_s
        return float(np.median(times[-max(1, len(times) // 5) :]))

    def steps_by(self, seconds: float) -> int:
        return sum(end <= seconds for end in self.ends_s)


Results = dict[str, dict[str, Turn]]
"""What each side has done, by scene, then by side, in the order of the run."""


def difference(one: Turn, other: Turn) -> float | None:
    """The largest difference between values of the same step; None if both kept none of a step."""
    common = one.values.keys() & other.values.keys()
    gaps = [np.abs(other.values[n] - one.values[n]).max() for n in common]
    return float(max(gaps)) if gaps else None


def prepare() -> None:
    """Start the server process that turns are forked from. It imports PyTorch meanwhile, once for
    all turns."""
    forkserver.set_forkserver_preload([__name__])
    forkserver.ensure_running()


def run_turn(begin: Begin, side: str, seconds: float, show: Callable[[Turn], None]) -> Turn:
    """Run a program on one side for so many seconds, and one step at least.

    `show` is called every now and then with what has been done so far. A KeyboardInterrupt ends the
    process, and is raised again.
    """
    turn = Turn()
    prepare()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    with TemporaryDirectory(prefix="lazy_tensor_demo") as caches:
        process = context.Process(target=_work, args=(begin, side, seconds, caches, theirs))
        try:
            _start(process)
            # with this end open, `recv` would wait for ever if the process died
            theirs.close()
            for message in _received(ours):
                if isinstance(message, Turn):
                    turn = message
                    break
                turn.ends_s.extend(message)
                show(turn)
            else:
                turn.error = "its process ended early"
        finally:
            if process.pid is not None:
                # its caches are deleted next
                process.terminate()
                process.join()
    return turn


def _start(process: Any) -> None:
    """Have the server start a process. Ctrl-C waits until that is over: in the middle of it, the
    server would show an error."""
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def _received(pipe: Connection) -> Iterator[Turn | list[float]]:
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


def _work(begin: Begin, side: str, seconds: float, caches: str, pipe: Connection) -> None:
    """The main function of the process."""
    # Empty caches, so that no side gains by what another one has compiled. One thread leaves the
    # other cores to compilers.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(caches, "inductor"))
    torch.set_num_threads(1)
    lazy_tensor.configure(cache_dir=Path(caches, "lazy_tensor"), warn=False)
    turn = Turn()
    try:
        _run_steps(begin(SIDES[side]), seconds, turn, pipe)
        turn.why = _why() if side in ("lazy", "replay") else ""
    # Ctrl-C reaches all processes. The one that shows the table handles it; this one ends silently.
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(1)
    # the table shows the error, and the other sides have their turns
    except Exception as error:
        turn.error = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    with suppress(BrokenPipeError):
        pipe.send(turn)


def _run_steps(step: Step, seconds: float, turn: Turn, pipe: Connection) -> None:
    n_sent, sent_s, began = 0, 0.0, time.perf_counter()
    while not turn.ends_s or turn.ends_s[-1] < seconds:
        value = step()
        end_s = time.perf_counter() - began
        turn.ends_s.append(end_s)
        n = len(turn.ends_s)
        # of images only steps 1, 2, 4, 8, ... are kept: sides do different numbers of steps
        if value.dim() == 0 or n & (n - 1) == 0:
            turn.values[n] = value.numpy().copy()
        if end_s - sent_s >= EVERY_S:
            pipe.send(turn.ends_s[n_sent:])
            n_sent, sent_s = n, end_s
    turn.last = value.numpy().copy()


def _why() -> str:
    """A sentence on the kernel of the last flush that keeps most bytes out of memory, and how many;
    "" if there is no kernel yet."""
    flushes = lazy_tensor.explain().flushes
    kernels = [step for step in flushes[-1].steps if step.is_segment] if flushes else []
    best = max(kernels, key=lambda step: step.n_bytes_saved, default=None)
    if best is None or best.status not in available_backends() or best.status == "aten":
        return ""
    return (
        f"{len(best.ops)} ops at {best.lines} run as one kernel. It moves {amount(best.n_bytes)}; "
        f"{amount(best.n_bytes_saved)} of results between the ops never go to memory"
    )
