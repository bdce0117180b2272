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
from lazy_tensor.dispatch.ops.schema import OpFacts
from lazy_tensor.dispatch.record import sync_points
from lazy_tensor.dispatch.run import watch
from lazy_tensor.dispatch.torch_private import count_writes, kernels_only
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.dispatch.trie.keys import NUMBERS
from lazy_tensor.dispatch.trie.trace import Trace, Value
from lazy_tensor.kernels.cache import on_clear
from lazy_tensor.sharding.layout import ShardLayout
from lazy_tensor.sharding.ops.decisions import key_of


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
    known = None if is_observed(owner) else _known.get(key_of(op, args, kwargs))
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
    # keywords are passed on as they are, and tensors among them don't compare
    if not all(type(a) in FIXED or type(a) in NUMBERS for a in request.kwargs.values()):
        return
    if kwargs != request.kwargs or len(args) != len(request.args):
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
    _known[key_of(request.op, request.args, request.kwargs)] = Known(op, facts, fixed, out)


def _is_given(facts: OpFacts, place: int, argument: Any) -> bool | None:
    """Whether each call brings this argument of the local op itself.

    True for a sharded tensor, a list of them, or a number that is an operand: its value decides
    nothing. None for plain tensors and mixed lists: such a call isn't learnt.
    """
    kind = type(argument)
    if kind is list or kind is tuple:
        if all(type(item) is tensor_types.sharded_class for item in argument):
            return True
        if any(isinstance(item, torch.Tensor) for item in argument):
            return None
    elif kind is tensor_types.sharded_class:
        return True
    elif kind not in NUMBERS:
        return False if kind in FIXED else None
    return place in facts.number_args


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
