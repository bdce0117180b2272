"""Plans: a trace's graph as one straight-line Python function, segments and single calls its steps.

In: a `Graph`, its units, the fusions of its segments. Out: `Plan`, a pure function of (leaves,
scalars) to the live values. Called by `flush`, which keeps plans in the trie's states.
"""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from lazy_tensor.dispatch.graph import Graph
from lazy_tensor.dispatch.in_flight import gives_less
from lazy_tensor.dispatch.interpret import MISJUDGED, OWN_STRIDES, is_of, laid_out, restrided
from lazy_tensor.dispatch.partition import Fusibility, Unit, entry_of
from lazy_tensor.dispatch.trace import Node
from lazy_tensor.kernels.bindings import callable_of
from lazy_tensor.kernels.fusion import Fusion
from lazy_tensor.kernels.segment import Call, Ref, ScalarRef, Segment, n_bytes

FusionOf = Callable[[Segment], Fusion]


@dataclass(slots=True)
class Step:
    """One line of a plan: what it reads, what it sets, and the nodes it stands for.

    `fusion` is a segment's; a single call has none, and `reason` says why it isn't part of one.
    """

    code: str
    reads: tuple[int, ...]
    sets: tuple[int, ...]
    nodes: tuple[Node, ...]
    fusion: Fusion | None = None
    reason: str = ""


_plan_numbers = itertools.count()


