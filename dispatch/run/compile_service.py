"""The compile service of the process, and requests for the package's own C++.

In: the settings in force. Out: the compile service for their `cache_dir`. The other functions ask
for the C++ that records hits or runs programs, at the time when it may pay. Called by `flush`,
`plan_cache`, `sync_points` and the mode.
"""

from __future__ import annotations

import atexit
import os
import threading
from pathlib import Path

from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.stats import STATS
from lazy_tensor.kernels import backend as backends, cache as caches
from lazy_tensor.kernels.counters import Counters
from lazy_tensor.kernels.extension import program
from lazy_tensor.kernels.service.compile import Compiler

MOST_COMPILERS = 4
"""Compile services beside the one for the process's `cache_dir`. One more closes the oldest."""
_compilers: dict[str, Compiler] = {}  # by `cache_dir`
_counters = Counters()  # shared by all services: `stats()` shows one sum
_compilers_lock = threading.RLock()


def compiler() -> Compiler:
    """The compile service for the `cache_dir` in force, made at first use.

    A block with its own `cache_dir` gets its own service, so that it doesn't disturb the kernels of
    other threads.
    """
    now = settings.current()
    found = _compilers.get(now.cache_dir)
    return _new_compiler(now) if found is None else found


def _new_compiler(now: settings.Settings) -> Compiler:
    with _compilers_lock:
        if now.cache_dir not in _compilers:  # another thread may have made it before the lock
            # the process's own service stays: every block without a `cache_dir` comes back to it
            others = [one for one in _compilers if one != settings.of_process().cache_dir]
            if len(others) >= MOST_COMPILERS:
                closed = _compilers.pop(others[0])
                closed.close()
                atexit.unregister(closed.end)
            made = Compiler(
                maxsize=now.segment_cache_size,
                cache_dir=Path(now.cache_dir),
                counters=_counters,
                may_build=STATS.has_worked_long,
            )
            _compilers[now.cache_dir] = made
            atexit.register(made.end)
        return _compilers[now.cache_dir]


def _follow_settings(new: settings.Settings) -> None:
    found = _compilers.get(new.cache_dir)
    if found is not None:
        found.cache.resize(new.segment_cache_size)


def _forget_kernels() -> None:
    for one in list(_compilers.values()):
        one.cache.clear()


def _after_fork_in_child() -> None:
    global _compilers_lock
    _compilers_lock = threading.RLock()  # a thread that is gone may hold the parent's


settings.on_change(_follow_settings)
caches.on_clear(_forget_kernels)
os.register_at_fork(after_in_child=_after_fork_in_child)


def begin_hits() -> None:
    """Record hits in C++ from now on, if the C++ is on disk or compiled by now.

    Compiling it begins once the program has worked for long. While other threads have recorded,
    nothing is switched (see `hits.start_if_compiled`), so this is called again and again: where
    blocks begin, at `wrap`, and while many ops run unrecorded.
    """
    if not (hits.EXTENSION.is_asked_for or settings.records_in_python()):
        hits.EXTENSION.ask(compiler().disk, may_compile=False, wait=False)
        if STATS.has_worked_long():
            ask_for_hits()
    hits.start_if_compiled()


def obtain_extensions() -> None:
    """Compile all C++ of the package now, so that later processes find it on disk."""
    disk = compiler().disk
    hits.start(disk)
    program.ask_for(disk, may_compile=True, wait=True)


def ask_for_hits() -> None:
    """Compile the C++ that records hits in the background, unless `compile` is "off"."""
    if settings.current().compile != "off":
        hits.EXTENSION.ask(compiler().disk, may_compile=True, wait=False)


def chosen_backend(device_type: str) -> backends.Backend:
    """The backend that the settings in force mean on a device, such as "cpu"."""
    return backends.choose(settings.current().backend, device_type)
