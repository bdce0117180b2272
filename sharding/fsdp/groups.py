"""Groups of parameters sharded over ranks, gathered for use by recorded steps.

In: torch's groups and their parameters, as `fully_shard` makes them. Out: the whole parameters in
the modules, gradients on the sharded ones. When a group is gathered, resharded and reduced its
state says (see `states`); what happens then is in `gathering`. The whole parameters of a group
are lazy tensors that stay the same, whose memory comes and goes; one autograd node stands between
them and the sharded ones.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from lazy_tensor.dispatch import torch_private as dispatch_private
from lazy_tensor.dispatch.metadata.infer import dense_stride
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.sharding.fsdp import gathering, torch_private
from lazy_tensor.sharding.fsdp.gathering import PLANS, Gathering, Reduction
from lazy_tensor.sharding.fsdp.torch_private import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardedState,
    TrainingState,
)
from lazy_tensor.sharding.tensor import DTensor, adopted, linked_all, sharded

_SETATTR: Any = torch.nn.Module.__setattr__


class ShardedParameter(torch_private.FSDPParam):
    """One parameter of a group: sharded, and whole in memory that is there while it is needed."""

    is_state_of_modules = True  # replays look into it
    buffer: torch.Tensor | None = None
    places: list[tuple[Any, str]]
    """Where modules keep the parameter, under which names."""
    group: weakref.ref[ParameterGroup]

    def adopt(self) -> None:
        """Make the sharded parameter that torch has made one of ours."""
        self.__dict__.pop("_sharded_param_data")  # its memory would count as a plain tensor's
        self.__dict__.pop("all_gather_outputs", None)
        info, made = self._module_info, self.sharded_param
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        self.places = [(info.module, info.param_name), *shared]
        self.sharded_param = torch.nn.Parameter(adopted(made), made.requires_grad)
        self.show(self.sharded_param)

    def tie(self, original: torch.nn.Parameter, modules: Sequence[torch.nn.Module]) -> None:
        """Give `modules` this parameter wherever they still have the one that it was made of."""
        info = self._module_info
        for module in {module: None for root in modules for module in root.modules()}:
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if parameter is original:
                    self.places.append((module, name))
                    info.shared_modules.append(module)
                    info.shared_param_names.append(name)
                    module.register_load_state_dict_post_hook(lambda *_: self.reset_sharded_param())
        self.show(self.sharded_param)

    def show(self, tensor: Any) -> None:
        """Let the modules have `tensor` for the parameter."""
        for module, name in self.places:
            if type(module).__setattr__ is _SETATTR:
                module._parameters[name] = tensor  # what that comes to, at a tenth of the price
            else:
                setattr(module, name, tensor)

    def to_sharded_dtensor(self, tensor: torch.Tensor) -> DTensor:
        return sharded(tensor, self._sharding_spec)

    def to_sharded_post_forward_dtensor(self, tensor: torch.Tensor) -> DTensor:
        return adopted(super().to_sharded_post_forward_dtensor(tensor))

    def reset_sharded_param(self) -> None:
        """Take up what the module has now, after `load_state_dict(assign=True)`, say."""
        shown = [getattr(module, name) for module, name in self.places]
        now: Any = next((p for p in shown if p is not self.sharded_param), self.sharded_param)
        if now is not self.sharded_param:
            if not isinstance(now, DTensor):
                now = torch.nn.Parameter(adopted(now), now.requires_grad)
            self.show(now)
        self.sharded_param = now
        self._sharding_spec = now._spec

    @property
    def part_numel(self) -> int:
        """The elements of one rank's part, padding included."""
        return self.padded_sharded_param_size.numel()

    @property
    def dtype(self) -> torch.dtype:
        """Of the whole parameter."""
        dtype: torch.dtype = self.param_dtype or self.orig_dtype
        return dtype

    def whole(self, n_ranks: int) -> Any:
        """The whole parameter, of which autograd knows nothing yet."""
        if self.buffer is None or self.buffer.dtype != self.dtype:
            n = n_ranks * self.part_numel
            with dispatch_private.no_modes(), dispatch_private.no_inference():
                memory = torch.empty(n, dtype=self.dtype, device=self.device)
                data = memory.as_strided(self._orig_size, dense_stride(self._orig_size))
            dispatch_private.storage_of(memory).resize_(0)
            self.buffer = tensor_types.concrete(data)
        made = tensor_types.local_like(self.buffer)
        if self._unsharded_dtensor_spec is not None:
            made = sharded(made, self._get_unsharded_dtensor_spec(made))
        return made

    @property
    def all_gather_outputs(self) -> list[torch.Tensor]:  # type: ignore[override]
        """The memory of the whole parameter, padding included."""
        assert self.buffer is not None, "it was gathered"
        n = self.part_numel * self.mesh_info.shard_mesh_size
        return [self.buffer.as_strided((n,), (1,), 0)]

    def free_unsharded_param(self) -> None:
        """Nothing: groups release the memory of all their parameters at once."""


