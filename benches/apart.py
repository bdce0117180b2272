"""A measurement in a process of its own, with empty caches.

What one measurement compiles, or makes the policy learn, would change the next one in the same
process.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

T = TypeVar("T")


def apart(function: Callable[..., T], *args: Any) -> T:
    """`function(*args, caches)` in a new process; `caches` is the path of an empty folder."""
    # not forked: a fork would have torch's threads and the parent's caches
    context = multiprocessing.get_context("spawn")
    with (
        TemporaryDirectory(prefix="lazy_tensor_bench") as caches,
        ProcessPoolExecutor(1, mp_context=context) as pool,
    ):
        return pool.submit(function, *args, caches).result()
