"""Joins the small all-reduces that one call on lists of tensors needs.

In: the arguments of a foreach call, and the placements that the sharding rule asks for. Out: the
arguments with their partial tensors reduced, by one all-reduce for as many as fit in
`bucket_bytes`. `compute` calls it. The buckets follow from the call alone, so that ranks which
flush at different points issue the same collectives.
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
"""The list that holds a tensor, its index there, its spec, and the spec that the rule asks for."""


def reduced_together(
    args: tuple[Any, ...],
    pairs: list[tuple[DTensorSpec, DTensorSpec]],
    report: Callable[[DTensorSpec, DTensorSpec], None],
) -> tuple[Any, ...] | None:
    """`args` with the partial tensors of its lists reduced; None if no two fit in one bucket.

    `pairs` are the present and the wanted spec of each sharded argument. `report` is called for
    each tensor that is reduced, before any collective, as it may raise. Only global strides count:
    the local ones may differ between ranks.
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
        return None  # there are sharded arguments outside lists: `pairs` can't be matched
    alike: dict[Any, list[Member]] = {}
    for (items, i), (now, then) in zip(tensors, pairs, strict=True):
        dim = _reduced_dim(now, then)
        if dim is not None and items[i].is_contiguous():
            how = (now.mesh, dim, now.placements[dim], items[i].dtype)
            alike.setdefault(how, []).append((items, i, now, then))
    buckets = [(how, bucket) for how, members in alike.items() for bucket in _buckets(members)]
    for _, bucket in buckets:
        for *_, now, then in bucket:
            report(now, then)
    for (mesh, dim, placement, _), bucket in buckets:
        _reduce(bucket, mesh, dim, placement)
    return copied if buckets else None


def _reduced_dim(now: DTensorSpec, then: DTensorSpec) -> int | None:
    """The mesh dimension along which a tensor changes from Partial to Replicate, if that is the
    only change; else None."""
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
    """Runs of members, in the order of the arguments, that fit in `bucket_bytes`; two at least."""
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
    """Reduce the bucket's tensors by one all-reduce, and put the results into their lists."""
    # other mesh dimensions are replicated for the flat tensor, though members may be sharded along
    # them: only `dim` is reduced, and each rank keeps its own parts
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
