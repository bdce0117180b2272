"""Sharding decisions: an LRU cache in front of torch's sharding rules.

In: an op, the layouts of its sharded arguments, and its static arguments. Out: torch's
`OutputSharding`, which has the placements that each input needs and those of the outputs. A second
cache serves calls of sizes not seen before. `compute` asks both; a call that the trie knows asks
neither.
"""

from __future__ import annotations

from functools import _CacheInfo as CacheInfo, partial
from typing import Any

import torch

from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.ops.request import FIXED, Request
from lazy_tensor.dispatch.ops.schema import facts_of
from lazy_tensor.dispatch.stats import STATS
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.dispatch.trie.keys import NUMBERS
from lazy_tensor.dispatch.trie.trace import local, setting_apart, switch_apart
from lazy_tensor.kernels.cache import Cache
from lazy_tensor.sharding import torch_private
from lazy_tensor.sharding.torch_private import OutputSharding

_decisions: Cache[tuple[Any, ...], OutputSharding] = Cache("sharding", 4096)
settings.on_change(lambda new: _decisions.resize(new.sharding_cache_size))


def get_sharding_prop_cache_info() -> CacheInfo:
    """`CacheInfo(hits, misses, maxsize, currsize)` of the cache of sharding decisions.

    A call that the trie knows is no look-up here. `configure`'s `sharding_cache_size` sets
    `maxsize`.
    """
    return _decisions.info()


def decide(info: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OutputSharding:
    """The decision for the call of `info`; NotImplementedError if torch has no rule for its op."""
    op = info.schema.op
    key = key_of(op, args, kwargs)
    found = _decisions.get(key)
    if found is None:
        STATS.sharding_misses[op] += 1
        found = _asked(info)
        _decisions.put(key, found)
    return found


def key_of(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, any_size: bool = False
) -> tuple[Any, ...]:
    """The key of a call: its decision, its local op and the layouts of its results follow from it.

    Tensors count by layout, operands by type, other arguments by type and value. With `any_size`
    sizes count only by how they divide among the ranks.
    """
    numbers, sharded = facts_of(op).number_args, tensor_types.sharded_class
    key: list[Any] = [op._op]  # the builtin behind the op, as it has its hash in C
    for i, a in enumerate(args):
        # the usual argument costs no call
        is_usual = type(a) is sharded and not any_size
        key.append(a._layout if is_usual else _described(a, i in numbers, any_size))
    for name, a in kwargs.items():
        key.append((name, _described(a, name in numbers, any_size)))
    return tuple(key)


_families: Cache[tuple[Any, ...], Any] = Cache("sharding_families", 4096)
settings.on_change(lambda new: _families.resize(new.sharding_cache_size))


def placements_at_any_size(request: Request) -> Any:
    """The output placements of a call that was decided for other sizes, and redistributes nothing.

    A tuple of placements for a single tensor, a tuple of such tuples for several; None if unknown.
    """
    return _families.get(key_of(request.op, request.args, request.kwargs, any_size=True))


def _asked(info: Any) -> OutputSharding:
    """The answer of torch's rules."""
    # While the trace is busy, direct calls of `torch.distributed` flush nothing: a rule that makes
    # one is part of recording this call.
    trace = local.trace
    was_busy = trace.busy
    try:
        trace.busy = True
        return torch_private.propagate(info)
    finally:
        trace.busy = was_busy


def learn_for_any_size(request: Request, sharding: OutputSharding) -> None:
    """Keep a decision that redistributes nothing, for calls whose sizes divide alike among ranks.

    torch's rules choose the cheapest way, and no way is cheaper than to move nothing: they decide
    the same for those sizes.
    """
    specs: Any = sharding.output_spec
    if sharding.needs_redistribute or specs is None or torch_private.takes_sizes(request.op):
        return
    if any(type(tensor) is not tensor_types.sharded_class for tensor in request.tensors):
        # `implicit_replication` decides whether plain tensors are allowed, and isn't in the key
        return
    several = isinstance(specs, (list, tuple))
    if several and any(spec is None for spec in specs):
        return
    placements = tuple(s.placements for s in specs) if several else specs.placements
    key = key_of(request.op, request.args, request.kwargs, any_size=True)
    _families.put(key, placements)


def _described(argument: Any, may_vary: bool, any_size: bool) -> Any:
    """The part of an argument that a decision may depend on; `may_vary`: a number is an operand,
    and counts by its type."""
    kind = type(argument)
    if kind is tensor_types.sharded_class:
        return argument._layout.family if any_size else argument._layout
    if kind in FIXED:
        return argument
    if kind in NUMBERS:
        # as text where 0.0 and -0.0 would be equal; either part of a complex number may be -0.0
        fixed = str(argument) if kind is complex or not argument else argument
        return kind if may_vary else (kind, fixed)
    if isinstance(argument, (list, tuple)):
        return tuple([_described(item, may_vary, any_size) for item in argument])
    if isinstance(argument, torch.Tensor):
        return (argument.shape, argument.dtype)
    return argument


def forget() -> None:
    """Drop all decisions: a later mesh may equal an old one, but have other process groups."""
    _decisions.clear()
    _families.clear()


# a call that was recorded outside may redistribute what such a block forbids: inside it is a miss,
# so that the block is asked
torch_private.around_explicit_redistribution(partial(setting_apart, here_only=True))
# a call with a plain tensor that was recorded inside must raise outside
torch_private.on_replicating_plain_tensors(partial(switch_apart, "implicit replication"))
