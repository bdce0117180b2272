"""Cuts a graph into units: single calls, and segments of which a backend makes one kernel.

Fusible calls get a depth, connected ones of equal depth form a group, and a group is cut into
segments of limited length. In: a `Graph` and a backend's `refuses`. Out: `Unit`s in an order that
keeps every effect in place and stays close to the program's. Called by `plan_cache` and
`second_tier`. Pure: no tensor data, no caches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazy_tensor.dispatch.ops.may_raise import divides_integers
from lazy_tensor.dispatch.plan.dependencies import Marks, dependencies, in_order
from lazy_tensor.dispatch.plan.graph import MARKS, Graph, may_fail
from lazy_tensor.dispatch.trie.trace import Node
from lazy_tensor.kernels.backend import Backend, CountsPaths
from lazy_tensor.kernels.fusible import DTYPES, SLOW_ALONE
from lazy_tensor.kernels.segment import ScalarRef, base_name

MAX_GAP = 160
"""Recorded calls between two members from which a segment is cut there. The values that the first
part makes would have to live until the second has its inputs."""
MAX_MEMBERS = 128
"""Calls of a segment, views left out."""

# Its offset counts from the begin of the storage, but a kernel's inputs begin at 0.
NEVER_INSIDE = frozenset({torch.ops.aten.as_strided.default})


@dataclass(slots=True)
class Unit:
    """Calls that run together: one of any kind, or some that a backend makes a kernel of."""

    nodes: list[Node]
    is_fused: bool


class Fusibility:
    """Which nodes may be in a kernel. The backend is asked once for each node.

    `backend_on` gives the backend for a device's type: a graph may hold work for several devices.
    The sizes of the slots in `varying` are others in each run.
    """

    def __init__(
        self,
        graph: Graph,
        backend_on: Callable[[str], Backend],
        varying: frozenset[int] = frozenset(),
    ) -> None:
        self._graph = graph
        self._varying = varying
        self._backend_on = backend_on
        self._known: dict[int, str | None] = {}

    def parts(self, nodes: list[Node], members: list[int]) -> Iterator[list[int]]:
        """Cut a group, nodes by number, into runs that one kernel can hold."""
        backend = self._backend_of(nodes[members[0]])
        for part in _cut(members):
            if isinstance(backend, CountsPaths):
                yield from self._cut_by_paths(backend, nodes, part)
            else:
                yield part

    def _backend_of(self, node: Node) -> Backend:
        return self._backend_on(device_of(self._graph, node).type)

    def pays(self, nodes: Sequence[Node]) -> bool:
        """Whether a kernel of these calls may be faster than the calls are in eager."""
        if len(nodes) > 1:
            return True  # what isn't fusible is alone
        is_on_cpu = device_of(self._graph, nodes[0]).type == "cpu"
        is_slow = is_on_cpu and base_name(nodes[0].facts.op) in SLOW_ALONE
        return is_slow and self.reason_against(nodes[0]) is None

    def _cut_by_paths(
        self, backend: CountsPaths, nodes: list[Node], members: list[int]
    ) -> Iterator[list[int]]:
        """Cut a run before more than `max_paths` lead from its inputs to one of its values.

        nvFuser walks all paths. Their number doubles with each use of a value together with what
        was made from it, so its time would have no bound.
        """
        part: list[int] = []
        paths: dict[int, int] = {}  # that lead to a value, by the owner of its memory
        for i in members:
            node = nodes[i]
            through = backend.paths(node.call)
            found = through * sum(paths.get(self._graph.root[slot], 1) for slot in node.reads)
            if found > backend.max_paths and part:
                # the next run begins here, where all that the node reads is an input: one path each
                yield part
                part, paths, found = [], {}, through * len(node.reads)
            part.append(i)
            paths.update((self._graph.root[s], found) for s in (*node.makes, *node.writes))
        yield part

    def reason_against(self, node: Node) -> str | None:
        """Why `node` can't be inside a kernel; None if it can."""
        key = id(node)
        if key not in self._known:
            self._known[key] = self._find_reason(node)
        return self._known[key]

    def _find_reason(self, node: Node) -> str | None:
        # these checks need the graph, of which the backend sees one call
        facts, spec = node.facts, self._graph.spec
        if facts.op in NEVER_INSIDE:
            return "a view with an absolute offset"
        if facts.op in MARKS or any(map(self._graph.is_marked, node.reads)):
            return "a conjugate or negative view"
        specs = [spec[slot] for slot in node.reads]
        if not self._varying.isdisjoint((*node.reads, *node.makes)):
            return "its sizes vary"
        if divides_integers(facts.op, [s.dtype for s in specs]):
            return "it checks its divisor"
        if any(s.dtype not in DTYPES for s in specs):
            return "a dtype that kernels don't take"
        device = device_of(self._graph, node)
        # as in eager, a 0-dim CPU tensor may be an operand of a tensor on another device
        elsewhere = [s for s in specs if s.device != device]
        if any(s.size or s.device.type != "cpu" for s in elsewhere):
            return "tensors on several devices"
        if any(0 in s.size for s in (*specs, *filter(None, node.specs))):
            return "an empty tensor"
        if not _takes_scalars(node):
            return "a changing number that only eager takes"
        return self._backend_of(node).refuses(node.call, specs)