@dataclass(slots=True, weakref_slot=True)
class Plan:
    """`function(leaves, scalars)` gives the live values; its line `i + FIRST_LINE` is step `i`.

    `names` are the ops, kernels and constants that the steps name; `root`, `lasting` and
    `parts_of_leaves` are the graph's. `peak_bytes` is the most memory that values made by the plan
    take at a time, those inside a kernel left out. `communicates`: other ranks wait for it.
    `n_there` and `n_under_way` are the ops in kernels that are there, and that are being built, as
    of the last `told()`. `is_checked`: its calls were seen to give what was recorded.
    """

    function: Callable[[list[torch.Tensor], list[complex]], tuple[torch.Tensor, ...]]
    source: str
    steps: list[Step]
    fusions: tuple[Fusion, ...]
    filename: str
    names: dict[str, Any]
    root: dict[int, int]
    lasting: frozenset[int]
    parts_of_leaves: tuple[tuple[int, int], ...]
    peak_bytes: int
    communicates: bool
    _distinct: tuple[Fusion, ...] = field(init=False)
    _told: tuple[Any, ...] = ()
    n_there: int = 0
    n_under_way: int = 0
    is_checked: bool = True

    FIRST_LINE = 4

    def __post_init__(self) -> None:
        self._distinct = tuple(dict.fromkeys(self.fusions))

    def told(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The status of each fusion, and the reason for it."""
        now = [(fusion.status, fusion.reason) for fusion in self._distinct]
        if not self._told or now != self._told[0]:
            fusions = self.fusions
            statuses = tuple([fusion.status for fusion in fusions])
            self._told = (now, statuses, tuple([fusion.reason for fusion in fusions]))
            self.n_there = self._n_ops("measuring", "ready")
            self.n_under_way = self._n_ops("queued", "compiling")
        return self._told[1:]

    def _n_ops(self, *statuses: str) -> int:
        return sum(len(one.segment.calls) for one in self.fusions if one.status in statuses)

    def awaits_kernels(self) -> bool:
        """Whether more of its ops are in kernels that are being built than in those there are."""
        self.told()
        return self.n_under_way > self.n_there

    def observed(
        self,
        leaves: list[torch.Tensor],
        scalars: list[complex],
        around: Callable[[int], AbstractContextManager[Any]] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """What `function` gives, step `i` run within `around(i)`.

        What single calls give is checked, as by `interpret`, unless `is_checked` says that it was.
        """
        lines = self.source.splitlines()
        names = {**self.names, "around": around, "check": self._check, "wrong": set()}
        for i, step in enumerate(self.steps):
            place = self.FIRST_LINE - 1 + i
            line = lines[place].lstrip()
            if not self.is_checked and step.fusion is None and step.sets:
                values = "".join(f"v{slot}, " for slot in step.sets)
                check = f"{values}= check({i}, wrong, {values})"
                line = line.replace(step.code, f"{step.code}; {check}", 1)
            lines[place] = f" with around({i}): {line}" if around is not None else f" {line}"
        exec(compile("\n".join(lines), self.filename, "exec"), names)
        results: tuple[torch.Tensor, ...] = names["plan"](leaves, scalars)
        return results

    def _check(
        self, number: int, wrong: set[int], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """What step `number` gave, laid out as was recorded; `wrong` gets what can't be."""
        (node,), slots = self.steps[number].nodes, self.steps[number].sets
        specs = [spec for spec in node.specs if spec is not None]
        found = []
        is_given_right = wrong.isdisjoint(node.reads)
        for slot, tensor, spec in zip(slots, tensors, specs, strict=True):
            if not is_of(tensor, spec):
                wrong.add(slot)
                if is_given_right:
                    MISJUDGED.add(node.facts.op)
            found.append(laid_out(tensor, node, spec))
        return tuple(found)


class Planner:
    """Emits a plan's steps, making each view where it is first needed."""

    def __init__(
        self, graph: Graph, scalars: Sequence[complex], fusible: Fusibility | None
    ) -> None:
        self.graph = graph
        self.fusible = fusible
        self.scalar_types = [type(scalar) for scalar in scalars]
        self.names: dict[str, Any] = {}
        self.steps: list[Step] = []
        self.fusions: list[Fusion] = []
        self.made = {leaf.slot for leaf in graph.leaves}
        self.users = _users(graph)
        self.in_flight: dict[int, list[int]] = {}  # memory that collectives read: their waits
        self.reductions: list[int] = []  # the waits for the last one
        self.waits = {
            node.view_of: node.outs[0]
            for node in graph.nodes
            if node.facts.communicates and node.view_of is not None and node.outs[0] is not None
        }

    def plan(self, units: list[Unit], fusion_of: FusionOf) -> Plan:
        for unit in units:
            if unit.is_fused:
                self._add_segment(unit, fusion_of)
            else:
                self._add_call(unit.nodes[0])
        for slot in (*self.graph.live, *self.waits.values()):
            self._need(slot)
        return self._compiled()

    def _need(self, slot: int) -> None:
        """Make `slot`, a view, if it isn't yet; units make all else in time."""
        if slot in self.made:
            return
        node = self.graph.producer[slot]
        assert node.view_of is not None, "a unit runs after what it depends on"
        self._add_call(node)

    def _await_readers(self, nodes: Sequence[Node]) -> None:
        """Have collectives finished that read what is about to be written."""
        if self.in_flight:
            for node in nodes:
                for slot in node.writes:
                    for wait in self.in_flight.pop(self.graph.root[slot], ()):
                        self._need(wait)

    def _add_call(self, node: Node) -> None:
        reads = node.reads
        for slot in reads:
            self._need(slot)
        self._await_readers((node,))
        if node.issues:
            if gives_less(node.facts.op):
                for wait in self.reductions:
                    self._need(wait)  # its input stays as long as it is under way
                self.reductions = [self.waits[out] for out in node.outs if out in self.waits]
            for slot in reads:
                self.in_flight.setdefault(self.graph.root[slot], []).extend(
                    self.waits[out] for out in node.outs if out in self.waits
                )
        name = self._named("op", callable_of(node.facts.op, by_name=bool(node.kwargs)))
        args = [self._expression(a) for a in node.args]
        args += [f"{key}={self._expression(a)}" for key, a in node.kwargs]
        code = f"{_target(node)}{name}({', '.join(args)})"
        if node.facts.op in OWN_STRIDES and node.view_of is None:
            for out in node.outs:
                if out is not None:
                    fix = self._named("restrided", restrided)
                    stride = self._expression(self.graph.spec[out].stride)
                    code += f"; v{out} = {fix}(v{out}, {stride})"
        self._add(Step(code, reads, _made(node.outs), (node,), reason=self._reason(node)))

    def _add_segment(self, unit: Unit, fusion_of: FusionOf) -> None:
        assert self.fusible is not None
        segmenter = Segmenter(self.graph, self.fusible, self.users)
        segment, inputs, scalars, outputs = segmenter.build(unit.nodes, self.scalar_types)
        for slot in inputs:
            self._need(slot)
        self._await_readers(unit.nodes)
        fusion = fusion_of(segment)
        self.fusions.append(fusion)
        name = self._named("segment", fusion)
        tensors = "".join(f"v{slot}, " for slot in inputs)
        numbers = "".join(f"S[{i}], " for i in scalars)
        target = "".join(f"v{slot}, " for slot in outputs)
        code = f"{target}{'= ' if target else ''}{name}.run(({tensors}), ({numbers}))"
        self._add(Step(code, tuple(inputs), tuple(outputs), tuple(segmenter.inside), fusion))

    def _add(self, step: Step) -> None:
        self.made.update(step.sets)
        self.steps.append(step)

    def _reason(self, node: Node) -> str:
        """Why `node` runs by itself."""
        if node.view_of is not None:
            return "a view"
        if self.fusible is None:
            return "nothing is fused with these settings"
        return self.fusible.reason_against(node) or "nothing beside it can be fused with it"

    def _named(self, prefix: str, thing: Any) -> str:
        name = f"{prefix}{len(self.names)}"
        self.names[name] = thing
        return name

    def _expression(self, argument: Any) -> str:
        if isinstance(argument, Ref):
            return f"v{argument.index}"
        if isinstance(argument, ScalarRef):
            return f"S[{argument.index}]"
        if type(argument) is tuple:
            return f"({''.join(f'{self._expression(item)}, ' for item in argument)})"
        if argument is None or type(argument) in (int, bool, str):
            return repr(argument)
        return self._named("c", argument)

    def _compiled(self) -> Plan:
        leaves = self.graph.leaves
        taken = "".join(f"v{leaf.slot}, " for leaf in leaves)
        filename = f"<lazy_tensor plan {next(_plan_numbers)}>"
        lines = ["def plan(L, S):", f" {taken}= L" if taken else " pass", " L.clear()"]
        dying = self._dying()
        for step, dead in zip(self.steps, dying, strict=True):
            deletion = f"; del {', '.join(f'v{slot}' for slot in dead)}" if dead else ""
            lines.append(f" {step.code}{deletion}")
        lines.append(f" return ({''.join(f'v{slot}, ' for slot in self.graph.live)})")
        source = "\n".join(lines)
        exec(compile(source, filename, "exec"), self.names)
        graph = self.graph
        plan = Plan(
            function=self.names["plan"],
            source=source,
            steps=self.steps,
            fusions=tuple(self.fusions),
            filename=filename,
            names=self.names,
            root=graph.root,
            lasting=graph.lasting,
            parts_of_leaves=graph.parts_of_leaves,
            peak_bytes=self._peak_bytes(dying),
            communicates=any(node.facts.communicates for node in graph.nodes),
        )
        # for tracebacks, as long as the plan is kept
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        weakref.finalize(plan, linecache.cache.pop, filename, None)
        return plan

    def _dying(self) -> list[list[int]]:
        """For each step the values used last there: deleted then, memory goes back as in eager."""
        alive = set(self.graph.live)
        dying: list[list[int]] = []
        for step in reversed(self.steps):
            dead = [s for s in dict.fromkeys((*step.reads, *step.sets)) if s not in alive]
            alive.update(dead)
            dying.append(dead)
        dying.reverse()
        return dying

    def _peak_bytes(self, dying: list[list[int]]) -> int:
        root = self.graph.root
        own = {slot for step in self.steps for slot in step.sets}
        users = Counter(root[slot] for slot in own)
        now = peak = 0
        for step, dead in zip(self.steps, dying, strict=True):
            now += sum(n_bytes(self.graph.spec[slot]) for slot in step.sets if root[slot] == slot)
            peak = max(peak, now)
            for slot in dead:
                users[root[slot]] -= 1
                if users[root[slot]] == 0 and root[slot] in own:
                    now -= n_bytes(self.graph.spec[root[slot]])
        return peak


def _made(outs: Sequence[int | None]) -> tuple[int, ...]:
    return tuple([slot for slot in outs if slot is not None])


def _target(node: Node) -> str:
    """The left-hand side for what `node` creates."""
    if not node.outs:
        return ""
    if node.is_single:
        return f"v{node.outs[0]} = "
    return "".join("_, " if slot is None else f"v{slot}, " for slot in node.outs) + "= "


def _users(graph: Graph) -> dict[int, set[int]]:
    """For each owner of memory the `id`s of the nodes, views left out, that use it."""
    users: dict[int, set[int]] = defaultdict(set)
    for node in graph.nodes:
        if node.view_of is None:
            for slot in node.reads:
                users[graph.root[slot]].add(id(node))
    return users


class Segmenter:
    """Renumbers one unit's nodes into a canonical segment."""

    def __init__(self, graph: Graph, fusible: Fusibility, users: dict[int, set[int]]) -> None:
        self.graph = graph
        self.fusible = fusible
        self.users = users
        self.inputs: list[int] = []
        self.inside: list[Node] = []
        self.made: set[int] = set()
        self.scalars: list[int] = []

    def build(
        self, nodes: list[Node], scalar_types: list[type]
    ) -> tuple[Segment, list[int], list[int], list[int]]:
        """The segment; the slots it takes; the scalars it takes; the slots it gives."""
        for node in nodes:
            self._take(node)
        numbers = {slot: i for i, slot in enumerate(self.inputs)}
        count = len(self.inputs)
        for node in self.inside:
            for slot in node.outs:
                if slot is not None:
                    numbers[slot] = count
                count += 1
        calls = tuple(
            Call(
                node.facts.op,
                self._local(node.args, numbers),
                tuple((name, self._local(a, numbers)) for name, a in node.kwargs),
                node.specs,
            )
            for node in self.inside
        )
        outputs = self._seen_outside(nodes)
        segment = Segment(
            tuple(self.graph.spec[slot] for slot in self.inputs),
            tuple(scalar_types[i] for i in self.scalars),
            calls,
            tuple(numbers[slot] for slot in outputs),
        )
        return segment, self.inputs, self.scalars, outputs

    def _take(self, node: Node) -> None:
        for slot in node.reads:
            self._bring_in(slot)
        self.inside.append(node)
        self.made.update(slot for slot in node.outs if slot is not None)

    def _bring_in(self, slot: int) -> None:
        if slot in self.made or slot in self.inputs:
            return
        entry = entry_of(self.graph, slot, self.fusible)
        if entry == slot:
            self.inputs.append(slot)
        else:
            self._take(self.graph.producer[slot])

    def _local(self, argument: Any, numbers: dict[int, int]) -> Any:
        if isinstance(argument, Ref):
            return Ref(numbers[argument.index])
        if isinstance(argument, ScalarRef):
            if argument.index not in self.scalars:
                self.scalars.append(argument.index)
            return ScalarRef(self.scalars.index(argument.index))
        if type(argument) is tuple:
            return tuple(self._local(item, numbers) for item in argument)
        return argument

    def _seen_outside(self, nodes: list[Node]) -> list[int]:
        """The values that the unit's nodes create and others use, as they are or through views."""
        members = {id(node) for node in nodes}
        live = {self.graph.root[slot] for slot in self.graph.live}
        created = [slot for node in nodes for slot in node.outs if slot is not None]
        return [slot for slot in created if slot in live or self.users.get(slot, set()) - members]
