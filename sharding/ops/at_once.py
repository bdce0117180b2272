"""Learns calls on sharded tensors that C++ may run at once, as the same op on this rank's memory.

In: a call that `compute` has executed by one local op, with its result, while nothing is recorded.
The next equal call is run by `dispatch/native/at_once.h`: its key holds the layouts of all tensors,
from which those of the results follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from lazy_tensor.dispatch.ops.request import FIXED, Request
from lazy_tensor.dispatch.ops.rules import Rule, rule_of
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.dispatch.trie.keys import NUMBERS
from lazy_tensor.kernels.cache import on_clear

# a call whose results have other placements isn't learnt: those hold masks, or order parts
# differently
PLACEMENTS = (Shard, Replicate, Partial)


def forget() -> None:
    """Drop all known calls, so that torch's rules are asked again."""
    if hits.native is not None:
        hits.native.forget_at_once()


on_clear(forget)


def learn(
    request: Request, op: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> None:
    """Note that a call on sharded tensors ran `op` on these local arguments, and nothing else.

    Only calls that C++ can repeat from the key are noted; others are ignored.
    """
    facts = request.facts
    # C++ knows a call by the program's arguments: it must not take a part of it for all of it
    if hits.native is None or not request.is_called:
        return
    if op is not request.op or rule_of(op) is not Rule.RECORD:
        return
    if facts.is_out or facts.changes_metadata:
        return
    # keywords are passed on as they are
    if not all(type(a) in FIXED or type(a) in NUMBERS for a in request.kwargs.values()):
        return
    if kwargs != request.kwargs or len(args) != len(request.args):
        return
    sizes = []
    for i, (given, local) in enumerate(zip(request.args, args, strict=True)):
        if isinstance(given, torch.Tensor) or _has_tensors(given) or given == local:
            continue
        if not isinstance(local, (list, tuple)) or not all(type(n) is int for n in local):
            return
        sizes.append((i, tuple(local)))
    layouts = None if facts.writes else _layouts_of(result)
    if layouts is None and facts.returns_arg is None and not facts.returns_nothing:
        return  # something new, of a kind that isn't known
    hits.native.learn_at_once(op, sizes, layouts, facts.returns_arg)


def _has_tensors(argument: Any) -> bool:
    return isinstance(argument, (list, tuple)) and any(
        isinstance(item, torch.Tensor) for item in argument
    )


def _layouts_of(result: Any) -> Any:
    """The layout of a result, a list of layouts for several; None if some have none."""
    results: Any = [result] if isinstance(result, torch.Tensor) else result
    if not (results and all(type(one) is tensor_types.sharded_class for one in results)):
        return None
    layouts = [one._layout for one in results]
    if not all(type(p) in PLACEMENTS for one in layouts for p in one.spec.placements):
        return None
    return layouts[0] if isinstance(result, torch.Tensor) else layouts
