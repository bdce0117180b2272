"""Tries whether private parts of torch do what the package expects, for `torch_checks.assumptions`.

In: `dispatch.torch_private`. Out: `CHECKS`, each of which gives a text that says what torch did
instead, or "" if it holds. They run in a thread without modes. No op here has a tensor subclass as
an argument: for the first such op torch would import its distributed tensors (0.4 s).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.torch_private import (
    count_writes,
    has_own_kernel,
    is_composite,
    is_dispatched,
    is_in_dispatcher,
    is_mode_entered,
    is_storage_held,
    is_structured,
    kernels_only,
    lazy_clone,
    mark,
    n_users,
    new_wrapper,
    no_dispatch,
    pop_mode,
    push_mode,
    storage_of,
    values_of,
    versions_kept,
)

aten = torch.ops.aten
CPU = torch.device("cpu")


def _sample() -> torch.Tensor:
    return torch.arange(4, dtype=torch.float32, device=CPU)


class _Watching(torch_private.TorchDispatchMode):
    """A mode that notes the ops that it sees."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # for True torch would import its compiler (1.5 s)


def _modes_see_ops() -> str:
    seen: list[Any] = []
    tensor = _sample()
    if is_mode_entered():
        return "one is entered in a new thread"
    mode = _Watching(seen)  # held here: torch 2.10 frees a mode on its stack that nobody holds
    push_mode(mode)
    try:
        torch.mul(tensor, tensor)
        with kernels_only():
            torch.add(tensor, tensor)
        with no_dispatch():
            torch.sub(tensor, tensor)
        is_entered = is_mode_entered()
    finally:
        pop_mode(None)
    if seen != [aten.mul.Tensor] or not is_entered or is_mode_entered():
        return f"of mul, and of add and sub below dispatch, one saw {seen}"
    return ""


def _ops_have_kernels() -> str:
    matmul, mm, add = aten.matmul.default, aten.mm.default, aten.add.Tensor
    answers = {
        "matmul is composite": is_composite(matmul),
        "mm isn't composite": not is_composite(mm),
        "mm has a kernel for the CPU": has_own_kernel(mm, CPU),
        "matmul has none": not has_own_kernel(matmul, CPU),
        "add has a shape function": is_structured(add),
        "the dispatcher knows add": is_in_dispatcher(add),
    }
    wrong = [answer for answer, holds in answers.items() if not holds]
    return f"they don't say that {' or that '.join(wrong)}" if wrong else ""


class _Wrapper(torch.Tensor):
    __torch_function__ = torch_private.disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        """torch requires one. No op comes here."""


def _meta(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return (size, stride, 1, None, dtype, torch.strided, CPU)


def _wrappers_have_metadata() -> str:
    wrapper = new_wrapper(_Wrapper, _meta((2, 3), (1, 2), torch.float64))
    found = _metadata(wrapper)
    if found != ((2, 3), (1, 2), 1, torch.float64, CPU):
        return f"one made of other arguments has {found}"
    if not is_dispatched(wrapper):
        return "ops on one don't come to its class"
    torch_private.become(wrapper, new_wrapper(_Wrapper, _meta((5,), (1,), torch.int64)))
    if _metadata(wrapper) != ((5,), (1,), 1, torch.int64, CPU):
        return f"one that became another has {_metadata(wrapper)}"
    return ""


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    size, stride = tuple(tensor.shape), tensor.stride()
    return size, stride, tensor.storage_offset(), tensor.dtype, tensor.device


def _clones_copy_on_write() -> str:
    # a write to the tensor doesn't show in its clone, and one to a clone not in the tensor
    tensor = _sample()
    clone = lazy_clone(tensor)
    tensor.add_(1)
    after = lazy_clone(tensor)
    after.add_(1)
    found = [values_of(one) for one in (tensor, clone, after)]
    if found != [[1, 2, 3, 4], [0, 1, 2, 3], [2, 3, 4, 5]]:
        return f"after writes to one side they hold {found}"
    return ""


def _storages_count_users() -> str:
    tensor = _sample()
    counts = [n_users(tensor)]
    view = tensor.view(2, 2)
    counts.append(n_users(tensor))
    del view
    counts.append(n_users(tensor))
    held = [is_storage_held(tensor)]
    storage = storage_of(tensor)
    held.append(is_storage_held(tensor))
    del storage
    held.append(is_storage_held(tensor))
    if counts != [1, 2, 1] or held != [False, True, False]:
        return f"of one tensor, two and one they counted {counts}, with their object held {held}"
    return ""


def _versions_count_writes() -> str:
    # autograd counts a write, and so does `count_writes`; nothing does inside `versions_kept`, and
    # below autograd
    tensor = _sample()
    tensor.add_(1)
    found = [tensor._version]
    count_writes([tensor])
    found.append(tensor._version)
    with versions_kept([tensor]):
        tensor.add_(1)
    found.append(tensor._version)
    with kernels_only():
        tensor.add_(1)
    found.append(tensor._version)
    return "" if found == [1, 2, 2, 2] else f"they were {found}, not [1, 2, 2, 2]"


def _bits_are_set() -> str:
    tensor = torch.view_as_complex(_sample().view(2, 2))
    with kernels_only():
        found = values_of(torch.resolve_conj(mark(tensor.view(2), True, False)))
    return "" if found == [0 - 1j, 2 - 3j] else f"with the conjugate bit values are {found}"


CHECKS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("dispatch modes see ops", _modes_see_ops),
    ("torch's tables say which kernels an op has", _ops_have_kernels),
    ("tensors without memory have the metadata they are made of", _wrappers_have_metadata),
    ("clones share memory until one is written", _clones_copy_on_write),
    ("storages count the tensors that use them", _storages_count_users),
    ("version counters count writes above autograd alone", _versions_count_writes),
    ("a tensor's conjugate bit can be set", _bits_are_set),
)
