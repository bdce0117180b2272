"""Storages: which tensors and others have one, and copies on write."""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

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

    It is a copy at once if an array, a file, another process or a collective shares the memory, or
    if that is pinned: then writes are not seen, or torch refuses. A copy has no gaps. Its strides
    are zero where the tensor's are, and else in the same order, so ops on it give the same as on
    the tensor.
    """
    is_pinned = False
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowADInplaceOrView():
        may_share = is_resizable(tensor) and not is_shared_by_processes(tensor)
        if may_share and not is_in_flight(tensor):
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


_in_flight: dict[int, tuple[tuple[StorageWeakRef, ...], Callable[[], Any]]] = {}
"""Collectives that may not have ended: by a number, the storages and what gives the `Work`, or None
if nobody has it. The storages' numbers aren't used again while these references are kept. Threads
change the dict without a lock, by methods that are atomic."""
_numbers = itertools.count()


def stop_sharing(tensor: torch.Tensor) -> None:
    """Give the tensor memory of its own, if a `snapshot` shares it.

    A write does the same. But it moves the tensor to other memory, and c10d keeps the address that
    it was given.
    """
    if torch._C._is_cow_tensor(tensor):  # type: ignore[attr-defined]
        with CLONES:
            torch._C.TensorBase.data_ptr(tensor)


def note_in_flight(tensors: Iterable[torch.Tensor], work: Any, *, is_held: bool) -> None:
    """Note that c10d uses the tensors' memory until `work` has ended.

    `is_held`: the backend goes on with a `Work` that the program drops. A message to one rank, or
    from one, ends when its `Work` is dropped.
    """
    storages = tuple(StorageWeakRef(storage_of(tensor)) for tensor in tensors)
    forget_ended()
    _in_flight[next(_numbers)] = storages, (lambda: work) if is_held else weakref.ref(work)


def is_in_flight(tensor: torch.Tensor) -> bool:
    """Whether a collective that hasn't ended uses the tensor's memory."""
    if not _in_flight:
        return False
    forget_ended()
    number = storage_id(tensor)
    return any(
        storage.cdata == number for storages, _ in list(_in_flight.values()) for storage in storages
    )


def forget_ended(waited_for: Any = None) -> None:
    """Drop the notes of collectives that have ended, and that of the `Work` `waited_for`.

    Some backends, torch's fake one among them, never call a `Work` completed. But all keep the
    tensors of a running collective alive, so freed memory means that it has ended.
    """
    for number, (storages, get_work) in list(_in_flight.items()):
        work = get_work()
        is_completed = work is None or work is waited_for or work.is_completed()
        if is_completed or all(storage.expired() for storage in storages):
            _in_flight.pop(number, None)


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
