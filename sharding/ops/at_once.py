"""Runs known calls on sharded tensors at once, as one local op, while nothing is recorded.

In: a call, and the local op that `compute` executed for an equal call before (`learn`). Out: its
result. `dispatch.record.recorder` calls `run` while the trace is cold. The key holds the layouts of
all tensors: the local op and the layouts of its results follow from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from lazy_tensor.dispatch.ops.request import FIXED, Request, is_observed
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
    """A known call: the op to run on this rank's memory, and the layouts of its results.

    `args` are the op's positional arguments. `GIVEN` stands for those that each call brings itself:
    tensors, and numbers that are operands. `out` is the layout of the result, a list of layouts for
    several, None if the call makes no new tensor.
    """

    op: Any
    facts: OpFacts
    args: tuple[Any, ...]
    out: Any


GIVEN = object()
# a call whose results have other placements isn't learnt: those hold masks, or order parts
# differently
PLACEMENTS = (Shard, Replicate, Partial)
MOST_KNOWN = 4096
# a plain dict, emptied when it is full: an LRU's bookkeeping takes a tenth of a call's time
_known: dict[tuple[Any, ...], Known] = {}


def forget() -> None:
    """Drop all known calls, so that torch's rules are asked again."""
    _known.clear()


on_clear(forget)


def run(trace: Trace, owner: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a known call; NotImplemented for any other call."""
    # not where something is pending, which goes first; not where `replay` records, or where another
    # tracer takes the program apart
    if trace.state is not trace.root or trace.tape is not None or trace.policy.is_paused:
        return NotImplemented
    key = _key_of(op, args, kwargs)
    known = None if key is None or is_observed(owner) else _known.get(key)
    if known is None:
        return NotImplemented
    local: list[Any] = []
    for argument, fixed in zip(args, known.args, strict=True):
        if fixed is GIVEN:
            fixed = _memory_of(argument)
            if fixed is None:
                return NotImplemented  # its value is pending, or its computation failed
        local.append(fixed)
    sync_points.run_at_once(trace, op, args, kwargs)
    # autograd has seen the call on the sharded tensors; on memory only the kernel is wanted
    with kernels_only(dispatches=True):
        result = known.op(*local, **kwargs)
    if known.facts.writes:
        return _written(known, args, kwargs)
    if type(known.out) is ShardLayout:
        return _laid_out(result, known.out)
    return type(result)(map(_laid_out, result, known.out))


def _written(known: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call that wrote arguments, once the writes are noted for others.

    `watch` drops what was derived from the old values; autograd counts the writes of a foreach op.
    """
    for label in known.facts.writes:
        written = args[label] if isinstance(label, int) else kwargs[label]
        watch.note_writes(written if isinstance(written, (list, tuple)) else [written])
    if known.facts.writes_list:
        count_writes(args[0])
    return None if known.facts.returns_arg is None else args[known.facts.returns_arg]


def learn(
    request: Request, op: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> None:
    """Note that a call on sharded tensors ran `op` on these local arguments, and nothing else.

    Only calls that `run` can repeat from the key are noted; others are ignored.
    """
    facts = request.facts
    if facts.is_out or facts.changes_metadata or rule_of(request.op) is not Rule.RECORD:
        return
    key = _key_of(request.op, request.args, request.kwargs)
    # keywords are passed on as they are; without a key they may hold tensors, which don't compare
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
        return  # it writes, and returns something new: `out` would need the layout
    fixed = tuple([GIVEN if takes else local for takes, local in zip(given, args, strict=True)])
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    _known[key] = Known(op, facts, fixed, out)


def _is_given(facts: OpFacts, place: int, argument: Any) -> bool | None:
    """Whether each call brings this argument of the local op itself.

    True for a sharded tensor, a list of them, or a number that is an operand: its value decides
    nothing. None for plain tensors and mixed lists: such a call isn't learnt.
    """
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
    """The key of a call: the local op and its results' layouts follow from it.

    Tensors count by layout, operands by type, other arguments by type and value. None if an
    argument is of another type, like a plain tensor.
    """
    numbers = facts_of(op).number_args
    key: list[Any] = [op._op]  # the builtin, as it has its hash in C
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
                    key += (kind, _static(kind, item))
                else:
                    return None
            key.append(None)  # the end of the list: else [a], b and [a, b] would have one key
        elif kind in FIXED or kind in NUMBERS:
            key += (kind, _static(kind, argument))
        else:
            return None
    for name, argument in kwargs.items():
        kind = type(argument)
        if kind is float and name in numbers:
            key += (name, kind)
        elif kind in FIXED or kind in NUMBERS:
            key += (name, kind, _static(kind, argument))
        else:
            return None
    return tuple(key)


def _static(kind: type, argument: Any) -> Any:
    """The part of a key for an argument that counts by its value."""
    # as text, by which 0.0 and -0.0 differ; either part of a complex number may be -0.0
    return str(argument) if kind is complex or not argument else argument


def _memory_of(argument: Any) -> Any:
    """The materialized local tensor of an argument, or of each item of a list.

    None if one isn't materialized. Other arguments are returned as they are.
    """
    kind = type(argument)
    if kind is tensor_types.sharded_class:
        value = argument._value
        return value.data if value.slot is None and value.failure is None else None
    if kind is list or kind is tuple:
        found = [_memory_of(item) for item in argument]
        return None if any(item is None for item in found) else found
    return argument


def _laid_out(local: torch.Tensor, layout: ShardLayout) -> Any:
    """The sharded tensor on a new value, which holds the local result."""
    value = Value()
    value.data = local
    return tensor_types.new_sharded(value, layout, local)
