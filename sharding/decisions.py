"""What each call on sharded tensors comes to, by an LRU in front of torch's rules.

In: an op, the layouts of its sharded arguments, static arguments. Out: torch's `OutputSharding`:
where each input must lie, where the outputs do. Hits of the trie never come here.
"""

from __future__ import annotations

from functools import _CacheInfo as CacheInfo
from typing import Any

import torch

from lazy_tensor.dispatch import host, settings
from lazy_tensor.dispatch.request import FIXED
from lazy_tensor.dispatch.stats import STATS
from lazy_tensor.dispatch.trace import local
from lazy_tensor.kernels.cache import Cache
from lazy_tensor.sharding import torch_private
from lazy_tensor.sharding.torch_private import DTensorSpec, OutputSharding

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
    key = (op, _described(args), tuple([(name, _described(a)) for name, a in kwargs.items()]))
    found = _decisions.get(key)
    if found is None:
        STATS.sharding_misses[op] += 1
        found = _asked(info)
        _decisions.put(key, found)
    return found


_families: Cache[tuple[Any, ...], Any] = Cache("sharding_families", 4096)
settings.on_change(lambda new: _families.resize(new.sharding_cache_size))


def placements_at_any_size(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where the outputs lie of a call that was decided for other sizes, all inputs as they are.

    A tuple of placements for a single tensor, a tuple of such tuples for several; None if unknown.
    """
    key = _family(op, args, kwargs)
    return None if key is None else _families.get(key)


def _asked(info: Any) -> OutputSharding:
    """What torch's rules say. To ask them is part of recording: it flushes nothing."""
    trace = local.trace
    was_busy, trace.busy = trace.busy, True
    try:
        return torch_private.propagate(info)
    finally:
        trace.busy = was_busy


def learn_for_any_size(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sharding: OutputSharding
) -> None:
    """Keep a decision that moves nothing for calls of other sizes that divide alike.

    Nothing is cheaper than that, so the rules decide the same for them.
    """
    specs: Any = sharding.output_spec
    if sharding.needs_redistribute or specs is None or torch_private.takes_sizes(op):
        return
    several = isinstance(specs, (list, tuple))
    if several and any(spec is None for spec in specs):
        return
    key = _family(op, args, kwargs)
    if key is not None:
        _families.put(key, tuple(s.placements for s in specs) if several else specs.placements)


def _family(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """What of a call a decision depends on, sizes only as far as they divide among the ranks."""
    meshes: list[Any] = []

    def part(argument: Any) -> Any:
        if type(argument) is host.sharded_class:
            spec: DTensorSpec = argument._spec  # type: ignore[attr-defined]
            meshes.append(spec.mesh)
            ways = [spec.mesh.size(dim) for dim in range(spec.mesh.ndim)]
            sizes = tuple([
                (n == 1, *[(n % way == 0, n >= way) for way in ways]) for n in argument.shape
            ])  # fmt: skip
            parts = (
                torch_private.is_uneven(spec),
                torch_private.has_empty_parts(spec),
                torch_private.is_split_twice(spec),
            )
            how = (spec.mesh, spec.placements, argument.dtype, argument.is_contiguous())
            return (*how, sizes, parts)
        if isinstance(argument, (list, tuple)):
            return tuple([part(item) for item in argument])
        return _described(argument)

    key = (op, part(args), tuple([(name, part(a)) for name, a in kwargs.items()]))
    return key if all(mesh == meshes[0] for mesh in meshes) else None


def _described(argument: Any) -> Any:
    """What of an argument a decision may depend on."""
    kind = type(argument)
    if kind is host.sharded_class:
        return argument._layout
    if kind in FIXED:
        return argument
    if kind in (int, float, complex):
        return (kind, str(argument))
    if isinstance(argument, torch.Tensor):
        return (argument.shape, argument.dtype)
    if isinstance(argument, (list, tuple)):
        return tuple([_described(item) for item in argument])
    return argument


def forget() -> None:
    """Ask torch's rules anew."""
    _decisions.clear()
    _families.clear()
