"""The program of a worker process, which builds segments for its parent.

`workers` starts it. In: requests on standard input. Out: answers on the original standard output.
It ends when its parent closes the pipe or ends.
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
    """Serve requests until the parent closes its end of the pipe.

    Compilers keep their files in `build_dir`. The process takes on `niceness` after it has used
    `head_start_s` seconds of processor time.
    """
    if head_start_s == 0.0:
        os.nice(niceness)
    elif niceness:
        # ITIMER_PROF counts processor time, not the time that the worker waits for requests
        signal.signal(signal.SIGPROF, lambda *_: os.nice(niceness))
        signal.setitimer(signal.ITIMER_PROF, head_start_s)
    if build_dir is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = build_dir
        _drop_stale(Path(build_dir))
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    answers = _private_stdout()
    # in a thread of its own, so that the worker ends with its parent in the middle of a build too
    threading.Thread(target=_read_requests, args=(sys.stdin.buffer, requests), daemon=True).start()
    while True:
        request = requests.get()
        try:
            if isinstance(request, Exception):
                raise request
            module, kind, method, argument, n_threads = request
            # Inductor compiles the number of threads into kernels: the parent's, not the worker's
            torch.set_num_threads(n_threads)
            send(answers, ("built", getattr(_backend(module, kind), method)(argument)))
        except Declined as reason:
            send(answers, ("declined", str(reason)))
        except Exception as error:
            send(answers, ("failed", _told(error)))


def _drop_stale(build_dir: Path) -> None:
    """Delete files of `build_dir` that are older than a day. Compilers make again what they need.

    Inductor keeps a file of each kernel there, which nothing else would delete.
    """
    oldest = time.time() - 24 * 3600
    for path in build_dir.glob("*/*"):
        with contextlib.suppress(OSError):  # another worker may delete the same file
            if path.is_file() and path.stat().st_mtime < oldest:
                path.unlink()


def _private_stdout() -> IO[bytes]:
    """The pipe to the parent, on another descriptor; standard output goes nowhere.

    Otherwise a library that prints would write into the middle of an answer.
    """
    pipe = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return pipe


def _read_requests(pipe: IO[bytes], requests: queue.SimpleQueue[Any]) -> None:
    """Move requests from the pipe to the queue; end the process when the parent is gone."""
    while True:
        try:
            requests.put(receive(pipe))
        except EOFError:
            # `sys.exit` would end this thread only
            os._exit(0)
        except Exception as error:
            # a request that can't be unpickled: the parent waits for an answer to it all the same
            requests.put(error)


def _backend(module: str, kind: str) -> PortableBackend:
    return cast(PortableBackend, getattr(importlib.import_module(module), kind)())


def _told(error: Exception) -> str:
    """The error on one line, and where it was raised."""
    line = traceback.format_exception_only(error)[-1].strip()
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{line} ({os.path.basename(last.filename)}:{last.lineno})"
