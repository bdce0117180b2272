"""Takes calls with `out=` apart, so that they can be fused.

In: a graph. Out: the graph with two calls in place of each of those that have something to be fused
with: the call without `out=`, and a copy of its result into `out`. Called for plans with kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import torch

from lazy_tensor.dispatch.ops.schema import facts_of, functional_of
from lazy_tensor.dispatch.plan.graph import Graph, may_fail, with_nodes
from lazy_tensor.dispatch.trie.trace import Node
from lazy_tensor.kernels.fusible import refuses
from lazy_tensor.kernels.segment import Call, Ref

COPY = facts_of(torch.ops.aten.copy_.default)


def expand_out_forms(graph: Graph) -> Graph:
    """The graph with such calls taken apart; `graph` itself if nothing changes.

    A call that may raise stays whole: behind the error `out` has what its kernel wrote until then.
    """
    apart = [node for node in graph.nodes if node.facts.is_out and not may_fail(graph, node)]
    if not apart:
        return graph
    fusible = [node for node in graph.nodes if node.view_of is None and _is_fusible(node)]
    made = Counter(root for node in fusible for root in _made(graph, node))
    read = Counter(root for node in fusible for root in _read(graph, node))

    def has_company(node: Node) -> bool:
        """Whether another call that can be fused makes what `node` reads or reads what it makes."""
        its_made, its_read = _made(graph, node), _read(graph, node)
        return any(made[root] > (root in its_made) for root in its_read) or any(
            read[root] > (root in its_read) for root in its_made
        )

    taken = {id(node) for node in apart if _is_fusible(node) and has_company(node)}
    new, nodes = 1 + max(graph.spec), list[Node]()
    for node in graph.nodes:
        if id(node) in taken:
            nodes += _parts(node, graph, new)
            new += 1
        else:
            nodes.append(node)
    return with_nodes(graph, nodes)


def _made(graph: Graph, node: Node) -> Collection[int]:
    """The owners of the memory that a call makes or writes."""
    return {graph.root[slot] for slot in (*node.outs, *node.writes) if slot is not None}


def _read(graph: Graph, node: Node) -> Collection[int]:
    """The owners of the memory that a call reads, without that of an `out` which it only writes."""
    read = list(node.reads)
    if node.facts.is_out:
        read.remove(node.writes[0])
    return {graph.root[slot] for slot in read}


def _is_fusible(node: Node) -> bool:
    op, specs = node.facts.op, node.specs
    if node.facts.is_out:
        op, specs = functional_of(op) or op, (None,)
    return refuses(Call(op, node.args, _without_out(node), specs)) is None


def _without_out(node: Node) -> tuple[tuple[str, object], ...]:
    out = node.facts.writes[0] if node.facts.is_out else None
    return tuple((name, value) for name, value in node.kwargs if name != out)


def _parts(node: Node, graph: Graph, new: int) -> list[Node]:
    """The call that gives a new tensor, in the slot `new`, and the copy of it into `out`."""
    functional, (out,) = functional_of(node.facts.op), node.writes
    assert functional is not None, "else it isn't recorded"
    given = replace(
        node,
        facts=facts_of(functional),
        kwargs=_without_out(node),
        outs=(new,),
        # what is recorded has an `out` like the new tensor (see `infer.OUT_DIFFERS`)
        specs=(graph.spec[out],),
        writes=(),
    )
    return [given, replace(node, facts=COPY, args=(Ref(out), Ref(new)), kwargs=())]
