"""Groups of parameters that are sharded over ranks, and gathered while their modules need them.

In: torch's groups and parameters, as `fully_shard` makes them. Out: whole parameters in the modules
while those run, gradients on the sharded parameters. The hooks of `states` decide when a group is
gathered, resharded and reduced; the recorded ops are in `gathering`.

The whole parameters are lazy tensors that stay the same objects: only their memory comes and goes.
So the graph of a forward stays valid. One autograd node connects them with the sharded ones.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
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
    """One parameter of a group: the sharded one, and the whole one while it is gathered."""

    is_state_of_modules = True  # `replay` looks into it
    # the whole parameter without an autograd edge; its storage has no bytes while it isn't gathered
    buffer: torch.Tensor | None = None
    places: list[tuple[Any, str]]
    """The modules that hold the parameter, with its name in each."""
    group: weakref.ref[ParameterGroup]  # weak, as the group holds this parameter

    def adopt(self) -> None:
        """Replace the sharded parameter that torch made by one of ours, in all modules."""
        # a plain tensor on the shard's memory, which only torch's gathering uses. While it lives,
        # the memory counts as shared with plain tensors, and ops that write it run at once.
        self.__dict__.pop("_sharded_param_data")
        self.__dict__.pop("all_gather_outputs", None)
        info, made = self._module_info, self.sharded_param
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        self.places = [(info.module, info.param_name), *shared]
        self.sharded_param = torch.nn.Parameter(adopted(made), made.requires_grad)
        self.show(self.sharded_param)

    def tie(self, original: torch.nn.Parameter, modules: Sequence[torch.nn.Module]) -> None:
        """Put this parameter in place of its `original`, wherever `modules` still hold that."""
        info = self._module_info
        for module in {module: None for root in modules for module in root.modules()}:
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if parameter is original:
                    self.places.append((module, name))
                    info.shared_modules.append(module)
                    info.shared_param_names.append(name)
                    # with `assign=True` the module may get a new tensor, which the others need too
                    module.register_load_state_dict_post_hook(lambda *_: self.reset_sharded_param())
        self.show(self.sharded_param)

    def show(self, tensor: Any) -> None:
        """Set `tensor` as the parameter in all modules that hold it."""
        for module, name in self.places:
            if type(module).__setattr__ is _SETATTR:
                # nn.Module's `__setattr__` does the same after checks, and takes ten times as long
                module._parameters[name] = tensor
            else:
                # The class does more with a parameter, as `nn.LSTM`. In the end nn.Module's method
                # registers it, which refuses a tensor with an autograd edge.
                own = module.__dict__.get("register_parameter")
                module.__dict__["register_parameter"] = module._parameters.__setitem__
                try:
                    setattr(module, name, tensor)
                finally:
                    del module.__dict__["register_parameter"]
                    if own is not None:
                        module.__dict__["register_parameter"] = own

    def to_sharded_dtensor(self, tensor: torch.Tensor) -> DTensor:
        return sharded(tensor, self._sharding_spec)

    def to_sharded_post_forward_dtensor(self, tensor: torch.Tensor) -> DTensor:
        return adopted(super().to_sharded_post_forward_dtensor(tensor))

    def reset_sharded_param(self) -> None:
        """Adopt the parameter that a module holds now, after `load_state_dict(assign=True)` say.

        torch's method also pads the shard and notes its address; `gathering` pads when it gathers.
        """
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
        """The number of elements of one rank's part, with the padding that makes parts equal."""
        return self.padded_sharded_param_size.numel()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the whole parameter: that of the mixed-precision policy, if it has one."""
        dtype: torch.dtype = self.param_dtype or self.orig_dtype
        return dtype

    def whole(self, n_ranks: int) -> Any:
        """The whole parameter, without an autograd edge. Its memory comes when it is gathered."""
        if self.buffer is None or self.buffer.dtype != self.dtype:
            # An ordinary tensor even if the first forward is in inference mode: later forwards use
            # it in training. The padding lies behind the parameter's own elements.
            n = n_ranks * self.part_numel
            with dispatch_private.no_modes(), dispatch_private.no_inference():
                memory = torch.empty(n, dtype=self.dtype, device=self.device)
                data = memory.as_strided(self._orig_size, dense_stride(self._orig_size))
            dispatch_private.storage_of(memory).resize_(0)  # until `refill_` gives it bytes
            self.buffer = tensor_types.concrete(data)
        made = tensor_types.local_like(self.buffer)
        # with tensor parallel inside the group the whole parameter is a DTensor itself
        if self._unsharded_dtensor_spec is not None:
            made = sharded(made, self._get_unsharded_dtensor_spec(made))
        return made

    @property
    def all_gather_outputs(self) -> list[torch.Tensor]:  # type: ignore[override]
        """The memory of the whole parameter, padding included, as one flat tensor: torch's
        `to_sharded_post_forward` cuts this rank's part out of it."""
        assert self.buffer is not None, "it was gathered"
        n = self.part_numel * self.mesh_info.shard_mesh_size
        return [self.buffer.as_strided((n,), (1,), 0)]

    def free_unsharded_param(self) -> None:
        """Do nothing: a group frees the memory of all its parameters by one op."""


