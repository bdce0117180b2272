"""Sharded tensors from plain ones: `distribute_tensor`, `distribute_module`, factory functions.

In: plain tensors, modules or sizes, a mesh and placements. Out: DTensors, as the functions of the
same names in `torch.distributed.tensor` make them. Users call these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement

from lazy_tensor.dispatch import torch_private as dispatch_private
from lazy_tensor.dispatch.metadata.infer import dense_stride
from lazy_tensor.sharding import torch_private
from lazy_tensor.sharding.layout import count_once_, part_of
from lazy_tensor.sharding.tensor import DTensor, normalized, sharded
from lazy_tensor.sharding.torch_private import DeviceMesh, TensorMeta
from lazy_tensor.tensor import LazyTensor, computed, flush_here


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """The DTensor of a plain tensor, as torch's `distribute_tensor` makes it.

    Its parts don't share memory with `tensor`: a replicated one is copied when either is written.
    Raises RuntimeError if `tensor` is not a leaf of autograd.
    """
    # torch's function runs collectives on memory, below dispatch. A pending tensor is materialized
    # for it, and the collectives recorded so far are issued first.
    if isinstance(tensor, LazyTensor) and not isinstance(tensor, DTensor):
        leaf = computed(tensor)
        with dispatch_private.no_modes():
            plain = leaf.detach().requires_grad_(tensor.requires_grad)
    else:
        plain = tensor
        flush_here("distribute_tensor()", quiet=True)
    if not tensor.is_leaf:
        raise RuntimeError(
            "`distribute_tensor` should be used to distribute leaf tensors! but found non-leaf "
            "tensor!"
        )
    with dispatch_private.no_modes():
        made = torch_private.api.distribute_tensor(
            plain, device_mesh, placements, src_data_rank=src_data_rank
        )
        # a DTensor with this mesh and these placements comes back as it is
        if isinstance(made, DTensor):
            return made
        local = made._local_tensor
        if not local.is_meta and dispatch_private.storage_id(local) == dispatch_private.storage_id(
            plain
        ):
            # a replicated part is the tensor itself in torch: writes to one would change the other
            local = dispatch_private.snapshot(local)
    ours = sharded(local, made._spec)
    ours.requires_grad_(tensor.requires_grad)
    return ours


distribute_module = torch_private.rebound(
    torch_private.api.distribute_module, DTensor=DTensor, distribute_tensor=distribute_tensor
)


def _made(
    size: tuple[Any, ...],
    make: Any,
    *,
    draws: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """The DTensor of a global size whose parts `make(size, dtype=..., device=...)` fills.

    `draws`: `make` draws random numbers. Raises AssertionError if `layout` is not strided, as
    torch does.
    """
    if layout is not torch.strided:
        raise AssertionError("layout value not supported!")
    shape = torch_private.as_size(size)
    mesh = device_mesh or torch_private.current_mesh()
    placed = normalized(placements, mesh, len(shape))
    stride = dense_stride(shape)
    options: dict[str, Any] = {"dtype": dtype, "device": mesh.device_type}
    if draws:
        # each rank draws the numbers of the global tensor, and keeps its part: so the numbers are
        # those of one process, whatever the mesh
        whole = make(shape, **options)
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        spec = torch_private.spec_of(mesh, placed, meta)
        local = part_of(whole, spec)
    else:
        part, _ = torch_private.compute_local_shape_and_global_offset(shape, mesh, placed)
        local = make(part, **options)
        spec = torch_private.spec_of(mesh, placed, TensorMeta(shape, stride, local.dtype))
        count_once_(local, spec)
    made = sharded(local, spec)
    made.requires_grad_(requires_grad)
    return made


def zeros(*size: Any, **options: Any) -> DTensor:
    """Zeros of this global size. The options are `dtype`, `layout`, `requires_grad`, `device_mesh`
    and `placements`, as in `torch.distributed.tensor.zeros`."""
    return _made(size, torch.zeros, **options)


def ones(*size: Any, **options: Any) -> DTensor:
    """Ones of this global size; options as for `zeros`."""
    return _made(size, torch.ones, **options)


def empty(*size: Any, **options: Any) -> DTensor:
    """Uninitialized memory of this global size; options as for `zeros`."""
    return _made(size, torch.empty, **options)


def full(size: Any, fill_value: Any, **options: Any) -> DTensor:
    """One number everywhere, in a tensor of this global size; options as for `zeros`."""
    return _made((size,), lambda shape, **given: torch.full(shape, fill_value, **given), **options)


def rand(*size: Any, **options: Any) -> DTensor:
    """Uniform random numbers: each rank draws all of them, and keeps its part.

    Options as for `zeros`. The ranks' generators must have the same seed.
    """
    return _made(size, torch.rand, draws=True, **options)


def randn(*size: Any, **options: Any) -> DTensor:
    """Normal random numbers; otherwise as `rand`."""
    return _made(size, torch.randn, draws=True, **options)
