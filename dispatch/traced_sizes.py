"""Notes Python's reads of tensors' sizes while `replay` records a call whose sizes vary.

In: a `NumberLog`. Out: within the context `sizes_noted`, `Tensor.shape`, `size()` and `numel()`
give a `TracedSize` to the code of the program and of its libraries, in the thread that entered it.
Called by `take`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lazy_tensor.dispatch.patches import PutWhileUsed
from lazy_tensor.dispatch.torch_private import is_mode_entered, is_own_mode_entered
from lazy_tensor.dispatch.traced_number import NumberLog, TracedSize

LEAST = 2
"""The least size that is traced: what has one element or none is broadcast, or skipped, by rules of
its own."""
DECIDING = ((torch, "cdist"), (torch, "chain_matmul"), (torch.linalg, "multi_dot"))
"""Functions that choose by sizes what ops they call, in C++: the sizes that they get are fixed."""

_PLAIN: dict[str, Any] = {
    name: getattr(torch.Tensor, name)
    for name in ("shape", "size", "numel", "nelement", "__len__", "stride", "nbytes")
}


class _Here(threading.local):
    log: NumberLog | None = None


_here = _Here()


@contextmanager
def sizes_noted(log: NumberLog) -> Iterator[None]:
    """Context manager: sizes that this thread reads are numbers of this log."""
    _here.log = log
    try:
        with _PUT:
            yield
    finally:
        _here.log = None


def _is_noted(log: NumberLog, tensor: torch.Tensor) -> bool:
    """Whether code that is part of the recorded call looks at the tensor."""
    # Our mode isn't entered while its handler runs, as it does for each new op. To infer metadata,
    # ops also run on meta tensors, or in one of torch's own modes.
    is_own = is_mode_entered() and not is_own_mode_entered()
    return is_own and log.is_noting and tensor.device.type != "meta"


def _traced(tensor: torch.Tensor, found: Any) -> Any:
    """A size, or several, traced if code that is part of the recorded call reads them."""
    log = _here.log
    if log is None or not _is_noted(log, tensor):
        return found
    if type(found) is int:
        return found if found < LEAST else log.size(found)
    return torch.Size([n if n < LEAST else log.size(n) for n in found])


def _fix(log: NumberLog, tensor: torch.Tensor) -> None:
    """Note that the call may depend on the sizes of a tensor in any way."""
    if _is_noted(log, tensor):
        log.fix(*[log.size(n) for n in _PLAIN["shape"].__get__(tensor) if n >= LEAST])


def _fixing(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that fixes the sizes of the tensors that it gets."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for tensor in pytree.tree_leaves((args, kwargs)) if _here.log is not None else ():
            if isinstance(tensor, torch.Tensor) and _here.log is not None:
                _fix(_here.log, tensor)
        return function(*args, **kwargs)

    return call


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


def _stride(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if _here.log is not None:
        _fix(_here.log, tensor)
    return _PLAIN["stride"](tensor, *args, **kwargs)


def _nbytes(tensor: torch.Tensor) -> int:
    if _here.log is not None:
        _fix(_here.log, tensor)
    n: int = _PLAIN["nbytes"].__get__(tensor)
    return n


_METHODS: dict[str, Callable[..., Any] | property] = {
    "shape": property(_shape), "size": _size, "numel": _numel, "nelement": _numel,
    "__len__": _len, "stride": _stride, "nbytes": property(_nbytes),
}  # fmt: skip
_PUT = PutWhileUsed([
    *((torch.Tensor, name, method) for name, method in _METHODS.items()),
    *((module, name, _fixing(getattr(module, name))) for module, name in DECIDING),
])  # fmt: skip
