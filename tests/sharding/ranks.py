"""Ranks as threads of one process, on torch's threaded process group: fast, and they may differ."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import _redistribute
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)
from torch.utils import _python_dispatch

import lazy_tensor


def on_ranks(world_size: int) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a test once on each of so many ranks; `dist.get_rank()` says on which.

    All must come to the end; the first error of any is raised.
    """

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def on_all(*args: Any, **kwargs: Any) -> None:
            run_on_ranks(world_size, lambda: test(*args, **kwargs))

        return on_all

    return decorate


def _forget_other_ranks() -> None:
    """torch remembers what a rank does by its mesh, which holds a number of the thread; threads of
    other ranks may have the same number later."""
    _redistribute._gen_transform_infos.cache_clear()
    clear = getattr(_redistribute, "clear_redistribute_planner_cache", None)
    if clear is not None:
        clear()


def _forget_modes() -> None:
    """torch's flags that a dispatch mode is on are the process's: threads that enter and leave some
    at a time leave them set, and Dynamo then takes what it would skip."""
    for name in vars(_python_dispatch):
        if name.startswith("_is_in_"):
            setattr(_python_dispatch, name, False)


def run_on_ranks(world_size: int, body: Callable[[], Any]) -> list[Any]:
    """What `body` returns on each rank."""
    _forget_other_ranks()
    errors: list[tuple[int, BaseException]] = []
    results: list[Any] = [None] * world_size
    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store = dist.HashStore()

    def rank_runs(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        try:
            results[rank] = body()
            lazy_tensor.flush()
        except BaseException as error:
            errors.append((rank, error))
            ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    torch.manual_seed(0)  # the generator is the process's: only one rank may draw at a time
    threads = [threading.Thread(target=rank_runs, args=(rank,)) for rank in range(world_size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        _uninstall_threaded_pg()
        ProcessLocalGroup.reset()
        _forget_modes()
    if errors:
        raise errors[0][1]
    return results