def _takes_scalars(node: Node) -> bool:
    """Whether run-time scalars stand only where the op does arithmetic.

    An argument like `eps: float` must be known when the kernel is compiled.
    """
    if not (any(map(_has_scalar, node.args)) or any(_has_scalar(a) for _, a in node.kwargs)):
        return True
    schema = node.facts.op._schema.arguments
    by_name = {argument.name: argument for argument in schema}
    placed = [(schema[i], a) for i, a in enumerate(node.args)]
    placed += [(by_name[name], a) for name, a in node.kwargs]
    return all(
        str(described.type) in ("number", "Tensor", "Optional[number]")
        for described, argument in placed
        if _has_scalar(argument)
    )


def _has_scalar(argument: Any) -> bool:
    if type(argument) is tuple:
        return any(_has_scalar(item) for item in argument)
    return isinstance(argument, ScalarRef)


def units_of(graph: Graph, fusible: Fusibility | None) -> list[Unit]:
    """The graph's units, in order. Views are left out: the plan makes one where it is needed.

    Without `fusible` every call is its own unit, in the program's order but for collectives.
    """
    nodes = [node for node in graph.nodes if node.view_of is None]
    marks = Marks(graph, nodes)
    if fusible is None:
        if not any(node.facts.communicates for node in nodes):
            return [Unit([node], False) for node in nodes]
        single = [[node] for node in nodes]
        depends = dependencies(graph, nodes, marks)
        return [Unit(single[i], False) for i in in_order(graph, single, nodes, depends)]
    takes = [fusible.reason_against(node) is None for node in nodes]
    depends = dependencies(graph, nodes, marks)
    through = [_through_views(graph, node, fusible) for node in nodes]
    groups = list(_Groups(graph, nodes, takes, depends, marks, through).found())
    parts = [[nodes[i] for i in part] for group in groups for part in fusible.parts(nodes, group)]
    units = [Unit(part, fusible.pays(part)) for part in parts]
    # A unit that can't be one kernel falls apart into single calls.
    flat: list[Unit] = []
    for unit in units:
        if unit.is_fused and not _aliasing_is_safe(graph, unit, fusible):
            unit.is_fused = False
        flat += [unit] if unit.is_fused else [Unit([node], False) for node in unit.nodes]
    return [flat[u] for u in in_order(graph, [unit.nodes for unit in flat], nodes, depends)]


