"""The private names of `torch.distributed` that sharding uses; no other file here may use any.

Read and tested with torch 2.13. The sharding rules of the ops, their propagation and redistribution
are torch's own; each question to them has one function here. All of `sharding` calls this file;
`fsdp` has an adapter of its own for `fully_shard`.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from lazy_tensor.dispatch.torch_private import FAKES, no_modes
from lazy_tensor.kernels.extension.build_apart import module_at

NEEDED = (
    "lazy_tensor.sharding needs torch.distributed as torch 2.13 has it; the installed torch "
    f"{torch.__version__}"
)
try:
    from torch.distributed import _functional_collectives as funcol, distributed_c10d
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
    from torch.distributed.tensor import (
        DTensor as TorchDTensor,
        Partial,
        Placement,
        _api as api,
        _dispatch,
    )
    from torch.distributed.tensor._collective_utils import check_tensor_meta, mesh_broadcast
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OpInfo, OutputSharding
    from torch.distributed.tensor._redistribute import redistribute_local_tensor
    from torch.distributed.tensor._utils import (
        ExplicitRedistributionContext,
        compute_global_tensor_info,
        compute_local_shape_and_global_offset,
    )
    from torch.distributed.tensor.experimental import _func_map
    from torch.distributed.tensor.parallel import loss as _loss
    from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
except ImportError as error:
    raise ImportError(f"{NEEDED} lacks a name ({error})") from error
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
    raise ImportError(f"{NEEDED} is older; pip install 'torch>=2.13'")

__all__ = [
    "AsyncCollectiveTensor", "DTensorSpec", "DeviceMesh", "OutputSharding", "TensorMeta",
    "TorchDTensor", "api", "check_tensor_meta", "compute_global_tensor_info",
    "compute_local_shape_and_global_offset", "mesh_broadcast", "redistribute_local_tensor",
]  # fmt: skip

_dispatcher = TorchDTensor._op_dispatcher
_functional = torch.ops._c10d_functional
# torch has two pytrees; `op_info` flattens with this one, and `local_arguments` must invert it
pytree: Any = vars(_dispatch)["pytree"]

# The propagator asks fake tensors for sizes, without a lock, and so do threads that record. While
# one thread asks a fake tensor, it seems to the others to be on "meta".
setattr(type(_dispatcher.sharding_propagator), "_fake_mode_lock", FAKES)  # noqa: B010

_aten = torch.ops.aten
RANDOM_OPS = frozenset(_dispatcher._random_ops) | {
    _aten.cauchy_.default, _aten.exponential_.default, _aten.geometric_.default,
    _aten.log_normal_.default,
}  # fmt: skip
"""Ops that draw one number for each element of the global tensor."""
# Ops whose rules compare the sizes of two tensors, or make as many results as a dimension has rows.
_READS_SIZES = frozenset({
    _aten.gather.default, _aten.scatter.src, _aten.scatter.value, _aten.scatter_.src,
    _aten.scatter_.value, _aten.scatter_add.default, _aten.scatter_add_.default,
    _aten.unbind_copy.int,
})  # fmt: skip


def as_size(size: tuple[Any, ...]) -> torch.Size:
    """The size in the arguments of a factory function: numbers, or one sequence of them."""
    found: torch.Size = vars(api)["normalize_to_torch_size"](size)
    return found


def current_mesh() -> DeviceMesh:
    """The mesh of the innermost `with mesh:`; RuntimeError without one."""
    return _mesh_resources.get_current_mesh()


def is_strided_shard(placement: Placement) -> bool:
    return isinstance(placement, _StridedShard)


def strided_shard(dim: int, like: Any) -> Placement:
    """The strided shard `like`, of tensor dimension `dim`."""
    return _StridedShard(dim, split_factor=like.split_factor)


def is_member(mesh: DeviceMesh) -> bool:
    """Whether this rank is part of the mesh."""
    return mesh.get_coordinate() is not None


def handler_of(op: Any) -> Any:
    """torch's handler of an op that no sharding rule can describe; None for other ops.

    `loss_parallel` adds the handlers of its ops while it is entered.
    """
    return _dispatcher._custom_op_handlers.get(op)


def replicates_plain_tensors() -> bool:
    """Whether the program is inside `implicit_replication()`."""
    return bool(_dispatcher._allow_implicit_replication)


def on_replicating_plain_tensors(changed: Callable[[bool], None]) -> None:
    """Have `changed(allowed)` called when `implicit_replication()` begins or ends in a thread."""
    flag = vars(type(_dispatcher))["_allow_implicit_replication"]

    def set_flag(self: Any, allowed: bool) -> None:
        # the end of a nested block switches it off, and then the outer one once more
        if allowed != flag.fget(self):
            changed(allowed)
        flag.fset(self, allowed)

    setattr(type(_dispatcher), flag.fget.__name__, property(flag.fget, set_flag))


def op_info(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpInfo:
    """A call on sharded tensors in the form that torch's rules take: specs in place of tensors."""
    return _dispatcher.unwrap_to_op_info(op, args, kwargs)


