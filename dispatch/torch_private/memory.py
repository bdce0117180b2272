"""Storages: which tensors and others have one, and copies on write."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch

lazy_clone: Callable[[torch.Tensor], torch.Tensor] = torch._lazy_clone
"""A copy that shares memory until either side is written (copy-on-write, 0.4 us)."""
CLONES = threading.Lock()
"""Held while memory becomes copy-on-write. If two threads do that to one storage at once, torch
raises an error, though both only read it."""

# `TensorBase`'s own method: `lazy_mode` replaces `Tensor.untyped_storage` by one that flushes.
storage_of: Callable[[torch.Tensor], torch.UntypedStorage] = torch._C.TensorBase.untyped_storage


def storage_id(tensor: torch.Tensor) -> int:
    """A number that tensors share if they share a storage. Once a storage is freed, another may get
    its number."""
    number: int = storage_of(tensor)._cdata
    return number


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor stands for zeros and has no memory. Autograd makes such tensors."""
    return torch._C.TensorBase._is_zerotensor(tensor)


def n_users(tensor: torch.Tensor) -> int:
    """How many tensors have `tensor`'s storage, itself included."""
    counted: int = torch._C._storage_Use_Count(storage_of(tensor)._cdata)
    return counted - 1  # `storage_of` makes the storage's Python object, which counts


def is_storage_held(tensor: torch.Tensor) -> bool:
    """Whether the program has the Python object of the tensor's storage."""
    return sys.getrefcount(storage_of(tensor)) > _UNHELD


def _references_to_an_unheld_storage() -> int:
    tensor = torch.empty(1)
    return sys.getrefcount(storage_of(tensor))


_UNHELD = _references_to_an_unheld_storage()


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as it is now: it shares memory until either side is written.

    It is a copy at once if an array, a file or another process shares the memory, or if that is
    pinned: then writes are not seen, or torch refuses. A copy has no gaps. Its strides are zero
    where the tensor's are, and else in the same order, so ops on it give the same as on the tensor.
    """
    is_pinned = False
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowADInplaceOrView():
        if is_resizable(tensor) and not is_shared_by_processes(tensor):
            try:
                with CLONES:
                    return lazy_clone(tensor)
            except RuntimeError:  # its allocator's memory can't be copied on write: pinned memory
                is_pinned = tensor.is_pinned()
        # a dimension of stride 0 repeats one element: copy that once, and expand the copy
        size = [
            n if step else min(n, 1) for n, step in zip(tensor.shape, tensor.stride(), strict=True)
        ]
        once = tensor.as_strided(size, tensor.stride(), tensor.storage_offset())
        copy = once.clone()
        return (copy.pin_memory() if is_pinned else copy).expand(tensor.shape)


def fix_memory(tensor: torch.Tensor) -> None:
    """Make the tensor's memory fixed in size, by which others see that it was handed out.
    `Tensor.numpy` does so for good: an array of another tensor on this memory is made here."""
    if tensor.is_cpu and is_resizable(tensor):
        torch.empty(0, dtype=torch.uint8).set_(storage_of(tensor)).numpy()


def is_shared_by_processes(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is one that other processes may have."""
    # torch says so of all CUDA memory, which other processes open only when it is sent
    return tensor.is_cpu and storage_of(tensor).is_shared()


def is_part(tensor: torch.Tensor) -> bool:
    """Whether the 0-dim tensor is an element of a larger tensor's memory."""
    return storage_of(tensor).nbytes() > tensor.itemsize


def is_resizable(tensor: torch.Tensor) -> bool:
    """Whether torch alone owns the tensor's memory. It doesn't if it comes from an array or a file,
    or was handed to an array."""
    return storage_of(tensor).resizable()
