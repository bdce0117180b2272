"""The parent's side of the worker processes: starts them, sends requests, and ends them.

In: a backend of this package and a segment. Out: the artifact. Called by `service.compile`.
Messages are pickles. Unpickling is safe here, since the pipes lead only to processes that this
process has started.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from lazy_tensor.kernels.backend import Backend, Declined
from lazy_tensor.kernels.extension.extension import BEHIND
from lazy_tensor.kernels.segment import Segment

_TOP_PACKAGE, _, _ = __name__.partition(".")
_PACKAGE = "lazy_tensor.kernels"


class BuildError(RuntimeError):
    """A worker could not build a segment; the message says why."""


class WorkerDied(BuildError):
    """A build crashed its worker, or exceeded `BUILD_LIMIT_S`.

    No process tries such a build again. A worker that someone else killed is a plain BuildError.
    """


CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals that mean that the worker crashed. Others, such as SIGKILL, come from outside: from a
user, or from a system that is short of memory."""

BUILD_LIMIT_S = 600.0
"""Seconds after which a build is given up and its worker is killed."""


def is_known_to_workers(backend: Backend) -> bool:
    """Whether a worker can create this backend, by its module and class.

    That is so for the backends of this package. A class of the user's program may not be importable
    in a worker.
    """
    return type(backend).__module__.startswith(_PACKAGE + ".")


class _Pickler(pickle.Pickler):
    """Pickles torch's constants, such as dtypes, as attributes of torch.

    By default they pickle as globals without a module. Then pickle searches all loaded modules for
    the name, and may find a module of the user's, which a worker can't import.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (torch.memory_format, torch.layout, torch.dtype)):
            return _torch_constant, (str(obj).removeprefix("torch."),)
        return NotImplemented


def _torch_constant(name: str) -> Any:
    return getattr(torch, name)


def pickled(message: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(message)
    return buffer.getvalue()


HEAD_START_S = 10.0
"""Seconds of processor time for which a new worker has the program's own priority.

To import torch's compiler and build a first kernel takes 5 to 8 s. Beside a program of two threads
on two cores the first kernel comes after 8 s, while steps take five to ten times as long. Without a
head start it comes after 12 to 19 s, while steps take twice as long.

Programs of several ranks get no head start, because each rank waits for the slowest. In the first
20 s two ranks on two cores do 0.9 of torch's steps under DDP, and 0.65 with a head start. Under
`fully_shard` it makes no difference."""

# A worker's program, given to `python -c`. It finds the package where this process found it, as
# another version may come first on the path. It doesn't run the package's `__init__.py`: that would
# import the whole of it, which takes half a second.
_PROGRAM = f"""
import sys, types
pipe, niceness, head_start_s, path, package_path, *build_dir = sys.argv[1:]
sys.path[:] = path.split({os.pathsep!r})
package = sys.modules[{_TOP_PACKAGE!r}] = types.ModuleType({_TOP_PACKAGE!r})
package.__path__ = package_path.split({os.pathsep!r})
from {__name__.rpartition(".")[0]}.worker import main
main(int(pipe), int(niceness), float(head_start_s), *build_dir)
"""


def _worker_path() -> list[str]:
    """The worker's `sys.path`: this process's own, with the program's folder moved to the end.

    A file beside the program must not shadow a module that torch's compiler imports and the program
    never does. The empty entry, which means the working directory, is left out for the same reason.
    """
    program = os.path.dirname(getattr(sys.modules["__main__"], "__file__", None) or "")
    return sorted((path for path in sys.path if path), key=lambda path: path == program)


def _has_ranks() -> bool:
    """Whether the program is one rank of several, which wait for each other."""
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


ENDS_WITHIN_S = 5.0
"""Seconds within which a worker ends after its pipe is closed."""


class _Worker:
    """One child process, which answers one request at a time."""

    def __init__(self, build_dir: str | None, niceness: int, head_start_s: float) -> None:
        package_path = os.pathsep.join(sys.modules[_TOP_PACKAGE].__path__)
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            arguments = map(str, (theirs.fileno(), niceness, head_start_s))
            paths = [os.pathsep.join(_worker_path()), package_path, *filter(None, [build_dir])]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, *arguments, *paths],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def build(self, backend: Backend, segment: Segment) -> bytes:
        """The result of `backend.build(segment)` in the worker.

        Declined or BuildError if it raises there; WorkerDied or BuildError if the worker ends.
        """
        kind = type(backend)
        n_threads = torch.get_num_threads()
        request = pickled((kind.__module__, kind.__qualname__, segment, n_threads))
        began_s = time.monotonic()
        # a killed process closes its end of the pipe, so that `recv_bytes` below raises
        limit = threading.Timer(BUILD_LIMIT_S, self._process.kill)
        limit.daemon = True
        limit.start()
        is_answered = False
        try:
            self._pipe.send_bytes(request)
            ending, answer = pickle.loads(self._pipe.recv_bytes())
            is_answered = True
        except (OSError, EOFError) as error:
            try:
                # a negative code is the number of the signal that ended the process
                code = self._process.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                raise error from None  # from a signal handler, such as a TimeoutError
            if time.monotonic() - began_s >= BUILD_LIMIT_S:
                raise WorkerDied(f"it took the compile worker over {BUILD_LIMIT_S:.0f} s") from None
            failure = WorkerDied if -code in CRASHES else BuildError
            raise failure(f"the compile worker ended with exit code {code}") from None
        finally:
            limit.cancel()
            # the next request would read this one's answer
            if not is_answered:
                self._process.kill()
                self._process.wait()
        if ending != "built":
            raise Declined(answer) if ending == "declined" else BuildError(answer)
        artifact: bytes = answer
        return artifact

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self.let_go()

    def let_go(self) -> None:
        """Close this process's end of the pipe."""
        self._pipe.close()

    def disown(self) -> None:
        """Let go of the process in a forked child: it belongs to the parent."""
        # as if it had ended: `Popen` would otherwise wait for it or warn when it is deleted
        self._process.returncode = 0
        self.let_go()