def propagate(info: OpInfo) -> OutputSharding:
    """The answer of torch's rules to a call, without torch's caches: `decisions` has its own.

    NotImplementedError if there is no rule.
    """
    assert info.schema is not None, "made with the info"
    # rules make tensors of their own, which are no part of the program
    with no_modes():
        return _dispatcher.sharding_propagator.propagate_op_sharding_non_cached(info.schema)


def local_arguments(info: OpInfo, sharding: OutputSharding) -> tuple[Any, ...]:
    """The local arguments of the op, redistributed to the placements that the rules ask for."""
    if sharding.needs_redistribute:
        assert sharding.redistribute_schema is not None, "it says to what"
        type(_dispatcher).redistribute_local_args(
            info, sharding.redistribute_schema, sharding.use_val_from_redistribute_schema
        )
    if info.args_tree_spec is None:
        return tuple(info.local_args)
    arguments: tuple[Any, ...] = pytree.tree_unflatten(list(info.local_args), info.args_tree_spec)
    return arguments


def observe_redistribution(op: Any, now: DTensorSpec, then: DTensorSpec) -> None:
    """Report an implicit redistribution to torch's `ExplicitRedistributionContext`, which may
    raise.

    For redistributions of ours: `local_arguments` runs code of torch that reports its own.
    """
    message = (
        f"Implicit redistribution occurred for {op} while ExplicitRedistributionContext was active"
    )
    if now.placements != then.placements:
        ExplicitRedistributionContext.observe_redistribution(now, then, message)  # type: ignore[arg-type]


def around_explicit_redistribution(apart: Callable[[str], AbstractContextManager[None]]) -> None:
    """Enter `apart(name)` with each block of `ExplicitRedistributionContext`.

    The name holds the block's settings. So the block has states of its own in the trie, and an op
    that was recorded outside is checked when it is called inside.
    """
    block: Any = ExplicitRedistributionContext
    enter, leave = block.__enter__, block.__exit__

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        how = self._enable, self._strict, self._raise_on_redistribution
        inside = apart(f"explicit redistribution {how}")
        inside.__enter__()
        # a list, as one object may be entered several times
        self.__dict__.setdefault("_inside", []).append(inside)
        return enter(self)

    @functools.wraps(leave)
    def left(self: Any, *exception: Any) -> None:
        leave(self, *exception)
        self._inside.pop().__exit__(None, None, None)

    block.__enter__, block.__exit__ = entered, left


def takes_sizes(op: Any) -> bool:
    """Whether the rules' answer for an op depends on sizes: it has them as arguments, squeezes or
    compares them."""
    propagator = _dispatcher.sharding_propagator
    return (
        op in _READS_SIZES
        or op in propagator.op_to_shape_and_stride_idx
        or op in propagator.op_to_scalar_shape_adjuster
        or op in propagator.squeeze_op_to_dims_variant
    )


