"""Takes calls with `out=` apart, so that they can be fused.

In: a graph. Out: the graph with two calls in place of each of those that kernels can hold: the call
without `out=`, and a copy of its result into `out`. Called for plans with kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from lazy_tensor.dispatch.ops.schema import facts_of, functional_of
from lazy_tensor.dispatch.plan.graph import Graph, with_nodes
from lazy_tensor.dispatch.trie.trace import Node
from lazy_tensor.kernels.fusible import refuses
from lazy_tensor.kernels.segment import Call, Ref

COPY = facts_of(torch.ops.aten.copy_.default)


def expand_out_forms(graph: Graph) -> Graph:
    """The graph with such calls taken apart; `graph` itself if nothing changes."""
    first_new = 1 + max(graph.spec, default=0)
    nodes = [
        part
        for i, node in enumerate(graph.nodes)
        for part in (_parts(node, graph, first_new + i) if node.facts.is_out else [node])
    ]
    return graph if len(nodes) == len(graph.nodes) else with_nodes(graph, nodes)


def _parts(node: Node, graph: Graph, new: int) -> Iterator[Node]:
    """The call that gives a new tensor in the slot `new`, and the copy of it; or `node` itself."""
    functional = functional_of(node.facts.op)
    (out,) = node.writes
    given = tuple((name, value) for name, value in node.kwargs if name != node.facts.writes[0])
    spec = graph.spec[out]  # that of the new tensor, too: else the call isn't recorded
    if functional is None or refuses(Call(functional, node.args, given, (spec,))) is not None:
        yield node
        return
    yield replace(
        node, facts=facts_of(functional), kwargs=given, outs=(new,), specs=(spec,), writes=()
    )
    yield replace(node, facts=COPY, args=(Ref(out), Ref(new)), kwargs=())
