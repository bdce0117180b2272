"""Runs a graph call by call, without a plan: for traces that are flushed for the first time.

In: a graph, its leaves and scalars. Out: the live values. Each result is compared with the metadata
it was recorded with, on which later ops and plans rely. Ops that gave something else are collected
in `MISJUDGED` and `OWN_STRIDES`. Called by `flush`, `aside` and, for what is left, by `failure`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch.plan.graph import Graph
from lazy_tensor.dispatch.trie.trace import Node
from lazy_tensor.kernels.segment import TensorSpec, last_uses, substituted


def interpret(
    graph: Graph, leaves: list[torch.Tensor], scalars: list[complex]
) -> tuple[torch.Tensor, ...]:
    """The values of `graph.live`. Empties `leaves`.

    After an exception `failure` reads this function's variables `graph`, `values`, `scalars`,
    `node` and `done` from the traceback, so their names matter.
    """
    values: dict[int, Any] = {
        leaf.slot: data for leaf, data in zip(graph.leaves, leaves, strict=True)
    }
    leaves.clear()  # else the list would keep each leaf alive past its last use
    done: Node | None = None
    # Not called `node`: since Python 3.12 a comprehension's variable is one of the function's own.
    named = [[*each.reads, *each.makes] for each in graph.nodes]
    for node, dead in zip(graph.nodes, last_uses(named, graph.live), strict=True):
        done = run_node(node, values, scalars, graph.spec)  # noqa: F841  `failure` looks at it
        for slot in dead:
            del values[slot]
    return tuple(values[slot] for slot in graph.live)


def run_node(
    node: Node, values: dict[int, Any], scalars: list[complex], promised: Mapping[int, TensorSpec]
) -> Node:
    """Run one call on `values`, by slot, and add its outputs; `promised` are the recorded specs.

    Returns the node. After an exception `failure` looks whether the variable `results` was set:
    then the op has run.
    """
    args = [substituted(a, values, scalars) for a in node.args]
    kwargs = {name: substituted(a, values, scalars) for name, a in node.kwargs}
    results = node.facts.op._op(*args, **kwargs)
    made = (results,) if node.is_single else results
    for i, slot in enumerate(node.outs):
        if slot is not None:
            tensor, spec = made[i], promised[slot]
            # An op whose input already differs from the recorded one isn't to blame.
            if not is_of(tensor, spec) and all(is_of(values[r], promised[r]) for r in node.reads):
                MISJUDGED.add(node.facts.op)
            values[slot] = laid_out(tensor, node, spec)
    return node


def is_of(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    """Whether the tensor has the shape and dtype that were recorded."""
    return tensor.shape == spec.size and tensor.dtype == spec.dtype


def laid_out(tensor: torch.Tensor, node: Node, spec: TensorSpec) -> torch.Tensor:
    """The output of `node` with the recorded strides, by a copy where the kernel chose others.

    The program has seen the recorded strides already, on the lazy tensor. A view is left as it is:
    a copy would not share memory.
    """
    if not is_of(tensor, spec) or node.view_of is not None or has_strides(tensor, spec.stride):
        return tensor
    OWN_STRIDES.add(node.facts.op)
    copy = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=tensor.device)
    return copy.copy_(tensor)


MISJUDGED: set[OpOverload] = set()
"""Ops seen to give another shape or dtype than was recorded. `flush` empties the set, and has them
run at once from then on."""
OWN_STRIDES: set[OpOverload] = set()
"""Ops seen to choose other strides than were recorded. Plans have C++ copy their results."""


def has_strides(tensor: torch.Tensor, stride: tuple[int, ...]) -> bool:
    """Whether the tensor has these strides. Those of dims of one element don't count."""
    given = tensor.stride()
    return given == stride or all(
        n <= 1 or a == b for n, a, b in zip(tensor.shape, given, stride, strict=True)
    )
