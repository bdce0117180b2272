"""The errors of calls on sharded tensors: they name the op, the argument, and what would work.

In: a call, and torch's error if there is one. Out: an exception with the user's line and the call's
tensors. `compute` raises them.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from lazy_tensor.dispatch.ops.request import Request
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.dispatch.user_frame import user_line
from lazy_tensor.sharding import torch_private
from lazy_tensor.sharding.torch_private import DTensorSpec, TorchDTensor


def check_arguments(request: Request) -> None:
    """RuntimeError if a plain tensor of several elements meets sharded ones, or if meshes differ.

    Foreach ops may have several meshes, as they treat each tensor by itself.
    """
    op, args, kwargs = request.op, request.args, request.kwargs
    sharded = [tensor for tensor in request.tensors if isinstance(tensor, TorchDTensor)]
    if len(sharded) < len(request.tensors):
        _refuse_plain(op, args, kwargs)
    meshes = {tensor.device_mesh for tensor in sharded}
    if len(meshes) > 1 and not is_foreach(op):
        raise RuntimeError(
            f"{op}: its tensors lie on {len(meshes)} different meshes, between which nothing is "
            f"moved unasked. Gather one with full_tensor() and distribute it on the other mesh\n"
            f"{_call(op, args, kwargs)}"
        )


def _refuse_plain(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """RuntimeError for the first plain tensor that doesn't count as replicated."""
    for name, tensor in _named_tensors(op, args, kwargs):
        if isinstance(tensor, TorchDTensor) or tensor.numel() == 1:
            continue
        if not torch_private.replicates_plain_tensors():
            raise RuntimeError(
                f"{op}: got mixed torch.Tensor and DTensor: argument {name} is a plain tensor of "
                f"shape {tuple(tensor.shape)}. Make it one with distribute_tensor or "
                f"DTensor.from_local, or take to_local() of the others\n{_call(op, args, kwargs)}"
            )


def of_propagation(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> Exception:
    """The error of torch's rules, or of the op's own shape check, with the call's tensors added.

    Its type is kept if it is one that eager raises, so that programs can catch it.
    """
    text = f"{error}\n{_call(op, args, kwargs)}"
    kind = type(error) if type(error) in (RuntimeError, ValueError, IndexError, TypeError) else None
    return (kind or RuntimeError)(text)


def forbidden(
    op: Any, now: DTensorSpec, placements: tuple[Any, ...], n_bytes: int, where: str
) -> RuntimeError:
    """The error for an implicit redistribution under `forbid={"redistribute"}`."""
    return RuntimeError(
        f"{op} at {where} needs a tensor of shape {tuple(now.shape)} placed {now.placements} to be "
        f"{tuple(placements)} ({n_bytes} bytes), and forbid has 'redistribute'; call "
        "redistribute() on it first, or place it so from the start"
    )


def _call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The user's line, and a line for each tensor of the call."""
    lines = [f"at {user_line()}:"]
    for name, tensor in _named_tensors(op, args, kwargs):
        if isinstance(tensor, TorchDTensor):
            placed = f"placed {tensor.placements} on {tensor.device_mesh}"
        else:
            placed = "plain"
        # modules hold the base, while an op may get a view of it
        known = _parameter_name(tensor if tensor._base is None else tensor._base)
        named = "" if known is None else f", parameter {known!r}"
        lines.append(f"  {name}: {tensor.dtype} {tuple(tensor.shape)}, {placed}{named}")
    return "\n".join(lines)


def _parameter_name(tensor: torch.Tensor) -> str | None:
    """The parameter's name in the outermost module that holds it; None if no module holds it."""
    path: list[str] = []
    held = _holder(tensor, "_parameters")
    while held is not None:
        name, module = held
        path.insert(0, name)
        held = _holder(module, "_modules")
    return ".".join(path) or None


def _holder(item: Any, kind: str) -> tuple[str, torch.nn.Module] | None:
    """The module in whose dict `kind` (`_parameters`, `_modules`) `item` is, and its name there."""
    # From the item up, by referrers. gc.get_objects() also lists tuples that another thread is
    # still filling, and a second reference to such a tuple makes that thread fail.
    for things in filter(_is_dict, gc.get_referrers(item)):
        name = next((name for name, thing in list(things.items()) if thing is item), None)
        for attributes in filter(_is_dict, gc.get_referrers(things)):
            if attributes.get(kind) is not things:
                continue
            for module in gc.get_referrers(attributes):
                if issubclass(type(module), torch.nn.Module) and vars(module) is attributes:
                    return str(name), module
    return None


def _is_dict(thing: Any) -> bool:
    # the exact type, as methods of a subclass may run any code
    return type(thing) is dict


def _named_tensors(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    """The call's tensors with the names of their arguments, those in lists with an index."""
    names = [argument.name for argument in op._schema.arguments]
    found: list[tuple[str, torch.Tensor]] = []
    for name, argument in (*zip(names, args, strict=False), *kwargs.items()):
        tensors = Request(tensor_types.tensor_class, op, (argument,), {}).tensors
        for i, tensor in enumerate(tensors):
            found.append((f"{name}[{i}]" if isinstance(argument, (list, tuple)) else name, tensor))
    return found


def is_foreach(op: Any) -> bool:
    """Whether the op treats each tensor of its lists by itself: foreach ops, fused optimizers."""
    return bool(op._schema.name.startswith(("aten::_foreach", "aten::_fused")))