class ParameterGroup(torch_private.FSDPParamGroup):
    """Parameters that are gathered, and whose gradients are reduced, by one collective."""

    is_state_of_modules = True
    fsdp_params: list[ShardedParameter]  # type: ignore[assignment]
    mesh_info: Any
    post_forward_mesh_info: Any
    _gathered: torch.Tensor | None = None
    _numbers: dict[Any, int]
    _buffers: list[torch.Tensor]
    _linked_to: list[Any] | None = None
    _learns: list[bool]
    _has_frozen: bool  # then backward may need parameters that have no gradients to wait for
    _is_linked_natively = False
    _kept: list[torch.Tensor | None]
    state: weakref.ref[Any]
    tied: TiedGroup | None = None
    """Those of its parameters that modules of other groups hold too: they are gathered apart."""

    def adopt(self, state: Any) -> None:
        """Make the parameters of a group that torch has made for `state` ours."""
        self.state = weakref.ref(state)
        for p in self.fsdp_params:
            p.__class__ = ShardedParameter
            p.adopt()
            p.group = weakref.ref(self)

    def lazy_init(self) -> None:
        if torch_private.has_own_collectives(self):
            raise NotImplementedError(
                f"{self}: set_custom_all_gather and its like replace collectives that traces hold; "
                "leave them out with lazy_tensor.sharding"
            )
        super().lazy_init()  # type: ignore[no-untyped-call]
        self._numbers = {}
        self._kept = [None] * len(self.fsdp_params)

    def _register_state_dict_hooks(self) -> None:
        """As torch does, for every module that holds one of the parameters."""
        handles = self._module_to_pre_save_state_dict_hook_handle
        if handles:
            return
        for module in {module for p in self.fsdp_params for module, _ in p.places}:
            handles[module] = module.register_state_dict_pre_hook(lambda *_: self._to_sharded())
            self._module_to_pre_load_state_dict_hook_handle[module] = (
                module.register_load_state_dict_pre_hook(lambda *_: self._to_sharded())
            )

    # -- whole and sharded

    def unshard(self, async_op: bool = False) -> None:
        """Gather the parameters; `wait_for_unshard` gives them to the modules."""
        if self._gathered is not None or self.is_unsharded:
            return
        if not self.unshard_in_backward and self._training_state == TrainingState.PRE_BACKWARD:
            return
        is_after = self.is_sharded_post_forward
        shards = [
            p._sharded_post_forward_param_data if is_after else p.sharded_param
            for p in self.fsdp_params
        ]
        self._gathered = gathering.gathered(shards, self._gathering(is_after))

    def _gathering(self, is_after: bool) -> int:
        number = self._numbers.get(is_after)
        if number is None:
            info = self.post_forward_mesh_info if is_after else self.mesh_info
            is_split = isinstance(info, FSDPMeshInfo)
            n_ranks = info.shard_mesh_size if is_split else 1
            whole = [p.part_numel * self._n_ranks for p in self.fsdp_params]
            plan = Gathering(
                numels=tuple(n // n_ranks for n in whole),
                dims=tuple(0 if is_after else p.fsdp_placement.dim for p in self.fsdp_params),
                n_ranks=n_ranks,
                group=info.shard_process_group.group_name if is_split else "",
                dtypes=tuple(p.dtype for p in self.fsdp_params),
                device=self.device,
            )
            number = self._numbers[is_after] = PLANS.number(plan)
        return number

    @property
    def _n_ranks(self) -> int:
        info = self.mesh_info
        return info.shard_mesh_size if isinstance(info, FSDPMeshInfo) else 1

    def wait_for_unshard(self) -> None:
        if self._gathered is None:
            return
        self._link()
        gathering.refill_(
            self._buffers, self._gathered, self._gathering(self.is_sharded_post_forward)
        )
        self._gathered = None
        self._to_unsharded()

    def _to_unsharded(self) -> None:
        if self.is_unsharded:
            return
        for p in self.fsdp_params:
            p.show(p._unsharded_param)
            p.sharded_state = ShardedState.UNSHARDED
        if self._use_post_forward_mesh:
            for p in self.fsdp_params:
                p._sharded_post_forward_param = p._sharded_post_forward_param_data = None
        self._sharded_state = ShardedState.UNSHARDED

    def _to_sharded(self) -> None:
        if self.is_sharded:
            return
        if self.is_unsharded:
            gathering.release_(self._buffers)
        for p in self.fsdp_params:
            p.show(p.sharded_param)
            p.sharded_state = ShardedState.SHARDED
        self._sharded_state = ShardedState.SHARDED

    def _to_sharded_post_forward(self) -> None:
        if self.is_unsharded:
            with torch.no_grad():
                super()._to_sharded_post_forward()  # type: ignore[no-untyped-call]
            gathering.release_(self._buffers)

    def reshard(self) -> None:
        if self._training_state == TrainingState.FORWARD:
            if not self._reshard_after_forward:
                return
            if self._use_post_forward_mesh:
                self._to_sharded_post_forward()
                return
        self._to_sharded()

    @property
    def _use_post_forward_mesh(self) -> bool:
        after = self.post_forward_mesh_info
        return after is not None and after is not self.mesh_info

    # -- between whole and sharded parameters, for autograd

    def _link(self) -> None:
        """Let the gradients of the whole parameters come to the sharded ones."""
        to = [p.sharded_param for p in self.fsdp_params]
        learns = [parameter.requires_grad for parameter in to]
        if self._linked_to is not None:
            if dispatch_private.in_backward():
                return  # what forward used
            is_same = all(map(operator.is_, to, self._linked_to)) and learns == self._learns
            if is_same and self._is_linked_natively:
                return
        whole = [p.whole(self._n_ranks) for p in self.fsdp_params]
        self._buffers = [p.buffer for p in self.fsdp_params if p.buffer is not None]
        if any(learns):
            whole = linked_all(whole, to, _reduced, weakref.ref(self))
        for p, tensor in zip(self.fsdp_params, whole, strict=True):
            tensor._is_param = True
            p._unsharded_param = tensor
        self._linked_to, self._learns = to, learns
        self._has_frozen = not all(learns)
        self._is_linked_natively = hits.native is not None

    def pre_forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        is_first = self._training_state != TrainingState.FORWARD
        self._training_state = TrainingState.FORWARD
        self.unshard()
        self.wait_for_unshard()
        if is_first and self._has_frozen:
            return torch_private.call_after_gradients(_Resharding(self), args, kwargs)
        return args, kwargs

    def post_forward(self, module: Any, inputs: Any, output: Any) -> Any:
        if not dispatch_private.in_backward():  # activation checkpointing computes again there
            self.reshard()
            self._record_post_forward()
        self._training_state = TrainingState.IDLE
        return output

    def pre_backward(self, default_prefetch: bool, *_: Any) -> None:
        if self._training_state == TrainingState.PRE_BACKWARD:
            return
        self._training_state = TrainingState.PRE_BACKWARD
        self.unshard()
        self.wait_for_unshard()
        if default_prefetch and self._num_param_groups == 1:
            self._gather_next()
        elif default_prefetch:
            self._backward_prefetch()

    def _gather_next(self) -> None:
        """Gather the group whose forward came before this one's: backward needs it next."""
        if self._post_forward_indices:
            place = self._post_forward_indices.pop()
            if place:
                before = self.comm_ctx.post_forward_order[place - 1]
                if before.unshard_in_backward:
                    before.unshard()

    def post_backward(self, *_: Any) -> None:
        """At the end of a backward that gave the group no gradients: reduce what was kept."""
        self._training_state = TrainingState.POST_BACKWARD
        if self.reshard_after_backward:
            self.reshard()
        if not self.reduce_grads or self._linked_to is None:
            return
        reduced = self._reduced([None] * len(self.fsdp_params))
        for p, gradient in zip(self.fsdp_params, reduced, strict=True):
            if gradient is None:
                continue
            parameter = p.sharded_param
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(parameter)

    def finalize_backward(self) -> None:
        self._gathered = None  # of a group that was gathered for nothing
        self._post_forward_indices.clear()

    def _reset_iter_state(self) -> None:
        self._gathered = self._partial_reduce_output = None
        self._kept = [None] * len(self.fsdp_params)
        self._post_forward_indices.clear()
        self._training_state = TrainingState.IDLE
        self._to_sharded()

    # -- gradients

    def take_gradients(self, gradients: Sequence[torch.Tensor | None]) -> list[DTensor | None]:
        """The sharded parameters' gradients, for those of the whole ones; None where they wait."""
        self._training_state = TrainingState.POST_BACKWARD
        if self.reshard_after_backward and not self._has_frozen:
            self.reshard()
        if self.reduce_grads:
            return self._reduced(gradients)
        for i, gradient in enumerate(map(self._in_reduce_dtype, gradients)):
            self._kept[i] = _sum(self._kept[i], gradient)
        return [None] * len(gradients)

    def _in_reduce_dtype(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None or self._reduce_dtype is None:
            return gradient
        return gradient.to(self._reduce_dtype)

    def _reduced(self, gradients: Sequence[torch.Tensor | None]) -> list[DTensor | None]:
        given: list[torch.Tensor] = []
        places: list[int] = []
        for i, (p, gradient) in enumerate(zip(self.fsdp_params, gradients, strict=True)):
            gradient = _sum(self._kept[i], gradient)
            self._kept[i] = None
            if gradient is None:
                if not (self.reduce_scatter_unused_params and p.sharded_param.requires_grad):
                    continue
                gradient = torch.zeros_like(p._unsharded_param)
            given.append(p._get_grad_inner_tensor(gradient))
            places.append(i)
        found: list[DTensor | None] = [None] * len(gradients)
        if places:
            parameters: list[Any] = [self.fsdp_params[i].sharded_param for i in places]
            for i, gradient in zip(
                places, self._all_reduced(parameters, given, places), strict=False
            ):
                found[i] = gradient
        return found

    def _all_reduced(
        self, parameters: list[DTensor], gradients: list[torch.Tensor], places: list[int]
    ) -> Sequence[DTensor]:
        """The gradients of these parameters; none if the replicas' are to be summed later."""
        number = self._reduction(places, gradients[0].dtype)
        waits = not self.all_reduce_grads and isinstance(self.mesh_info, HSDPMeshInfo)
        if not waits and self._partial_reduce_output is None and self._all_reduce_hook is None:
            return gathering.reduced(parameters, gradients, number)
        plan = PLANS[number]
        flat = gathering.reduce_scattered(gradients, plan)
        if self._partial_reduce_output is not None:
            flat = flat + self._partial_reduce_output
        self._partial_reduce_output = flat if waits else None
        if waits:
            return ()
        flat = gathering.all_reduced(flat, plan)
        if self._all_reduce_hook is not None:
            self._all_reduce_hook(flat)
        return gathering.as_gradients(parameters, flat, plan)

    def _reduction(self, places: list[int], dtype: torch.dtype) -> int:
        separate = getattr(self.mesh_info, "reduce_scatter_process_group", None)
        key = (tuple(places), dtype, self.gradient_divide_factor, separate)
        number = self._numbers.get(key)
        if number is None:
            info = self.mesh_info
            members = [self.fsdp_params[i] for i in places]
            dtype = self._reduce_dtype or dtype
            before, after = torch_private.divisors(self, dtype)
            has_replicas = isinstance(info, torch_private.DDPMeshInfo)
            is_split = isinstance(info, FSDPMeshInfo)
            plan = Reduction(
                numels=tuple(p.part_numel for p in members),
                dims=tuple(p.fsdp_placement.dim for p in members),
                n_ranks=self._n_ranks,
                group=self._reduce_scatter_process_group.group_name if is_split else "",
                replicas=self._all_reduce_process_group.group_name if has_replicas else None,
                before=before,
                after=after,
                dtype=dtype,
                out_dtype=members[0].orig_dtype,
                out_device=members[0].sharded_param.device,
            )
            number = self._numbers[key] = PLANS.number(plan)
        return number


def _sum(kept: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if kept is None or gradient is None:
        return gradient if kept is None else kept
    return kept + gradient


class _Resharding:
    """Reshards a group once the gradients of its module's inputs are there."""

    def __init__(self, group: ParameterGroup) -> None:
        self.group = group

    def post_backward(self) -> None:
        group = self.group
        if group.reshard_after_backward:
            group.reshard()
            group._training_state = TrainingState.IDLE  # the module may come again: gather then


def _reduced(gradients: Any, group: weakref.ref[ParameterGroup]) -> list[DTensor | None]:
    """What the autograd node of a group calls."""
    here = group()
    return [None] * len(gradients) if here is None else here.take_gradients(gradients)


class TiedGroup(ParameterGroup):
    """Those parameters of one group that modules of other groups hold too.

    They are gathered when the first of these modules wants them, and stay whole until their
    gradients are there, to which all the modules' uses add.
    """

    # None, whatever torch sets: not resharded after forward
    post_forward_mesh_info = property(lambda self: None, lambda self, _: None)
