"""What must come before what: producers, uses of one memory, collectives, calls that may raise.

In: a graph's calls in program order. Out: for each the calls that it must follow; units in an order
that keeps to it. Pure: no tensor data, no caches.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence

from lazy_tensor.dispatch.plan.comm_schedule import with_overlap
from lazy_tensor.dispatch.plan.graph import Graph, may_fail
from lazy_tensor.dispatch.trie.trace import Node


class Marks:
    """Which nodes may raise, and which write memory that outlives the flush: neither passes the
    other, so that after an error what was written is what eager had written."""

    def __init__(self, graph: Graph, nodes: list[Node]) -> None:
        lasting = graph.lasting
        made = {slot: i for i, node in enumerate(nodes) for slot in node.outs if slot is not None}
        self.fails = [may_fail(graph, node) for node in nodes]
        # for a node that writes lasting memory the node that made it, -1 where that is older
        self.born = [
            min(
                (made.get(r, -1) for s in node.writes if (r := graph.root[s]) in lasting), default=i
            )
            for i, node in enumerate(nodes)
        ]

    def lasts(self, i: int) -> bool:
        return self.born[i] < i

    def keeps_apart(self, j: int, i: int) -> bool:
        """Whether `i` must follow `j`, though it may not use it, and never in one kernel."""
        return (self.fails[j] and self.born[i] < j) or (self.lasts(j) and self.fails[i])


def dependencies(graph: Graph, nodes: list[Node], marks: Marks) -> list[set[int]]:
    """For each node those it must follow: producers, uses of the same memory, what may raise."""
    depends: list[set[int]] = []
    last_failing: int | None = None
    last_collective: int | None = None
    writes_since: set[int] = set()
    last_write: dict[int, int] = {}
    readers: dict[int, set[int]] = defaultdict(set)
    for i, node in enumerate(nodes):
        before: set[int] = set()
        if last_failing is not None and (marks.fails[i] or marks.keeps_apart(last_failing, i)):
            before.add(last_failing)
        if marks.fails[i]:
            before |= writes_since
            last_failing, writes_since = i, set()
        if marks.lasts(i):
            writes_since.add(i)
        if node.issues:
            before |= set() if last_collective is None else {last_collective}
            last_collective = i
        written = {graph.root[slot] for slot in node.writes}
        read = {graph.root[slot] for slot in node.reads}
        for root in read | written:
            if root in last_write:
                before.add(last_write[root])
            if root in written:
                before |= readers[root]
        before |= {last_write[graph.root[slot]] for slot in node.after}
        for root in read:
            readers[root].add(i)
        for root in written:
            last_write[root] = i
            readers[root] = set()
        for slot in node.outs:
            if slot is not None:
                last_write[slot] = i
        before.discard(i)
        depends.append(before)
    return depends


def in_order(
    graph: Graph, units: Sequence[Sequence[Node]], nodes: list[Node], depends: list[set[int]]
) -> list[int]:
    """The units' numbers so that each follows what it depends on, else by its last node's place,
    collectives earlier and what waits for them later."""
    index = {id(node): i for i, node in enumerate(nodes)}
    unit_of = {index[id(node)]: u for u, unit in enumerate(units) for node in unit}
    place = [float(max(index[id(node)] for node in unit)) for unit in units]
    place = with_overlap(graph, nodes, depends, unit_of, place)
    followers: list[set[int]] = [set() for _ in units]
    n_before = [0] * len(units)
    for i, before in enumerate(depends):
        for j in before:
            first, second = unit_of[j], unit_of[i]
            if first != second and second not in followers[first]:
                followers[first].add(second)
                n_before[second] += 1
    ready = [(place[u], u) for u in range(len(units)) if n_before[u] == 0]
    heapq.heapify(ready)
    ordered: list[int] = []
    while ready:
        _, u = heapq.heappop(ready)
        ordered.append(u)
        for follower in followers[u]:
            n_before[follower] -= 1
            if n_before[follower] == 0:
                heapq.heappush(ready, (place[follower], follower))
    assert len(ordered) == len(units), "units depend on each other in a circle"
    return ordered
