"""What is compiled for the process: the service that makes kernels, and the C++ of the package.

In: the settings in force. Out: the compile service for their `cache_dir`; C++ that is asked for.
"""

from __future__ import annotations

import atexit
import os
import threading
from pathlib import Path

from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.plan.plan import Plan
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.stats import STATS
from lazy_tensor.kernels import backend as backends, cache as caches
from lazy_tensor.kernels.counters import Counters
from lazy_tensor.kernels.extension import program
from lazy_tensor.kernels.extension.pool import POOL
from lazy_tensor.kernels.service.compile import Compiler

MOST_COMPILERS = 4
"""Compile services beside the process's own, one for each `cache_dir` in use; the oldest ends when
there is one more."""
_compilers: dict[str, Compiler] = {}
_counters = Counters()  # of all compile services
_compilers_lock = threading.RLock()


def compiler() -> Compiler:
    """The compile service for the `cache_dir` in force, made when first needed.

    A block that has a `cache_dir` of its own leaves the services of others alone.
    """
    now = settings.current()
    found = _compilers.get(now.cache_dir)
    return _new_compiler(now) if found is None else found


def _new_compiler(now: settings.Settings) -> Compiler:
    with _compilers_lock:
        if now.cache_dir not in _compilers:
            others = [one for one in _compilers if one != settings.of_process().cache_dir]
            if len(others) >= MOST_COMPILERS:
                _compilers.pop(others[0]).close()
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


def ask_for_pool(plan: Plan) -> None:
    """Have the memory of large results used again, once that pays."""
    if plan.is_pooled and not POOL.is_asked_for:
        compiler().keep_memory(settings.current().compile, may_compile=STATS.has_worked_long())


def begin_hits() -> None:
    """Have calls taken below Python from now on, if what does so is on disk or was compiled, which
    begins when the program has run for a while: it can't be begun with when several threads record.
    """
    if not (hits.EXTENSION.is_asked_for or settings.records_in_python()):
        hits.EXTENSION.ask_disk(compiler().disk)
        if STATS.has_worked_long():
            ask_for_hits()
    hits.start_if_compiled()


def obtain_extensions() -> None:
    """Have the C++ that helps compiled now, so that it lies on disk."""
    disk = compiler().disk
    hits.start(disk)
    program.ask_for(disk, may_compile=True, wait=True)
    POOL.ask_for(disk, wait=True)


def ask_for_hits() -> None:
    """Have what takes hits below Python compiled in the background."""
    if settings.current().compile != "off":
        hits.EXTENSION.ask_for(compiler().disk, wait=False)


def chosen_backend(device_type: str) -> backends.Backend:
    return backends.choose(settings.current().backend, device_type)
