"""From plain tensors to lazy ones and back: `wrap`, `unwrap`, `materialize`, `flush`, `is_pending`.

`wrap` and `unwrap` change modules in place: a parameter stays the same object, and torch swaps its
content with that of a *twin*, a tensor of the other kind on the same memory.
"""

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
    detach_computed_weights,
    import_for_subclasses,
    is_resizable,
    no_modes,
    put_hooks_anew,
    snapshot,
    without_weak_references,
)
from lazy_tensor.dispatch.trie import memory_sharing, tensor_types
from lazy_tensor.dispatch.trie.trace import local
from lazy_tensor.dispatch.wording import with_article
from lazy_tensor.tensor import LazyTensor, attributes_of, flush_here, plain_copy, plain_detached

M = TypeVar("M", bound=torch.nn.Module)

before_wrapping: list[Callable[[], None]] = []
"""Functions that `wrap` calls first. Other modules add what lazy tensors need outside a mode:
`mode` the hook after optimizer steps, `interop.patch_table` its patches."""


def is_lazy(t: Any) -> bool:
    """Whether `t` is a `LazyTensor`."""
    return isinstance(t, LazyTensor)


def is_pending(t: Any) -> bool:
    """Whether `t`'s value, or a write to it, is not computed yet. False for what isn't lazy."""
    if not isinstance(t, LazyTensor):
        return False
    value = t._value
    return (value.data is None and value.failure is None) or local.trace.has_write_to(value)


def flush() -> None:
    """Run all that this thread has recorded. Returns when it has been handed to the device."""
    _end_region()
    flush_here("flush()", quiet=True)


def _end_region() -> None:
    """End a region of the program, as an op does that reads a value."""
    # while the thread is asleep, reads are counted by C++ and by `pass_read`, not by `at_read`
    if get_ident() in sync_points.asleep:
        sync_points.pass_read(local.trace)
    else:
        sync_points.at_read(local.trace)


