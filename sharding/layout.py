"""How a sharded tensor lies on its mesh: its spec, and the metadata of the local tensor, interned.

In: a spec and a local tensor. Out: a `ShardLayout`, the same object for the same of both, so that
keys compare by identity.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate

from lazy_tensor.dispatch.metadata.infer import Meta, dense_stride, meta_of
from lazy_tensor.dispatch.record.extend_trie import wrapper_arguments
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.sharding.torch_private import (
    DeviceMesh,
    DTensorSpec,
    TensorMeta,
    is_strided_shard,
    parts_of,
    redistribute_local_tensor,
    spec_of,
)

_numbers = itertools.count()
_families: dict[tuple[Any, ...], int] = {}
_known: weakref.WeakValueDictionary[tuple[Any, ...], ShardLayout] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class ShardLayout(tensor_types.Layout):
    """A layout with torch's `spec`: mesh, placements, and the global size, strides and dtype.

    `moves` is what is known of redistributing tensors that lie so, for `tensor`.
    """

    __slots__ = ("_family", "_is_regular", "moves", "parts", "spec")

    def __init__(self, spec: DTensorSpec, local: Meta) -> None:
        meta = spec.tensor_meta
        assert meta is not None, "layouts are of tensors"
        self.spec = spec
        self.parts = parts_of(spec)
        self._family: int | None = None
        self._is_regular: bool | None = None
        self.moves: dict[tuple[Any, ...], Any] = {}
        *_, device = local
        described = (meta.shape, meta.stride, 0, meta.dtype, device)
        super().__init__(next(_numbers), wrapper_arguments(described), wrapper_arguments(local))

    @property
    def family(self) -> int:
        """The same number for layouts that differ in sizes alone, which divide alike among ranks:
        what a decision depends on."""
        if self._family is None:
            self._family = _families.setdefault(self._divided(), next(_numbers))
        return self._family

    def _divided(self) -> tuple[Any, ...]:
        spec, size, is_dense = self.spec, self.meta[0], self.meta[1] is None
        ways = [spec.mesh.size(dim) for dim in range(spec.mesh.ndim)]
        sizes = [(n == 1, *[(n % way == 0, n >= way) for way in ways]) for n in size]
        return (spec.mesh, spec.placements, self.meta[4], is_dense, tuple(sizes), self.parts)

    @property
    def is_regular(self) -> bool:
        """Whether the ranks have equal parts, dense and of more than one row each as the whole is:
        what an op makes of a part then tells what it makes of the whole."""
        if self._is_regular is None:
            dense = self.meta[1] is None and self.local[1] is None
            alike = not (self.parts.uneven or self.parts.single)
            strided = any(map(is_strided_shard, self.spec.placements))
            self._is_regular = dense and alike and not strided
        return self._is_regular

    def __repr__(self) -> str:
        return f"ShardLayout({self.spec})"


def layout_of(spec: DTensorSpec, local: torch.Tensor) -> ShardLayout:
    """The layout of a tensor with this spec and, on this rank, this local tensor."""
    size, stride, _, dtype, device = meta_of(local)
    described = (size, stride, offset_of_pending(local), dtype, device)
    key = (spec, spec.use_strided_shard_as_shard_order, described)
    with _lock:
        layout = _known.get(key)
        if layout is None:
            layout = _known[key] = ShardLayout(spec, described)
    return layout


def offset_of_pending(local: torch.Tensor) -> int:
    """Where in its base's memory a pending view begins; 0 for what is computed, as rows of a data
    set lie alike."""
    is_pending = (
        type(local) is tensor_types.tensor_class and tensor_types.value_in(local).slot is not None
    )
    return int(local.storage_offset()) if is_pending else 0


def forget() -> None:
    """Know no layout any more: meshes that come may equal those that were, on other groups."""
    with _lock:
        _known.clear()
        _families.clear()


def everywhere(mesh: DeviceMesh) -> tuple[Placement, ...]:
    """The placements of what every rank of the mesh has whole."""
    return (Replicate(),) * mesh.ndim


def part_of(whole: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """This rank's part of a tensor that each rank has."""
    replicated = spec_with(spec, everywhere(spec.mesh))
    part: torch.Tensor = redistribute_local_tensor(whole, replicated, spec)
    return part


def spec_of_regular(
    mesh: DeviceMesh, placements: tuple[Placement, ...], part: torch.Tensor
) -> DTensorSpec | None:
    """The spec of what an op gives on regular tensors; None if a part doesn't tell."""
    size = list(part.shape)
    if part.storage_offset() or part.stride() != dense_stride(part.shape):
        return None
    for dim, placement in enumerate(placements):
        if is_strided_shard(placement):
            return None
        if placement.is_shard():
            sharded = placement.dim  # type: ignore[attr-defined]
            if part.shape[sharded] < 2:
                return None
            size[sharded] *= mesh.size(dim)
    whole = torch.Size(size)
    return spec_of(mesh, placements, TensorMeta(whole, dense_stride(whole), part.dtype))


def spec_with(
    spec: DTensorSpec, placements: tuple[Any, ...], dtype: torch.dtype | None = None
) -> DTensorSpec:
    """The same tensor placed otherwise."""
    meta = spec.tensor_meta
    assert meta is not None, "specs of tensors say their size"
    if dtype is not None and dtype != meta.dtype:
        meta = TensorMeta(meta.shape, meta.stride, dtype)
    return spec_of(spec.mesh, tuple(placements), meta)
