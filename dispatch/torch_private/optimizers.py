"""torch's optimizers: how they read numbers, and for which tensors they use foreach ops."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.optim import optimizer
from torch.utils import _foreach_utils


class _Reading(threading.local):
    """What reads numbers for optimizers in this thread, or None."""

    read: Callable[[torch.Tensor], Any] | None = None


_reading = _Reading()
_reading_lock = threading.Lock()
_n_reading = 0  # users of `step_counts_read_by`, in all threads
_value_for_optimizer: Any = getattr(optimizer, "_get_value", None)  # torch's function


def _value_or_reading(tensor: Any) -> Any:
    """What stands in place of torch's function while there are users."""
    read = _reading.read
    found = read(tensor) if read is not None and isinstance(tensor, torch.Tensor) else None
    return _value_for_optimizer(tensor) if found is None else found


@contextmanager
def step_counts_read_by(read: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """Context manager: in this thread torch's optimizers get the values of step counts and the like
    from `read`. Where it gives None they read as ever."""
    before, _reading.read = _reading.read, read
    _count_reading(1)
    try:
        yield
    finally:
        _count_reading(-1)
        _reading.read = before


def is_own_optimizer(value: Any) -> bool:
    """Whether `value` is an optimizer whose class is torch's."""
    return isinstance(value, torch.optim.Optimizer) and _is_of_optim(type(value).__module__)


def _is_of_optim(module: str) -> bool:
    return module.startswith("torch.optim.")


def _count_reading(change: int) -> None:
    """Count a user more or less. The function that asks stands in place while there are any."""
    global _n_reading
    with _reading_lock:
        was_wanted, _n_reading = _n_reading > 0, _n_reading + change
        if was_wanted is (_n_reading > 0) or _value_for_optimizer is None:
            return
        old, new = _value_for_optimizer, _value_or_reading
        if was_wanted:
            old, new = new, old
        for module in _modules_of_optim():
            if vars(module).get("_get_value") is old:
                module._get_value = new  # type: ignore[attr-defined]


@functools.cache
def _modules_of_optim() -> list[ModuleType]:
    """The modules of `torch.optim`, each of which has imported the function by its name."""
    return [module for name, module in list(sys.modules.items()) if _is_of_optim(name)]


def allow_foreach(tensor_class: type[torch.Tensor]) -> None:
    """Have `torch.optim` and gradient clipping use foreach ops for tensors of this class."""
    # They use them for the types in these lists; others go through a slow loop.
    lists: tuple[list[Any], ...] = (
        optimizer._foreach_supported_types,
        _foreach_utils._foreach_supported_types,
    )
    for types in lists:
        types.append(tensor_class)
