"""Memory that others reach without an op of ours: arrays and storages, and plain tensors.

In: a computed tensor. Out: who else can write, or read, its storage through any view of it.
"""

from __future__ import annotations

import weakref

import torch

from lazy_tensor.dispatch.torch_private import (
    is_resizable,
    is_shared_by_processes,
    is_storage_held,
    n_users,
    no_modes,
    storage_id,
    storage_of,
)

# Storages by `storage_id`: handed out; of a plain tensor too; fixed by an array that was lent them.
_externally_writable: set[int] = set()
_shared: set[int] = set()
_lent: set[int] = set()


def note_external_writer(tensor: torch.Tensor) -> None:
    """Note that `tensor`'s memory is handed out (`numpy()`, DLPack), as long as it lives."""
    _note(tensor, _externally_writable)


def share(tensor: torch.Tensor) -> None:
    """Note that a plain tensor may have `tensor`'s storage too, as long as it lives."""
    _note(tensor, _shared)


def _note(tensor: torch.Tensor, notes: set[int]) -> None:
    number = storage_id(tensor)
    if number not in notes:
        notes.add(number)
        # torch keeps one Python object for a storage while the storage lives
        weakref.finalize(storage_of(tensor), notes.discard, number)


def is_externally_writable(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory can change at any time: what uses it runs at once."""
    if not _externally_writable or storage_id(tensor) not in _externally_writable:
        return False
    is_ours = is_resizable(tensor) or storage_id(tensor) in _lent
    if (
        is_ours
        and not is_shared_by_processes(tensor)
        and n_users(tensor) == 1
        and not is_storage_held(tensor)
    ):
        _externally_writable.discard(storage_id(tensor))  # arrays and storages that had it are gone
        return False
    return True


def lend(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor on `tensor`'s memory, for an array: others can write that while it lives."""
    note_external_writer(tensor)
    if is_resizable(tensor):  # arrays make it fixed, for good
        _note(tensor, _lent)
    with no_modes():
        return tensor.detach()


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether ops on plain tensors, which nobody records outside the mode, can reach its memory."""
    if not _shared or storage_id(tensor) not in _shared:
        return False
    if n_users(tensor) == 1:
        _shared.discard(storage_id(tensor))  # the plain tensor is gone
        return False
    return True
