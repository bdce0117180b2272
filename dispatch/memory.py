"""Memory that others reach without an op of ours: arrays and storages, and plain tensors.

In: a computed tensor. Out: who else can write, or read, its storage through any view of it.
"""

from __future__ import annotations

import weakref

import torch

from lazy_tensor.dispatch.torch_private import n_users, storage_id, storage_of

_exposed: set[int] = set()
_shared: set[int] = set()


def expose(tensor: torch.Tensor) -> None:
    """Note that `tensor`'s memory is handed out (`numpy()`, DLPack), as long as it lives."""
    _note(tensor, _exposed)


def share(tensor: torch.Tensor) -> None:
    """Note that a plain tensor may have `tensor`'s storage too, as long as it lives."""
    _note(tensor, _shared)


def _note(tensor: torch.Tensor, notes: set[int]) -> None:
    number = storage_id(tensor)
    if number not in notes:
        notes.add(number)
        # torch keeps one Python object for a storage while the storage lives
        weakref.finalize(storage_of(tensor), notes.discard, number)


def is_exposed(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory can change at any time: what uses it runs at once."""
    return bool(_exposed) and storage_id(tensor) in _exposed


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether ops on plain tensors, which nobody records outside the mode, can reach its memory."""
    if not _shared or storage_id(tensor) not in _shared:
        return False
    if n_users(tensor) == 1:
        _shared.discard(storage_id(tensor))  # the plain tensor is gone
        return False
    return True
