"""`DTensor`: a lazy tensor with global metadata, whose value is the local tensor of this rank.

In: local tensors (`from_local`) and results of ops on sharded tensors. Out: local tensors
(`to_local`) and gathered ones (`full_tensor`). The class also derives from torch's DTensor, so that
libraries which test for that class accept it. Programs call the methods; `sharding.ops` calls
`sharded`, `local_of` and `moved`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from lazy_tensor.dispatch import torch_private as dispatch_private
from lazy_tensor.dispatch.metadata.infer import is_recordable, meta_of
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.trie import memory_sharing, tensor_types
from lazy_tensor.dispatch.trie.trace import Value
from lazy_tensor.kernels.cache import on_clear
from lazy_tensor.sharding import torch_private
from lazy_tensor.sharding.layout import ShardLayout, everywhere, layout_of, offset_of_pending
from lazy_tensor.sharding.numbered import Numbered
from lazy_tensor.sharding.shared import note_phase, shared
from lazy_tensor.sharding.torch_private import DeviceMesh, DTensorSpec, TensorMeta
from lazy_tensor.tensor import LazyTensor, computed


class DTensor(LazyTensor, tensor_types.ShardedTensor, torch_private.TorchDTensor):
    """A tensor on a mesh of ranks, like torch's `DTensor`, whose ops are recorded.

    `from_local`, `distribute_tensor`, the factory functions and ops on other DTensors make it.
    """

    _layout: ShardLayout
    # torch.utils.swap_tensors exchanges the slots that copyreg finds under this name. torch's class
    # has the slots `_local_tensor` and `_spec`, which are properties here: `_value` and `_layout`
    # are in the `__dict__`, which is exchanged too.
    __slotnames__: ClassVar[list[str]] = []

    def __new__(
        cls, local_tensor: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool = False
    ) -> DTensor:
        if local_tensor.requires_grad and not requires_grad:
            warnings.warn(
                "To construct a DTensor from a tensor that requires a gradient, make requires_grad "
                "say so too, or pass local_tensor.detach().",
                stacklevel=2,
            )
        made = sharded(local_tensor, spec)
        made.requires_grad_(requires_grad)
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """Do nothing: without this, Python would call the `__init__` of torch's class."""

    @property
    def _spec(self) -> DTensorSpec:
        return self._layout.spec

    @_spec.setter
    def _spec(self, spec: DTensorSpec) -> None:
        self._layout = layout_of(spec, local_of(self))

    @property
    def _local_tensor(self) -> torch.Tensor:
        return local_of(self)

    @_local_tensor.setter
    def _local_tensor(self, local: torch.Tensor) -> None:
        self._value = value_of(local)
        self._layout = layout_of(self._spec, local)

    @property
    def device_mesh(self) -> DeviceMesh:
        return self._layout.spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self._layout.spec.placements

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: torch.Size | None = None,
        stride: tuple[int, ...] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """The sharded tensor of which each rank has its `local_tensor`, as in torch's DTensor."""
        device_mesh = torch_private.current_mesh() if device_mesh is None else device_mesh
        # by id, as a mesh has its hash and equality in Python; `_FromLocal.mesh` keeps the id valid
        key = (
            id(device_mesh), placements and tuple(placements),
            grad_placements and tuple(grad_placements), local_tensor.shape, local_tensor.stride(),
            local_tensor.dtype, local_tensor.device, shape, stride, offset_of_pending(local_tensor),
        )  # fmt: skip
        known = _plans.get(key)
        # `run_check` communicates at each call. Local tensors that aren't lazy are checked each
        # time: torch's DTensor, for example, must raise.
        if known is None or run_check or type(local_tensor) is not LazyTensor:
            given = local_tensor
            local_tensor, known = _from_local(
                given, device_mesh, placements, grad_placements, shape, stride, run_check
            )
            # a plan has the layout alone: it can't put another tensor in place of the given one
            if local_tensor is given and type(given) is LazyTensor:
                _put_plan(key, known)
        made = laid_out(local_tensor, known.layout)
        if not local_tensor.requires_grad:
            return made
        linked: DTensor = _linked(made, local_tensor, _to_local_as, known.wanted)
        return linked

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The local tensor of this rank, as torch's `DTensor.to_local` returns it."""
        how = (self._layout, grad_placements and tuple(grad_placements))
        local: torch.Tensor = _linked(local_of(self), self, _from_local_as, how)
        # the local tensor of a Parameter is a Parameter
        if getattr(self, "_is_param", False):
            local._is_param = True
        return local

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same tensor with other placements, as torch's `DTensor.redistribute` returns it.

        `async_op` has no effect: every collective is issued early and waited for late.
        """
        layout = self._layout
        # None stands for the tensor's own mesh in keys, whose hash is in Python
        mesh = None if device_mesh is layout.spec.mesh else device_mesh
        key = (placements and tuple(placements), mesh, forward_dtype, backward_dtype)
        move = layout.moves.get(key)
        if move is None:
            move = layout.moves[key] = _checked_move(
                layout.spec, device_mesh, placements, forward_dtype, backward_dtype
            )
        if not (self.requires_grad and torch.is_grad_enabled()):
            return moved(self, move.placements, move.dtype)
        # autograd sees one node, `_moved_back`, whatever is recorded to move the data
        with dispatch_private.below_autograd():
            # the same parameter in two layers is gathered once (see `shared`)
            if getattr(self, "_is_param", False) and move.placements != layout.spec.placements:
                made = shared(self, move, lambda: moved(self, move.placements, move.dtype))
            else:
                made = moved(self, move.placements, move.dtype)
        linked: DTensor = _linked(made, self, _moved_back, move.back)
        return linked

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The global tensor, on every rank, as torch's `DTensor.full_tensor` returns it."""
        replicated = self.redistribute(placements=everywhere(self.device_mesh))
        return replicated.to_local(grad_placements=grad_placements)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        local = local_of(self)
        return (
            f"DTensor(local_tensor={local}, device_mesh={self.device_mesh}, "
            f"placements={self.placements})"
        )

    __str__ = __repr__

    def numpy(self, *, force: bool = False) -> Any:
        """The values of a replicated tensor; RuntimeError if it is sharded or partial.

        Only `full_tensor()` gathers: a rank that calls `numpy()` alone would wait for the others.
        """
        return self._whole("numpy()").numpy(force=force)

    def tolist(self) -> Any:
        return self._whole("tolist()").tolist()

    def _whole(self, caller: str) -> torch.Tensor:
        if not all(placement.is_replicate() for placement in self.placements):
            raise RuntimeError(
                f"{caller} of a DTensor placed {self.placements}: no rank has all of it; call "
                "full_tensor() first (on every rank), or to_local()"
            )
        local = local_of(self)
        # numpy() of a tensor that requires a gradient raises, as in eager
        return local.requires_grad_(self.requires_grad) if not local.requires_grad else local

    def item(self) -> Any:
        # LazyTensor reads its own value, which is only this rank's part; the op comes to
        # `ops.compute`, which gathers what is split
        return torch.Tensor.item(self)

    def _to_convert(self, cause: str) -> torch.Tensor:
        return self  # the op itself gathers the parts, as for `item`

    def _copied(self, memo: dict[int, Any]) -> LazyTensor:
        new = self.detach().clone(memory_format=torch.preserve_format)
        assert isinstance(new, LazyTensor)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle torch's DTensor on the materialized local tensor, as checkpoints expect it."""
        plain = released(self)
        if getattr(self, "_is_param", False):
            plain = torch.nn.Parameter(plain, self.requires_grad)
        return plain.__reduce_ex__(protocol)

    @property
    def data(self) -> torch.Tensor:
        data: torch.Tensor = dispatch_private.tensor_data.__get__(self)
        return data

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        if not isinstance(new, torch_private.TorchDTensor):
            raise TypeError(
                "Tensor.data of a DTensor is set to a plain tensor; distribute_tensor it first"
            )
        become(self, adopted(new))

    def as_subclass(self, cls: type[Any]) -> Any:
        return torch.Tensor.as_subclass(self, cls)


