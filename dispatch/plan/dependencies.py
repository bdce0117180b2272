"""Which calls must follow which, and an order of units that keeps to it.

A call follows the producers of what it reads, and earlier uses of memory that it writes. Calls that
may raise follow each other, and no write to lasting memory passes one. Collectives follow each
other.

In: a graph's calls in program order, views left out. Out: for each the calls that it must follow;
and units of calls in order. Called by `partition`. Pure: no tensor data, no caches.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from graphlib import TopologicalSorter

from lazy_tensor.dispatch.plan.comm_schedule import with_overlap
from lazy_tensor.dispatch.plan.graph import Graph, may_fail
from lazy_tensor.dispatch.trie.trace import Node


class Marks:
    """Which nodes may raise, and which write lasting memory, which outlives the flush.

    Neither kind passes the other. So after an error, lasting memory holds what eager had written by
    then. Nodes are named by their numbers.
    """

    def __init__(self, graph: Graph, nodes: list[Node]) -> None:
        lasting = graph.lasting
        made = {slot: i for i, node in enumerate(nodes) for slot in node.makes}
        self.fails = [may_fail(graph, node) for node in nodes]
        # `born[i]`: if node i writes lasting memory, the number of the node that made this memory,
        # or -1 for a leaf's. Else i itself.
        self.born = [
            min(
                (made.get(r, -1) for s in node.writes if (r := graph.root[s]) in lasting), default=i
            )
            for i, node in enumerate(nodes)
        ]

    def lasts(self, i: int) -> bool:
        """Whether node `i` writes lasting memory that was there before it."""
        return self.born[i] < i

    def keeps_apart(self, j: int, i: int) -> bool:
        """Whether `i` must follow `j` even if it doesn't use its results, and in another kernel.

        If `j` may raise, `i` must not have written yet: unless it writes what was made behind `j`,
        which eager would never have had. If `j` writes lasting memory, `i` must not raise before
        that. One kernel that raises leaves open what it had written.
        """
        return (self.fails[j] and self.born[i] < j) or (self.lasts(j) and self.fails[i])


def dependencies(graph: Graph, nodes: list[Node], marks: Marks) -> list[set[int]]:
    """For each node the numbers of the nodes that it must follow; see the module for the rules."""
    depends: list[set[int]] = []
    last_failing: int | None = None
    last_collective: int | None = None
    writes_since: set[int] = set()  # nodes that write lasting memory, behind `last_failing`
    last_write: dict[int, int] = {}
    readers: dict[int, set[int]] = defaultdict(set)  # of a memory, since its last write
    for i, node in enumerate(nodes):
        before: set[int] = set()
        if last_failing is not None and (marks.fails[i] or marks.keeps_apart(last_failing, i)):
            before.add(last_failing)
        # Calls that may raise keep their order, so that the first error is eager's.
        if marks.fails[i]:
            before |= writes_since
            last_failing, writes_since = i, set()
        if marks.lasts(i):
            writes_since.add(i)
        # collectives are issued in the program's order, which is the same on all ranks
        if node.issues:
            before |= set() if last_collective is None else {last_collective}
            last_collective = i
        written = {graph.root[slot] for slot in node.writes}
        read = {graph.root[slot] for slot in node.reads}
        # Memory counts as a whole, by its owner: views of different parts aren't told apart.
        for root in read | written:
            if root in last_write:
                before.add(last_write[root])
            if root in written:
                before |= readers[root]
        # `after`: a value of backward that `remat` has a repeated call wait for
        before |= {last_write[graph.root[slot]] for slot in node.after}
        for root in read:
            readers[root].add(i)
        for root in written:
            last_write[root] = i
            readers[root] = set()
        last_write.update(dict.fromkeys(node.makes, i))
        before.discard(i)
        depends.append(before)
    return depends


def in_order(
    graph: Graph, units: Sequence[Sequence[Node]], nodes: list[Node], depends: list[set[int]]
) -> list[int]:
    """The units' numbers in an order in which each follows what it depends on.

    Otherwise they go by the place of their last node in the program, but for what `with_overlap`
    moves. Close to the program's order, memory lives about as long as in eager.
    """
    index = {id(node): i for i, node in enumerate(nodes)}
    unit_of = {index[id(node)]: u for u, unit in enumerate(units) for node in unit}
    place = [float(max(index[id(node)] for node in unit)) for unit in units]
    place = with_overlap(graph, nodes, depends, unit_of, place)
    before: dict[int, set[int]] = {u: set() for u in range(len(units))}
    for i, earlier in enumerate(depends):
        before[unit_of[i]].update(unit_of[j] for j in earlier)
    for u, others in before.items():
        others.discard(u)
    sorter = TopologicalSorter(before)
    sorter.prepare()  # raises for units that depend on each other in a circle
    # of the units that are ready, the first one by place comes next
    ready: list[tuple[float, int]] = []
    ordered: list[int] = []
    while sorter.is_active():
        for u in sorter.get_ready():
            heapq.heappush(ready, (place[u], u))
        _, u = heapq.heappop(ready)
        ordered.append(u)
        sorter.done(u)
    return ordered
