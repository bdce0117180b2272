"""The package's public names where recording is off: programs run as in eager.

`lazy_tensor/__init__.py` imports these names in place of the real ones if a check of
`dispatch.torch_checks.assumptions` fails. One warning says why. In: calls with the arguments of the
real functions; mistakes in them raise the same errors. Out: what eager gives. This module may use
no private name of torch: one of them may be what is missing.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.stats import COUNTED, STATS
from lazy_tensor.dispatch.torch_checks import assumptions
from lazy_tensor.dispatch.wording import with_article
from lazy_tensor.kernels.counters import Counters

WHY = f"lazy_tensor: recording is off, and programs run as in eager: {assumptions.why_off()}"
if settings.current().warn and assumptions.failed():
    # the third frame up is the line that imports `lazy_tensor`
    warnings.warn(WHY, stacklevel=3)


class LazyTensor(torch.Tensor):
    """The class of lazy tensors, for `isinstance`; here there are none."""

    def __new__(cls, *_: Any, **__: Any) -> LazyTensor:
        raise RuntimeError(f"LazyTensor(): {WHY}")


class lazy_mode:
    """A block, or a decorator, that does nothing; TypeError for an unknown option."""

    def __new__(cls, function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        settings.updated(settings.current(), options, "lazy_mode()")
        return super().__new__(cls) if function is None else function

    def __init__(self, **_: Any) -> None:
        """The options change nothing."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def __enter__(self) -> lazy_mode:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class Replay:
    """What `replay` returns: each call runs the function itself."""

    n_replayed = 0
    obstacle = "recording is off"

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise TypeError(f"replay(): function={function!r} can't be called")
        self.__replayed__ = function
        self.n_recorded = 0
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__replayed__(*args, **kwargs)

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def summary(self) -> str:
        """A line for reports."""
        return "replay: every call ran as in eager"


def replay(
    function: Callable[..., Any] | None = None,
    *,
    state: Any = None,
    warmup: int = 1,
    check_every: int = 1000,
    cuda_graphs: bool = False,
    **options: Any,
) -> Any:
    """`function`, whose calls run as in eager, or a decorator."""
    settings.updated(settings.current(), options, "replay()")
    return Replay if function is None else Replay(function)


def is_lazy(t: Any) -> bool:
    """False: nothing is lazy."""
    return False


def is_pending(t: Any) -> bool:
    """False: nothing is pending."""
    return False


def flush() -> None:
    """Nothing is pending."""


def materialize(tree: Any) -> Any:
    """A copy of `tree` with the same leaves: its tensors are plain."""
    return pytree.tree_map(lambda leaf: leaf, tree)


def wrap(x: Any) -> Any:
    """`x` itself."""
    return _taken(x, "wrap")


def unwrap(x: Any) -> Any:
    """`x` itself."""
    return _taken(x, "unwrap")


def _taken(x: Any, caller: str) -> Any:
    """`x`, if it is of a type that `wrap` and `unwrap` accept; else their TypeError."""
    if isinstance(x, (torch.Tensor, torch.nn.Module)):
        return x
    given = with_article(type(x).__name__)
    raise TypeError(f"{caller}(): x is {given}; it takes a torch.Tensor or an nn.Module")


def configure(**options: Any) -> None:
    """Check and keep the options, which have no effect; TypeError and ValueError for mistakes."""
    settings.change(options, "configure()")


def stats() -> dict[str, Any]:
    """The counters, all of them zero; the keys are those of the real `stats`."""
    counts: dict[str, Any] = dict.fromkeys(COUNTED, 0)
    counts.update(Counters().snapshot(), flush_s=0.0, regions_s=dict(STATS.regions_s))
    empty = ("flush_causes", "fallbacks", "sharding_misses", "redistributions")
    counts.update({name: Counter() for name in empty})
    return counts


def reset_stats() -> None:
    """The counters are zero anyway."""


def cache_info() -> dict[str, Any]:
    """There are no caches."""
    return {}


def cache_clear() -> None:
    """There are no caches."""


class Report:
    """What `explain` returns: its text says why recording is off; `result` is the function's."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.records: list[Any] = []
        self.flushes: list[Any] = []
        self.advice: list[Any] = []

    def __str__(self) -> str:
        return WHY

    __repr__ = __str__

    def save(self, path: Any) -> None:
        """RuntimeError: there is nothing to show."""
        raise RuntimeError(f"save(): there is no report: {WHY}")


def explain(fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Report:
    """A report that says why nothing is recorded. A function is called, and its result kept."""
    if fn is not None and not callable(fn):
        raise TypeError(f"explain(): fn={fn!r} can't be called")
    return Report(None if fn is None else fn(*args, **kwargs))