def value_of(local: torch.Tensor) -> Value:
    """The value of a lazy tensor, or a new value on the memory of a plain one.

    The memory of a plain tensor is noted as shared: its owner can write it without an op of ours.
    """
    if isinstance(local, torch_private.AsyncCollectiveTensor):
        local = local.wait()
    if isinstance(local, LazyTensor):
        return local._value
    alias = local.detach()
    if isinstance(alias, LazyTensor):  # inside `lazy_mode`, detach() is recorded
        return alias._value
    if is_recordable(alias):
        memory_sharing.share(alias)
    value = Value()
    value.data = alias
    return value


def sharded(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """The sharded tensor with this spec and this local tensor, without an autograd edge.

    Both share one value, so that nothing is recorded.
    """
    return laid_out(local, layout_of(spec, local))


def laid_out(local: torch.Tensor, layout: ShardLayout) -> DTensor:
    """As `sharded`, for a caller that has the layout."""
    if hits.native is not None and type(local) is LazyTensor:
        made: DTensor = hits.native.sharded(local, layout)
        return made
    with torch.no_grad():
        value = value_of(local)
    return tensor_types.new_sharded(value, layout, local)  # type: ignore[return-value]


def local_of(tensor: tensor_types.ShardedTensor) -> torch.Tensor:
    """A lazy local tensor on the value of a sharded one."""
    if hits.native is not None:
        local: torch.Tensor | None = hits.native.local(tensor)
        if local is not None:  # it is None for what traces can't hold, like meta tensors
            return local
    return tensor_types.local_of(tensor)


def become(tensor: DTensor, twin: DTensor) -> None:
    """Give `tensor` the value and the layout of `twin`; it stays the same object for Python and
    for autograd."""
    # the wrapper's own size, strides and dtype live in C++ and change only if they differ
    if meta_of(twin) != meta_of(tensor):
        tensor_types.become(tensor, laid_out(local_of(twin), twin._layout))
    tensor._value, tensor._layout = twin._value, twin._layout


def adopted(tensor: Any) -> DTensor:
    """Our DTensor on the local tensor of torch's; our own is returned as it is."""
    if isinstance(tensor, DTensor):
        return tensor
    return sharded(tensor._local_tensor, tensor._spec)


def released(tensor: DTensor) -> Any:
    """torch's DTensor for ours: materializes the local tensor and shares its memory."""
    local = computed(tensor)
    memory_sharing.share(local)
    with dispatch_private.no_modes():
        return torch_private.TorchDTensor(local.detach(), tensor._spec, requires_grad=False)


def normalized(
    placements: Sequence[Placement] | None, mesh: DeviceMesh, ndim: int
) -> tuple[Placement, ...]:
    """The placements as a tuple, with tensor dimensions counted from the front; replicated for
    None.

    ValueError if their number is not the mesh's `ndim`, or if Partial placements differ in
    `reduce_op`.
    """
    if placements is None:
        return everywhere(mesh)
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"placements: {len(placements)} were given ({tuple(placements)}) for a mesh of "
            f"{mesh.ndim} dimensions; give one for each"
        )
    found: list[Placement] = []
    for placement in placements:
        if placement.is_shard() and placement.dim < 0:  # type: ignore[attr-defined]
            placement = Shard(placement.dim + ndim)  # type: ignore[attr-defined]
        elif torch_private.is_strided_shard(placement) and placement.dim < 0:  # type: ignore[attr-defined]
            placement = torch_private.strided_shard(placement.dim + ndim, placement)  # type: ignore[attr-defined]
        found.append(placement)
    reductions = {p.reduce_op for p in found if isinstance(p, Partial)}
    if len(reductions) > 1:
        raise ValueError(
            f"placements {tuple(placements)} mix Partial reduce types "
            f"({', '.join(sorted(reductions))}); use one"
        )
    return tuple(found)


