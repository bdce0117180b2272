"""Layouts of sharded tensors: torch's spec together with the metadata of the local tensor.

In: a spec and a local tensor. Out: a `ShardLayout`. Layouts are interned: equal specs and equal
local metadata give the same object, so that the keys of the trie compare layouts by identity.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate

from lazy_tensor.dispatch.metadata.infer import Meta, meta_of
from lazy_tensor.dispatch.record.extend_trie import wrapper_arguments
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.sharding.torch_private import (
    DeviceMesh,
    DTensorSpec,
    TensorMeta,
    parts_of,
    redistribute_local_tensor,
    spec_of,
)

_numbers = itertools.count()
# weak: a layout lives while a tensor, a state of the trie or a key of a cache has it, and a family
# while a layout or a key has it
_families: weakref.WeakValueDictionary[tuple[Any, ...], Family] = weakref.WeakValueDictionary()
_known: weakref.WeakValueDictionary[tuple[Any, ...], ShardLayout] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class Family:
    """Stands for layouts that differ only in sizes that divide alike among ranks.

    torch's sharding rules decide the same for layouts of one family, unless they move data or
    depend on sizes.
    """

    __slots__ = ("__weakref__",)


class ShardLayout(tensor_types.Layout):
    """A layout with torch's `spec`: mesh, placements, and the global size, strides and dtype.

    `parts` says how the ranks' parts compare. `moves` holds the checked calls of `redistribute` on
    tensors of this layout; `tensor` fills it.
    """

    __slots__ = ("family", "moves", "parts", "spec")

    def __init__(self, spec: DTensorSpec, local: Meta) -> None:
        meta = spec.tensor_meta
        assert meta is not None, "layouts are of tensors"
        self.spec = spec
        self.parts = parts_of(spec)
        self.moves: dict[tuple[Any, ...], Any] = {}
        # the global tensor has no memory of its own, and so no offset in any
        *_, device = local
        described = (meta.shape, meta.stride, 0, meta.dtype, device)
        super().__init__(next(_numbers), wrapper_arguments(described), wrapper_arguments(local))
        self.family = _families.setdefault(self._divided(), Family())

    def _divided(self) -> tuple[Any, ...]:
        """What layouts of a family have in common."""
        spec, size, is_dense = self.spec, self.meta[0], self.meta[1] is None
        # of a size rules ask: is it 1 (then it broadcasts), does each dimension of the mesh divide
        # it, is there something for each rank
        ways = [spec.mesh.size(dim) for dim in range(spec.mesh.ndim)]
        sizes = [(n == 1, *[(n % way == 0, n >= way) for way in ways]) for n in size]
        return (spec.mesh, spec.placements, self.meta[4], is_dense, tuple(sizes), self.parts)

    def __repr__(self) -> str:
        return f"ShardLayout({self.spec})"


def layout_of(spec: DTensorSpec, local: torch.Tensor) -> ShardLayout:
    """The layout of a tensor that has this spec, and on this rank this local tensor."""
    size, stride, _, dtype, device = meta_of(local)
    described = (size, stride, offset_of_pending(local), dtype, device)
    # hash and equality of specs leave this flag out
    key = (spec, spec.use_strided_shard_as_shard_order, described)
    with _lock:
        layout = _known.get(key)
        if layout is None:
            layout = _known[key] = ShardLayout(spec, described)
    return layout


def offset_of_pending(local: torch.Tensor) -> int:
    """The storage offset of a pending view; 0 for a materialized tensor.

    Rows of a data set differ in their offsets alone: with 0 for each they share one layout, and
    steps on them repeat. A pending view has no memory yet, so that its layout must hold the offset.
    """
    is_pending = (
        type(local) is tensor_types.tensor_class and tensor_types.value_in(local).slot is not None
    )
    return int(local.storage_offset()) if is_pending else 0


def forget() -> None:
    """Forget all layouts: a later mesh may equal an old one, but have other process groups."""
    with _lock:
        _known.clear()
        _families.clear()


def everywhere(mesh: DeviceMesh) -> tuple[Placement, ...]:
    """The placements of a tensor that is replicated on every rank of the mesh."""
    return (Replicate(),) * mesh.ndim


def part_of(whole: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """This rank's part, under `spec`, of a tensor that each rank has whole. Moves no data."""
    replicated = spec_with(spec, everywhere(spec.mesh))
    part: torch.Tensor = redistribute_local_tensor(whole, replicated, spec)
    return part


def count_once_(local: torch.Tensor, spec: DTensorSpec) -> None:
    """Make equal parts of all ranks count once: where they would be added up or multiplied, those
    of all ranks but the first become zeros or ones. Moves no data."""
    # a rank outside the mesh has no coordinate
    coordinate = spec.mesh.get_coordinate() or ()
    for place, placement in zip(coordinate, spec.placements, strict=False):
        neutral = _NEUTRAL.get(getattr(placement, "reduce_op", None))
        if place and neutral is not None:
            local.copy_(neutral(local))


_NEUTRAL: dict[str | None, Callable[..., torch.Tensor]] = {
    "sum": torch.zeros_like,
    "product": torch.ones_like,
}


def spec_with(
    spec: DTensorSpec, placements: tuple[Any, ...], dtype: torch.dtype | None = None
) -> DTensorSpec:
    """The spec with other placements, and with another dtype if one is given."""
    meta = spec.tensor_meta
    assert meta is not None, "specs of tensors say their size"
    if dtype is not None and dtype != meta.dtype:
        meta = TensorMeta(meta.shape, meta.stride, dtype)
    return spec_of(spec.mesh, tuple(placements), meta)
