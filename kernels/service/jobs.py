"""Fusions waiting to be worked on by daemon threads, those first in which most time goes."""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from lazy_tensor.kernels.service.fusion import Fusion

MOST_TOGETHER = 8
"""Fusions that a thread takes at once: the first of their kernels comes when the last one does."""

GATHERS_S = 0.05
"""How long a thread that had nothing to do waits for more: those of one flush come at once."""


class Jobs:
    """Calls `work(fusion)` for each fusion added, on up to `n_threads` threads; if it is given,
    within `together(fusions)` for those that a thread takes at once.

    Neither may raise: they leave their verdict in the fusion.
    """

    def __init__(
        self,
        work: Callable[[Fusion], None],
        n_threads: int,
        together: Callable[[Sequence[Fusion]], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._work = work
        self._n_threads = n_threads
        self._together = together
        self.forget()

    def forget(self) -> None:
        """Start afresh, as in a forked child, where the threads and the locks' owners are gone."""
        self._changed = threading.Condition()
        self._waiting: list[Fusion] = []
        self._active: list[Fusion] = []
        self._threads: list[threading.Thread] = []
        self._n_idle = 0
        self._is_closed = False

    def add(self, fusion: Fusion) -> bool:
        """Have `fusion` worked on by a thread; False if that is under way already."""
        with self._changed:
            if self._is_closed or fusion in self._waiting or fusion in self._active:
                return False
            self._waiting.append(fusion)
            if self._n_idle < len(self._waiting) and len(self._threads) < self._n_threads:
                thread = threading.Thread(target=self._serve, daemon=True, name="lazy_tensor-jobs")
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()
            return True

    def take_back(self, fusion: Fusion) -> bool:
        """Withdraw `fusion` if nobody has started on it; True if so."""
        with self._changed:
            if fusion not in self._waiting:
                return False
            self._waiting.remove(fusion)
            self._changed.notify_all()
            return True

    def run_now(self, fusion: Fusion) -> None:
        """Work on `fusion` in this thread, or wait for the thread that has started already."""
        self._see_to(fusion, if_waiting=False)

    def finish(self, fusion: Fusion) -> None:
        """The same for a fusion that was added, if there is anything left to do."""
        self._see_to(fusion, if_waiting=True)

    def _see_to(self, fusion: Fusion, *, if_waiting: bool) -> None:
        with self._changed:
            if fusion in self._active:
                self._changed.wait_for(lambda: fusion not in self._active)
                return
            if fusion in self._waiting:
                fusions = self._take(fusion)
            elif if_waiting:
                return
            else:
                self._active.append(fusion)
                fusions = [fusion]
        self._finish(fusions)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until there is nothing to do; False if that took more than `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._active), timeout_s)

    def close(self) -> None:
        """Drop what waits and let the threads end. What is being worked on is not waited for."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """After `close`, wait for what is being worked on, so long at most: a thread in C++ that
        wants the interpreter back when it has gone ends the process with an abort."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0.0))

    def _serve(self) -> None:
        is_busy = False
        while True:
            with self._changed:
                self._n_idle += 1
                if not (is_busy and self._waiting):
                    self._changed.wait_for(lambda: self._waiting or self._is_closed)
                    if self._together is not None:
                        self._changed.wait_for(lambda: self._is_closed, GATHERS_S)
                self._n_idle -= 1
                if self._is_closed:
                    return
                fusions = self._take()
            self._finish(fusions)
            is_busy = True

    def _take(self, first: Fusion | None = None) -> list[Fusion]:
        """Begin on those that wait in which most time has gone, or on `first` and these: on this
        thread's share."""
        share = math.ceil(len(self._waiting) / self._n_threads)
        n = 1 if self._together is None else min(share, MOST_TOGETHER)
        taken = heapq.nlargest(n, self._waiting, key=lambda f: (f is first, f.spent_s))
        for fusion in taken:
            self._waiting.remove(fusion)
        self._active += taken
        return taken

    def _finish(self, fusions: Sequence[Fusion]) -> None:
        left = list(fusions)
        try:
            with nullcontext() if self._together is None else self._together(fusions):
                while left:
                    self._work(left[0])
                    self._release(left.pop(0))
        except Exception as error:  # not foreseen: nobody may wait for ever
            for fusion in left:
                fusion.fail(f"{type(error).__name__}: {error}")
        finally:
            for fusion in left:
                if fusion.status in ("queued", "compiling"):
                    fusion.run_op_by_op("its build was interrupted")
                self._release(fusion)

    def _release(self, fusion: Fusion) -> None:
        with self._changed:
            self._active.remove(fusion)
            self._changed.notify_all()
