"""Moves collectives in a plan so that ranks compute while one is under way.

A gather is issued one ahead: as soon as the result of the collective before it is first used. The
result of a reduction is used one behind: when it is needed, or when the next one is issued.

In: units of a graph with their places in the program. Out: changed places, by which
`dependencies.in_order` sorts the units. Collectives keep their order, because ranks that flush at
different points must issue the same ones in the same order. Pure: no tensor data, no caches.
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
"""Ops that assemble the input of a gather out of a rank's shards. They may move with the gather."""
MOST_PACKING = 1000
"""Calls before a gather up to which it is moved: more are no mere packing."""


def gives_less(op: OpOverload) -> bool:
    """Whether a collective's result is no larger than its input: all but gathers.

    Then the memory that it holds while it is under way is mostly its input.
    """
    return "all_gather" not in op._schema.name


def with_overlap(
    graph: Graph,
    nodes: list[Node],
    depends: list[set[int]],
    unit_of: dict[int, int],
    place: list[float],
) -> list[float]:
    """The units' places, changed for gathers, their packing, and users of reductions' results.

    A gather whose input is there early moves to the first use of the collective before it. So one
    gather is under way while the ranks compute with another. What uses a reduction's result moves
    later: to where it is needed, or to the next reduction. One is under way at a time.

    `nodes` has no views. `unit_of` maps a node's number to its unit's, `place` is by unit.
    """
    issued = [i for i, node in enumerate(nodes) if node.facts.communicates]
    if not issued:
        return place
    users = _users(graph, nodes)
    place = list(place)
    for previous, current in zip([None, *issued], issued, strict=False):
        # `previous` may be any collective: a gather never overtakes one
        if not gives_less(nodes[current].facts.op):
            _advance(nodes, depends, unit_of, place, users, previous, current)
    reductions = [i for i in issued if gives_less(nodes[i].facts.op)]
    for current, following in zip_longest(reductions, reductions[1:]):
        _delay(nodes, unit_of, place, users, current, following)
    return place


def _users(graph: Graph, nodes: list[Node]) -> list[list[int]]:
    """For each node the nodes that use memory it makes, through views too."""
    maker = {slot: i for i, node in enumerate(nodes) for slot in node.makes}
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
    """Move a gather to just behind the first use of the collective before it, if possible."""
    earliest = -1.0
    if previous is not None:
        earliest = min(
            (place[unit_of[i]] for i in users[previous]), default=place[unit_of[previous]]
        )
    # The chain is the gather and all that it depends on behind `earliest`. It moves only if that is
    # packing which nobody else uses: other calls stay where the program has them.
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
    # Places are whole numbers at first: a half comes behind that unit and before the next. Within
    # the chain, `in_order` keeps dependencies.
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
    """Move what uses a reduction's result to a later place, just before its own first user.

    The next reduction, `following`, is the latest place: it must wait for this one, because inputs
    stay in memory while reductions are under way.
    """
    latest = len(nodes) if following is None else place[unit_of[following]]
    for i in users[current]:
        unit = unit_of[i]
        needed = [place[unit_of[j]] for j in users[i] if unit_of[j] != unit]
        place[unit] = max(place[unit], min([latest, *needed]) - 0.25)
