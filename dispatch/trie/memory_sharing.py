"""Whether a computed tensor's memory is reached by others, past what is recorded.

There are two kinds of others. Arrays, DLPack and Python's storage objects write memory without any
op, so nothing may be pending on that memory. Plain tensors on the same storage are written by ops
that outside of modes nobody records. In: notes, from wherever memory is handed out. Out: answers
for `record`, which then runs a call at once or takes a snapshot. The two sets of notes are known to
C++ too (see `hits.use`).
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

# Storages, by `storage_id`.
_externally_writable: set[int] = set()  # handed out, to an array, say
_shared: set[int] = set()  # a plain tensor may have them too
_lent: set[int] = set()  # an array that `lend` served has made them fixed in size, for good
_trusted: set[int] = set()  # of parameters that were fixed in size when they became lazy
_noted: set[int] = set()  # any of these notes was taken: finalizers end them
_lazy_users: dict[int, int] = {}
"""How many lazy tensors have a storage beside the data of their values, by `storage_id`. C++ keeps
count: ops have passed these tensors by (see `PassedBy` in `native/below.h`)."""


def note_external_writer(tensor: torch.Tensor) -> None:
    """Note that `tensor`'s memory is handed out (`numpy()`, DLPack). Holds for the storage's life,
    or until `is_externally_writable` finds that nobody has it any more."""
    _note(tensor, _externally_writable)


def share(tensor: torch.Tensor) -> None:
    """Note that a plain tensor may have `tensor`'s storage too, as long as it lives."""
    _note(tensor, _shared)


def _n_others(tensor: torch.Tensor) -> int:
    """How many tensors besides `tensor` have its storage, apart from lazy ones."""
    return n_users(tensor) - 1 - _lazy_users.get(storage_id(tensor), 0)


def _note(tensor: torch.Tensor, notes: set[int]) -> None:
    number = storage_id(tensor)
    notes.add(number)
    if number not in _noted:
        _noted.add(number)
        # The number may be another storage's afterwards. torch keeps one Python object for a
        # storage as long as the storage lives, so its finalizers come in time. They are methods in
        # C: a signal's handler can't raise in them.
        storage = storage_of(tensor)
        for kind in (_externally_writable, _shared, _lent, _trusted, _noted):
            weakref.finalize(storage, kind.discard, number)


def is_externally_writable(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory, that of a lazy one, can change at any time, without an op."""
    number = storage_id(tensor)
    if number not in _externally_writable:
        if is_resizable(tensor) or number in _lent or number in _trusted:
            return False
        # a plain tensor on this memory has handed it out: torch makes it fixed in size for an array
        note_external_writer(tensor)
    # Memory that is fixed in size belongs to an array or a file, unless we have lent it to an array
    # ourselves. If it is torch's own, and no other tensor, storage object or process has it, then
    # all to which it was handed out are gone.
    is_ours = is_resizable(tensor) or number in _lent
    if (
        is_ours
        and not is_shared_by_processes(tensor)
        and not _n_others(tensor)
        and not is_storage_held(tensor)
    ):
        _externally_writable.discard(number)
        return False
    return True


def trust(tensor: torch.Tensor) -> None:
    """Take the memory of a parameter, if it is fixed in size now, for that of a mapped file, which
    nobody writes."""
    if not is_resizable(tensor):
        _note(tensor, _trusted)


def lend(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor on `tensor`'s memory, for an array to hold. While the array lives so does this
    tensor, which `n_users` counts."""
    note_external_writer(tensor)
    if is_resizable(tensor):  # torch makes it fixed for an array, and leaves it so
        _note(tensor, _lent)
    with no_modes():
        return tensor.detach()


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether plain tensors have the tensor's memory too: outside of modes their ops go unseen."""
    if not _shared or storage_id(tensor) not in _shared:
        return False
    if not _n_others(tensor) and not is_storage_held(tensor):
        _shared.discard(storage_id(tensor))  # the plain tensor is gone
        return False
    return True
