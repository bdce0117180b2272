"""Computes values of a trace without a flush: the trace stays pending.

In: a state and slots. Out: `Aside`, which runs one by one the calls that the slots depend on.
Leaves that these calls write are copied first. `debug_view` uses it for debuggers; `tape` and
`replay` use it for values that decide what a call does, such as `.item()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.plan.graph import Graph, graph_of
from lazy_tensor.dispatch.plan.interpret import interpret
from lazy_tensor.dispatch.plan.partition import units_of
from lazy_tensor.dispatch.plan.plan import Given, Plan, Planner, fuse_nothing
from lazy_tensor.dispatch.trie.trace import State


class Aside:
    """Computes the values of slots at a state, as often as it is called.

    `leaves` are the numbers of the trace's leaves that it needs. `communicates` says whether one of
    the calls is a collective: then other ranks would have to take part, and callers don't run it.
    """

    def __init__(self, state: State, *slots: int) -> None:
        self.state, self.slots = state, slots
        graph = graph_of(state.steps(), slots, effects=False)
        wanted = {graph.root[slot] for slot in slots}
        wanted.update(graph.root[one] for node in graph.nodes for one in node.reads)
        numbered = enumerate(graph.leaves)
        self.leaves = [i for i, leaf in numbered if graph.root[leaf.slot] in wanted]
        graph.leaves = tuple([graph.leaves[i] for i in self.leaves])
        self.communicates = any(node.facts.communicates for node in graph.nodes)
        self._graph = graph
        self._plan: Plan | None = None

    def plan(self, scalars: Sequence[complex]) -> None:
        """Run the calls by C++ from now on. That pays where the value is computed many times."""
        planner = Planner(self._graph, list(map(type, scalars)), None, self.state.varying)
        with suppress(Exception):  # what can't be planned is interpreted, as before
            self._plan = planner.plan(units_of(self._graph, None), fuse_nothing)

    def __call__(self, leaves: Sequence[Any], scalars: list[complex]) -> Sequence[torch.Tensor]:
        """The values for these leaves and scalars of the trace; raises what the ops raise."""
        with torch_private.kernels_only():
            # `interpret` and plans empty the list of leaves that they get
            own = _with_copies(self._graph, [leaves[i] for i in self.leaves])
            if self._plan is None:
                return interpret(self._graph, own, list(scalars))
            given: Given = []
            self._plan.run(own, list(scalars), given)
            (found,) = given
            return found


def _with_copies(graph: Graph, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves, with copies in place of those whose memory the graph writes.

    The whole storage is copied once for each `root`. So leaves that share memory share the copy,
    and a write through one shows in the other.
    """
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