def _checked(local: torch.Tensor, spec: DTensorSpec, *, with_size: bool) -> torch.Tensor:
    """Check that the ranks' metadata fit, and copy replicated parts from the first rank, for
    `from_local(run_check=True)`."""
    mesh = spec.mesh
    torch_private.check_tensor_meta(local, check_shape_stride=with_size)
    for dim, placement in enumerate(spec.placements):
        if placement.is_replicate():
            local = local.contiguous()
            torch_private.mesh_broadcast(local, mesh, mesh_dim=dim)
    return local


def _another(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor on the same value: autograd gives its node to a tensor that has none."""
    if isinstance(tensor, DTensor):
        return tensor_types.new_sharded(tensor._value, tensor._layout, tensor)
    return tensor_types.local_like(tensor)


def _linked(made: Any, tensor: torch.Tensor, function: Any, argument: Any) -> Any:
    """`made` with an autograd edge to `tensor`, whose gradient is `function(gradient, argument)`.

    `made` has no edge yet; without gradients it is returned as it is.
    """
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return made
    if hits.native is not None:
        return hits.native.linked(made, tensor, function, argument)
    (linked,) = linked_all([made], [tensor], partial(_of_one, function), argument)
    return linked


def _of_one(function: Any, grads: Sequence[Any], argument: Any) -> list[Any]:
    """The gradients of one tensor's node: of none if there is none."""
    return [None if grad is None else function(grad, argument) for grad in grads]


class _LinkedAll(torch.autograd.Function):
    """`linked_all` of the C++, in Python, for processes without the C++."""

    @staticmethod
    def forward(
        ctx: Any, function: Any, argument: Any, made: list[Any], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.function, ctx.argument = function, argument
        return tuple(map(_another, made))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return None, None, None, *ctx.function(grads, ctx.argument)


def linked_all(made: list[Any], tensors: list[Any], function: Any, argument: Any) -> list[Any]:
    """`made` with edges to as many `tensors`, by one autograd node for all of them.

    The node calls `function(gradients, argument)` for the tensors' gradients; None stands for a
    missing gradient on both sides. The engine runs it as soon as it has all gradients. The C++ node
    serves any number of forwards, the Python one serves one.
    """
    if hits.native is not None:
        hits.native.linked_all(made, tensors, function, argument)
        return made
    return list(_LinkedAll.apply(function, argument, made, *tensors))  # type: ignore[no-untyped-call]


def _to_local_as(grad: DTensor, placements: tuple[Placement, ...]) -> torch.Tensor:
    """The gradient of the local tensor that `from_local` was given: the local part of `grad`."""
    if grad._layout.spec.placements != placements:
        if any(placement.is_partial() for placement in placements):
            # `redistribute` refuses these; as in torch's DTensor the gradient has no graph then
            with dispatch_private.below_autograd():
                return local_of(moved(grad, placements))
        grad = grad.redistribute(placements=placements)
    return grad.to_local()


def _from_local_as(grad: torch.Tensor, how: tuple[ShardLayout, Any]) -> DTensor:
    """The gradient of the DTensor whose `to_local` was called, from the gradient of its local
    tensor. Its placements are `grad_placements`, or those of the DTensor with Replicate for
    Partial."""
    layout, grad_placements = how
    described = (grad.shape, grad.stride(), grad.dtype, grad.device, offset_of_pending(grad))
    key = (layout, grad_placements, described)
    known = _plans.get(key)
    if known is None:
        spec = layout.spec
        placements = grad_placements or torch_private.normalized_for_gradient(spec.placements)
        assert spec.tensor_meta is not None, "it is a tensor's"
        # size from the forward tensor, as parts may be uneven; strides from the gradient's own
        _, stride = torch_private.compute_global_tensor_info(grad, spec.mesh, spec.placements)
        wanted = torch_private.normalized_for_gradient(placements)
        meta = TensorMeta(spec.tensor_meta.shape, tuple(stride), grad.dtype)
        made = torch_private.spec_of(spec.mesh, tuple(placements), meta)
        known = _FromLocal(layout_of(made, grad), wanted, spec.mesh)
        _put_plan(key, known)
    return _linked(laid_out(grad, known.layout), grad, _to_local_as, known.wanted)  # type: ignore[no-any-return]


def _moved_back(grad: DTensor, how: tuple[Any, ...]) -> torch.Tensor:
    """The gradient of the DTensor that `redistribute` was called on: moved back to its placements.

    `how` is `_Move.back`: these placements, the dtype to communicate in, the dtype to return.
    """
    placements, wire, out = how
    # the next forward counts as a new phase even if this backward gathers no parameter
    note_phase()
    if wire is not None:
        grad = grad.to(wire)  # type: ignore[assignment]
    grad = grad.redistribute(placements=_on_the_way_back(grad.placements, placements))
    return grad if grad.dtype == out else grad.to(out)


@dataclass(frozen=True, slots=True)
class _FromLocal:
    """The checked result of a call of `from_local`: the layout, and the placements of gradients.

    It holds the mesh, so that no other mesh gets the id that stands in the key.
    """

    layout: ShardLayout
    wanted: tuple[Placement, ...]
    mesh: DeviceMesh


_plans: dict[tuple[Any, ...], _FromLocal] = {}
"""Known calls of `from_local` and gradients of `to_local`. A plain dict, as every call looks here:
an LRU took a twentieth of a tensor-parallel MLP's host time."""
MOST_PLANS = 4096
"""Entries of `_plans`, which is emptied when it is full."""
on_clear(_plans.clear)


def _put_plan(key: tuple[Any, ...], plan: _FromLocal) -> None:
    if len(_plans) >= MOST_PLANS:
        _plans.clear()
    _plans[key] = plan


def _from_local(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    grad_placements: Sequence[Placement] | None,
    shape: torch.Size | None,
    stride: tuple[int, ...] | None,
    run_check: bool,
) -> tuple[torch.Tensor, _FromLocal]:
    """Check a call of `from_local`. Returns the local tensor to use and the plan for such calls.

    The local tensor is another one if it was on another device, or if this rank is outside the
    mesh. Raises RuntimeError or ValueError as torch's `from_local` does.
    """
    if isinstance(local, torch_private.TorchDTensor):
        raise RuntimeError(
            f"the local_tensor argument only accepts torch.Tensor but got {type(local)} value."
        )
    if mesh.device_type != local.device.type and not local.is_meta:
        local = local.to(mesh.device_type)
    given = normalized(placements, mesh, local.ndim)
    if bool(shape) != bool(stride):
        raise RuntimeError(
            f"Found shape:{shape}, stride:{stride}.",
            "Please pass both shape and stride at the same time.",
        )
    if shape and stride:
        size = (torch.Size(shape), tuple(stride))
    else:
        found = torch_private.compute_global_tensor_info(local, mesh, given)
        size = (torch.Size(found[0]), tuple(found[1]))
    spec = torch_private.spec_of(mesh, given, TensorMeta(*size, local.dtype))
    if not torch_private.is_member(mesh):
        local = local.new_empty(0)
    elif run_check:
        local = _checked(local, spec, with_size=shape is None)
    wanted = tuple(grad_placements or torch_private.normalized_for_gradient(given))
    return local, _FromLocal(layout_of(spec, local), wanted, mesh)


def _on_the_way_back(
    now: tuple[Placement, ...], before: tuple[Placement, ...]
) -> tuple[Placement, ...]:
    """The placements to give a gradient that has placements `now`, for a tensor that had `before`.

    Those of the tensor, but a gradient that isn't Partial becomes Replicate instead of Partial:
    Partial would only make the next consumer reduce it again.
    """
    return tuple(
        Replicate() if was.is_partial() and not here.is_partial() else was
        for here, was in zip(now, before, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Move:
    """A checked call of `redistribute`: the new placements, the dtype to cast to before moving, and
    the argument of `_moved_back`."""

    placements: tuple[Placement, ...]
    dtype: torch.dtype | None
    back: tuple[Any, ...]


def _checked_move(
    spec: DTensorSpec,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
) -> _Move:
    """Check a call of `redistribute`; the caller keeps the answer in the layout's `moves`."""
    if placements is None:
        raise RuntimeError("placements is needed for redistribute!")
    if device_mesh is not None and device_mesh != spec.mesh:
        raise NotImplementedError("Cross device mesh comm not supported yet!")
    wanted = normalized(placements, spec.mesh, spec.ndim)
    for before, after in zip(spec.placements, wanted, strict=True):
        if after.is_partial() and before != after:
            raise RuntimeError(
                f"Can not redistribute from {before} to {after}, "
                "redistributing to Partial is for internal use only!"
            )
    assert spec.tensor_meta is not None, "it is a tensor's"
    dtype = spec.tensor_meta.dtype
    return _Move(
        wanted,
        None if forward_dtype is None or forward_dtype == dtype else forward_dtype,
        (spec.placements, backward_dtype, dtype),
    )


# Redistribution is an op, so that the trie can hold it: a hit then costs one look-up. Schemas know
# no placements, so that the op takes their number instead.
LIBRARY = torch.library.Library("lazy_tensor", "DEF")
LIBRARY.define("redistribute(Tensor input, int placements) -> Tensor")
REDISTRIBUTE = torch.ops.lazy_tensor.redistribute.default
_redistribute = REDISTRIBUTE._op
PLACEMENTS: Numbered[tuple[Placement, ...]] = Numbered()
"""The placements that the argument `placements` of `lazy_tensor::redistribute` numbers."""


def moved(
    tensor: DTensor, placements: tuple[Placement, ...], dtype: torch.dtype | None = None
) -> DTensor:
    """`tensor` with other placements, by the recorded op `REDISTRIBUTE`, without an autograd edge.

    The tensor is cast to `dtype` before it is moved, so that ranks communicate in `dtype`.
    """
    if dtype is not None:
        tensor = tensor.to(dtype)  # type: ignore[assignment]
    if placements == tensor._layout.spec.placements:
        # a new tensor all the same: the caller links it to `tensor`
        return laid_out(local_of(tensor), tensor._layout)
    made: DTensor = _redistribute(tensor, PLACEMENTS.number(placements))
    return made


def forget() -> None:
    """Drop the known calls of `from_local`: a later mesh may equal an old one on other groups."""
    _plans.clear()
