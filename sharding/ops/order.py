"""Collectives in the program's order: what is pending goes first when one is called directly.

In: calls of `torch.distributed`'s own functions, and the end of the process. Out: the same, after
what this thread has recorded was handed over; other ranks may wait for it.
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
ENDS = ("destroy_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration")


def _has_collectives() -> bool:
    """Whether this thread has recorded one that has not been issued yet."""
    trace = local.trace
    return trace.state is not trace.root and any(
        isinstance(step, Node) and step.facts.communicates for step in trace.state.steps()
    )


def _flushing(function: Any) -> Any:
    @functools.wraps(function)
    def after_what_is_pending(*args: Any, **kwargs: Any) -> Any:
        if not local.trace.busy and _has_collectives():
            flush_here(f"torch.distributed.{function.__name__}", quiet=True)
        try:
            return function(*args, **kwargs)
        finally:
            if function is _destroy:
                layout.forget()
                tensor.forget()
                decisions.forget()
                at_once.forget()

    return after_what_is_pending


def keep() -> None:
    """Let direct calls follow what was recorded before them, from now on."""
    wrapped = {}
    for name in distributed_c10d.__all__:
        function = getattr(distributed_c10d, name)
        if type(function) is not FunctionType or name.startswith(("get_", "is_")):
            continue
        if name in ENDS or "group" in inspect.signature(function).parameters:
            wrapped[function] = _flushing(function)
    for module in [m for name, m in sys.modules.items() if name.startswith("torch.distributed")]:
        for name, function in list(vars(module).items()):  # many import them by name
            if type(function) is FunctionType and function in wrapped:
                setattr(module, name, wrapped[function])
    own_init = DistributedDataParallel.__init__

    @functools.wraps(own_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        set_apart(DIRECT, self)  # its reducer is C++, which calls nothing that could be seen
        own_init(self, *args, **kwargs)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    atexit.register(_hand_over)


def _hand_over() -> None:
    """Issue at the end of the process what was recorded and never asked for."""
    if dist.is_initialized() and _has_collectives():
        flush_here("the process ends", quiet=True)
