"""What a child process runs that builds segments for its parent; `workers` starts it.

In: requests on standard input. Out: artifacts on what was standard output. Ends when its parent
does.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import IO, Any, cast

import torch

from lazy_tensor.kernels.backend import Declined, PortableBackend
from lazy_tensor.kernels.service.workers import receive, send


def main(niceness: int, head_start_s: float, build_dir: str | None = None) -> None:
    """Serve until the parent closes its end of the pipe; work in `build_dir`, and with `niceness`
    after so many seconds of a processor."""
    if head_start_s == 0.0:
        os.nice(niceness)
    elif niceness:
        signal.signal(signal.SIGPROF, lambda *_: os.nice(niceness))
        signal.setitimer(signal.ITIMER_PROF, head_start_s)
    if build_dir is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = build_dir
        _drop_stale(Path(build_dir))
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    answers = _private_stdout()
    # a thread of its own: the end of the parent must be noticed in the middle of a build
    threading.Thread(target=_read_requests, args=(sys.stdin.buffer, requests), daemon=True).start()
    while True:
        request = requests.get()
        try:
            if isinstance(request, Exception):
                raise request
            module, kind, method, argument, n_threads = request
            # nothing is computed here: this is the number of threads that kernels are compiled for
            torch.set_num_threads(n_threads)
            send(answers, ("built", getattr(_backend(module, kind), method)(argument)))
        except Declined as reason:
            send(answers, ("declined", str(reason)))
        except Exception as error:
            send(answers, ("failed", _told(error)))


def _drop_stale(build_dir: Path) -> None:
    """Delete what no build has touched for a day; what builds share is made again then."""
    oldest = time.time() - 24 * 3600
    for path in build_dir.glob("*/*"):
        with contextlib.suppress(OSError):  # another worker is at it as well
            if path.is_file() and path.stat().st_mtime < oldest:
                path.unlink()


def _private_stdout() -> IO[bytes]:
    """The pipe to the parent, out of reach of libraries that print."""
    pipe = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return pipe


def _read_requests(pipe: IO[bytes], requests: queue.SimpleQueue[Any]) -> None:
    while True:
        try:
            requests.put(receive(pipe))
        except EOFError:
            os._exit(0)
        except Exception as error:
            # the parent waits for an answer to this request: let the main thread give it
            requests.put(error)


def _backend(module: str, kind: str) -> PortableBackend:
    return cast(PortableBackend, getattr(importlib.import_module(module), kind)())


def _told(error: Exception) -> str:
    """One paragraph: the error, and where it was raised."""
    line = traceback.format_exception_only(error)[-1].strip()
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{line} ({os.path.basename(last.filename)}:{last.lineno})"
