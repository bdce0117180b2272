"""`DTensor`: a lazy tensor whose metadata is global and whose value is this rank's part of it.

In: local tensors (`from_local`), ops on other sharded tensors. Out: local tensors (`to_local`),
gathered ones (`full_tensor`). It is a subclass of torch's DTensor too, so that libraries know it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
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
    """A tensor on a mesh of ranks: what torch's `DTensor` is, recorded.

    Made by `from_local`, `distribute_tensor`, the factory functions, and by ops on other ones.
    """

    _layout: ShardLayout
    # what torch's class keeps in slots follows from `_value` and `_layout`: swapping them is enough
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
        """Nothing is left to do; torch's own would be called."""

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
        """A sharded tensor of these local ones, as torch's `DTensor.from_local` has it."""
        device_mesh = torch_private.current_mesh() if device_mesh is None else device_mesh
        key = (
            id(device_mesh), placements and tuple(placements),
            grad_placements and tuple(grad_placements), local_tensor.shape, local_tensor.stride(),
            local_tensor.dtype, local_tensor.device, shape, stride, offset_of_pending(local_tensor),
        )  # fmt: skip
        known = _plans.get(key)
        if known is None or run_check or type(local_tensor) is not LazyTensor:
            local_tensor, known = _from_local(
                local_tensor, device_mesh, placements, grad_placements, shape, stride, run_check
            )
            if type(local_tensor) is LazyTensor:
                _put_plan(key, known)
        made = laid_out(local_tensor, known.layout)
        if not local_tensor.requires_grad:
            return made
        linked: DTensor = _linked(made, local_tensor, _to_local_as, known.wanted)
        return linked

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's part, as torch's `DTensor.to_local` gives it."""
        how = (self._layout, grad_placements and tuple(grad_placements))
        local: torch.Tensor = _linked(local_of(self), self, _from_local_as, how)
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
        """The same tensor placed otherwise, as torch's `DTensor.redistribute` has it.

        `async_op` changes nothing: all communication is issued early and waited for late.
        """
        layout = self._layout
        mesh = None if device_mesh is layout.spec.mesh else device_mesh
        key = (placements and tuple(placements), mesh, forward_dtype, backward_dtype)
        move = layout.moves.get(key)
        if move is None:
            move = layout.moves[key] = _checked_move(
                layout.spec, device_mesh, placements, forward_dtype, backward_dtype
            )
        if not (self.requires_grad and torch.is_grad_enabled()):
            return moved(self, move.placements, move.dtype)
        with dispatch_private.below_autograd():
            if getattr(self, "_is_param", False) and move.placements != layout.spec.placements:
                made = shared(self, move, lambda: moved(self, move.placements, move.dtype))
            else:
                made = moved(self, move.placements, move.dtype)
        linked: DTensor = _linked(made, self, _moved_back, move.back)
        return linked

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor on every rank, as torch's `DTensor.full_tensor` gives it."""
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
        """The whole value, if each rank has it; RuntimeError otherwise, as gathering is asked for
        by `full_tensor()` alone."""
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
        return local.requires_grad_(self.requires_grad) if not local.requires_grad else local

    def item(self) -> Any:
        return torch.Tensor.item(self)  # by an op, as torch's rules say what it reads

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        return int(self.item())

    def _copied(self, memo: dict[int, Any]) -> LazyTensor:
        new = self.detach().clone(memory_format=torch.preserve_format)
        assert isinstance(new, LazyTensor)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as torch's DTensor on the computed local tensor."""
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
    """A value on a tensor's memory: a lazy one's own, else one that knows a plain tensor has it."""
    if isinstance(local, torch_private.AsyncCollectiveTensor):
        local = local.wait()
    if isinstance(local, LazyTensor):
        return local._value
    alias = local.detach()
    if isinstance(alias, LazyTensor):  # the mode has recorded it
        return alias._value
    if is_recordable(alias):
        memory_sharing.share(alias)
    value = Value()
    value.data = alias
    return value


