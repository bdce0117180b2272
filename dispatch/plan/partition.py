"""Cuts a graph into units: single calls, and segments that a backend makes one kernel of.

In: a `Graph` and a backend's `refuses`. Out: `Unit`s in an order that keeps every effect in place
and stays close to the program's. Pure: no tensor data, no caches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lazy_tensor.dispatch.ops.may_raise import divides_integers
from lazy_tensor.dispatch.plan.dependencies import Marks, dependencies, in_order
from lazy_tensor.dispatch.plan.graph import Graph, may_fail
from lazy_tensor.dispatch.trie.trace import Node
from lazy_tensor.kernels.backend import Backend, CountsPaths
from lazy_tensor.kernels.segment import Call, ScalarRef

MAX_GAP = 160
"""Recorded calls between two members after which a segment is cut: values it holds live longer."""
MAX_MEMBERS = 128

FUSIBLE_DTYPES = frozenset({
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
})  # fmt: skip

# A view with an absolute offset means something else inside a kernel, whose inputs start at 0.
NEVER_INSIDE = frozenset({torch.ops.aten.as_strided.default})
MARKS = frozenset({torch.ops.aten._conj.default, torch.ops.aten._neg_view.default})
"""Views that only set a bit, which kernels don't know."""


@dataclass(slots=True)
class Unit:
    """Calls that run together: one of any kind, or several that a backend fuses."""

    nodes: list[Node]
    is_fused: bool


class Fusibility:
    """Which nodes a backend takes, asked once a node. `backend_on` says whose nodes are which: a
    graph may hold work for several devices.

    Where a backend counts paths, a segment ends before more than it can bear lead to one of its
    values.
    """

    def __init__(self, graph: Graph, backend_on: Callable[[str], Backend]) -> None:
        self._graph = graph
        self._backend_on = backend_on
        self._known: dict[int, str | None] = {}

    def parts(self, nodes: list[Node], members: list[int]) -> Iterator[list[int]]:
        """The members, nodes by number, in runs that a kernel can hold."""
        backend = self._backend_of(nodes[members[0]])
        for part in _cut(members):
            if isinstance(backend, CountsPaths):
                yield from self._cut_by_paths(backend, nodes, part)
            else:
                yield part

    def _backend_of(self, node: Node) -> Backend:
        return self._backend_on(device_of(self._graph, node).type)

    def _cut_by_paths(
        self, backend: CountsPaths, nodes: list[Node], members: list[int]
    ) -> Iterator[list[int]]:
        part: list[int] = []
        paths: dict[int, int] = {}  # that lead to what owns the memory: views count as their bases
        for i in members:
            node = nodes[i]
            through = backend.paths(Call(node.facts.op, node.args, node.kwargs, node.specs))
            found = through * sum(paths.get(self._graph.root[slot], 1) for slot in node.reads)
            if found > backend.max_paths and part:
                yield part
                part, paths, found = [], {}, through * len(node.reads)
            part.append(i)
            made = {slot for slot in node.outs if slot is not None} | set(node.writes)
            paths.update((self._graph.root[slot], found) for slot in made)
        yield part

    def reason_against(self, node: Node) -> str | None:
        """Why `node` can't be inside a kernel; None if it can."""
        key = id(node)
        if key not in self._known:
            self._known[key] = self._find_reason(node)
        return self._known[key]

    def _find_reason(self, node: Node) -> str | None:
        facts, spec = node.facts, self._graph.spec
        if facts.op in NEVER_INSIDE:
            return "a view with an absolute offset"
        if facts.op in MARKS or any(self._is_marked(slot) for slot in node.reads):
            return "a conjugate or negative view"
        specs = [spec[slot] for slot in node.reads]
        if divides_integers(facts.op, [s.dtype for s in specs]):
            return "it checks its divisor"
        if any(s.dtype not in FUSIBLE_DTYPES for s in specs):
            return "a dtype that kernels don't take"
        device = device_of(self._graph, node)
        elsewhere = [s for s in specs if s.device != device]
        if any(s.size or s.device.type != "cpu" for s in elsewhere):
            return "tensors on several devices"
        if any(0 in s.size for s in (*specs, *filter(None, node.specs))):
            return "an empty tensor"
        if not _takes_scalars(node):
            return "a changing number that only eager takes"
        call = Call(facts.op, node.args, node.kwargs, node.specs)
        return self._backend_of(node).refuses(call, specs)

    def _is_marked(self, slot: int) -> bool:
        """Whether `slot` is a conjugate or negative view, or a view of one."""
        while self._graph.is_view(slot):
            node = self._graph.producer[slot]
            if node.facts.op in MARKS:
                return True
            assert node.view_of is not None
            slot = node.view_of
        return False


