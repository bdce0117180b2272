"""A queue of fusions for daemon threads; those first that have spent most time op by op.

`service.compile` has three: one loads kernels from disk, one builds those of simple segments, and
one has workers build all others. A thread of the program may also do a waiting fusion's work
itself, in "blocking" mode.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from lazy_tensor.kernels.service.fusion import Fusion


class Jobs:
    """Calls `work(fusion)` for each fusion added, on up to `n_threads` threads.

    `work` should not raise: it records what went wrong in the fusion.
    """

    def __init__(self, work: Callable[[Fusion], None], n_threads: int) -> None:
        self._work = work
        self._n_threads = n_threads
        self.forget()

    def forget(self) -> None:
        """Set all state to that of a new queue, as in a forked child, which has no threads."""
        # guards all that follows, and is notified at each change
        self._changed = threading.Condition()
        self._waiting: list[Fusion] = []
        # taken by a thread and not yet released; a fusion is never in both lists
        self._active: list[Fusion] = []
        self._threads: list[threading.Thread] = []
        # threads in `_serve` that wait for a fusion
        self._n_idle = 0
        self._is_closed = False

    def add(self, fusion: Fusion) -> bool:
        """Queue `fusion` for a thread; False if it is queued or worked on already, or on close."""
        with self._changed:
            if self._is_closed or fusion in self._waiting or fusion in self._active:
                return False
            self._waiting.append(fusion)
            # a new thread only if more fusions wait than threads are idle
            if self._n_idle < len(self._waiting) and len(self._threads) < self._n_threads:
                thread = threading.Thread(target=self._serve, daemon=True, name="lazy_tensor-jobs")
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()
            return True

    def take_back(self, fusion: Fusion) -> bool:
        """Remove `fusion` from the queue; False if it isn't there or a thread has taken it."""
        with self._changed:
            if fusion not in self._waiting:
                return False
            self._waiting.remove(fusion)
            self._changed.notify_all()
            return True

    def finish(self, fusion: Fusion) -> None:
        """Work on `fusion` in this thread, or wait for the thread that works on it already.

        Does nothing if `fusion` is neither waiting nor worked on.
        """
        with self._changed:
            if fusion not in self._waiting:
                self._changed.wait_for(lambda: fusion not in self._active)
                return
            self._take(fusion)
        self._finish(fusion)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing waits or is worked on; False if that takes over `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._active), timeout_s)

    def close(self) -> None:
        """Drop all waiting fusions and let the threads end, without waiting for them."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """After `close`, wait for the threads to end, `timeout_s` at most.

        A thread that returns from C++ after the interpreter has been shut down would abort the
        process.
        """
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - time.monotonic(), 0.0))

    def _serve(self) -> None:
        """What each thread runs until `close`."""
        while True:
            with self._changed:
                self._n_idle += 1
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                self._n_idle -= 1
                if self._is_closed:
                    return
                # a kernel helps most where replay has taken most time
                fusion = max(self._waiting, key=lambda fusion: fusion.spent_s)
                self._take(fusion)
            self._finish(fusion)

    def _take(self, fusion: Fusion) -> None:
        """Move a fusion from `_waiting` to `_active`. The caller holds the lock."""
        self._waiting.remove(fusion)
        self._active.append(fusion)

    def _finish(self, fusion: Fusion) -> None:
        """Work on an active fusion, and release it even if that raises."""
        try:
            self._work(fusion)
        except Exception as error:
            # unforeseen, such as no memory for a process
            fusion.fail(f"{type(error).__name__}: {error}")
        except BaseException:
            # Ctrl-C in a thread of the program: its fusion must not stay "compiling" for ever
            if fusion.status in ("queued", "compiling"):
                fusion.run_op_by_op("its build was interrupted")
            raise
        finally:
            with self._changed:
                self._active.remove(fusion)
                self._changed.notify_all()
