"""What each call on sharded tensors comes to, by an LRU in front of torch's rules.

In: an op, the layouts of its sharded arguments, static arguments. Out: torch's `OutputSharding`:
where each input must lie, where the outputs do. Hits of the trie never come here.
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
from lazy_tensor.dispatch.trie.trace import local, setting_apart
from lazy_tensor.kernels.cache import Cache
from lazy_tensor.sharding import torch_private
from lazy_tensor.sharding.torch_private import OutputSharding

_decisions: Cache[tuple[Any, ...], OutputSharding] = Cache("sharding", 4096)
settings.on_change(lambda new: _decisions.resize(new.sharding_cache_size))


def get_sharding_prop_cache_info() -> CacheInfo:
    """`CacheInfo(hits, misses, maxsize, currsize)` of the cache of sharding decisions.

    Calls that the trie of traces knows ask neither it nor anything else. `configure`'s
    `sharding_cache_size` sets `maxsize`.
    """
    return _decisions.info()


def decide(info: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OutputSharding:
    """What the call of `info` comes to; NotImplementedError if torch has no rule for its op."""
    op = info.schema.op
    numbers = facts_of(op).number_args
    given = [*enumerate(args), *kwargs.items()]
    key = (op, *[(label, _described(a, label in numbers)) for label, a in given])
    found = _decisions.get(key)
    if found is None:
        STATS.sharding_misses[op] += 1
        found = _asked(info)
        _decisions.put(key, found)
    return found


_families: Cache[tuple[Any, ...], Any] = Cache("sharding_families", 4096)
settings.on_change(lambda new: _families.resize(new.sharding_cache_size))


def placements_at_any_size(request: Request) -> Any:
    """Where the outputs lie of a call that was decided for other sizes, all inputs as they are.

    A tuple of placements for a single tensor, a tuple of such tuples for several; None if unknown.
    """
    return _families.get(_family(request))


def _asked(info: Any) -> OutputSharding:
    """What torch's rules say. To ask them is part of recording: it flushes nothing."""
    trace = local.trace
    was_busy = trace.busy
    try:
        trace.busy = True
        return torch_private.propagate(info)
    finally:
        trace.busy = was_busy


def learn_for_any_size(request: Request, sharding: OutputSharding) -> None:
    """Keep a decision that moves nothing for calls of other sizes that divide alike.

    Nothing is cheaper than that, so the rules decide the same for them.
    """
    specs: Any = sharding.output_spec
    if sharding.needs_redistribute or specs is None or torch_private.takes_sizes(request.op):
        return
    if any(type(tensor) is not tensor_types.sharded_class for tensor in request.tensors):
        return  # whether plain tensors may take part depends on the context
    several = isinstance(specs, (list, tuple))
    if several and any(spec is None for spec in specs):
        return
    placements = tuple(s.placements for s in specs) if several else specs.placements
    _families.put(_family(request), placements)


def _family(request: Request) -> tuple[Any, ...]:
    """What of a call a decision depends on, sizes only as far as they divide among the ranks."""
    numbers = request.facts.number_args
    args = [_alike(argument, i in numbers) for i, argument in enumerate(request.args)]
    kwargs = [(name, _alike(a, name in numbers)) for name, a in request.kwargs.items()]
    return (request.op, *args, *kwargs)


def _alike(argument: Any, may_vary: bool) -> Any:
    kind = type(argument)
    if kind is tensor_types.sharded_class:
        return argument._layout.family
    if kind is list or kind is tuple:
        return (kind, *[_alike(item, may_vary) for item in argument])
    return _described(argument, may_vary)


def _described(argument: Any, may_vary: bool) -> Any:
    """What of an argument a decision may depend on; of a number that is an operand its type."""
    kind = type(argument)
    if kind is tensor_types.sharded_class:
        return argument._layout
    if kind in FIXED:
        return argument
    if kind in NUMBERS:
        return kind if may_vary else (kind, str(argument))
    if isinstance(argument, torch.Tensor):
        return (argument.shape, argument.dtype)
    if isinstance(argument, (list, tuple)):
        return tuple([_described(item, may_vary) for item in argument])
    return argument


def forget() -> None:
    """Ask torch's rules anew."""
    _decisions.clear()
    _families.clear()


# what is known may have moved what such a block doesn't let move: there it is new
torch_private.around_explicit_redistribution(partial(setting_apart, here_only=True))
