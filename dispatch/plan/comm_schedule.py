"""When collectives are issued and waited for: gathers one ahead, what reductions give one behind.

In: units of a graph with their places in the program. Out: other places, for as long as collectives
keep their order: ranks that flush elsewhere issue the same ones. Pure: no tensor data, no caches.
"""

from __future__ import annotations

from itertools import zip_longest

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch.plan.graph import Graph
from lazy_tensor.dispatch.trie.trace import Node

aten = torch.ops.aten
PACKS = frozenset({
    aten.cat.default, aten.clone.default, aten.constant_pad_nd.default, aten._to_copy.default,
})  # fmt: skip
"""What puts the parts together that a rank gives to a gather."""
MOST_PACKING = 1000


def gives_less(op: OpOverload) -> bool:
    """Whether a collective's input is what takes memory: all but gathers."""
    return "all_gather" not in op._schema.name


def with_overlap(
    graph: Graph,
    nodes: list[Node],
    depends: list[set[int]],
    unit_of: dict[int, int],
    place: list[float],
) -> list[float]:
    """The units' places, those changed that collectives wait for or that wait for collectives.

    A gather of what is there moves to where the one before it was first used: one is under way
    while the ranks compute with another. What a reduction gives is used no sooner than somebody
    needs it, or the next reduction is issued, so that one is under way at a time.
    """
    issued = [i for i, node in enumerate(nodes) if node.facts.communicates]
    if not issued:
        return place
    users = _users(graph, nodes)
    place = list(place)
    for previous, current in zip([None, *issued], issued, strict=False):
        if not gives_less(nodes[current].facts.op):
            _advance(nodes, depends, unit_of, place, users, previous, current)
    reductions = [i for i in issued if gives_less(nodes[i].facts.op)]
    for current, following in zip_longest(reductions, reductions[1:]):
        _delay(nodes, unit_of, place, users, current, following)
    return place


def _users(graph: Graph, nodes: list[Node]) -> list[list[int]]:
    """For each node those that use the memory it makes."""
    maker = {slot: i for i, node in enumerate(nodes) for slot in node.outs if slot is not None}
    users: list[list[int]] = [[] for _ in nodes]
    for i, node in enumerate(nodes):
        for root in {graph.root[slot] for slot in node.reads}:
            if root in maker and maker[root] != i:
                users[maker[root]].append(i)
    return users


def _advance(
    nodes: list[Node],
    depends: list[set[int]],
    unit_of: dict[int, int],
    place: list[float],
    users: list[list[int]],
    previous: int | None,
    current: int,
) -> None:
    """Let a gather follow the first use of the collective before it."""
    earliest = -1.0
    if previous is not None:
        earliest = min(
            (place[unit_of[i]] for i in users[previous]), default=place[unit_of[previous]]
        )
    chain, todo = {current}, [current]
    while todo and len(chain) <= MOST_PACKING:
        for i in depends[todo.pop()]:
            if place[unit_of[i]] > earliest and i != previous and i not in chain:
                chain.add(i)
                todo.append(i)
    if len(chain) > MOST_PACKING or not all(
        i == current or (nodes[i].facts.op in PACKS and chain.issuperset(users[i])) for i in chain
    ):
        return
    for i in chain:
        place[unit_of[i]] = min(place[unit_of[i]], earliest + 0.5)


def _delay(
    nodes: list[Node],
    unit_of: dict[int, int],
    place: list[float],
    users: list[list[int]],
    current: int,
    following: int | None,
) -> None:
    """Let what directly uses a reduction's result wait for its own users, or the next reduction."""
    latest = len(nodes) if following is None else place[unit_of[following]]
    for i in users[current]:
        unit = unit_of[i]
        needed = [place[unit_of[j]] for j in users[i] if unit_of[j] != unit]
        place[unit] = max(place[unit], min([latest, *needed]) - 0.25)
