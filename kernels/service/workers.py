"""The parent's side of the worker processes: starting them, asking them to build, ending them.

In: a backend of this package and a segment. Out: the artifact. Called by `service.compile`.
Messages are pickles behind an 8-byte length, over the pipes of our own children.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any

import torch

from lazy_tensor.kernels.backend import Backend, BuildsTogether, Declined
from lazy_tensor.kernels.extension.extension import BEHIND
from lazy_tensor.kernels.segment import Segment

_TOP_PACKAGE, _, _ = __name__.partition(".")
_PACKAGE = "lazy_tensor.kernels"


class BuildError(RuntimeError):
    """A worker could not build a segment; says why."""


class WorkerDied(BuildError):
    """A build crashed its worker, or took so long that the worker was ended."""


CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""What ends a worker by its own doing: others can kill it, or the machine be short of memory."""

BUILD_LIMIT_S = 600.0
"""Seconds after which a build is given up and its worker ended."""


def is_known_to_workers(backend: Backend) -> bool:
    """Whether a worker can make this backend: one of this package, not one registered by others."""
    return type(backend).__module__.startswith(_PACKAGE + ".")


class _Pickler(pickle.Pickler):
    """Names torch's constants as attributes of torch.

    They pickle as globals without a module, so pickle would name whichever loaded module it first
    finds torch in, one of the user's perhaps, which a worker can't import.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (torch.memory_format, torch.layout, torch.dtype)):
            return _torch_constant, (str(obj).removeprefix("torch."),)
        return NotImplemented


def _torch_constant(name: str) -> Any:
    return getattr(torch, name)


def send(pipe: IO[bytes], message: Any) -> None:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(message)
    content = buffer.getvalue()
    left = memoryview(len(content).to_bytes(8, "little") + content)
    while left:
        left = left[pipe.write(left) :]
    pipe.flush()


def receive(pipe: IO[bytes]) -> Any:
    """The next message; EOFError if the other side is gone."""
    n_bytes = int.from_bytes(_read(pipe, 8), "little")
    return pickle.loads(_read(pipe, n_bytes))


def _read(pipe: IO[bytes], n_bytes: int) -> bytes:
    content = bytearray()
    while len(content) < n_bytes:
        part = pipe.read(n_bytes - len(content))
        if not part:
            raise EOFError
        content += part
    return bytes(content)


HEAD_START_S = 10.0
"""Seconds of a processor for which a worker is as nice as the program. To import torch's compiler
and build a first kernel takes 5 to 8: beside a program of two threads on two cores 8 s, where steps
take five to ten times as long, instead of 12 to 19, where they take twice as long. Not beside
ranks of a program, each of which waits for the slowest: two ranks on two cores do 0.9 of torch's
steps in the first 20 s under DDP, 0.65 with the head start, and as many either way by
`fully_shard`."""

# The whole package comes from where this process has it: on the path there may be another version.
_BEGIN = f"""
import importlib.util, os, sys
niceness, head_start_s = int(sys.argv.pop(1)), float(sys.argv.pop(1))
sys.path[:] = sys.argv.pop(1).split({os.pathsep!r})
spec = importlib.util.spec_from_file_location({_TOP_PACKAGE!r}, sys.argv.pop(1))
sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[spec.name])
from {__name__.rpartition(".")[0]}.worker import main
main(niceness, head_start_s, *sys.argv[1:])
"""


def _path() -> list[str]:
    """Where modules are looked for, as here, but last where the program lies: a file of the user's
    must not shadow a module that the program itself never imports. Nor may one of the working
    directory."""
    program = os.path.dirname(getattr(sys.modules["__main__"], "__file__", None) or "")
    return sorted((path for path in sys.path if path), key=lambda path: path == program)


def _has_ranks() -> bool:
    """Whether the program is several processes that wait for each other."""
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


class _Worker:
    """One child process, which does one thing at a time."""

    def __init__(self, build_dir: str | None, niceness: int, head_start_s: float) -> None:
        init_file = sys.modules[_TOP_PACKAGE].__file__
        assert init_file is not None, "it has an __init__.py"
        priority = str(niceness), str(head_start_s)
        arguments = [*priority, os.pathsep.join(_path()), init_file]
        if build_dir is not None:
            arguments.append(build_dir)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BEGIN, *arguments],
            bufsize=0,  # a buffer's lock would stay locked in a child that is forked during a read
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, backend: Backend, method: str, argument: Any) -> Any:
        """What `method` of the backend gives there."""
        kind = type(backend)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        n_threads = torch.get_num_threads()
        request = (kind.__module__, kind.__qualname__, method, argument, n_threads)
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            self._process.kill()

        limit = threading.Timer(BUILD_LIMIT_S, end)
        limit.daemon = True
        limit.start()
        try:
            send(self._process.stdin, request)
            ending, answer = receive(self._process.stdout)
        except (OSError, EOFError):
            code = self._process.wait()
            if is_late.is_set():
                raise WorkerDied(f"it took the compile worker over {BUILD_LIMIT_S:.0f} s") from None
            failure = WorkerDied if -code in CRASHES else BuildError
            raise failure(f"the compile worker ended with exit code {code}") from None
        finally:
            limit.cancel()
        if ending != "built":
            raise Declined(answer) if ending == "declined" else BuildError(answer)
        return answer

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self.let_go()

    def let_go(self) -> None:
        """Close this process's ends of the pipes."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def disown(self) -> None:
        """Leave the process to its parent: to this forked child it is none of its business."""
        self._process.returncode = 0
        self.let_go()


class Workers:
    """Up to `size` worker processes, started when first needed, ended with this process.

    `build_dir` says where backends keep their working files, None if they may choose. It is asked
    when a process is started, which has `niceness` after `head_start_s`
    of a processor.
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
        self._slots = threading.BoundedSemaphore(self.size)
        self._lock = threading.Lock()
        self._all: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._is_closed = False

    def build(self, backend: Backend, segment: Segment) -> bytes:
        """What `backend.build(segment)` returns in a worker; BuildError if that fails, Declined if
        that is no failure."""
        artifact: bytes = self._ask(backend, "build", segment)
        return artifact

    def build_all(self, backend: BuildsTogether, segments: Sequence[Segment]) -> list[bytes | None]:
        """What `backend.build_all(segments)` returns in a worker; BuildError if that fails."""
        artifacts: list[bytes | None] = self._ask(backend, "build_all", segments)
        return artifacts

    def _ask(self, backend: Backend, method: str, argument: Any) -> Any:
        with self._slots:
            worker = self._take()
            try:
                return worker.ask(backend, method, argument)
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
            except OSError as error:  # no memory, or no process, is left for one
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
        """End the workers, in the middle of a build too."""
        atexit.unregister(self.close)
        with self._lock:
            self._is_closed = True
            for worker in self._all:
                worker.end()
            self._idle.clear()

    def forget(self) -> None:
        """Leave the workers to the parent process, as in a forked child."""
        for worker in self._all:
            worker.disown()
        self._reset()
