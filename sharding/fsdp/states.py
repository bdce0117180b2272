"""`fully_shard`: torch's own, whose states decide over our groups.

In: modules, from the user. Out: their parameters sharded, and hooks that gather and reshard them.
torch refuses a parameter that modules wrapped apart share; here it goes to a group of its own (see
`groups.TiedGroup`), which each of these modules' states gathers.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from lazy_tensor.sharding.fsdp import torch_private
from lazy_tensor.sharding.fsdp.groups import ParameterGroup, ShardedParameter, TiedGroup


class _NoStream:
    """Collectives are recorded; where they run is for plans to decide."""

    def wait_event(self, _: Any) -> None: ...
    def wait_stream(self, _: Any) -> None: ...


class _Order(torch_private.FSDPCommContext):
    """What the states of one model share: the order of the groups in forward."""

    def lazy_init(self, device: torch.device) -> None:
        self.all_gather_copy_in_stream = self.all_gather_stream = _NoStream()
        self.all_gather_state: Any = None
        self.reduce_scatter_states: list[Any] = []
        self._last_post_reduce_events: dict[Any, Any] = {}
        self.post_forward_order = []


class _State(torch_private.FSDPState):
    """torch's state of a module, with hooks as they are under `torch.compile`'s wrapper."""

    is_state_of_modules = True

    def __init__(self) -> None:
        super().__init__()
        self._comm_ctx = _Order()
        self.ties: list[tuple[ShardedParameter, torch.nn.Parameter]] = []
        self.shares: list[TiedGroup] = []  # groups of other states that this one's modules need

    _begin_forward = torch_private.undecorated(torch_private.FSDPState._pre_forward)
    _post_forward = torch_private.undecorated(torch_private.FSDPState._post_forward)
    _begin_backward = torch_private.undecorated(torch_private.FSDPState._pre_backward)
    _finish_backward = torch_private.undecorated(
        torch_private.FSDPState._root_post_backward_final_callback
    )

    def _pre_forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        if self._is_root is None:  # it is about to be decided
            self._check_ties()
        begun = self._begin_forward(module, args, kwargs)
        for group in self.shares:
            group.unshard()
            group.wait_for_unshard()
        return begun

    def _pre_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        for group in self.shares:
            group.pre_backward(False)
        self._begin_backward(gradient)
        return gradient

    def _check_ties(self) -> None:
        """Raise unless the groups that modules below share are groups of modules below, too."""
        states = torch_private.states_below(self._modules)
        known = {id(group) for state in states for group in state._fsdp_param_groups}
        for group in (group for state in states for group in state.shares):
            if id(group) not in known:
                raise NotImplementedError(
                    f"{group} holds a parameter that modules under another root share; call "
                    "fully_shard on a module that contains them all, and run forward through it"
                )

    def _root_post_backward_final_callback(self) -> None:
        self._finish_backward()
        # A group with frozen parameters waits for its inputs' gradients: there may be none.
        for state in self._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                if group.reshard_after_backward:
                    group.reshard()


_SHARDED: weakref.WeakValueDictionary[int, ShardedParameter] = weakref.WeakValueDictionary()
"""By what torch numbers original parameters with: those that modules may still hold elsewhere."""


def _adopt(state: _State) -> None:
    """Make the groups that torch has made for `state` ours, and their parameters; tie the rest."""
    groups: list[Any] = state._fsdp_param_groups
    for group in groups:
        group.__class__ = ParameterGroup
        group.adopt(state)
        for p in group.fsdp_params:
            _SHARDED[p._orig_param_uid] = p
    for owner, parameter in state.ties:
        group = _apart(owner)
        if group not in state.shares:
            state.shares.append(group)
        owner.tie(parameter, state._modules)
    state.ties.clear()


def _not_sharded(
    state: _State, params: list[torch.nn.Parameter], how: torch_private.How
) -> list[torch.nn.Parameter]:
    """Those of `params` that no module has sharded before; the others are noted in `state.ties`."""
    left: list[torch.nn.Parameter] = []
    for parameter in params:
        owner = _SHARDED.get(torch_private.number_of(parameter))
        if owner is None:
            left.append(parameter)
        else:
            _check_alike(owner, how)
            state.ties.append((owner, parameter))
    return left


def _check_alike(owner: ShardedParameter, how: torch_private.How) -> None:
    """Raise ValueError unless what `owner` was sharded with is what `how` says."""
    theirs = torch_private.how_sharded(_group_of(owner))
    for name, one, other in zip(how._fields, theirs, how, strict=True):
        if other is not None and one != other:
            module, parameter = owner.places[0]
            raise ValueError(
                f"{name}={other}: {parameter!r} of {type(module).__name__}, which this module "
                f"shares, was sharded with {one}; give fully_shard the same {name} for both"
            )


def _group_of(owner: ShardedParameter) -> ParameterGroup:
    group = owner.group()
    assert group is not None, "a parameter lives no longer than its group"
    return group


def _apart(owner: ShardedParameter) -> TiedGroup:
    """The group of what several states need of the group of `owner`, with `owner` in it."""
    group = _group_of(owner)
    if isinstance(group, TiedGroup):
        return group
    state: Any = group.state()
    groups: list[ParameterGroup] = state._fsdp_param_groups
    if group.tied is None:
        made: Any = torch_private.empty_like(group)
        made.__class__ = TiedGroup
        group.tied = made
        groups.insert(0, group.tied)
    group.fsdp_params.remove(owner)
    if not group.fsdp_params:
        groups.remove(group)
    group.tied.fsdp_params.append(owner)
    owner.group = weakref.ref(group.tied)
    return group.tied


fully_shard = torch_private.fully_shard_with(_State, _not_sharded, _adopt)
