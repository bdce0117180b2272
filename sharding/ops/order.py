"""Keeps collectives in the program's order when `torch.distributed` is called directly.

Each of its functions is wrapped: it flushes the collectives that this thread has recorded before it
communicates itself. The end of the process flushes them too. Otherwise another rank, which has
issued them already, would wait for this one. `lazy_tensor.sharding` calls `keep` at import.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import sys
from types import FunctionType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from lazy_tensor.dispatch.record.segment_end import DIRECT
from lazy_tensor.dispatch.trie.trace import Node, local, set_apart
from lazy_tensor.sharding import layout, tensor
from lazy_tensor.sharding.ops import at_once, decisions
from lazy_tensor.tensor import flush_here

_destroy = distributed_c10d.destroy_process_group
# wrapped whatever their arguments are called: all ranks make and end groups together
ENDS = ("destroy_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration")


def _has_collectives() -> bool:
    """Whether this thread has recorded a collective that has not been issued yet."""
    trace = local.trace
    return trace.state is not trace.root and any(
        isinstance(step, Node) and step.facts.communicates for step in trace.state.steps()
    )


def _flushing(function: Any) -> Any:
    """`function`, with a flush of recorded collectives before it."""

    @functools.wraps(function)
    def after_what_is_pending(*args: Any, **kwargs: Any) -> Any:
        # a busy trace is in the middle of recording a call, which a flush would tear apart
        if not local.trace.busy and _has_collectives():
            flush_here(f"torch.distributed.{function.__name__}", quiet=True)
        try:
            return function(*args, **kwargs)
        finally:
            # meshes compare equal by their ranks: a mesh of the next process group would find what
            # was decided and laid out for the groups that are gone
            if function is _destroy:
                layout.forget()
                tensor.forget()
                decisions.forget()
                at_once.forget()

    return after_what_is_pending


def keep() -> None:
    """Wrap the functions of `torch.distributed`, in each module that has imported them."""
    wrapped = {}
    for name in distributed_c10d.__all__:
        function = getattr(distributed_c10d, name)
        if type(function) is not FunctionType or name.startswith(("get_", "is_")):
            continue
        if name in ENDS or "group" in inspect.signature(function).parameters:
            wrapped[function] = _flushing(function)
    for module in [m for name, m in sys.modules.items() if name.startswith("torch.distributed")]:
        # many import the functions by name, and hold references of their own
        for name, function in list(vars(module).items()):
            if type(function) is FunctionType and function in wrapped:
                setattr(module, name, wrapped[function])
    own_init = DistributedDataParallel.__init__

    @functools.wraps(own_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        # its reducer communicates in C++, where nothing is wrapped: while it lives, collectives are
        # issued as soon as they are recorded
        set_apart(DIRECT, self)
        own_init(self, *args, **kwargs)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    atexit.register(_hand_over)


def _hand_over() -> None:
    """Issue the collectives that are still recorded at exit: other ranks may wait for them."""
    if dist.is_initialized() and _has_collectives():
        flush_here("the process ends", quiet=True)
