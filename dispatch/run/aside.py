"""A value of a trace, computed aside, with the trace left as it was.

In: a state and a slot. Out: `Aside`, which computes the slot's value op by op from the leaves that
it depends on. Memory that the ops write is written in copies. Debuggers look at values so, and
`replay` at those that decide what a call does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.plan.graph import Graph, graph_of, with_nodes
from lazy_tensor.dispatch.plan.interpret import interpret
from lazy_tensor.dispatch.trie.trace import Node, State


class Aside:
    """What computes the value of a slot at a state. `leaves` are the numbers of those that it needs
    among the leaves of the trace; `communicates`: other ranks would have to take part."""

    def __init__(self, state: State, slot: int) -> None:
        whole = graph_of(state.steps(), (slot,))
        graph = with_nodes(whole, _needed_for(whole, slot))
        wanted = {graph.root[slot]}
        wanted.update(graph.root[one] for node in graph.nodes for one in node.reads)
        numbered = enumerate(graph.leaves)
        self.leaves = [i for i, leaf in numbered if graph.root[leaf.slot] in wanted]
        graph.leaves = tuple([graph.leaves[i] for i in self.leaves])
        self.communicates = any(node.facts.communicates for node in graph.nodes)
        self._graph = graph

    def __call__(self, leaves: Sequence[Any], scalars: list[complex]) -> torch.Tensor:
        """The value, for these leaves of the trace; raises what the ops raise."""
        with torch_private.kernels_only():
            given = _with_copies(self._graph, [leaves[i] for i in self.leaves])
            (found,) = interpret(self._graph, given, list(scalars))
        return found


def _needed_for(graph: Graph, slot: int) -> list[Node]:
    """The calls that one value depends on, in order."""
    wanted = {graph.root[slot]}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        touched = (*(out for out in node.outs if out is not None), *node.writes)
        if any(graph.root[one] in wanted for one in touched):
            kept.append(node)
            wanted.update(graph.root[one] for one in node.reads)
    kept.reverse()
    return kept


def _with_copies(graph: Graph, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves, copies in place of those whose memory is written; what shares memory still
    does."""
    written = {graph.root[slot] for node in graph.nodes for slot in node.writes}
    copies: dict[int, torch.UntypedStorage] = {}
    found: list[torch.Tensor] = []
    for leaf, data in zip(graph.leaves, leaves, strict=True):
        root = graph.root[leaf.slot]
        if root in written:
            if root not in copies:
                copies[root] = data.untyped_storage().clone()
            place = (data.storage_offset(), data.shape, data.stride())
            data = torch.empty(0, dtype=data.dtype, device=data.device).set_(copies[root], *place)
        found.append(data)
    return found
