"""Between plain and lazy tensors: `wrap`, `unwrap`, `materialize`, `flush`, `is_pending`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar, overload

import torch
from torch.utils import _pytree as pytree

from lazy_tensor.dispatch.metadata.infer import is_recordable
from lazy_tensor.dispatch.record import sync_points
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.tiering.policy import Policy
from lazy_tensor.dispatch.torch_private import (
    call_by,
    called_by,
    import_for_subclasses,
    is_held_by_python_alone,
    is_resizable,
    no_modes,
    without_weak_references,
)
from lazy_tensor.dispatch.trie import memory_sharing, tensor_types
from lazy_tensor.dispatch.trie.trace import local
from lazy_tensor.dispatch.wording import with_article
from lazy_tensor.tensor import LazyTensor, flush_here, plain_copy, plain_detached

M = TypeVar("M", bound=torch.nn.Module)

before_wrapping: list[Callable[[], None]] = []
"""Called by `wrap`: what lazy tensors need in no mode too puts itself here."""


def is_lazy(t: Any) -> bool:
    """Whether `t` is a `LazyTensor`."""
    return isinstance(t, LazyTensor)


def is_pending(t: Any) -> bool:
    """Whether `t` still waits for its value, a write to it included. False for what isn't lazy."""
    if not isinstance(t, LazyTensor):
        return False
    value = t._value
    return (value.data is None and value.failure is None) or local.trace.has_write_to(value)


def flush() -> None:
    """Run all that this thread has recorded; returns when it has been handed to the device."""
    _end_region()
    flush_here("flush()", quiet=True)


def _end_region() -> None:
    """Begin a region of the program, as where an op reads values."""
    if get_ident() in sync_points.asleep:
        sync_points.pass_read(local.trace)
        make_met_plain()
    else:
        sync_points.at_read(local.trace)


def materialize(tree: Any) -> Any:
    """`tree` with each lazy tensor replaced by a plain `torch.Tensor` that holds its value.

    Any pytree. The plain tensors are detached and have memory of their own, which is copied only
    when either side is written; a sharded one is gathered, on every rank. Other leaves come back as
    they are.
    """
    _end_region()
    return pytree.tree_map(_materialized, tree)


def _materialized(leaf: Any) -> Any:
    if _is_sharded(leaf):
        whole = leaf.full_tensor()
        return plain_copy(whole) if isinstance(whole, LazyTensor) else whole.detach()
    return plain_copy(leaf) if isinstance(leaf, LazyTensor) else leaf


