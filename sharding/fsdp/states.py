"""`fully_shard`: torch's own function, with our states of modules and our groups of parameters.

In: modules, from the user. Out: the same modules with sharded parameters, and with hooks that
gather and reshard them. torch raises an error for a parameter that is shared by modules in
different groups. Here such a parameter moves to a group of its own (`groups.TiedGroup`), which each
of the modules' states gathers.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from lazy_tensor.sharding.fsdp import torch_private
from lazy_tensor.sharding.fsdp.groups import ParameterGroup, ShardedParameter, TiedGroup


class _NoStream:
    """Stands for the device stream that torch's hooks wait on: plans schedule the collectives."""

    def wait_event(self, _: Any) -> None: ...
    def wait_stream(self, _: Any) -> None: ...


class _Order(torch_private.FSDPCommContext):
    """What the states of one model share; `post_forward_order` lists groups as forward used them.

    Read by torch's hooks and by `ParameterGroup`.
    """

    def lazy_init(self, device: torch.device) -> None:
        # as torch's, which makes streams of the device; these are the attributes that hooks read
        self.all_gather_copy_in_stream = self.all_gather_stream = _NoStream()
        self.all_gather_state: Any = None
        self.reduce_scatter_states: list[Any] = []
        self._last_post_reduce_events: dict[Any, Any] = {}
        self.post_forward_order = []


class _State(torch_private.FSDPState):
    """torch's state of the modules of one `fully_shard` call, with hooks that also handle ties.

    The inherited hooks are taken without the wrapper that keeps `torch.compile` out of them, which
    costs host time at each call.
    """

    is_state_of_modules = True  # `replay` looks into it: what the user sets here changes the step

    def __init__(self) -> None:
        super().__init__()
        self._comm_ctx = _Order()
        # parameters of these modules that other states have sharded, with the originals that these
        # modules still hold; `_not_sharded` fills it, `_adopt` empties it
        self.ties: list[tuple[ShardedParameter, torch.nn.Parameter]] = []
        # groups of other states that hold these parameters: gathered here too
        self.shares: list[TiedGroup] = []

    _begin_forward = torch_private.undecorated(torch_private.FSDPState._pre_forward)
    _post_forward = torch_private.undecorated(torch_private.FSDPState._post_forward)
    _begin_backward = torch_private.undecorated(torch_private.FSDPState._pre_backward)
    _finish_backward = torch_private.undecorated(
        torch_private.FSDPState._root_post_backward_final_callback
    )

    def _pre_forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        # The first forward makes this state the root. The check comes before, so that the next
        # forward raises the error again.
        if self._is_root is None:
            self._check_ties()
        # first torch's hook: at the first forward it initializes all groups of the root
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
        """NotImplementedError if a module below shares a group whose modules aren't below.

        Such a group belongs to another root, whose forward initializes and reshards it.
        """
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
        # A group with frozen parameters is resharded when its inputs' gradients are there. Inputs
        # that require none never have any: such a group is still whole here, and would keep its
        # values after the optimizer's step.
        for state in self._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                if group.reshard_after_backward:
                    group.reshard()


_SHARDED: weakref.WeakValueDictionary[int, ShardedParameter] = weakref.WeakValueDictionary()
"""Sharded parameters by torch's number of the original, by which other modules that still hold the
original are recognized."""


def _adopt(state: _State) -> None:
    """Turn the groups that torch made for `state`, and their parameters, into ours, and tie the
    parameters that were sharded before."""
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
    """The `params` that were not sharded before; the others go to `state.ties`."""
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
    """ValueError if `owner` was sharded with other options than `how`."""
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
    """Move `owner` from its group to the group's `TiedGroup`, and return that.

    The tied group is made if need be, and joins the groups of the same state.
    """
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
    # an empty group goes: there is nothing to gather, and `torch.cat` of no tensors raises
    group.fsdp_params.remove(owner)
    if not group.fsdp_params:
        groups.remove(group)
    group.tied.fsdp_params.append(owner)
    owner.group = weakref.ref(group.tied)
    return group.tied


fully_shard = torch_private.fully_shard_with(_State, _not_sharded, _adopt)