def _takes_scalars(node: Node) -> bool:
    """Whether run-time scalars stand only where the op does arithmetic (not as `eps: float`)."""
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
    """The graph's units, in order. Views are no units: who needs one makes it.

    Without `fusible` every call is its own unit, in program order but for collectives.
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
    units = [
        Unit([nodes[i] for i in part], takes[part[0]] and len(part) > 1)
        for group in groups
        for part in fusible.parts(nodes, group)
    ]
    flat: list[Unit] = []
    for unit in units:
        if unit.is_fused and not _aliasing_is_safe(graph, unit, fusible):
            unit.is_fused = False
        flat += [unit] if unit.is_fused else [Unit([node], False) for node in unit.nodes]
    return [flat[u] for u in in_order(graph, [unit.nodes for unit in flat], nodes, depends)]


def whole_units(graph: Graph, fusible: Fusibility) -> list[Unit] | None:
    """The units, each a run of calls that the backend takes, as long as may be. Another call goes
    before the run that it came in, if neither uses what the other makes or writes.

    A run whose calls may raise writes nothing that outlives the flush: an error comes at its end.
    None where memory that a run writes is reached in several ways.
    """
    units: list[Unit] = []
    run: list[Node] = []
    changed: set[int] = set()  # memory that the run makes or writes
    read: set[int] = set()
    lasting = graph.lasting
    may_raise = written = False  # a call of the run; memory that outlives the flush

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
            continue
        reads, changes = {graph.root[slot] for slot in node.reads}, _touched(graph, node)
        fails = may_fail(graph, node)
        if fusible.reason_against(node) is not None:
            if fails or (reads | changes) & changed or changes & read:
                end_run()
            units.append(Unit([node], False))
            continue
        writes_on = any(graph.root[slot] in lasting for slot in node.writes)
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


class _Groups:
    """Connected fusible nodes of equal depth; any other node alone.

    Depth counts the boundaries on the longest way from the inputs: calls that are not fusible, and
    0-dim results that larger tensors use (a norm, a loss scale). A group so can't depend on itself
    through another, and what many groups use does not make them one.
    """

    def __init__(
        self,
        graph: Graph,
        nodes: list[Node],
        takes: list[bool],
        depends: list[set[int]],
        marks: Marks,
        through: list[set[int]],
    ) -> None:
        self.graph = graph
        self.nodes = nodes
        self.takes = takes
        self.depends = depends
        self.marks = marks
        self.through = through
        self.depth = [0] * len(nodes)
        self.parent = list(range(len(nodes)))

    def find(self, i: int) -> int:
        while self.parent[i] != i:
            self.parent[i] = self.parent[self.parent[i]]
            i = self.parent[i]
        return i

    def joins(self, j: int, i: int) -> bool:
        """Whether `i`, which depends on `j`, may be in one kernel with it."""
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
        self._sink_to_depth()
        self._delay_to_users()
        members: dict[int, list[int]] = defaultdict(list)
        for i in range(len(self.nodes)):
            members[self.find(i)].append(i)
        yield from members.values()

    def _sink_to_depth(self) -> None:
        """As early as inputs allow; unite what then stands at one depth."""
        depth = self.depth
        for i, before in enumerate(self.depends):
            if not self.takes[i]:
                depth[i] = max((depth[j] for j in before), default=0)
                continue
            depth[i] = max((depth[j] + (not self.joins(j, i)) for j in before), default=0)
            self._unite(i)

    def _unite(self, i: int) -> None:
        for j in self.depends[i]:
            if self.depth[j] == self.depth[i] and self.joins(j, i):
                self.parent[self.find(i)] = self.find(j)

    def _delay_to_users(self) -> None:
        """As late as users allow, group by group from the last: `m.mul_(beta)` joins its `add_`."""
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
            latest = min(depth[i] - (self.takes[i] and not self.joins(j, i)) for j, i in outside)
            if latest > depth[group[0]]:
                for j in group:
                    depth[j] = latest
                for i in {i for _, i in outside}:
                    self._unite(i)


def _through_views(graph: Graph, node: Node, fusible: Fusibility) -> set[int]:
    """The memory that `node` reads through views which no kernel can make inside."""
    return {
        graph.root[slot]
        for slot in node.reads
        if graph.is_view(slot) and graph.is_view(entry_of(graph, slot, fusible))
    }


def _touched(graph: Graph, node: Node) -> set[int]:
    """The memory that `node` makes or writes."""
    return {slot for slot in node.outs if slot is not None} | {graph.root[s] for s in node.writes}


def device_of(graph: Graph, node: Node) -> torch.device:
    """Where `node` runs: where its results are, or, if it only writes, what it writes."""
    specs = [*node.specs, *(graph.spec[slot] for slot in (*node.writes, *node.reads))]
    return next((spec.device for spec in specs if spec is not None), torch.device("cpu"))


def _is_boundary(producer: Node, consumer: Node) -> bool:
    produced = [spec for spec in producer.specs if spec is not None]
    if not produced or any(math.prod(spec.size) != 1 for spec in produced):
        return False
    return not consumer.specs or any(
        spec is not None and math.prod(spec.size) > 1 for spec in consumer.specs
    )


def _cut(group: list[int]) -> Iterator[list[int]]:
    """A group in runs of at most MAX_MEMBERS without a gap over MAX_GAP; runs follow each other."""
    group = sorted(group)
    part = [group[0]]
    for i in group[1:]:
        if i - part[-1] > MAX_GAP or len(part) == MAX_MEMBERS:
            yield part
            part = []
        part.append(i)
    yield part


def _aliasing_is_safe(graph: Graph, unit: Unit, fusible: Fusibility) -> bool:
    """Whether memory that the unit writes is reached through one input only."""
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
    """The slot a kernel takes in to have `slot`: the base, if its views can be made inside."""
    while graph.is_view(slot):
        node = graph.producer[slot]
        if fusible.reason_against(node) is not None:
            return slot
        assert node.view_of is not None
        slot = node.view_of
    return slot
