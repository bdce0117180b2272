"""Rematerialization: values that backward needs are computed again there, instead of being kept.

That saves memory, and costs little where the calls are fused into backward's kernels. In: a graph
with a forward and its backward, and `remat_interval`. Out: the graph with fusible calls repeated
before the backward call that first needs their values. Called by `plan_cache.with_remat`. Pure: no
tensor data.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from dataclasses import dataclass, field, replace

from lazy_tensor.dispatch.plan.graph import Graph, may_fail, renamed, with_nodes
from lazy_tensor.dispatch.trie.trace import Node
from lazy_tensor.kernels.fusible import refuses
from lazy_tensor.kernels.segment import n_bytes

MAX_CHAIN = 64
"""Most calls, views left out, that are repeated for one value."""
SMALL = 8
"""A value of at most an eighth of the size of what is made from it is kept: a norm's mean."""
LEAST_BYTES = 1024
"""Bytes below which a value is kept: to repeat its call costs more than the memory is worth."""


def rematerialized(graph: Graph, interval: int) -> Graph:
    """`graph` with cheap calls of forward repeated in backward, instead of their values being kept.

    A value is repeated from values that are kept anyway, or from others that take at most half of
    its memory together. At most `interval` saved values are repeated from one another. The next
    one in such a chain is kept, so that chains, and with them kernels, don't grow with the depth of
    a model: otherwise each layer would have a longer segment than the one before.
    """
    chains = _Chains(graph, interval)
    chains.decide()
    return with_nodes(graph, _Rewrite(chains).nodes()) if chains.levels else graph


@dataclass(slots=True)
class _Chain:
    """What it takes to repeat one value.

    `nodes` are the calls, `keeps` the owners of values that must be kept for them. `level` is how
    many saved values are repeated one from another on the way.
    """

    nodes: list[Node] = field(default_factory=list)
    keeps: set[int] = field(default_factory=set)
    level: int = 1


class _Chains:
    """Decides which values are repeated.

    `levels` has those values, by the owner of their memory, each with the `level` of its chain. A
    *saved* value is one that forward makes and backward reads.
    """

    def __init__(self, graph: Graph, interval: int) -> None:
        self.graph = graph
        self.interval = interval
        self.levels: dict[int, int] = {}
        self.position = {id(node): i for i, node in enumerate(graph.nodes)}
        self.writes: dict[int, list[int]] = defaultdict(list)  # positions, by owner, ascending
        # by owner of a saved value: the position of the first backward call that reads it
        self.first_use: dict[int, int] = {}
        for i, node in enumerate(graph.nodes):
            for slot in node.writes:
                self.writes[graph.root[slot]].append(i)
            if node.in_backward:
                for slot in node.reads:
                    root = graph.root[slot]
                    if root in graph.producer and not graph.producer[root].in_backward:
                        self.first_use.setdefault(root, i)
        self.kept = {leaf.slot for leaf in graph.leaves} | {graph.root[s] for s in graph.live}

    def decide(self) -> None:
        """Go through the saved values in program order, and keep or repeat each.

        So earlier saved values, from which a chain may begin, have been decided on already.
        """
        for root in sorted(self.first_use):  # slots are numbered in program order
            chain = None if root in self.kept or root in self.levels else self._chain(root)
            if chain is None:
                self.kept.add(root)
                continue
            self.kept |= chain.keeps
            for node in chain.nodes:
                for slot in node.makes:
                    if slot not in self.kept:
                        self.levels[slot] = chain.level

    def _chain(self, root: int) -> _Chain | None:
        """How to repeat the value; None if it is better kept.

        Goes back from the call that makes it, until all that the calls read is kept or repeated.
        """
        size, use, chain = self._size(root), self.first_use[root], _Chain()
        wanted = [self.graph.producer[root]]
        if size < LEAST_BYTES or not self._is_repeatable(root, size):
            return None
        while wanted:
            node = wanted.pop()
            chain.nodes.append(node)
            if len(chain.nodes) > MAX_CHAIN:
                return None
            for source in {self.graph.root[slot] for slot in node.reads}:
                if self._is_written(source, node, use):
                    return None  # it would read another value in backward
                # a source is repeated already, kept already, or has to be decided on now
                if source in self.levels:
                    is_saved = source in self.first_use
                    chain.level = max(chain.level, self.levels[source] + is_saved)
                elif source not in self.kept and source not in chain.keeps:
                    maker = self.graph.producer[source]
                    if not self._is_repeatable(source, size):
                        chain.keeps.add(source)
                    elif maker not in chain.nodes and maker not in wanted:
                        wanted.append(maker)
        if chain.level > self.interval or 2 * sum(map(self._size, chain.keeps)) > size:
            return None
        return chain

    def _is_repeatable(self, root: int, size: int) -> bool:
        """Whether a value's call may be made twice, to repeat a value of this size.

        Not if the call may raise or writes, if its result is written, or if no kernel can hold it.
        Nor if the value is small, or its call reads much more than it makes, as a reduction does.
        """
        node = self.graph.producer[root]
        return (
            not (node.in_backward or node.writes or may_fail(self.graph, node))
            and root not in self.writes
            and self._size(root) * SMALL > size
            and all(self._size(self.graph.root[slot]) < SMALL * size for slot in node.reads)
            and refuses(node.call) is None
        )

    def _is_written(self, root: int, reader: Node, until: int) -> bool:
        """Whether the memory is written behind `reader` and before the position `until`."""
        places = self.writes.get(root, ())
        next_write = bisect(places, self.position[id(reader)])
        return next_write < len(places) and places[next_write] < until

    def _size(self, root: int) -> int:
        return n_bytes(self.graph.spec[root])