def whole_units(graph: Graph, fusible: Fusibility) -> list[Unit] | None:
    """The units of a plan that is compiled whole: runs of calls that the backend takes, as long as
    possible. None if memory that a run writes is reached through several of its inputs.

    Library calls count as taken (see `WHOLE`), so no depths are needed: runs follow the program. A
    call that the backend refuses is put before the run that it interrupts, if neither uses what the
    other makes or writes. Else the run ends there.

    A run whose calls may raise must not write lasting memory, because its error comes at its end:
    all its writes would have happened, also those that eager would not have come to.
    """
    units: list[Unit] = []
    run: list[Node] = []
    changed: set[int] = set()  # memory that the run makes or writes
    read: set[int] = set()
    lasting = graph.lasting
    # whether a call of the run may raise, and whether one writes memory that outlives the flush
    may_raise = written = False

    def end_run() -> None:
        nonlocal may_raise, written
        if run:
            units.append(Unit([*run], True))
        run.clear()
        changed.clear()
        read.clear()
        may_raise = written = False

    for node in graph.nodes:
        if node.view_of is not None:
            continue  # made where it is needed
        reads, changes = {graph.root[slot] for slot in node.reads}, _touched(graph, node)
        fails = may_fail(graph, node)
        writes_on = any(graph.root[slot] in lasting for slot in node.writes)
        # a call that may raise isn't put before the run, whose writes and errors come first; nor is
        # a write that eager would not have come to
        if fusible.reason_against(node) is not None:
            keeps_place = fails or (writes_on and may_raise)
            if keeps_place or (reads | changes) & changed or changes & read:
                end_run()
            units.append(Unit([node], False))
            continue
        if (
            _through_views(graph, node, fusible) & changed
            or (writes_on and may_raise)
            or (fails and written)
        ):
            end_run()
        run.append(node)
        changed |= changes
        read |= reads
        may_raise |= fails
        written |= writes_on
    end_run()
    are_safe = all(_aliasing_is_safe(graph, unit, fusible) for unit in units if unit.is_fused)
    return units if are_safe else None


@dataclass
class _Groups:
    """Groups of connected fusible nodes of equal depth; every other node is alone.

    The depth of a node counts the boundaries on the longest path from the inputs to it. Boundaries
    are calls that are not fusible, and 0-dim results that larger tensors use (a norm, a loss
    scale). Where a node depends on one that it can't join, it is deeper. So a group can't depend on
    itself through another group, which would leave no order to run them in. And a number that many
    groups use doesn't join them into one.

    `takes[i]` says whether node i is fusible; `through[i]` is the memory that it reads through
    views which no kernel can make. `parent` is a union-find forest of the groups.
    """

    graph: Graph
    nodes: list[Node]
    takes: list[bool]
    depends: list[set[int]]
    marks: Marks
    through: list[set[int]]

    def __post_init__(self) -> None:
        self.depth = [0] * len(self.nodes)
        self.parent = list(range(len(self.nodes)))

    def find(self, i: int) -> int:
        """The number that stands for the group of node `i`; shortens the path to it."""
        while self.parent[i] != i:
            self.parent[i] = self.parent[self.parent[i]]
            i = self.parent[i]
        return i

    def joins(self, j: int, i: int) -> bool:
        """Whether node `i`, which depends on node `j`, may be in one kernel with it.

        A view that the kernel can't make is one of its inputs. So what it shows must not be made or
        written in the same kernel.
        """
        takes, nodes = self.takes, self.nodes
        return (
            takes[i]
            and takes[j]
            and not self.marks.keeps_apart(j, i)
            and not (self.through[i] and self.through[i] & _touched(self.graph, nodes[j]))
            and not _is_boundary(nodes[j], nodes[i])
            and device_of(self.graph, nodes[j]) == device_of(self.graph, nodes[i])
        )

    def found(self) -> Iterator[list[int]]:
        """The groups, each as the numbers of its nodes."""
        self._sink_to_depth()
        self._delay_to_users()
        members: dict[int, list[int]] = defaultdict(list)
        for i in range(len(self.nodes)):
            members[self.find(i)].append(i)
        yield from members.values()

    def _sink_to_depth(self) -> None:
        """Give each node the least depth that its inputs allow; unite those that then can join."""
        depth = self.depth
        for i, before in enumerate(self.depends):
            # a call that isn't fusible runs behind the groups of its depth; its users are deeper
            if not self.takes[i]:
                depth[i] = max((depth[j] for j in before), default=0)
                continue
            depth[i] = max((depth[j] + (not self.joins(j, i)) for j in before), default=0)
            self._unite(i)

    def _unite(self, i: int) -> None:
        """Unite node `i` with the nodes of its depth that it depends on and can join."""
        for j in self.depends[i]:
            if self.depth[j] == self.depth[i] and self.joins(j, i):
                self.parent[self.find(i)] = self.find(j)

    def _delay_to_users(self) -> None:
        """Move each group as deep as its users allow, and unite it with them.

        An optimizer's `m.mul_(beta)` needs no gradient, so its least depth is 0. Its user `m.add_`
        comes behind backward: there the two are one kernel. Deeper groups go first, so that the
        depths of a group's users are final.
        """
        members: dict[int, list[int]] = defaultdict(list)
        users: list[list[int]] = [[] for _ in self.nodes]
        for i, before in enumerate(self.depends):
            members[self.find(i)].append(i)
            for j in before:
                users[j].append(i)
        depth = self.depth
        for group in sorted(members.values(), key=lambda g: depth[g[0]], reverse=True):
            inside = set(group)
            outside = [(j, i) for j in group for i in users[j] if i not in inside]
            if not (self.takes[group[0]] and outside):
                continue
            # as deep as a user that isn't fusible, or that may join; less deep than any other
            latest = min(depth[i] - (self.takes[i] and not self.joins(j, i)) for j, i in outside)
            if latest > depth[group[0]]:
                for j in group:
                    depth[j] = latest
                for i in {i for _, i in outside}:
                    self._unite(i)


