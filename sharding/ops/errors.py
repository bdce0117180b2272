"""The errors of calls on sharded tensors: they name the op, the argument, and what would work.

In: a call, and torch's error if there is one. Out: an exception with the user's line and the call's
tensors. `compute` raises them.
"""

from __future__ import annotations

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
        lines.append(f"  {name}: {tensor.dtype} {tuple(tensor.shape)}, {placed}")
    return "\n".join(lines)


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