class ParameterGroup(torch_private.FSDPParamGroup):
    """Parameters that are gathered by one collective, and whose gradients are reduced by one."""

    is_state_of_modules = True
    fsdp_params: list[ShardedParameter]  # type: ignore[assignment]
    mesh_info: Any
    post_forward_mesh_info: Any
    # the gathered flat tensor, between `unshard` and `wait_for_unshard`
    _gathered: torch.Tensor | None = None
    # numbers of plans in `PLANS`, by what the plan depends on
    _numbers: dict[Any, int]
    _buffers: list[torch.Tensor]  # those of the parameters, for `refill_` and `release_`
    # the sharded parameters that the whole ones have edges to, and which of them require gradients:
    # `_link` makes new edges when one of them changes
    _linked_to: list[Any] | None = None
    _learns: list[bool]
    # whether some parameter requires no gradient: backward may then need the whole parameters after
    # all gradients of the group are there
    _has_frozen: bool
    # whether the C++ made the node: such a node serves any number of forwards
    _is_linked_natively = False
    # for each parameter the sum of gradients while `reduce_grads` is off
    _kept: list[torch.Tensor | None]
    # the parameters whose gradients are in `_partial_reduce_output`, one after the other
    _partial_places: list[int]
    # how often the sharded parameters were written, as of a forward that left the group whole
    _gathered_from: list[int] | None = None
    state: weakref.ref[Any]
    tied: TiedGroup | None = None
    """The group of those of its parameters that modules of other groups hold too."""

    def adopt(self, state: Any) -> None:
        """Turn the parameters of this group, which torch made for `state`, into ours."""
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
        self._partial_places = []
        self._kept = [None] * len(self.fsdp_params)

    def _register_state_dict_hooks(self) -> None:
        """As torch's method, but for every module that holds a parameter, tied ones included."""
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
        """Gather the parameters into one flat tensor; `wait_for_unshard` puts them into modules.

        `async_op` has no effect: every gather is issued early and waited for late.
        """
        if self._gathered is not None:
            return
        if self.is_unsharded:
            if not self._is_out_of_date:
                return
            self._to_sharded()
        # the user said that backward doesn't need these parameters
        if not self.unshard_in_backward and self._training_state == TrainingState.PRE_BACKWARD:
            return
        is_after = self.is_sharded_post_forward
        shards = [
            p._sharded_post_forward_param_data if is_after else p.sharded_param
            for p in self.fsdp_params
        ]
        self._gathered = gathering.gathered(shards, self._gathering(is_after))

    def _gathering(self, is_after: bool) -> int:
        """The number of the plan to gather; `is_after`: from the smaller mesh after forward."""
        number = self._numbers.get(is_after)
        if number is None:
            info = self.post_forward_mesh_info if is_after else self.mesh_info
            is_split = isinstance(info, FSDPMeshInfo)
            n_ranks = info.shard_mesh_size if is_split else 1
            # the padded size is the same on both meshes, the smaller one has larger parts of it
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
    def _is_out_of_date(self) -> bool:
        """Whether an optimizer, say, has written the sharded parameters since a forward that left
        the whole ones in memory. Autograd counts calls that write, so all ranks agree."""
        seen = self._gathered_from
        # backward needs the values that forward had
        return (
            seen is not None
            and self._training_state != TrainingState.PRE_BACKWARD
            and seen != self._counts_of_writes()
        )

    def _counts_of_writes(self) -> list[int]:
        shards = [p.sharded_param for p in self.fsdp_params]
        return [0 if shard.is_inference() else shard._version for shard in shards]

    @property
    def _n_ranks(self) -> int:
        info = self.mesh_info
        return info.shard_mesh_size if isinstance(info, FSDPMeshInfo) else 1

    def wait_for_unshard(self) -> None:
        """Copy what `unshard` gathered into the whole parameters, and show those to the modules."""
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
        # after forward the parameters may be sharded over a smaller mesh: then no memory is left
        if self.is_unsharded:
            gathering.release_(self._buffers)
        for p in self.fsdp_params:
            p.show(p.sharded_param)
            p.sharded_state = ShardedState.SHARDED
        self._sharded_state = ShardedState.SHARDED
        self._gathered_from = None

    def _to_sharded_post_forward(self) -> None:
        if self.is_unsharded:
            with torch.no_grad():
                super()._to_sharded_post_forward()  # type: ignore[no-untyped-call]
            gathering.release_(self._buffers)

    def reshard(self) -> None:
        if self._training_state == TrainingState.FORWARD:
            if not self._reshard_after_forward:
                self._gathered_from = self._counts_of_writes()
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
        """Give the whole parameters an autograd edge to the sharded ones, if they lack it."""
        to = [p.sharded_param for p in self.fsdp_params]
        learns = [parameter.requires_grad for parameter in to]
        if self._linked_to is not None:
            if dispatch_private.in_backward():
                # the graph of forward has the present whole parameters
                return
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
        """Gather the group before one of its modules runs."""
        # of several modules in one group only the first registers what follows the gradients
        is_first = self._training_state != TrainingState.FORWARD
        self._training_state = TrainingState.FORWARD
        self.unshard()
        self.wait_for_unshard()
        # frozen parameters have no gradients to wait for: the group is resharded after the
        # gradients of its inputs, which need those parameters
        if is_first and self._has_frozen:
            return torch_private.call_after_gradients(_Resharding(self), args, kwargs)
        return args, kwargs

    def post_forward(self, module: Any, inputs: Any, output: Any) -> Any:
        # activation checkpointing repeats forward in backward, which still needs the parameters
        if not dispatch_private.in_backward():
            self.reshard()
            self._record_post_forward()
        self._training_state = TrainingState.IDLE
        return output

    def pre_backward(self, default_prefetch: bool, *_: Any) -> None:
        """Gather the group, and the one that backward needs next if `default_prefetch`."""
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
        """Gather the group whose forward came before this one's: backward needs it next.

        As torch's `_backward_prefetch` for a state with one group, without its profiler ranges.
        """
        if self._post_forward_indices:
            place = self._post_forward_indices.pop()
            if place:
                before = self.comm_ctx.post_forward_order[place - 1]
                if before.unshard_in_backward:
                    before.unshard()

    def post_backward(self, *_: Any) -> None:
        """Reduce kept gradients at the end of a backward that gave this group none.

        torch's hook at the end of backward calls it for groups whose state isn't POST_BACKWARD.
        Autograd takes no part: the gradients are added to `grad` here, and hooks are called.
        """
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
        self._gathered = None  # gathered ahead, and not needed after all
        self._post_forward_indices.clear()

    def _reset_iter_state(self) -> None:
        self._gathered = self._partial_reduce_output = None
        self._kept = [None] * len(self.fsdp_params)
        self._post_forward_indices.clear()
        self._training_state = TrainingState.IDLE
        self._to_sharded()

    # -- gradients

    def take_gradients(self, gradients: Sequence[torch.Tensor | None]) -> list[DTensor | None]:
        """The gradients of the sharded parameters, from those of the whole ones.

        The group's autograd node calls it. None for a gradient that is kept: while `reduce_grads`
        is off, gradients are summed whole on each rank.
        """
        self._training_state = TrainingState.POST_BACKWARD
        # with frozen parameters this is too early: see `pre_forward`
        if self.reshard_after_backward and not self._has_frozen:
            self.reshard()
        if self.reduce_grads:
            return self._reduced(gradients)
        # summed in the dtype in which they are reduced later, as in torch
        for i, gradient in enumerate(map(self._in_reduce_dtype, gradients)):
            self._kept[i] = _sum(self._kept[i], gradient)
        return [None] * len(gradients)

    def _in_reduce_dtype(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None or self._reduce_dtype is None:
            return gradient
        return gradient.to(self._reduce_dtype)

    def _reduced(self, gradients: Sequence[torch.Tensor | None]) -> list[DTensor | None]:
        """The reduced sum of `gradients` and the kept ones, by one collective; None for a parameter
        that has neither."""
        given: list[torch.Tensor] = []
        places: list[int] = []
        for i, (p, gradient) in enumerate(zip(self.fsdp_params, gradients, strict=True)):
            gradient = _sum(self._kept[i], gradient)
            self._kept[i] = None
            if gradient is None:
                # the user asks for zeros if only some ranks use a parameter: all must reduce it
                if not (self.reduce_scatter_unused_params and p.sharded_param.requires_grad):
                    continue
                gradient = torch.zeros_like(p._unsharded_param)
            given.append(p._get_grad_inner_tensor(gradient))
            places.append(i)
        found: list[DTensor | None] = [None] * len(gradients)
        if places or self._partial_reduce_output is not None:
            for i, reduced in self._all_reduced(given, places):
                found[i] = reduced
        return found

    def _all_reduced(
        self, gradients: list[torch.Tensor], places: list[int]
    ) -> Iterable[tuple[int, DTensor]]:
        """The reduced gradients of the parameters at `places`, and of those whose gradients waited,
        each with its place; none if the all-reduce over replicas is left to a later backward."""
        # the usual case is one recorded op, the others are taken apart
        waits = not self.all_reduce_grads and isinstance(self.mesh_info, HSDPMeshInfo)
        if not waits and self._partial_reduce_output is None and self._all_reduce_hook is None:
            number = self._reduction(places, gradients[0].dtype)
            return zip(
                places, gathering.reduced(self._shards(places), gradients, number), strict=True
            )
        if places:
            plan = PLANS[self._reduction(places, gradients[0].dtype)]
            self._keep_partial(gathering.reduce_scattered(gradients, plan), places)
        flat, places = self._partial_reduce_output, self._partial_places
        if waits or flat is None:
            return ()
        self._partial_reduce_output = None
        plan = PLANS[self._reduction(places, flat.dtype)]
        flat = gathering.all_reduced(flat, plan)
        if self._all_reduce_hook is not None:
            self._all_reduce_hook(flat)
        return zip(places, gathering.as_gradients(self._shards(places), flat, plan), strict=True)

    def _shards(self, places: list[int]) -> list[Any]:
        return [self.fsdp_params[i].sharded_param for i in places]

    def _keep_partial(self, flat: torch.Tensor, places: list[int]) -> None:
        """Add the parts of gradients in `flat` to those that wait for the all-reduce.

        Backwards may use different parameters, so that `flat` may have other parts than what waits.
        """
        kept, kept_places = self._partial_reduce_output, self._partial_places
        if kept is not None and kept_places == places:
            flat = flat + kept
        elif kept is not None:
            parts: dict[int, torch.Tensor] = {}
            for its, tensor in ((kept_places, kept), (places, flat)):
                pieces = tensor.split([self.fsdp_params[i].part_numel for i in its])
                for i, piece in zip(its, pieces, strict=True):
                    parts[i] = parts[i] + piece if i in parts else piece
            places = sorted(parts)
            flat = torch.cat([parts[i] for i in places])
        self._partial_reduce_output, self._partial_places = flat, places

    def _reduction(self, places: list[int], dtype: torch.dtype) -> int:
        """The number of the plan to reduce the gradients of the parameters at `places`."""
        # users may set the factor and the process group at any time
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
    """The sum of two gradients, of which each may be missing."""
    if kept is None or gradient is None:
        return gradient if kept is None else kept
    return kept + gradient


class _Resharding:
    """Reshards a group once the gradients of its module's inputs are there.

    torch's `RegisterPostBackwardFunction` calls it in place of a group.
    """

    def __init__(self, group: ParameterGroup) -> None:
        self.group = group

    def post_backward(self) -> None:
        group = self.group
        if group.reshard_after_backward:
            group.reshard()
            # backward may come to the module again, if forward ran it several times: only from
            # another state than PRE_BACKWARD does `pre_backward` gather. POST_BACKWARD stays: it
            # says that the gradients are reduced, which torch's hook at the end would do again.
            if group._training_state == TrainingState.PRE_BACKWARD:
                group._training_state = TrainingState.IDLE


def _reduced(gradients: Any, group: weakref.ref[ParameterGroup]) -> list[DTensor | None]:
    """The function of a group's autograd node: no gradients if the group is gone."""
    here = group()
    return [None] * len(gradients) if here is None else here.take_gradients(gradients)


class TiedGroup(ParameterGroup):
    """The parameters of one group that modules of other groups hold too.

    They are gathered for the first of these modules that runs, and stay whole until their gradients
    are there. All modules' uses add to these, so that each is reduced once.
    """

    # None, whatever torch sets, means that forward doesn't reshard: a later module needs them
    post_forward_mesh_info = property(lambda self: None, lambda self, _: None)
