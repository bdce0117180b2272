"""Treatments of collectives: c10d uses the memory of their tensors until they have ended.

In: the methods of process groups, and `Work.wait`. Out: wrappers for the table of patches. They
note which memory is in use, so that `snapshot` copies it at once. They also unwrap lazy tensors
where torch's dispatcher doesn't find them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.trie.trace import local
from lazy_tensor.interop.torch_ways import MESSAGES
from lazy_tensor.tensor import LazyTensor, computed, plain_detached


def communicating(name: str, own: Any) -> Any:
    """A method of process groups that begins a collective."""
    is_held = name not in MESSAGES

    @functools.wraps(own)
    def communicate(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The dispatcher sees tensors in a list, but not those in a list of lists.
        if any(_has_nested_lazy(argument) for argument in (*args, *kwargs.values())):
            args, kwargs = pytree.tree_map_only(LazyTensor, plain_detached, (args, kwargs))
        memory = [data for leaf in pytree.tree_leaves((args, kwargs)) for data in _memory_of(leaf)]
        for data in memory:
            torch_private.stop_sharing(data)
        work = own(self, *args, **kwargs)
        if memory and work is not None:
            torch_private.note_in_flight(memory, work, is_held=is_held)
        return work

    return communicate


def _has_nested_lazy(argument: Any) -> bool:
    """Whether the argument is a list of lists, one of which holds a lazy tensor."""
    return isinstance(argument, (list, tuple)) and any(
        isinstance(item, LazyTensor)
        for part in argument
        if isinstance(part, (list, tuple))
        for item in part
    )


def _memory_of(leaf: Any) -> list[torch.Tensor]:
    """The tensor whose memory c10d uses for the argument: one at most."""
    # a tape ends with the op that is called next, which says why
    if type(leaf) is LazyTensor and local.trace.tape is None:
        leaf = computed(leaf, "a collective")
    # tensors of other classes may have no memory; neither have sparse ones
    is_plain = type(leaf) in (torch.Tensor, torch.nn.Parameter)
    return [leaf] if is_plain and leaf.layout is torch.strided else []


def waiting(name: str, own: Any) -> Any:
    """`Work.wait`, after which c10d doesn't use the memory any more."""

    @functools.wraps(own)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = own(self, *args, **kwargs)
        torch_private.forget_ended(self)
        return result

    return wait
