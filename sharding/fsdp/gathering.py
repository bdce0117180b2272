"""What `fully_shard` records: parameters gathered to memory that comes and goes, gradients reduced.

In: the sharded parameters of one group, or their whole gradients. Out: the whole parameters, the
sharded gradients, by one collective each. Each function is one step of a trace once it is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazy_tensor.dispatch import torch_private as dispatch_private
from lazy_tensor.dispatch.metadata.infer import dense_stride
from lazy_tensor.dispatch.ops import rules
from lazy_tensor.sharding import torch_private
from lazy_tensor.sharding.numbered import Numbered
from lazy_tensor.sharding.ops import compute
from lazy_tensor.sharding.tensor import LIBRARY, DTensor, local_of, sharded


@dataclass(frozen=True)
class Gathering:
    """How a group's parameters are gathered: for each the elements of one rank's padded part, the
    dimension that is split, and whether that is so on `n_ranks` ranks of `group` (a name)."""

    numels: tuple[int, ...]
    dims: tuple[int, ...]
    n_ranks: int
    group: str
    dtypes: tuple[torch.dtype, ...]
    device: torch.device


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced: over `n_ranks` of `group`, each split along its dimension into
    parts of so many elements, then over the group `replicas` if the mesh has one; in `dtype`,
    divided by `before` and by `after`."""

    numels: tuple[int, ...]
    dims: tuple[int, ...]
    n_ranks: int
    group: str
    replicas: str | None
    before: float | None
    after: float | None
    dtype: torch.dtype
    out_dtype: torch.dtype
    out_device: torch.device


PLANS: Numbered[Any] = Numbered()
"""`Gathering`s and `Reduction`s; calls have their numbers."""

LIBRARY.define("gather(Tensor[] shards, int plan) -> Tensor")
LIBRARY.define("refill_(Tensor(a!)[] whole, Tensor gathered, int plan) -> ()")
LIBRARY.define("release_(Tensor(a!)[] whole) -> ()")
LIBRARY.define("reduce_gradients(Tensor[] parameters, Tensor[] gradients, int plan) -> Tensor[]")
_ops = torch.ops.lazy_tensor
_gather_op, _reduce_op = _ops.gather.default, _ops.reduce_gradients.default
_gather, _reduce = _gather_op._op, _reduce_op._op
refill_, release_ = _ops.refill_.default._op, _ops.release_.default._op


def gathered(shards: list[Any], number: int) -> torch.Tensor:
    """The ranks' parts one after the other, those of one rank in the parameters' order."""
    with dispatch_private.below_autograd():
        if isinstance(shards[0], DTensor):
            flat: torch.Tensor = _gather(shards, number)
            return flat
        return _gathered(_gather_op, (shards, number), {})


def reduced(
    parameters: list[DTensor], gradients: list[torch.Tensor], number: int
) -> Sequence[DTensor]:
    """The gradients of sharded parameters, for those of the whole ones."""
    with dispatch_private.below_autograd():
        made: Sequence[DTensor] = _reduce(parameters, gradients, number)
        return made


def _gathered(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    shards, number = args
    plan: Gathering = PLANS[number]
    flat: list[torch.Tensor] = []
    for shard, numel, dtype in zip(shards, plan.numels, plan.dtypes, strict=True):
        local = local_of(shard) if isinstance(shard, DTensor) else shard
        part = local.to(plan.device).reshape(-1).to(dtype)
        missing = numel - part.numel()
        flat.append(torch.constant_pad_nd(part, (0, missing)) if missing else part)
    packed = flat[0] if len(flat) == 1 else torch.cat(flat)
    if plan.n_ranks == 1:
        return packed.clone() if len(flat) == 1 else packed
    return torch_private.all_gathered(packed, plan.n_ranks, plan.group)


def _refill(whole: list[torch.Tensor], flat: torch.Tensor, number: int) -> None:
    """Give the whole parameters memory again, with what was gathered in it."""
    plan: Gathering = PLANS[number]
    n = plan.n_ranks
    into: list[torch.Tensor] = []
    for tensor, numel, dim in zip(whole, plan.numels, plan.dims, strict=True):
        storage = dispatch_private.storage_of(tensor)
        n_bytes = n * numel * tensor.itemsize
        if storage.nbytes() != n_bytes:
            storage.resize_(n_bytes)
        if dim == 0:  # the ranks' parts lie one after the other, padding last
            into.append(tensor.as_strided((n, numel), (numel, 1), 0))
        else:
            into.append(tensor.new_empty((n, numel)))
    torch.split_with_sizes_copy(flat.view(n, -1), list(plan.numels), 1, out=into)
    for tensor, dim, parts in zip(whole, plan.dims, into, strict=True):
        if dim:
            for part, rows in zip(tensor.chunk(n, dim), parts, strict=True):
                part.copy_(rows.view(part.shape))


def _release(whole: list[torch.Tensor]) -> None:
    """Free the memory of the whole parameters, of which views may be left."""
    for tensor in whole:
        storage = dispatch_private.storage_of(tensor)
        if storage.nbytes():
            storage.resize_(0)


def _reduce_gradients(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DTensor]:
    parameters, gradients, number = args
    plan: Reduction = PLANS[number]
    return as_gradients(parameters, all_reduced(reduce_scattered(gradients, plan), plan), plan)


def reduce_scattered(gradients: Sequence[torch.Tensor], plan: Reduction) -> torch.Tensor:
    """This rank's parts of the gradients' sums, one after the other."""
    split: list[torch.Tensor] = []
    for gradient, dim in zip(gradients, plan.dims, strict=True):
        gradient = gradient.to(plan.dtype)
        split.append(torch.cat(gradient.chunk(plan.n_ranks, dim)) if dim else gradient)
    packed: torch.Tensor = torch.ops.aten._chunk_cat(split, 0, plan.n_ranks).view(-1)
    if plan.before is not None:
        packed = packed.div_(plan.before)
    if plan.n_ranks == 1:
        return packed
    return torch_private.reduce_scattered(packed, "sum", plan.n_ranks, plan.group)


def all_reduced(flat: torch.Tensor, plan: Reduction) -> torch.Tensor:
    """Summed over the replicas, if the mesh has any."""
    if plan.replicas is None:
        return flat
    return torch_private.all_reduced(flat, "sum", plan.replicas)


def as_gradients(
    parameters: Sequence[DTensor], flat: torch.Tensor, plan: Reduction
) -> list[DTensor]:
    """The gradients of sharded parameters, views of what was reduced."""
    if plan.after is not None:
        flat = flat.div_(plan.after)
    flat = flat.to(plan.out_dtype).to(plan.out_device)
    gradients: list[DTensor] = []
    offset = 0
    for parameter, numel in zip(parameters, plan.numels, strict=True):
        layout = parameter._layout
        size = layout.local[0]
        part = flat.as_strided(size, dense_stride(size), offset)
        gradients.append(sharded(part, layout.spec))
        offset += numel
    return gradients


compute.SPECIAL[_gather_op] = _gathered
compute.SPECIAL[_reduce_op] = _reduce_gradients
for _name, _function in {"refill_": _refill, "release_": _release}.items():
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    LIBRARY.impl(_name, lambda *_: None, "Meta")
for _op in (_ops.gather, _ops.refill_, _ops.release_, _ops.reduce_gradients):
    rules.RULES[_op.default] = rules.Rule.RECORD