class Workers:
    """Up to `size` worker processes: started when first needed, and ended with this process.

    `build_dir()` is the folder for the compilers' own files, or None if they may choose. It is
    called when a worker is started. `niceness` and `head_start_s` hold for the next workers; see
    `HEAD_START_S`.
    """

    def __init__(
        self, size: int | None = None, build_dir: Callable[[], str | None] | None = None
    ) -> None:
        self.size = size or max(1, (os.cpu_count() or 1) - 1)
        self._build_dir = build_dir or (lambda: None)
        self.niceness, self.head_start_s = BEHIND, HEAD_START_S
        self._reset()
        atexit.register(self.close)

    def _reset(self) -> None:
        # bounds the number of workers: each build holds a slot
        self._slots = threading.BoundedSemaphore(self.size)
        # guards the lists below
        self._lock = threading.Lock()
        self._all: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._is_closed = False

    def build(self, backend: Backend, segment: Segment) -> bytes:
        """The result of `backend.build(segment)` in a worker; raises BuildError or Declined."""
        with self._slots:
            worker = self._take()
            try:
                return worker.build(backend, segment)
            finally:
                self._put_back(worker)

    def _take(self) -> _Worker:
        with self._lock:
            if self._is_closed:
                raise BuildError("the compile service is closed")
            if self._idle:
                return self._idle.pop()
            try:
                head_start_s = 0.0 if _has_ranks() else self.head_start_s
                worker = _Worker(self._build_dir(), self.niceness, head_start_s)
            except OSError as error:  # too little memory, or too many processes
                raise BuildError(
                    f"a process to build kernels in can't be started: {error}"
                ) from None
            self._all.append(worker)
            return worker

    def _put_back(self, worker: _Worker) -> None:
        with self._lock:
            if worker.is_alive:
                self._idle.append(worker)
            else:
                worker.let_go()
                self._all.remove(worker)

    def close(self) -> None:
        """End the workers, also in the middle of a build, which then raises a BuildError."""
        atexit.unregister(self.close)
        with self._lock:
            self._is_closed = True
            for worker in self._all:
                worker.end()
            self._idle.clear()

    def forget(self) -> None:
        """Let go of all workers, in a forked child: they belong to the parent process."""
        for worker in self._all:
            worker.disown()
        self._reset()
