"""Memory that was handed out (`numpy()`, storages, DLPack): it can change without an op.

In: a computed tensor. Out: whether anybody outside can reach its storage, through any view of it.
"""

from __future__ import annotations

import weakref

import torch

from lazy_tensor.dispatch.torch_private import storage_id, storage_of

_exposed: set[int] = set()


def expose(tensor: torch.Tensor) -> None:
    """Note that `tensor`'s storage is handed out, for as long as it lives."""
    number = storage_id(tensor)
    if number not in _exposed:
        _exposed.add(number)
        # torch keeps one Python object for a storage while the storage lives
        weakref.finalize(storage_of(tensor), _exposed.discard, number)


def is_exposed(tensor: torch.Tensor) -> bool:
    return bool(_exposed) and storage_id(tensor) in _exposed
