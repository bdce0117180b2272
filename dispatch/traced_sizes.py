"""Notes Python's reads of tensors' sizes while `replay` records a call whose sizes vary.

In: a `NumberLog`. Out: within the context `sizes_noted`, `Tensor.shape`, `size()` and `numel()`
give a `TracedSize` to the code of the program and of its libraries, in the thread that entered it.
Called by `take`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lazy_tensor.dispatch.torch_private import is_mode_entered, is_own_mode_entered
from lazy_tensor.dispatch.traced_number import NumberLog, TracedSize

LEAST = 2
"""The least size that is traced: what has one element or none is broadcast, or skipped, by rules of
its own."""

_PLAIN: dict[str, Any] = {
    name: getattr(torch.Tensor, name) for name in ("shape", "size", "numel", "nelement", "__len__")
}


class _Here(threading.local):
    log: NumberLog | None = None


_here = _Here()
_lock = threading.Lock()
_n_users = 0  # of `sizes_noted`, in all threads


@contextmanager
def sizes_noted(log: NumberLog) -> Iterator[None]:
    """Context manager: sizes that this thread reads are numbers of this log."""
    global _n_users
    with _lock:
        _n_users += 1
        if _n_users == 1:
            torch.Tensor.shape = property(_shape)  # type: ignore[assignment]
            for name, method in _METHODS.items():
                setattr(torch.Tensor, name, method)
    _here.log = log
    try:
        yield
    finally:
        _here.log = None
        with _lock:
            _n_users -= 1
            if _n_users == 0:
                for name, plain in _PLAIN.items():
                    # `Tensor` inherits all but the last, as long as it has none of its own
                    if name == "__len__":
                        setattr(torch.Tensor, name, plain)
                    else:
                        delattr(torch.Tensor, name)


def _traced(tensor: torch.Tensor, found: Any) -> Any:
    """A size, or several, traced if code that is part of the recorded call reads them."""
    log = _here.log
    # Our mode isn't entered while its handler runs, as at each new op. The metadata of its results
    # are told by meta tensors, or within a mode of torch's own.
    is_own = is_mode_entered() and not is_own_mode_entered() and tensor.device.type != "meta"
    if log is None or not (is_own and log.is_noting):
        return found
    if type(found) is int:
        return found if found < LEAST else log.size(found)
    return torch.Size([n if n < LEAST else log.size(n) for n in found])


def _shape(tensor: torch.Tensor) -> torch.Size:
    shape: torch.Size = _traced(tensor, _PLAIN["shape"].__get__(tensor))
    return shape


def _size(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return _traced(tensor, _PLAIN["size"](tensor, *args, **kwargs))


def _numel(tensor: torch.Tensor) -> int:
    n: int = _traced(tensor, _PLAIN["numel"](tensor))
    return n


def _len(tensor: torch.Tensor) -> int:
    found: int = _PLAIN["__len__"](tensor)
    if type(found) is TracedSize:
        found.log.fix(found)  # `len` returns a plain int
        return found.value
    return found


_METHODS: dict[str, Callable[..., Any]] = {
    "size": _size, "numel": _numel, "nelement": _numel, "__len__": _len,
}  # fmt: skip