def _is_sharded(x: Any) -> bool:
    """Whether `x` is a DTensor, torch's or ours."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


@overload
def wrap(x: torch.Tensor) -> LazyTensor: ...
@overload
def wrap(x: M) -> M: ...
def wrap(x: Any) -> Any:
    """Make `x` lazy, so that what is computed with it is recorded, in no mode too.

    A `Tensor` gives a `LazyTensor` that shares its memory (a sparse, quantized, nested or "meta"
    one comes back as it is, and runs eagerly). An `nn.Module` comes back itself, with
    its parameters, buffers and their gradients made lazy in place: the `Parameter` objects stay the
    same objects, so tied weights stay tied and an optimizer built before goes on working. torch's
    DTensors become `lazy_tensor.sharding`'s.
    TypeError for anything else; RuntimeError if a parameter is held by a live autograd graph.
    """
    Policy.has_wrapped = True
    if hits.native is not None:
        hits.native.end_rests()
    sync_points.see_outside_blocks(local.trace)
    import_for_subclasses()
    for prepare in before_wrapping:
        prepare()
    if isinstance(x, torch.nn.Module):
        flush_here("wrap()", quiet=True)  # what is pending holds the tensors that change now
        _convert_module(x, _can_be_lazy, _lazy_twin, "wrap")
        return x
    if isinstance(x, torch.Tensor):
        if not _can_be_lazy(x):
            return x
        if not (_is_sharded(x) or is_resizable(x)):
            memory_sharing.note_external_writer(
                x
            )  # an array, a file or another process has its memory too
        return _lazy_twin(x)
    raise _wrong_type("wrap()", x)


def unwrap(x: Any) -> Any:
    """The way back: a plain tensor for a `LazyTensor`, an `nn.Module` with plain parameters, whose
    calls `replay` no longer replays.

    Runs what is pending. Objects stay the same objects, and memory is shared, not copied.
    """
    if isinstance(x, torch.nn.Module):
        for part in x.modules():
            if getattr(called_by(part), "is_replay", False):
                call_by(part, None)
        _convert_module(x, is_lazy, _plain_twin, "unwrap")
        return x
    if isinstance(x, torch.Tensor):
        return _plain_twin(x) if isinstance(x, LazyTensor) else x
    raise _wrong_type("unwrap()", x)


def _wrong_type(caller: str, x: object) -> TypeError:
    given = with_article(type(x).__name__)
    return TypeError(f"{caller}: x is {given}; it takes a torch.Tensor or an nn.Module")


def make_met_plain() -> None:
    """Let lazy tensors that were met lately where nothing is recorded become plain, in place.

    They are of ops that were recorded once (an optimizer's state) and cost each op on them some
    microseconds. In a mode plain ones do as well; whoever calls `wrap` wants lazy ones without.
    """
    if hits.native is None:
        return
    for tensor in hits.native.met(not Policy.has_wrapped):
        if not Policy.has_wrapped and type(tensor) is LazyTensor and _may_become_plain(tensor):
            _swap_in_place(tensor, _plain_twin(tensor), "lazy_mode")


def _may_become_plain(tensor: LazyTensor) -> bool:
    """Whether it has its value, and neither autograd nor C++ knows it."""
    value = tensor._value
    return (
        value.slot is None
        and value.data is not None
        and not tensor.requires_grad
        and tensor.grad is None
        and is_held_by_python_alone(tensor)
    )


def _convert_module(
    module: torch.nn.Module,
    changes: Callable[[Any], bool],
    make_twin: Callable[[Any], torch.Tensor],
    caller: str,
) -> None:
    """Convert the module's parameters and buffers in place, and their gradients.

    `changes` says of each tensor whether it is converted. A gradient may be of the other kind than
    its parameter: plain beside a lazy one where nothing was recorded, or sparse.
    """
    with without_weak_references(module):
        for tensor in _tensors_of(module):
            grad = tensor.grad if tensor.is_leaf else None
            if changes(tensor):
                tensor.grad = None  # a gradient that stays would be held to the twin's class
                try:
                    _swap_in_place(tensor, make_twin(tensor), caller)
                finally:
                    tensor.grad = grad
            if grad is not None and changes(grad):
                tensor.grad = make_twin(grad)


def _tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """The module's distinct parameters and buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _can_be_lazy(tensor: torch.Tensor) -> bool:
    """Whether `wrap` makes it lazy: not what is lazy already, or what traces don't hold (sparse,
    quantized, nested, "meta" or uninitialized tensors)."""
    if isinstance(tensor, LazyTensor):
        return False
    if _is_sharded(tensor):
        return True
    return not torch.nn.parameter.is_lazy(tensor) and is_recordable(tensor)


def _lazy_twin(tensor: torch.Tensor) -> torch.Tensor:
    """A lazy tensor on `tensor`'s memory, a parameter if it is one."""
    if _is_sharded(tensor):
        return _like(tensor, _sharding().adopted(tensor.detach()))
    with no_modes():
        data = tensor.detach()
    memory_sharing.share(data)
    return _like(tensor, tensor_types.concrete(data))


def _sharding() -> Any:
    return importlib.import_module("lazy_tensor.sharding.tensor")


def _plain_twin(tensor: LazyTensor) -> torch.Tensor:
    if _is_sharded(tensor):
        return _like(tensor, _sharding().released(tensor))
    return _like(tensor, plain_detached(tensor))


def _like(original: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
    """`twin` with what makes `original` a parameter, but not its gradient."""
    if isinstance(original, torch.nn.Parameter):
        return torch.nn.Parameter(twin, original.requires_grad)
    return twin.requires_grad_(original.requires_grad) if original.is_leaf else twin


def _swap_in_place(tensor: torch.Tensor, twin: torch.Tensor, caller: str) -> None:
    """Let the object `tensor` become its twin; its attributes stay. It has no gradient."""
    kept = {k: v for k, v in tensor.__dict__.items() if k not in ("_value", "_layout", "_is_param")}
    try:
        torch.utils.swap_tensors(tensor, twin)
    except RuntimeError as error:
        raise RuntimeError(
            f"{caller}(): a tensor of shape {tuple(tensor.shape)} is held by an autograd graph or "
            f"a weak reference, so it can't change in place; {caller} before the forward pass, or "
            f"delete the loss first ({error})"
        ) from None
    tensor.__dict__.update(kept)
