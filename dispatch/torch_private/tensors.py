"""Tensors of a class of ours: to make them, mark them, count writes to them and look at them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._C import DispatchKey

from lazy_tensor.dispatch.torch_private.modes import _NOTHING, kernels_only

make_wrapper: Callable[..., torch.Tensor] = torch.Tensor._make_wrapper_subclass
"""A tensor without memory: `(cls, size, stride, offset, memory_format, dtype, layout, device)`."""


no_memory: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
"""Have C++ raise an error where it takes a wrapper's memory for writing: there is none."""


def new_wrapper(
    tensor_class: type[Any], meta: tuple[Any, ...], like: torch.Tensor | None = None
) -> Any:
    """`make_wrapper(tensor_class, *meta)`: an inference tensor if `like` is one, or, without
    `like`, if inference mode is on."""
    # A view and its base must agree: autograd refuses anything else.
    if like is None or like.is_inference() is torch.is_inference_mode_enabled():
        made = make_wrapper(tensor_class, *meta)
    else:
        with torch._C._InferenceMode(like.is_inference()):
            made = make_wrapper(tensor_class, *meta)
    no_memory(made)
    return made


def is_dispatched(tensor: torch.Tensor) -> bool:
    """Whether ops on the tensor come to the `__torch_dispatch__` of its class."""
    return bool(torch._C._dispatch_keys(tensor).has(DispatchKey.Python))


def count_writes(tensors: Iterable[torch.Tensor]) -> None:
    """Count a write to each tensor, for autograd's check that no saved tensor was written."""
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def versions_kept(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Context manager: what runs inside counts no writes to these. They were counted when the ops
    were recorded."""
    # Kernels leave that to autograd, except in-place foreach ops on CUDA (ForeachUtils.h).
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
    """Set the tensor's conjugate and negative bits: C++ resolves such a tensor for most ops."""
    if is_conj:
        torch._C._set_conj(tensor, True)
    if is_neg:
        torch._C._set_neg(tensor, True)
    return tensor


disabled_torch_function = torch._C._disabled_torch_function_impl


def values_of(tensor: torch.Tensor) -> Any:
    """A computed tensor's values as Python numbers. No mode sees it."""
    with kernels_only():
        return torch._C.TensorBase.tolist(tensor)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own. No mode sees it."""
    with kernels_only():
        return tensor.clone(memory_format=torch.preserve_format)


TensorBase: Any = torch._C.TensorBase
"""The class below `Tensor`: it has torch's own methods, where patches replace those of `Tensor`."""

tensor_data: Any = torch._C.TensorBase.data
"""The descriptor behind `Tensor.data`."""


def print_width() -> int:
    """How many characters a line of a printed tensor may have (`torch.set_printoptions`)."""
    return int(torch._tensor_str.PRINT_OPTS.linewidth)


def put_hooks_anew(tensor: torch.Tensor) -> None:
    """Have autograd call the tensor's hooks again. They are kept by the Python object, and by the
    C++ tensor that it had before `swap_tensors`."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(tensor, name)
        if hooks is not None:
            setattr(tensor, name, None)
            setattr(tensor, name, hooks)


def become(tensor: torch.Tensor, twin: torch.Tensor) -> None:
    """Give a wrapper another wrapper's size, strides and dtype; it stays the same object."""
    tensor_data.__set__(tensor, twin)
