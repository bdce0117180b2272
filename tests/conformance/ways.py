"""One program run eagerly, inside `lazy_mode`, and on wrapped inputs.

In: a `Program`. Out: an `Outcome` for each way: what it showed, raised and warned of. Knows nothing
of where programs come from.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

import lazy_tensor
from lazy_tensor.dispatch.stats import STATS
from lazy_tensor.dispatch.trie.trace import local


class Tolerance(NamedTuple):
    rtol: float
    atol: float


class Program(NamedTuple):
    """`prepare` makes plain arguments, new ones each time; `run` gives a tree of what is compared.

    `compares_values` is False where eager itself gives other values each time. Without a
    `tolerance` values must be equal bit for bit. Lazily no program may warn of anything else than
    eager does; of all that eager warns of if `compares_warnings`.
    """

    prepare: Callable[[], Any]
    run: Callable[[Any], Any]
    compares_values: bool = True
    compares_warnings: bool = False
    tolerance: Tolerance | None = None


class Seen(NamedTuple):
    """One leaf of a result: a tensor's metadata, and its value or the leaf that is no tensor."""

    meta: tuple[Any, ...]
    value: Any


@dataclass
class Outcome:
    seen: list[Seen]
    error: Exception | None
    warned: frozenset[str]
    n_recorded: int = 0
    n_fused: int = 0


def eager(program: Program) -> Outcome:
    return _outcome(program, lambda given: _valued(_described(program.run(given))))


def in_mode(program: Program) -> Outcome:
    def call(given: Any) -> list[Seen]:
        with lazy_tensor.lazy_mode():
            shown = _described(program.run(given))
        return _valued(shown)

    return _lazily(program, call)


def wrapped(program: Program) -> Outcome:
    def call(given: Any) -> list[Seen]:
        lazy: dict[int, Any] = {}

        def wrap(x: Any) -> Any:
            if id(x) not in lazy:
                lazy[id(x)] = lazy_tensor.wrap(x)
            return lazy[id(x)]

        arguments = pytree.tree_map_only((torch.Tensor, torch.nn.Module), wrap, given)
        return _valued(_described(program.run(arguments)))

    return _lazily(program, call)


WAYS = {"mode": in_mode, "wrapped": wrapped}


def _lazily(program: Program, call: Callable[[Any], list[Seen]]) -> Outcome:
    # What may be recorded at first, earlier programs may have spent: ops would prove nothing.
    local.trace.policy.reset()
    n_ops, n_segments = STATS.counts["ops"], STATS.counts["segments"]
    outcome = _outcome(program, call)
    try:
        lazy_tensor.flush()
    except Exception as error:
        outcome.error = outcome.error or error
    outcome.n_recorded = STATS.counts["ops"] - n_ops
    outcome.n_fused = STATS.counts["segments"] - n_segments
    return outcome


def _outcome(program: Program, call: Callable[[Any], list[Seen]]) -> Outcome:
    seen: list[Seen] = []
    raised: Exception | None = None
    given = program.prepare()
    torch.manual_seed(3)
    random.seed(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            seen = call(given)
        except Exception as error:  # what eager raises, lazy must raise
            raised = error.with_traceback(None)
    return Outcome(seen, raised, frozenset(f"{w.category.__name__}: {w.message}" for w in caught))


def _described(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Each leaf with its metadata as they are now, before anything is computed."""
    return [(_meta(leaf), leaf) for leaf in pytree.tree_leaves(tree)]


def _meta(leaf: Any) -> tuple[Any, ...]:
    if not isinstance(leaf, torch.Tensor):
        return (type(leaf),)
    strides: tuple[int, ...] = ()
    if leaf.layout is torch.strided and leaf.numel() > 1:
        # the stride of a dimension of size 1 is never used
        strides = tuple(s for n, s in zip(leaf.shape, leaf.stride(), strict=True) if n > 1)
    return (leaf.dtype, tuple(leaf.shape), strides, leaf.layout, leaf.requires_grad)


def _valued(shown: list[tuple[tuple[Any, ...], Any]]) -> list[Seen]:
    return [Seen(meta, _value(leaf)) for meta, leaf in shown]


def _value(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    # clone: the program's other run may share memory with this one's arguments
    return lazy_tensor.materialize(leaf).detach()
