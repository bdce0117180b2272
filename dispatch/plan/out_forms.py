"""Takes calls with `out=` apart, so that they can be fused.

In: a graph. Out: the graph with two calls in place of each of those that have something to be fused
with: the call without `out=`, and a copy of its result into `out`. Called for plans with kernels.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain

import torch

from lazy_tensor.dispatch.ops.schema import facts_of, functional_of
from lazy_tensor.dispatch.plan.graph import Graph, may_fail, with_nodes
from lazy_tensor.dispatch.trie.trace import Node
from lazy_tensor.kernels.fusible import refuses
from lazy_tensor.kernels.segment import Ref

COPY = facts_of(torch.ops.aten.copy_.default)


def expand_out_forms(graph: Graph) -> Graph:
    """The graph with such calls taken apart; `graph` itself if nothing changes.

    A call that may raise stays whole: behind the error `out` has what its kernel wrote until then.
    """
    first_new = 1 + max(graph.spec, default=0)
    parts = {
        id(node): _parts(node, graph, first_new + i)
        for i, node in enumerate(graph.nodes)
        if node.facts.is_out and not may_fail(graph, node)
    }
    if not parts:
        return graph
    # of each call that can be fused: the memory that it makes or writes, and reads, by its owners
    made: dict[int, set[int]] = {}
    read: dict[int, set[int]] = {}
    for node in graph.nodes:
        one = parts.get(id(node), (node,))[0]
        if one.view_of is None and refuses(one.call) is None:
            made[id(node)] = {graph.root[slot] for slot in (*node.makes, *node.writes)}
            read[id(node)] = {graph.root[slot] for slot in one.reads}
    n_made, n_read = (Counter(chain.from_iterable(of.values())) for of in (made, read))

    def has_company(key: int) -> bool:
        """Whether another of these calls makes what this one reads, or reads what it makes."""
        return any(n_made[root] > (root in made[key]) for root in read[key]) or any(
            n_read[root] > (root in read[key]) for root in made[key]
        )

    taken = {key for key in parts if key in made and has_company(key)}
    return with_nodes(
        graph,
        [
            part
            for node in graph.nodes
            for part in (parts[id(node)] if id(node) in taken else (node,))
        ],
    )


def _parts(node: Node, graph: Graph, new: int) -> tuple[Node, ...]:
    """The call that gives a new tensor, in the slot `new`, and the copy of it into `out`."""
    functional, (out,), (name,) = functional_of(node.facts.op), node.writes, node.facts.writes
    assert functional is not None, "else it isn't recorded"
    given = replace(
        node,
        facts=facts_of(functional),
        kwargs=tuple(one for one in node.kwargs if one[0] != name),
        outs=(new,),
        # A call is recorded only if its `out` has the metadata of the new tensor.
        specs=(graph.spec[out],),
        writes=(),
    )
    return given, replace(node, facts=COPY, args=(Ref(out), Ref(new)), kwargs=())