def materialize(tree: Any) -> Any:
    """`tree` with each lazy tensor replaced by a plain `torch.Tensor` that holds its value.

    `tree` is any pytree. The plain tensors are detached. They have memory of their own, which is
    copied only when either side is written. A sharded tensor is gathered, which every rank must
    take part in. Other leaves come back as they are.
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
    # not imported here: it takes half a second, and a program without it has no DTensor
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


@overload
def wrap(x: torch.Tensor) -> LazyTensor: ...
@overload
def wrap(x: M) -> M: ...
def wrap(x: Any) -> Any:
    """Make `x` lazy, so that ops on it are recorded outside `lazy_mode` too.

    For a `Tensor`, return a `LazyTensor` that shares its memory; of one that has a graph, a copy
    that is differentiated as it is. A sparse, quantized, nested or "meta" tensor, or one of a class
    of yours, comes back as it is, and runs as in eager. For an `nn.Module`, make its parameters,
    its buffers and their gradients lazy in place, and return it. `Parameter`s stay the same
    objects: tied weights stay tied, hooks stay registered, and an optimizer built before goes on
    working. torch's DTensors become `lazy_tensor.sharding`'s.

    Anything else raises TypeError. A parameter that a live autograd graph holds raises
    RuntimeError.
    """
    # A bypassed block leaves its thread asleep, and ops on `x` would pass unrecorded. So no block
    # rests from here on, and this thread sees ops again.
    Policy.has_wrapped = True
    if hits.native is not None:
        hits.native.end_rests()
    sync_points.see_outside_blocks(local.trace)
    # torch imports DTensor with the first op on a subclass; here it is out of the first step's time
    import_for_subclasses()
    for prepare in before_wrapping:
        prepare()
    if isinstance(x, torch.nn.Module):
        # pending ops hold the parameters that are about to change
        flush_here("wrap()", quiet=True)
        _convert_module(x, _can_be_lazy, _lazy_twin, "wrap")
        return x
    if isinstance(x, torch.Tensor):
        if not _can_be_lazy(x):
            return x
        # memory that can't be resized belongs to an array, a file or another process, which may
        # write it unseen
        if not (_is_sharded(x) or is_resizable(x)):
            memory_sharing.note_external_writer(x)
        return _with_graph(x, _lazy_copy) if _has_graph(x) else _lazy_twin(x)
    raise _wrong_type("wrap()", x)


def unwrap(x: Any) -> Any:
    """Undo `wrap`: return a plain tensor for a `LazyTensor`, or the `nn.Module` with plain
    parameters. Calls of the module are no longer replayed by `replay`.

    What is pending runs. Objects stay the same objects, and memory is shared, not copied, but that
    of a tensor that has a graph.
    """
    if isinstance(x, torch.nn.Module):
        for part in x.modules():
            if getattr(called_by(part), "is_replay", False):
                call_by(part, None)
        _convert_module(x, is_lazy, _plain_twin, "unwrap")
        return x
    if isinstance(x, LazyTensor):
        return _with_graph(x, _plain_copy) if _has_graph(x) else _plain_twin(x)
    if isinstance(x, torch.Tensor):
        return x
    raise _wrong_type("unwrap()", x)


def _has_graph(x: torch.Tensor) -> bool:
    return x.requires_grad and not x.is_leaf


def _with_graph(x: torch.Tensor, make: Callable[[Any], torch.Tensor]) -> Any:
    """The copy that `make` makes of `x`, differentiated as `x` is. It is a copy, because autograd
    counts no write to one of the two as a write to the other."""
    with torch.enable_grad():
        return _Copied.apply(x, make)  # type: ignore[no-untyped-call]


class _Copied(torch.autograd.Function):
    """Gives a copy of a tensor in the other kind. Its gradient is of the tensor's kind."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, make: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        ctx.is_of_lazy = isinstance(x, LazyTensor)
        return make(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (grad if ctx.is_of_lazy else unwrap(grad)), None


def _wrong_type(caller: str, x: object) -> TypeError:
    given = with_article(type(x).__name__)
    return TypeError(f"{caller}: x is {given}; it takes a torch.Tensor or an nn.Module")


def _convert_module(
    module: torch.nn.Module,
    changes: Callable[[Any], bool],
    make_twin: Callable[[Any], torch.Tensor],
    caller: str,
) -> None:
    """Convert the module's parameters and buffers in place, and their gradients.

    `changes` says whether a tensor is converted. It is asked of each gradient by itself, which may
    be of another kind than its parameter: plain where nothing was recorded, or sparse.
    """
    detach_computed_weights(module)
    # RNNs hold weak references to their weights, which `swap_tensors` doesn't accept
    with without_weak_references(module):
        for tensor in _tensors_of(module):
            grad = tensor.grad if tensor.is_leaf else None
            if changes(tensor):
                # a gradient that stayed would have to be of the twin's class
                tensor.grad = None
                try:
                    _swap_in_place(tensor, make_twin(tensor), caller)
                finally:
                    tensor.grad = grad
            if grad is not None and changes(grad):
                tensor.grad = make_twin(grad)


def _tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """The module's parameters and buffers, each once: two buffers may be one tensor."""
    tensors = [*module.parameters(), *module.buffers()]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _can_be_lazy(tensor: torch.Tensor) -> bool:
    """Whether `wrap` makes the tensor lazy. Not if it is lazy already, or if traces don't hold its
    kind: sparse, quantized, nested, "meta" or uninitialized tensors, and those of other classes."""
    if isinstance(tensor, LazyTensor):
        return False
    if _is_sharded(tensor):
        return True
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and not torch.nn.parameter.is_lazy(tensor) and is_recordable(tensor)


def _lazy_twin(tensor: torch.Tensor) -> torch.Tensor:
    """A lazy tensor on `tensor`'s memory; a parameter if `tensor` is one."""
    if _is_sharded(tensor):
        return _like(tensor, _sharding().adopted(tensor.detach()))
    with no_modes():
        data = tensor.detach()
    # whoever has the plain tensor goes on writing its memory, unseen outside a mode
    memory_sharing.share(data)
    if isinstance(tensor, torch.nn.Parameter):
        memory_sharing.trust(data)
    return _like(tensor, tensor_types.concrete(data))


def _sharding() -> Any:
    # by name, and late: this folder works without `sharding`, which imports it
    return importlib.import_module("lazy_tensor.sharding.tensor")


def _plain_twin(tensor: LazyTensor) -> torch.Tensor:
    """A plain tensor on `tensor`'s memory; a parameter if `tensor` is one."""
    if _is_sharded(tensor):
        return _like(tensor, _sharding().released(tensor))
    return _like(tensor, plain_detached(tensor))


def _like(original: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
    """`twin` as a parameter, or with `requires_grad`, if `original` is so; without its gradient."""
    if isinstance(original, torch.nn.Parameter):
        return torch.nn.Parameter(twin, original.requires_grad)
    return twin.requires_grad_(original.requires_grad) if original.is_leaf else twin


def _lazy_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A lazy tensor with `tensor`'s values, whose memory is copied when one of them is written."""
    if _is_sharded(tensor):
        return _lazy_twin(tensor)
    with no_modes():
        return tensor_types.concrete(snapshot(tensor.detach()))


def _plain_copy(tensor: LazyTensor) -> torch.Tensor:
    """A plain tensor that has `tensor`'s values, in the same way."""
    return _plain_twin(tensor) if _is_sharded(tensor) else plain_copy(tensor)


def _swap_in_place(tensor: torch.Tensor, twin: torch.Tensor, caller: str) -> None:
    """Make the object `tensor` its twin. `tensor` must have no gradient; its attributes stay."""
    # `swap_tensors` swaps the attributes as well, and leaves the hooks behind: both are put back.
    kept = attributes_of(tensor)
    try:
        torch.utils.swap_tensors(tensor, twin)
    except RuntimeError as error:
        raise RuntimeError(
            f"{caller}(): a tensor of shape {tuple(tensor.shape)} is held by an autograd graph or "
            f"a weak reference, so it can't change in place; {caller} before the forward pass, or "
            f"delete the loss first ({error})"
        ) from None
    tensor.__dict__.update(kept)
    put_hooks_anew(tensor)