class _Rewrite:
    """Emits the graph's calls, and each repeated call before the first one in backward that needs
    it. Repeated calls make new slots, which backward then reads."""

    def __init__(self, chains: _Chains) -> None:
        self.graph = chains.graph
        self.repeated = chains.levels.keys()
        self.position = chains.position
        self.copies: dict[int, int] = {}  # the new slot of each slot that was repeated
        self.emitted: list[Node] = []
        self.n_slots = 1 + max(self.graph.spec)
        self.last_made: int | None = None  # the slot that backward made last

    def nodes(self) -> list[Node]:
        for node in self.graph.nodes:
            if node.in_backward and any(map(self._is_repeated, node.reads)):
                self._repeat_for(node)
                self.emitted.append(renamed(node, self.copies))
            else:
                self.emitted.append(node)
            if node.in_backward and node.outs and node.outs[0] is not None:
                self.last_made = node.outs[0]
        return self.emitted

    def _is_repeated(self, slot: int) -> bool:
        return self.graph.root[slot] in self.repeated

    def _repeat_for(self, node: Node) -> None:
        """Emit the calls that make what `node` reads of repeated values, where that isn't there.

        Each copy comes `after` a value of backward. Else nothing would keep it from running beside
        the original in forward, and its value would be alive all the time.
        """
        missing: dict[int, Node] = {}
        wanted = list(node.reads)
        while wanted:
            slot = wanted.pop()
            maker = self.graph.producer.get(slot)
            if (
                maker is not None
                and not maker.in_backward
                and self._is_repeated(slot)
                and slot not in self.copies
                and self.position[id(maker)] not in missing
            ):
                missing[self.position[id(maker)]] = maker
                wanted += maker.reads
        # what `node` waits for anyway; if it reads nothing of backward, the call before it
        others = tuple(
            s for s in node.reads if not self._is_repeated(s) and self._is_of_backward(s)
        )
        if not others and self.last_made is not None:
            others = (self.last_made,)
        for _, maker in sorted(missing.items()):
            self._emit_copy(maker, others)

    def _is_of_backward(self, slot: int) -> bool:
        maker = self.graph.producer.get(self.graph.root[slot])
        return maker is not None and maker.in_backward

    def _emit_copy(self, node: Node, after: tuple[int, ...]) -> None:
        """Emit a call again, with new slots for its outputs, as one of backward's."""
        made = {slot: self.n_slots + i for i, slot in enumerate(node.outs) if slot is not None}
        self.n_slots += len(node.outs)
        outs = tuple(None if slot is None else made[slot] for slot in node.outs)
        copy = replace(renamed(node, self.copies), outs=outs, in_backward=True, after=after)
        self.emitted.append(copy)
        self.copies |= {old: new for old, new in made.items() if self._is_repeated(old)}