def local_op(op: Any, sharding: OutputSharding) -> Any:
    """The op to run on the local tensors.

    It is another overload if the rules have rewritten the arguments of a squeeze: of a part, only
    dimensions that are 1 in the global tensor may be squeezed.
    """
    if sharding.use_val_from_redistribute_schema and sharding.redistribute_schema is not None:
        return _dispatcher.sharding_propagator.squeeze_op_to_dims_variant.get(op, op)
    return op


def keep_classes_sharded(on: bool) -> None:
    """Switch torch's handlers of log-softmax and losses, which keep logits sharded by class, on or
    off for all threads."""
    if on:
        _loss._enable_custom_loss_ops()
    else:
        _loss._disable_custom_loss_ops()


_orders: dict[tuple[Any, ...], dict[str, Any]] = {}


def spec_of(mesh: DeviceMesh, placements: tuple[Any, ...], meta: TensorMeta) -> DTensorSpec:
    """A `DTensorSpec`, made faster than by torch's constructor.

    The constructor computes each time in which order the mesh's dimensions split the tensor. That
    follows from the placements alone, so it is looked up here.
    """
    known = _orders.get(placements)
    if known is None:
        known = dict(vars(DTensorSpec(mesh, placements)))
        del known["mesh"]  # the table must not keep a mesh alive
        _orders[placements] = known
    made = object.__new__(DTensorSpec)
    vars(made).update(known, mesh=mesh, tensor_meta=meta)
    return made


class Parts(NamedTuple):
    """How the ranks' parts of a tensor compare.

    `uneven`: they differ in size. `may_be_empty`: some rank may have no element of a tensor that
    has elements. `split_twice`: several dimensions of the mesh split one tensor dimension, and not
    into equal parts. `single`: each rank has one row of a dimension that is split.
    """

    uneven: bool = False
    may_be_empty: bool = False
    split_twice: bool = False
    single: bool = False


