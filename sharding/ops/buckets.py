"""Small all-reduces that one call asks for, done together.

In: the arguments of a call on lists of tensors, and where its rule wants them. Out: the arguments
with partial tensors reduced, by one all-reduce for as many as fit in `bucket_bytes`. What goes
together follows from the call alone: ranks that flush elsewhere do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import Partial

from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.metadata.infer import dense_stride
from lazy_tensor.sharding import torch_private
from lazy_tensor.sharding.layout import everywhere
from lazy_tensor.sharding.tensor import DTensor, local_of, sharded
from lazy_tensor.sharding.torch_private import DTensorSpec, TensorMeta

Member = tuple[list[Any], int, DTensorSpec, DTensorSpec]
"""A tensor's list, its place there, where it lies, and where it must lie."""


def reduced_together(
    args: tuple[Any, ...],
    pairs: list[tuple[DTensorSpec, DTensorSpec]],
    note: Callable[[DTensorSpec, tuple[Any, ...]], None],
) -> tuple[Any, ...] | None:
    """`args` with the partial tensors of its lists reduced; None if no two go together.

    `pairs` say for each sharded tensor among the arguments where it lies and where it must lie;
    `note` is told of those that are reduced. Local strides count for nothing: ranks may differ.
    """
    copied = tuple([list(a) if isinstance(a, (list, tuple)) else a for a in args])
    tensors = [
        (items, i)
        for items in copied
        if isinstance(items, list)
        for i, item in enumerate(items)
        if isinstance(item, DTensor)
    ]
    if len(tensors) != len(pairs):
        return None  # others than those in lists are sharded too
    alike: dict[Any, list[Member]] = {}
    for (items, i), (now, then) in zip(tensors, pairs, strict=True):
        dim = _reduced_dim(now, then)
        if dim is not None and items[i].is_contiguous():
            how = (now.mesh, dim, now.placements[dim], items[i].dtype)
            alike.setdefault(how, []).append((items, i, now, then))
    buckets = [(how, bucket) for how, members in alike.items() for bucket in _buckets(members)]
    for _, bucket in buckets:
        for *_, now, then in bucket:
            note(now, then.placements)
    for (mesh, dim, placement, _), bucket in buckets:
        _reduce(bucket, mesh, dim, placement)
    return copied if buckets else None


def _reduced_dim(now: DTensorSpec, then: DTensorSpec) -> int | None:
    """The dimension of the mesh along which a tensor is reduced, if that is all that is done."""
    changed = [
        (dim, before, after)
        for dim, (before, after) in enumerate(zip(now.placements, then.placements, strict=True))
        if before != after
    ]
    if len(changed) != 1:
        return None
    ((dim, before, after),) = changed
    return dim if type(before) is Partial and after.is_replicate() else None


def _buckets(members: list[Member]) -> Iterator[list[Member]]:
    """Those that go together, two at least, in the order of the arguments."""
    most = settings.current().bucket_bytes
    bucket: list[Member] = []
    filled = 0
    for member in members:
        items, i, *_ = member
        n_bytes = items[i].nbytes
        if bucket and filled + n_bytes > most:
            if len(bucket) > 1:
                yield bucket
            bucket, filled = [], 0
        bucket.append(member)
        filled += n_bytes
    if len(bucket) > 1:
        yield bucket


def _reduce(bucket: list[Member], mesh: Any, dim: int, placement: Partial) -> None:
    locals_ = [local_of(items[i]) for items, i, *_ in bucket]
    flat = torch.cat([local.reshape(-1) for local in locals_])
    meta = TensorMeta(flat.shape, dense_stride(flat.shape), flat.dtype)
    placements: list[Any] = list(everywhere(mesh))
    whole = torch_private.spec_of(mesh, tuple(placements), meta)
    placements[dim] = placement
    partial = torch_private.spec_of(mesh, tuple(placements), meta)
    flat = torch_private.redistribute_local_tensor(flat, partial, whole)
    parts = flat.split([local.numel() for local in locals_])
    for (items, i, _, then), part, local in zip(bucket, parts, locals_, strict=True):
        items[i] = sharded(part.view(local.shape), then)
