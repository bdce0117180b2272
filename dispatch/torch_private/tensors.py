"""Tensors of a class of ours: made, marked, counted as written, looked at."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._C import DispatchKey

from lazy_tensor.dispatch.torch_private.modes import _NOTHING, kernels_only

make_wrapper: Callable[..., torch.Tensor] = torch.Tensor._make_wrapper_subclass
"""A tensor without storage: `(cls, size, stride, offset, memory_format, dtype, layout, device)`."""


no_memory: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
"""Have whoever writes, or might write, a wrapper's memory in C++ get an error: there is none."""


def new_wrapper(
    tensor_class: type[Any], meta: tuple[Any, ...], like: torch.Tensor | None = None
) -> Any:
    """`make_wrapper(tensor_class, *meta)`, a tensor of inference mode if that is on.

    What shares memory with `like` is what that is: autograd refuses another.
    """
    if like is None or like.is_inference() is torch.is_inference_mode_enabled():
        made = make_wrapper(tensor_class, *meta)
    else:
        with torch._C._InferenceMode(like.is_inference()):
            made = make_wrapper(tensor_class, *meta)
    no_memory(made)
    return made


def is_dispatched(tensor: torch.Tensor) -> bool:
    """Whether ops on the tensor come to its class."""
    return bool(torch._C._dispatch_keys(tensor).has(DispatchKey.Python))


def count_writes(tensors: Iterable[torch.Tensor]) -> None:
    """Count a write to each tensor, for autograd's check that nothing saved was written."""
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def versions_kept(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Context manager: what runs counts no writes to these, which were counted when recorded.

    Kernels leave that to autograd, but for the foreach ops in place on CUDA (ForeachUtils.h).
    """
    return _versions_kept(tensors) if tensors else _NOTHING


@contextmanager
def _versions_kept(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    counted = [tensor for tensor in tensors if not tensor.is_inference()]
    versions = [tensor._version for tensor in counted]
    try:
        yield
    finally:
        torch._C._autograd._unsafe_set_version_counter(tuple(counted), tuple(versions))


def mark(tensor: torch.Tensor, is_conj: bool, is_neg: bool) -> torch.Tensor:
    """`tensor` with these conjugate and negative bits, by which C++ resolves it for most ops."""
    if is_conj:
        torch._C._set_conj(tensor, True)
    if is_neg:
        torch._C._set_neg(tensor, True)
    return tensor


disabled_torch_function = torch._C._disabled_torch_function_impl


def values_of(tensor: torch.Tensor) -> Any:
    """A computed tensor's values as Python numbers, whatever mode is active."""
    with kernels_only():
        return torch._C.TensorBase.tolist(tensor)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own, whatever mode is active."""
    with kernels_only():
        return tensor.clone(memory_format=torch.preserve_format)


TensorBase: Any = torch._C.TensorBase
"""The class that has the methods of `Tensor` as they are, whoever replaces those."""

tensor_data: Any = torch._C.TensorBase.data
"""The descriptor behind `Tensor.data`."""


def print_width() -> int:
    """Characters a line of a tensor's text may have (`torch.set_printoptions`)."""
    return int(torch._tensor_str.PRINT_OPTS.linewidth)


def become(tensor: torch.Tensor, twin: torch.Tensor) -> None:
    """Give a wrapper another wrapper's size, strides and dtype; it stays the same object."""
    tensor_data.__set__(tensor, twin)


def is_held_by_python_alone(tensor: torch.Tensor) -> bool:
    """Whether `torch.utils.swap_tensors` takes it: not in an autograd graph, or in C++."""
    return tensor._use_count() == 1 and not weakref.getweakrefs(tensor)  # type: ignore[attr-defined]