def parts_of(spec: DTensorSpec) -> Parts:
    """How the ranks' parts of a tensor compare."""
    uneven = may_be_empty = False
    sizes = list(spec.shape)
    ways: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(spec.placements):
        if not (placement.is_shard() or is_strided_shard(placement)):
            continue
        dim, n = placement.dim, spec.mesh.size(mesh_dim)  # type: ignore[attr-defined]
        # torch cuts as torch.chunk does: all parts have the rounded-up size but the last ones. A
        # later dimension of the mesh that splits the same tensor dimension cuts the largest part.
        size = sizes[dim]
        part = sizes[dim] = -(-size // n)
        uneven = uneven or part * n != size
        may_be_empty = may_be_empty or 0 < size <= part * (n - 1)
        ways.setdefault(dim, []).append(n)
    if not ways:
        return WHOLE
    counts = {dim: math.prod(its) for dim, its in ways.items()}
    split_twice = any(len(ways[dim]) > 1 and spec.shape[dim] % n for dim, n in counts.items())
    single = any(spec.shape[dim] == n for dim, n in counts.items())
    return Parts(uneven, may_be_empty, split_twice, single)


WHOLE = Parts()


def flat_specs(info: OpInfo, sharding: OutputSharding) -> list[tuple[DTensorSpec, DTensorSpec]]:
    """For each sharded argument its spec, and the spec that the rules ask for; none if nothing is
    redistributed."""
    schema = sharding.redistribute_schema
    if not sharding.needs_redistribute or schema is None:
        return []
    wanted = (
        schema.args_schema
        if info.args_tree_spec is None
        else tuple(pytree.tree_leaves(schema.args_schema))
    )
    return [
        (now, then)
        for now, then in zip(info.flat_args_schema, wanted, strict=False)
        if isinstance(now, DTensorSpec) and isinstance(then, DTensorSpec)
    ]


def masks_what_moves(pairs: list[tuple[DTensorSpec, DTensorSpec]]) -> bool:
    """Whether indices of a vocabulary-parallel embedding must move along a second mesh dimension.

    torch then makes the mask before it moves them, so that the mask has too few elements.
    """
    return any(
        any(isinstance(placement, _MaskPartial) for placement in then.placements)
        and sum(a != b for a, b in zip(now.placements, then.placements, strict=True)) > 1
        for now, then in pairs
    )


def unmasked(local: torch.Tensor, spec: DTensorSpec) -> DTensorSpec:
    """The spec with ordinary Partial placements for the masked ones of a vocabulary-parallel
    embedding.

    A masked placement holds a mask that torch applies when it reduces. Here it is applied to
    `local`, in place and now: specs stand in keys, so that their placements may hold no tensors.
    """
    if not any(isinstance(placement, _MaskPartial) for placement in spec.placements):
        return spec
    plain = []
    for placement in spec.placements:
        if isinstance(placement, _MaskPartial):
            placement.mask_buffer.apply_mask(local)
            placement.mask_buffer.release_mask()
            placement = Partial(placement.reduce_op)
        plain.append(placement)
    return DTensorSpec(spec.mesh, tuple(plain), tensor_meta=spec.tensor_meta)


def rebound(function: Any, **names: Any) -> Any:
    """A copy of one of torch's functions that finds `names` in place of its globals of that name.

    So torch's code runs with our classes, and torch's own function stays as it is.
    """
    names = {**function.__globals__, **names}
    rest = function.__name__, function.__defaults__, function.__closure__
    copy = types.FunctionType(function.__code__, names, *rest)
    functools.update_wrapper(copy, function)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def second_instance(module: types.ModuleType, name: str, **names: Any) -> types.ModuleType:
    """One of torch's modules, executed once more under another name, with some globals replaced.

    So torch's own code makes tensors of our class. AssertionError if the module lacks a name.
    """
    assert module.__file__ is not None, "torch is installed as files"
    made: types.ModuleType = module_at(name, module.__file__)
    for key, value in names.items():
        assert hasattr(made, key), f"{module.__name__} no longer has {key}"
        setattr(made, key, value)
    return made


def normalized_for_gradient(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The placements of gradients of tensors with these placements: Replicate for Partial."""
    return api._normalize_placements_for_grad(tuple(placements))


def minimum_over(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The elementwise minimum of the tensors of all ranks of the mesh."""
    for dim in range(mesh.ndim):
        tensor = funcol.all_reduce(tensor, "min", (mesh, dim))
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.wait()
    return tensor


def all_gathered(flat: torch.Tensor, n_ranks: int, group: str) -> torch.Tensor:
    """The tensors of the ranks of `group` (a name), concatenated in the order of the ranks."""
    made = _functional.all_gather_into_tensor(flat, n_ranks, group)
    return _functional.wait_tensor(made)  # type: ignore[no-any-return]


def reduce_scattered(flat: torch.Tensor, n_ranks: int, group: str) -> torch.Tensor:
    """This rank's part of the sum of all ranks' tensors."""
    made = _functional.reduce_scatter_tensor(flat, "sum", n_ranks, group)
    return _functional.wait_tensor(made)  # type: ignore[no-any-return]


def all_reduced(flat: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of all ranks' tensors, on each rank."""
    return _functional.wait_tensor(_functional.all_reduce(flat, "sum", group))  # type: ignore[no-any-return]


def store() -> Any:
    """The store by which the ranks of the default group rendezvoused."""
    return distributed_c10d._get_default_store()


def local_map_for(tensor_class: type[Any]) -> Any:
    """torch's `local_map`, which makes and recognizes tensors of this class."""
    return second_instance(
        _func_map, "lazy_tensor.sharding.func_map", DTensor=tensor_class
    ).local_map
