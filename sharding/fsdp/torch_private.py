"""The private names of torch's `fully_shard` that ours is built on.

Read and tested with torch 2.13. torch's code decides what a group is, and when it is gathered,
resharded and reduced; `FSDPModule` and its methods are torch's own too. Ours replaces how data are
moved (see `groups`). `states` and `groups` call this file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from lazy_tensor.sharding import torch_private

try:
    from torch.distributed._composable.contract import contract
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        DataParallelMeshDims,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        UnshardHandle,
        register_fsdp_forward_method,
    )
    from torch.distributed.fsdp._fully_shard import _fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather,
        DefaultReduceScatter,
        _get_gradient_divide_factors,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        DDPMeshInfo,
        FSDPMeshInfo,
        HSDPMeshInfo,
        TrainingState,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import (
        FSDPCommContext,
        FSDPParamGroup,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state
except ImportError as error:
    raise ImportError(f"{torch_private.NEEDED} lacks a name ({error})") from error

__all__ = [
    "CPUOffloadPolicy", "DDPMeshInfo", "DataParallelMeshDims", "FSDPCommContext", "FSDPMeshInfo",
    "FSDPModule", "FSDPParam", "FSDPParamGroup", "FSDPState", "HSDPMeshInfo",
    "MixedPrecisionPolicy", "OffloadPolicy", "ShardedState", "TrainingState", "UnshardHandle",
    "register_fsdp_forward_method",
]  # fmt: skip


def undecorated(method: Any) -> Any:
    """A hook of torch's states without the decorator that keeps `torch.compile` out of it."""
    return method.__wrapped__


class How(NamedTuple):
    """The options of `fully_shard` that must agree for a shared parameter, by their names.

    `mesh` is None if `shard_placement_fn` may give each parameter its own.
    """

    mesh: Any
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy


def fully_shard_with(
    state_class: type[Any],
    choose: Callable[[Any, list[Any], How], list[Any]],
    adopt: Callable[[Any], None],
) -> Any:
    """torch's `fully_shard` with states of `state_class`.

    `choose(state, parameters, how)` returns the parameters to shard; it is called before torch
    makes groups of them. `adopt(state)` is called after that.
    """

    init = _fully_shard._init_param_group  # type: ignore[attr-defined]

    def init_param_group(
        state: Any, params: list[Any], modules: Any, mesh_info: Any, after: Any, device: Any,
        placement_fn: Any, mp_policy: Any, offload_policy: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        how = How(mesh_info.mesh if placement_fn is None else None, mp_policy, offload_policy)
        chosen = choose(state, params, how)
        init(state, chosen, modules, mesh_info, after, device, placement_fn, *how[1:], **kwargs)

    inner = torch_private.rebound(
        _fully_shard.fully_shard.__wrapped__,  # type: ignore[attr-defined]
        _init_param_group=init_param_group,
    )
    decorated = contract(state_cls=state_class)(inner)
    # torch's function reads `fully_shard.state` from its globals, which must be the new one
    inner.__globals__["fully_shard"] = decorated

    @functools.wraps(decorated)
    def fully_shard(module: Any, **options: Any) -> Any:
        made = decorated(module, **options)
        adopt(decorated.state(module if isinstance(module, torch.nn.Module) else module[0]))
        return made

    return fully_shard


def number_of(original: torch.nn.Parameter) -> int:
    """torch's number of a parameter that was sharded, which the original keeps; -1 for others."""
    return getattr(original, "_fsdp_orig_uid", -1)


def how_sharded(group: FSDPParamGroup) -> How:
    """The options with which a group's parameters were sharded."""
    return How(group.mesh_info.mesh, group.mp_policy, group.offload_policy)


def states_below(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """The states of these modules and of all modules in them; a state may come several times."""
    within = (module for root in modules for module in root.modules())
    return [state for module in within if (state := _get_module_fsdp_state(module)) is not None]


def empty_like(group: FSDPParamGroup) -> FSDPParamGroup:
    """A group without parameters, with the options of `group`, but not resharded after forward."""
    return FSDPParamGroup(
        [], group.modules, group.mesh_info, None, group.device, None, group.mp_policy,
        group.offload_policy,
    )  # fmt: skip


def divisors(group: FSDPParamGroup, dtype: torch.dtype) -> tuple[float | None, float | None]:
    """The numbers that gradients are divided by before and after they are summed; None for 1."""
    mesh_info = group.mesh_info
    before, after, *_ = _get_gradient_divide_factors(
        group._reduce_scatter_process_group if isinstance(mesh_info, FSDPMeshInfo) else None,
        group._all_reduce_process_group if isinstance(mesh_info, DDPMeshInfo) else None,
        dtype,
        group.device.type,
        group.gradient_divide_factor,
        True,  # by sums only: else torch may leave the division to NCCL
    )
    return tuple(None if factor == 1 else factor for factor in (before, after))  # type: ignore[return-value]


def has_own_collectives(group: FSDPParamGroup) -> bool:
    """Whether the user has set other collectives for the group than torch's defaults."""
    return (
        type(group._all_gather_comm) is not DefaultAllGather
        or type(group._reduce_scatter_comm) is not DefaultReduceScatter
    )


def call_after_gradients(callback: Any, args: Any, kwargs: Any) -> Any:
    """The arguments of forward, with an autograd node: `callback.post_backward()` is called when
    the gradients of the arguments are there."""
    return FSDPParamGroup._register_post_backward_hook(callback, args, kwargs)
