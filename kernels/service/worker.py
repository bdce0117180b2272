"""The program of a worker process, which builds segments for its parent.

`workers` starts it. In: requests. Out: answers, by the same pipe. It ends when its parent closes
the pipe or ends.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch

from lazy_tensor.kernels.backend import Declined, PortableBackend
from lazy_tensor.kernels.service.workers import pickled


def main(number: int, niceness: int, head_start_s: float, build_dir: str | None = None) -> None:
    """Serve requests until the parent closes its end of the pipe, here descriptor `number`.

    Compilers keep their files in `build_dir`. The process takes on `niceness` after it has used
    `head_start_s` seconds of processor time.
    """
    os.set_inheritable(number, False)  # a compiler must not keep the pipe open
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
    pipe = Connection(number)
    # in a thread of its own, so that the worker ends with its parent in the middle of a build too
    threading.Thread(target=_read_requests, args=(pipe, requests), daemon=True).start()
    while True:
        request = requests.get()
        try:
            # unpickled here: the parent waits for an answer even if that fails
            module, kind, segment, n_threads = pickle.loads(request)
            # Inductor compiles the number of threads into kernels: the parent's, not the worker's
            torch.set_num_threads(n_threads)
            answer: tuple[str, Any] = ("built", _backend(module, kind).build(segment))
        except Declined as reason:
            answer = ("declined", str(reason))
        except Exception as error:
            answer = ("failed", _error_text(error))
        pipe.send_bytes(pickled(answer))


def _drop_stale(build_dir: Path) -> None:
    """Delete files of `build_dir` that are older than a day.

    Inductor keeps a file of each kernel there, which nothing else would delete. Compilers make any
    file again that they need.
    """
    oldest = time.time() - 24 * 3600
    for path in build_dir.glob("*/*"):
        with contextlib.suppress(OSError):  # another worker may delete the same file
            if path.is_file() and path.stat().st_mtime < oldest:
                path.unlink()


def _read_requests(pipe: Connection, requests: queue.SimpleQueue[bytes]) -> None:
    """Move requests from the pipe to the queue; end the process when the parent is gone."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            requests.put(pipe.recv_bytes())
    # `sys.exit` would end this thread only
    os._exit(0)


def _backend(module: str, kind: str) -> PortableBackend:
    return cast(PortableBackend, getattr(importlib.import_module(module), kind)())


def _error_text(error: Exception) -> str:
    """The error on one line, and where it was raised."""
    line = traceback.format_exception_only(error)[-1].strip()
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{line} ({os.path.basename(last.filename)}:{last.lineno})"
