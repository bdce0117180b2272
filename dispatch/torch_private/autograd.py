"""Autograd's graph and its engine: what they hold, which threads they run in."""

from __future__ import annotations

from typing import Any

import torch


def in_backward() -> bool:
    """Whether autograd's engine runs a backward pass in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def keeps_tensors(node: Any) -> bool | None:
    """Whether a node of autograd's graph holds saved tensors; None if it never saves any.

    A node has an attribute `_saved_*` for each tensor or number that it saved, and a
    `torch.autograd.Function` has `saved_tensors`.
    """
    names = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
    found = None
    for name in names:
        try:
            saved = getattr(node, name)
        except RuntimeError:
            found = False  # freed by a backward pass
            continue
        if isinstance(saved, torch.Tensor) or (isinstance(saved, tuple) and any(
            isinstance(item, torch.Tensor) for item in saved
        )):  # fmt: skip
            return True
    return found


def differentiated(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a replayed call returns it where eager's graph would be freed by now: it requires
    a gradient, and backward() through it raises."""
    message = (
        "Trying to backward through the graph a second time: this tensor comes from a call that "
        "lazy_tensor.replay repeated, which ran backward() inside"
    )
    result: torch.Tensor = torch._C._functions.DelayedError(message, 1)(tensor.requires_grad_())
    return result


def next_sequence_number() -> int:
    """The number that the next node of an autograd graph gets. Earlier nodes have smaller ones."""
    return torch._C._autograd._get_sequence_nr()


def views_by_their_ops() -> Any:
    """Context manager: autograd keeps, for each view, the op that made it.

    It does so for `LazyTensor`s anyway. For plain tensors it keeps sizes and strides alone: after a
    write to such a view its graph has `as_strided` where the graph of lazy tensors has `select`.
    """
    return torch.autograd.grad_mode._force_original_view_tracking(True)


def saves_by_hooks() -> bool:
    """Whether hooks for saved tensors are active, as those of checkpointing are."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def let_engine_have_threads(allowed: bool) -> bool:
    """Allow, or forbid, that backward runs on autograd's own threads; returns what held before."""
    before: bool = torch._C._is_multithreading_enabled()
    torch._C._set_multithreading_enabled(allowed)
    return before
