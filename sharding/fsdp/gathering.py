"""The recorded ops of `fully_shard`: gather parameters, fill and free memory, reduce gradients.

In: the sharded parameters of one group, or the gradients of its whole parameters. Out: the whole
parameters, or the sharded gradients, by one collective. `groups` calls these ops. Each is an op of
the namespace `lazy_tensor`, so that one look-up in the trie stands for all of its local ops.
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
    """How a group's parameters are gathered, from `n_ranks` ranks of the process group `group`.

    For each parameter: `numels` has the elements of one rank's padded part, `dims` the dimension
    that is split, `dtypes` the dtype to gather in. The result lies on `device`.
    """

    numels: tuple[int, ...]
    dims: tuple[int, ...]
    n_ranks: int
    group: str
    dtypes: tuple[torch.dtype, ...]
    device: torch.device


@dataclass(frozen=True)
class Reduction:
    """How a group's gradients are reduced: scattered over `group`, then summed over `replicas`.

    `numels` and `dims` are as in `Gathering`; `replicas` is None if the mesh has none. Gradients
    are summed in `dtype`, divided by `before` before that, and by `after` after it. The results
    have `out_dtype` and lie on `out_device`.
    """

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
"""The `Gathering`s and `Reduction`s. Ops take their numbers, as schemas have no such type."""

LIBRARY.define("gather(Tensor[] shards, int plan) -> Tensor")
LIBRARY.define("refill_(Tensor(a!)[] whole, Tensor gathered, int plan) -> ()")
LIBRARY.define("release_(Tensor(a!)[] whole) -> ()")
LIBRARY.define("reduce_gradients(Tensor[] parameters, Tensor[] gradients, int plan) -> Tensor[]")
_ops = torch.ops.lazy_tensor
_gather_op, _reduce_op = _ops.gather.default, _ops.reduce_gradients.default
# the builtins behind the ops, which cost less to call
_gather, _reduce = _gather_op._op, _reduce_op._op
refill_, release_ = _ops.refill_.default._op, _ops.release_.default._op


def gathered(shards: list[Any], number: int) -> torch.Tensor:
    """The ranks' parts in one flat tensor: rank after rank, each in the order of the parameters.

    `number` is that of a `Gathering`.
    """
    with dispatch_private.below_autograd():
        # parts on the smaller mesh after forward are plain lazy tensors, and no sharded call
        if isinstance(shards[0], DTensor):
            flat: torch.Tensor = _gather(shards, number)
            return flat
        return _gathered(_gather_op, (shards, number), {})


def reduced(
    parameters: list[DTensor], gradients: list[torch.Tensor], number: int
) -> Sequence[DTensor]:
    """The gradients of sharded parameters, from those of the whole ones, by the `Reduction` of this
    number."""
    with dispatch_private.below_autograd():
        made: Sequence[DTensor] = _reduce(parameters, gradients, number)
        return made


def _gathered(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """`lazy_tensor::gather` by local ops: cast, pad, concatenate, all-gather."""
    shards, number = args
    plan: Gathering = PLANS[number]
    flat: list[torch.Tensor] = []
    for shard, numel, dtype in zip(shards, plan.numels, plan.dtypes, strict=True):
        local = local_of(shard) if isinstance(shard, DTensor) else shard
        part = local.to(plan.device).reshape(-1).to(dtype)
        # an all-gather takes equal parts: those at the end of a parameter are padded
        missing = numel - part.numel()
        flat.append(torch.constant_pad_nd(part, (0, missing)) if missing else part)
    packed = flat[0] if len(flat) == 1 else torch.cat(flat)
    # one part may still be the parameter's own memory, but the op's schema promises a new tensor
    if plan.n_ranks == 1:
        return packed.clone() if len(flat) == 1 else packed
    return torch_private.all_gathered(packed, plan.n_ranks, plan.group)


def _refill(whole: list[torch.Tensor], flat: torch.Tensor, number: int) -> None:
    """Give the whole parameters their memory back, and copy the gathered parts into it.

    The kernel of `refill_`: its tensors have data.
    """
    plan: Gathering = PLANS[number]
    n = plan.n_ranks
    into: list[torch.Tensor] = []
    for tensor, numel, dim in zip(whole, plan.numels, plan.dims, strict=True):
        storage = dispatch_private.storage_of(tensor)
        n_bytes = n * numel * tensor.itemsize
        if storage.nbytes() != n_bytes:
            dispatch_private.stop_sharing(tensor)
            storage.resize_(n_bytes)
        if dim == 0:  # the ranks' parts lie one after the other, padding last
            into.append(tensor.as_strided((n, numel), (numel, 1), 0))
        else:  # the parts are columns of the parameter: through a buffer, and copied below
            into.append(tensor.new_empty((n, numel)))
    # row i of the view is what rank i gave: the parameters are blocks of columns
    torch.split_with_sizes_copy(flat.view(n, -1), list(plan.numels), 1, out=into)
    for tensor, dim, parts in zip(whole, plan.dims, into, strict=True):
        if dim:
            for part, rows in zip(tensor.chunk(n, dim), parts, strict=True):
                part.copy_(rows.view(part.shape))


def _release(whole: list[torch.Tensor]) -> None:
    """Free the memory of the whole parameters; the tensors, and views of them, stay.

    The kernel of `release_`.
    """
    for tensor in whole:
        storage = dispatch_private.storage_of(tensor)
        if storage.nbytes():
            # outside a block pending ops have a snapshot of it, and torch can't resize such memory
            dispatch_private.stop_sharing(tensor)
            storage.resize_(0)


def _reduce_gradients(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DTensor]:
    """`lazy_tensor::reduce_gradients` by local ops."""
    parameters, gradients, number = args
    plan: Reduction = PLANS[number]
    return as_gradients(parameters, all_reduced(reduce_scattered(gradients, plan), plan), plan)


def reduce_scattered(gradients: Sequence[torch.Tensor], plan: Reduction) -> torch.Tensor:
    """This rank's parts of the gradients' sums over the ranks, in one flat tensor."""
    split: list[torch.Tensor] = []
    for gradient, dim in zip(gradients, plan.dims, strict=True):
        gradient = gradient.to(plan.dtype)
        # parts along another dimension become blocks of rows, as `_chunk_cat` cuts dimension 0; it
        # also pads what the ranks don't divide
        split.append(torch.cat(gradient.chunk(plan.n_ranks, dim)) if dim else gradient)
    packed: torch.Tensor = torch.ops.aten._chunk_cat(split, 0, plan.n_ranks).view(-1)
    if plan.before is not None:
        packed = packed.div_(plan.before)
    if plan.n_ranks == 1:
        return packed
    return torch_private.reduce_scattered(packed, plan.n_ranks, plan.group)


def all_reduced(flat: torch.Tensor, plan: Reduction) -> torch.Tensor:
    """`flat` summed over the replicas, if the mesh has any."""
    if plan.replicas is None:
        return flat
    return torch_private.all_reduced(flat, plan.replicas)


def as_gradients(
    parameters: Sequence[DTensor], flat: torch.Tensor, plan: Reduction
) -> list[DTensor]:
    """The gradients of sharded parameters, as views of the reduced flat tensor."""
    if plan.after is not None:
        flat = flat.div_(plan.after)
    flat = flat.to(plan.out_dtype).to(plan.out_device)
    gradients: list[DTensor] = []
    offset = 0
    for parameter, numel in zip(parameters, plan.numels, strict=True):
        layout = parameter._layout
        size = layout.local[0]
        # the parameter's own size on this rank, without the padding
        part = flat.as_strided(size, dense_stride(size), offset)
        gradients.append(sharded(part, layout.spec))
        offset += numel
    return gradients


# These two are sharded calls: `compute` takes them apart into local ops and collectives. The other
# two get local tensors and are recorded as they are; when a plan runs, their kernels are called.
compute.SPECIAL[_gather_op] = _gathered
compute.SPECIAL[_reduce_op] = _reduce_gradients
for _name, _function in {"refill_": _refill, "release_": _release}.items():
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    LIBRARY.impl(_name, lambda *_: None, "Meta")
for _op in (_ops.gather, _ops.refill_, _ops.release_, _ops.reduce_gradients):
    rules.RULES[_op.default] = rules.Rule.RECORD
