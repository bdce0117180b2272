"""Calls on sharded tensors while nothing is recorded: known ones run at once, as one local op.

In: a call, and what `compute` made of the same call before. Out: its result. The key has the
layouts of all tensors, so that the op on this rank, and the layouts of its results, follow from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from lazy_tensor.dispatch.ops.request import FIXED, Request, is_shown
from lazy_tensor.dispatch.ops.rules import Rule, rule_of
from lazy_tensor.dispatch.ops.schema import OpFacts, facts_of
from lazy_tensor.dispatch.record import sync_points
from lazy_tensor.dispatch.run import watch
from lazy_tensor.dispatch.torch_private import count_writes, kernels_only
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.dispatch.trie.keys import NUMBERS
from lazy_tensor.dispatch.trie.trace import Trace, Value
from lazy_tensor.kernels.cache import on_clear
from lazy_tensor.sharding.layout import ShardLayout


class Known(NamedTuple):
    """What a call comes to: an op on this rank's memory, and how its results lie.

    `args` are its arguments with `GIVEN` where the call gives them: tensors, and numbers. `out` is
    the layout of the result, or a list of them; None where nothing new comes back.
    """

    op: Any
    facts: OpFacts
    args: tuple[Any, ...]
    out: Any


GIVEN = object()
PLACEMENTS = (Shard, Replicate, Partial)  # others hold masks, or parts in another order
MOST_KNOWN = 4096
_known: dict[tuple[Any, ...], Known] = {}  # an LRU's own time is a tenth of a call's


def forget() -> None:
    """Ask torch's rules anew."""
    _known.clear()


on_clear(forget)


def run(trace: Trace, owner: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call that is known; NotImplemented of any other."""
    if trace.state is not trace.root or trace.tape is not None or trace.policy.is_paused:
        return NotImplemented
    key = _key_of(op, args, kwargs)
    known = None if key is None or is_shown(owner) else _known.get(key)
    if known is None:
        return NotImplemented
    local: list[Any] = []
    for argument, fixed in zip(args, known.args, strict=True):
        if fixed is GIVEN:
            fixed = _memory_of(argument)
            if fixed is None:
                return NotImplemented  # it is pending, or has failed
        local.append(fixed)
    sync_points.run_at_once(trace, op, args, kwargs)
    with kernels_only(dispatches=True):
        result = known.op(*local, **kwargs)
    if known.facts.writes:
        return _written(known, args, kwargs)
    if type(known.out) is ShardLayout:
        return _laid_out(result, known.out)
    return type(result)(map(_laid_out, result, known.out))


def _written(known: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call gives that has written arguments."""
    for label in known.facts.writes:
        written = args[label] if isinstance(label, int) else kwargs[label]
        watch.note_writes(written if isinstance(written, (list, tuple)) else [written])
    if known.facts.writes_list:
        count_writes(args[0])
    return None if known.facts.returns_arg is None else args[known.facts.returns_arg]


def learn(
    request: Request, op: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> None:
    """Note what a call on sharded tensors came to: `op` on these arguments, and nothing else."""
    facts = request.facts
    if facts.is_out or facts.changes_metadata or rule_of(request.op) is not Rule.RECORD:
        return
    key = _key_of(request.op, request.args, request.kwargs)
    if key is None or kwargs != request.kwargs or len(args) != len(request.args):
        return
    given = [_is_given(facts, i, argument) for i, argument in enumerate(request.args)]
    if None in given:
        return
    out: Any = None
    if not facts.writes:
        results: Sequence[Any] = [result] if isinstance(result, torch.Tensor) else result
        if not (results and all(type(one) is tensor_types.sharded_class for one in results)):
            return
        layouts = [one._layout for one in results]
        if not all(type(p) in PLACEMENTS for one in layouts for p in one.spec.placements):
            return
        out = layouts[0] if isinstance(result, torch.Tensor) else layouts
    elif not (result is None and facts.returns_nothing) and facts.returns_arg is None:
        return  # it writes, and gives something new
    fixed = tuple([GIVEN if takes else local for takes, local in zip(given, args, strict=True)])
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    _known[key] = Known(op, facts, fixed, out)


def _is_given(facts: OpFacts, place: int, argument: Any) -> bool | None:
    """Whether the local op takes an argument from the call: a tensor, a list of them, or a number
    whose value decides nothing. None if that can't be said."""
    kind = type(argument)
    if kind is tensor_types.sharded_class:
        return True
    if kind is list or kind is tuple:
        tensors = [isinstance(item, torch.Tensor) for item in argument]
        if not any(tensors):
            return False
        return True if all(type(a) is tensor_types.sharded_class for a in argument) else None
    if isinstance(argument, torch.Tensor):
        return None
    return kind in (float, complex) and place in facts.number_args


def _key_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """What the local op and its results' layouts follow from; None if plain tensors take part."""
    numbers = facts_of(op).number_args
    key: list[Any] = [op._op]  # which has a hash in C
    for place, argument in enumerate(args):
        kind = type(argument)
        if kind is tensor_types.sharded_class:
            key.append(argument._layout)
        elif kind is float and place in numbers:
            key.append(kind)
        elif kind is list or kind is tuple:
            for item in argument:
                kind = type(item)
                if kind is tensor_types.sharded_class:
                    key.append(item._layout)
                elif kind in FIXED or kind in NUMBERS:
                    key += (kind, item)
                else:
                    return None
            key.append(None)  # the end
        elif kind in FIXED or kind in NUMBERS:
            key += (kind, argument)
        else:
            return None
    for name, argument in kwargs.items():
        kind = type(argument)
        if kind is float and name in numbers:
            key += (name, kind)
        elif kind in FIXED or kind in NUMBERS:
            key += (name, kind, argument)
        else:
            return None
    return tuple(key)


def _memory_of(argument: Any) -> Any:
    """This rank's part of a tensor, or of each in a list; None if one isn't computed."""
    kind = type(argument)
    if kind is tensor_types.sharded_class:
        value = argument._value
        return value.data if value.slot is None and value.failure is None else None
    if kind is list or kind is tuple:
        found = [_memory_of(item) for item in argument]
        return None if any(item is None for item in found) else found
    return argument


def _laid_out(local: torch.Tensor, layout: ShardLayout) -> Any:
    value = Value()
    value.data = local
    return tensor_types.new_sharded(value, layout, local)