def _through_views(graph: Graph, node: Node, fusible: Fusibility) -> set[int]:
    """The memory that `node` reads through views that no kernel can make inside."""
    return {
        graph.root[slot]
        for slot in node.reads
        if graph.is_view(slot) and graph.is_view(entry_of(graph, slot, fusible))
    }


def _touched(graph: Graph, node: Node) -> set[int]:
    """The memory that `node` makes or writes."""
    return {*node.makes, *(graph.root[slot] for slot in node.writes)}


def device_of(graph: Graph, node: Node) -> torch.device:
    """Where `node` runs: the device of its results or, if it only writes, of what it writes."""
    specs = [*node.specs, *(graph.spec[slot] for slot in (*node.writes, *node.reads))]
    return next((spec.device for spec in specs if spec is not None), torch.device("cpu"))


def _is_boundary(producer: Node, consumer: Node) -> bool:
    """Whether `producer` gives one element only, and `consumer` works on larger tensors."""
    produced = [spec for spec in producer.specs if spec is not None]
    if not produced or any(math.prod(spec.size) != 1 for spec in produced):
        return False
    return not consumer.specs or any(
        spec is not None and math.prod(spec.size) > 1 for spec in consumer.specs
    )


def _cut(group: list[int]) -> Iterator[list[int]]:
    """Cut a group, in program order, at gaps over MAX_GAP, and after MAX_MEMBERS."""
    group = sorted(group)
    part = [group[0]]
    for i in group[1:]:
        if i - part[-1] > MAX_GAP or len(part) == MAX_MEMBERS:
            yield part
            part = []
        part.append(i)
    yield part


def _aliasing_is_safe(graph: Graph, unit: Unit, fusible: Fusibility) -> bool:
    """Whether all memory that the unit writes is reached through one input of the kernel each.

    A kernel may assume that its inputs don't share memory if one of them is written (`Segment`).
    """
    own = {slot for node in unit.nodes for slot in node.outs}
    written = {graph.root[slot] for node in unit.nodes for slot in node.writes} - own
    entries: dict[int, set[int]] = defaultdict(set)
    for node in unit.nodes:
        for slot in node.reads:
            root = graph.root[slot]
            if root in written:
                entries[root].add(entry_of(graph, slot, fusible))
    return all(len(slots) == 1 for slots in entries.values())


def entry_of(graph: Graph, slot: int, fusible: Fusibility) -> int:
    """The slot that a kernel takes as its input for `slot`: the base, if it can make the views."""
    while graph.is_view(slot):
        node = graph.producer[slot]
        if fusible.reason_against(node) is not None:
            return slot
        assert node.view_of is not None
        slot = node.view_of
    return slot