def sharded(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A sharded tensor on a local one's value; autograd knows nothing of it."""
    return laid_out(local, layout_of(spec, local))


def laid_out(local: torch.Tensor, layout: ShardLayout) -> DTensor:
    """The same of a layout that is known."""
    if hits.native is not None and type(local) is LazyTensor:
        made: DTensor = hits.native.sharded(local, layout)
        return made
    with torch.no_grad():
        value = value_of(local)
    return tensor_types.new_sharded(value, layout, local)  # type: ignore[return-value]


def local_of(tensor: tensor_types.ShardedTensor) -> torch.Tensor:
    """The local tensor, lazy, on the same value."""
    if hits.native is not None:
        local: torch.Tensor | None = hits.native.local(tensor)
        if local is not None:
            return local
    return tensor_types.local_of(tensor)


def become(tensor: DTensor, twin: DTensor) -> None:
    """Make `tensor` what `twin` is, the same object for Python and for autograd."""
    if meta_of(twin) != meta_of(tensor):
        tensor_types.become(tensor, laid_out(local_of(twin), twin._layout))
    tensor._value, tensor._layout = twin._value, twin._layout


def adopted(tensor: Any) -> DTensor:
    """Ours for torch's DTensor, on the same local tensor; ours as it is."""
    if isinstance(tensor, DTensor):
        return tensor
    return sharded(tensor._local_tensor, tensor._spec)


def released(tensor: DTensor) -> Any:
    """torch's DTensor for ours, its local tensor computed, on the same memory."""
    local = computed(tensor)
    memory_sharing.share(local)
    with dispatch_private.no_modes():
        return torch_private.TorchDTensor(local.detach(), tensor._spec, requires_grad=False)


def normalized(
    placements: Sequence[Placement] | None, mesh: DeviceMesh, ndim: int
) -> tuple[Placement, ...]:
    """Placements, replicated for None, with dimensions counted from the front.

    ValueError if there is not one for each dimension of the mesh, or partial ones reduce in
    different ways.
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
    """`from_local(run_check=True)`: the ranks' metadata fit; what is replicated is rank 0's."""
    mesh = spec.mesh
    torch_private.check_tensor_meta(local, check_shape_stride=with_size)
    for dim, placement in enumerate(spec.placements):
        if placement.is_replicate():
            local = local.contiguous()
            torch_private.mesh_broadcast(local, mesh, mesh_dim=dim)
    return local


def _another(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor on the same value, for autograd to take."""
    if isinstance(tensor, DTensor):
        return tensor_types.new_sharded(tensor._value, tensor._layout, tensor)
    return tensor_types.local_like(tensor)


class _Linked(torch.autograd.Function):
    """What `linked` of the C++ does, where that isn't there."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, made: torch.Tensor, function: Any, argument: Any
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.function, ctx.argument = function, argument
        return _another(made)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        back = None if grad is None else ctx.function(grad, ctx.argument)
        return back, None, None, None


def _linked(made: Any, tensor: torch.Tensor, function: Any, argument: Any) -> Any:
    """`made`, of which autograd knows nothing, as what became of `tensor`: its gradient is what
    `function(gradient, argument)` gives."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return made
    if hits.native is not None:
        return hits.native.linked(made, tensor, function, argument)
    return _Linked.apply(tensor, made, function, argument)  # type: ignore[no-untyped-call]


class _LinkedAll(torch.autograd.Function):
    """What `linked_all` of the C++ does, where that isn't there."""

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
    """`made`, of which autograd knows nothing, as what became of as many tensors, by one node:
    `function(gradients, argument)` gives their gradients, None where there is none.

    The node runs before others that could. In C++ it may serve any number of times; without, for
    one forward.
    """
    if hits.native is not None:
        hits.native.linked_all(made, tensors, function, argument)
        return made
    return list(_LinkedAll.apply(function, argument, made, *tensors))  # type: ignore[no-untyped-call]


def _to_local_as(grad: DTensor, placements: tuple[Placement, ...]) -> torch.Tensor:
    """The gradient of what `from_local` was given."""
    if grad._layout.spec.placements != placements:
        grad = grad.redistribute(placements=placements)
    return grad.to_local()


def _from_local_as(grad: torch.Tensor, how: tuple[ShardLayout, Any]) -> DTensor:
    """The gradient of what `to_local` was given: sharded as that was, partial ones replicated."""
    layout, grad_placements = how
    described = (grad.shape, grad.stride(), grad.dtype, grad.device, offset_of_pending(grad))
    key = (layout, grad_placements, described)
    known = _plans.get(key)
    if known is None:
        spec = layout.spec
        placements = grad_placements or torch_private.normalized_for_gradient(spec.placements)
        assert spec.tensor_meta is not None, "it is a tensor's"
        _, stride = torch_private.compute_global_tensor_info(grad, spec.mesh, spec.placements)
        wanted = torch_private.normalized_for_gradient(placements)
        meta = TensorMeta(spec.tensor_meta.shape, tuple(stride), grad.dtype)
        made = torch_private.spec_of(spec.mesh, tuple(placements), meta)
        known = _FromLocal(layout_of(made, grad), wanted, spec.mesh)
        _put_plan(key, known)
    return _linked(laid_out(grad, known.layout), grad, _to_local_as, known.wanted)  # type: ignore[no-any-return]


def _moved_back(grad: DTensor, how: tuple[Any, ...]) -> torch.Tensor:
    """The gradient of what `redistribute` was given: back to where that was."""
    placements, wire, out = how
    note_phase()
    if wire is not None:
        grad = grad.to(wire)  # type: ignore[assignment]
    grad = grad.redistribute(placements=_on_the_way_back(grad.placements, placements))
    return grad if grad.dtype == out else grad.to(out)


@dataclass(frozen=True, slots=True)
class _FromLocal:
    """What a call of `from_local` comes to: the layout, and where gradients are wanted. The mesh
    lives as long as its id stands in a key."""

    layout: ShardLayout
    wanted: tuple[Placement, ...]
    mesh: DeviceMesh


_plans: dict[tuple[Any, ...], _FromLocal] = {}
"""A plain dict: every call asks it, and an LRU's bookkeeping would be a twentieth of an MLP's."""
MOST_PLANS = 4096
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
    """`from_local` looked at for the first time; the local tensor is lazy then."""
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
    """Where a gradient goes whose tensor was placed `before`: what isn't partial never becomes so,
    for it would have to be reduced again."""
    return tuple(
        Replicate() if was.is_partial() and not here.is_partial() else was
        for here, was in zip(now, before, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Move:
    """What a call of `redistribute` comes to: the new placements, the dtype to cast to first, and
    what the way back needs."""

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
    """A call of `redistribute` looked at for the first time."""
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


LIBRARY = torch.library.Library("lazy_tensor", "DEF")
LIBRARY.define("redistribute(Tensor input, int placements) -> Tensor")
REDISTRIBUTE = torch.ops.lazy_tensor.redistribute.default
_redistribute = REDISTRIBUTE._op
PLACEMENTS: Numbered[tuple[Placement, ...]] = Numbered()
"""What the argument `placements` of `lazy_tensor::redistribute` stands for."""


def moved(
    tensor: DTensor, placements: tuple[Placement, ...], dtype: torch.dtype | None = None
) -> DTensor:
    """`tensor` placed otherwise, by an op that traces know; autograd sees nothing of it."""
    if dtype is not None:
        tensor = tensor.to(dtype)  # type: ignore[assignment]
    if placements == tensor._layout.spec.placements:
        return laid_out(local_of(tensor), tensor._layout)
    made: DTensor = _redistribute(tensor, PLACEMENTS.number(placements))
    return made


def forget() -> None:
    """Look at calls of `from_local` anew, on meshes that may equal old ones."""
    _plans.clear()
