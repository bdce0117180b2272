"""The graph of a trace: the recorded calls that are needed, and which slots share memory.

In: the steps from root to a state, and the live slots, which somebody still holds. Out: `Graph`,
without dead code, and by `eliminate_common_subexpressions` without repeated calls. `flush`,
`plan_cache` and `aside` call it. Pure: no tensor data, no caches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lazy_tensor.dispatch.ops.may_raise import may_raise
from lazy_tensor.dispatch.trie.trace import Leaf, Node
from lazy_tensor.kernels.segment import Ref, TensorSpec


@dataclass(slots=True)
class Graph:
    """Calls in program order, and facts of the slots that they name.

    `root` maps a slot to the slot that owns its memory: itself, the base of a view, or the first
    leaf of a shared storage. Reads and writes are compared by `root`. `live` are the slots to hand
    back, in the order asked for, repeats included. `producer` maps a slot to the call that makes
    it; leaves have none.
    """

    leaves: tuple[Leaf, ...]
    nodes: list[Node]
    live: tuple[int, ...]
    root: dict[int, int]
    spec: dict[int, TensorSpec]
    producer: dict[int, Node]

    @property
    def lasting(self) -> frozenset[int]:
        """The owners of memory that outlives the flush: of leaves and of live values."""
        return frozenset(
            self.root[slot] for slot in (*(leaf.slot for leaf in self.leaves), *self.live)
        )

    @property
    def parts_of_leaves(self) -> tuple[tuple[int, int], ...]:
        """The live views of leaves: the place of each in `live`, and the owner of its memory."""
        leaves = {leaf.slot for leaf in self.leaves}
        found = ((i, self.root[slot]) for i, slot in enumerate(self.live) if slot not in leaves)
        return tuple([(i, owner) for i, owner in found if owner in leaves])

    def is_view(self, slot: int) -> bool:
        node = self.producer.get(slot)
        return node is not None and node.view_of is not None

    def is_marked(self, slot: int) -> bool:
        """Whether `slot` is a conjugate or negative view, or a view of one."""
        while self.is_view(slot):
            node = self.producer[slot]
            if node.facts.op in MARKS:
                return True
            assert node.view_of is not None
            slot = node.view_of
        return False


def may_fail(graph: Graph, node: Node) -> bool:
    """Whether the call may raise for the values that it gets."""
    return may_raise(node.facts.op, [graph.spec[slot].dtype for slot in node.reads])


def graph_of(steps: Sequence[Node | Leaf], live: tuple[int, ...], *, effects: bool = True) -> Graph:
    """The graph of a trace's steps, without dead code.

    Without `effects` only what reaches the memory of `live` is kept: no other writes to leaves,
    collectives, or calls that may raise.
    """
    leaves = tuple(step for step in steps if isinstance(step, Leaf))
    nodes = [step for step in steps if isinstance(step, Node)]
    graph = Graph(leaves, nodes, live, {}, {}, {})
    _find_owners(graph)
    graph.nodes = _needed(graph, effects)
    return graph


def with_nodes(graph: Graph, nodes: list[Node]) -> Graph:
    """The graph with other nodes, in their order. Slots of nodes left out keep their `spec`."""
    changed = Graph(graph.leaves, nodes, graph.live, {}, graph.spec, {})
    _find_owners(changed)
    return changed


def _find_owners(graph: Graph) -> None:
    """Fill in `root`, `spec` and `producer`. Nodes come after what they view, so one pass does."""
    for leaf in graph.leaves:
        graph.root[leaf.slot] = leaf.slot if leaf.shares is None else graph.root[leaf.shares]
        graph.spec[leaf.slot] = leaf.spec
    for node in graph.nodes:
        for slot, spec in zip(node.outs, node.specs, strict=True):
            if slot is not None and spec is not None:
                graph.root[slot] = slot if node.view_of is None else graph.root[node.view_of]
                graph.spec[slot] = spec
                graph.producer[slot] = node


def _needed(graph: Graph, effects: bool) -> list[Node]:
    """The nodes whose values, or `effects`, somebody sees, found by one walk from the end.

    A storage counts as a whole: once something reads it, all earlier writes to it are needed. Calls
    that may raise are needed, because eager would have raised. So are collectives, because other
    ranks take part, whatever is live there.
    """
    # `wanted` has owners of memory, leaves among them: writes to leaves are seen outside
    wanted = {graph.root[slot] for slot in graph.live}
    if effects:
        wanted.update(graph.root[leaf.slot] for leaf in graph.leaves)
    kept: list[Node] = []
    # A view does nothing to memory. It is needed only if somebody names the view itself, not
    # whenever its base is read.
    wanted_views = set(graph.live)
    for node in reversed(graph.nodes):
        if effects and node.facts.communicates:
            is_needed = True
        elif node.view_of is not None:
            is_needed = any(slot in wanted_views for slot in node.outs)
        else:
            is_needed = any(graph.root[slot] in wanted for slot in (*node.makes, *node.writes)) or (
                effects and may_fail(graph, node)
            )
        if is_needed:
            kept.append(node)
            for slot in node.reads:
                wanted.add(graph.root[slot])
                wanted_views.add(slot)
    kept.reverse()
    return kept


CLONE = torch.ops.aten.clone.default
MARKS = frozenset({torch.ops.aten._conj.default, torch.ops.aten._neg_view.default})
"""Views that only set the conjugate or negative bit. Kernels read memory and ignore such bits."""
NEAR = 12
"""Calls from the last use of a value to its repeat, up to which the value is kept for that."""


def eliminate_common_subexpressions(graph: Graph) -> Graph:
    """The graph with repeated pure calls replaced by the value of the first one.

    Only where the first value is used after the repeat, or was last used shortly before. So hardly
    a value lives longer, and recomputation (`torch.utils.checkpoint`) still saves memory. Values
    that are written or handed back keep memory of their own. Copies that nobody can tell from
    their source are left out, too.
    """
    last_use = _last_uses(graph)
    written = {graph.root[slot] for node in graph.nodes for slot in node.writes}
    kept_apart = written | {graph.root[slot] for slot in graph.live}
    # How often each memory was written so far. Equal calls are repeats only if what they read has
    # the same versions. Arguments are compared by `repr`, because 0.0 == -0.0 and 1 == True.
    version: dict[int, int] = defaultdict(int)
    seen: dict[tuple[Any, ...], tuple[int, Node]] = {}
    names: dict[int, int] = {}  # slots of calls left out, and the slots that stand for them
    nodes: list[Node] = []
    for position, original in enumerate(graph.nodes):
        node = renamed(original, names) if names else original
        reads = tuple((slot, version[graph.root[slot]]) for slot in node.reads)
        key = (node.facts.op, repr(node.args), repr(node.kwargs), reads)
        first = seen.get(key)
        roots = {graph.root[slot] for slot in node.makes}
        # A value that is written or live needs memory of its own. A view has none, so only a live
        # one stays: slots in `live` aren't renamed.
        can_merge = (
            bool(node.outs)
            and not node.writes
            and not node.facts.communicates
            and not (
                roots & kept_apart if node.view_of is None else set(node.outs) & set(graph.live)
            )
        )
        if _is_bare_copy(graph, node) and can_merge and graph.root[node.reads[0]] not in written:
            names[next(iter(roots))] = node.reads[0]
            continue
        if first and can_merge and last_use[first[0]] >= position - NEAR:
            names.update(
                (new, old)
                for new, old in zip(node.outs, first[1].outs, strict=True)
                if new is not None and old is not None
            )
            # the value now lives as long as its repeat would have
            last_use[first[0]] = max(last_use[first[0]], last_use[position])
            continue
        if can_merge:
            seen[key] = (position, node)
        for slot in node.writes:
            version[graph.root[slot]] += 1
        nodes.append(node)
    return with_nodes(graph, nodes)


def _is_bare_copy(graph: Graph, node: Node) -> bool:
    """Whether the call copies its argument into memory of the same layout."""
    if node.facts.op is not CLONE or node.specs[0] != graph.spec[node.reads[0]]:
        return False
    return not graph.is_marked(node.reads[0])  # its clone has other numbers in memory


def _last_uses(graph: Graph) -> list[int]:
    """For each node the position of the last node that reads its value, through views too.

    Behind the last node for a live value, -1 for one that nobody reads.
    """
    last_by_root: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        for slot in node.reads:
            last_by_root[graph.root[slot]] = position
    for slot in graph.live:
        last_by_root[graph.root[slot]] = len(graph.nodes)
    return [
        max((last_by_root.get(graph.root[s], -1) for s in node.makes), default=-1)
        for node in graph.nodes
    ]


def _renamed(argument: Any, names: dict[int, int]) -> Any:
    if isinstance(argument, Ref):
        return Ref(names.get(argument.index, argument.index))
    if type(argument) is tuple:
        return tuple(_renamed(item, names) for item in argument)
    return argument


def renamed(node: Node, names: dict[int, int]) -> Node:
    """`node` with the slots in its arguments renamed; its outputs keep their slots."""
    return replace(
        node,
        args=_renamed(node.args, names),
        kwargs=tuple((name, _renamed(a, names)) for name, a in node.kwargs),
        writes=tuple(names.get(slot, slot) for slot in node.writes),
        view_of=None if node.view_of is None else names.get(node.view_of, node.view_of),
    )
