"""Plans: a trace's graph as a program in C++, whose instructions are segments and single calls.

In: a `Graph`, its units, the fusions of its segments. Out: `Plan`, which computes the live values
from leaves and scalars, and depends on nothing else. `Planner` makes it, with the help of
`Segmenter`. `plan_cache` keeps plans in the trie's states; `flush` and captured calls run them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lazy_tensor.dispatch.ops.schema import MARKED_VIEWS
from lazy_tensor.dispatch.plan.comm_schedule import gives_less
from lazy_tensor.dispatch.plan.graph import Graph
from lazy_tensor.dispatch.plan.interpret import MISJUDGED, OWN_STRIDES, is_of, laid_out
from lazy_tensor.dispatch.plan.partition import Fusibility, Unit, entry_of
from lazy_tensor.dispatch.plan.view_offsets import offset_of
from lazy_tensor.dispatch.trie.trace import Node
from lazy_tensor.kernels.extension import program
from lazy_tensor.kernels.segment import (
    Call,
    Ref,
    ScalarRef,
    Segment,
    TensorSpec,
    last_uses,
    n_bytes,
)
from lazy_tensor.kernels.service.fusion import Fusion

if TYPE_CHECKING:
    from lazy_tensor.dispatch.plan.second_tier import SecondTier

FusionOf = Callable[[Segment], Fusion]


def fuse_nothing(segment: Segment) -> Fusion:
    """The `FusionOf` of plans without segments."""
    raise AssertionError("nothing is fused without a backend")


Given = list[Sequence[torch.Tensor]]
"""Where a run puts its results, as one sequence: what it returned could be lost by an interrupt."""


NOTHING_FUSED = "nothing is fused with these settings"
"""The `reason` of all calls in a plan without segments."""


TIER_FROM_S = 5.0
"""Seconds of a plan's runs after which it is compiled whole: that takes some 10 s of another core.
"""


@dataclass(slots=True)
class Step:
    """One instruction of a plan: the slots it reads, the slots it sets, and its nodes.

    A segment has a `fusion`, which gets the run-time scalars `numbers`. A single call has none;
    `reason` says why it is in no segment. `failure` and reports find nodes by the step's number.
    """

    reads: tuple[int, ...]
    sets: tuple[int, ...]
    nodes: tuple[Node, ...]
    fusion: Fusion | None = None
    numbers: tuple[int, ...] = ()
    reason: str = ""

    def instruction(
        self, dead: Sequence[int], spec: dict[int, TensorSpec], varying: frozenset[int]
    ) -> program.Instruction:
        """The instruction for C++. `dead` are the slots used here for the last time. The specs of
        slots in `varying` are examples."""
        if self.fusion is not None:
            return program.segment(self.fusion, self.reads, self.numbers, self.sets, dead)
        (node,) = self.nodes
        varies = not varying.isdisjoint((*node.reads, *node.makes))
        offset = None if varies else offset_of(node, spec)
        if offset is not None:  # a view that C++ makes without calling the op
            (made,), base = self.sets, spec[self.sets[0]]
            return program.view(made, node.reads[0], base.size, base.stride, offset, dead)
        # Known so far: `flush` drops a plan whose first run shows more such ops.
        op, strides = node.facts.op, []
        if op in OWN_STRIDES and node.view_of is None:
            if varies:
                raise RuntimeError(f"{op} chooses its results' strides by their sizes")
            strides = [None if out is None else spec[out].stride for out in node.outs]
        touched = [spec[slot] for slot in (*self.reads, *self.sets)]
        return program.call(op, node.args, dict(node.kwargs), node.outs, dead, touched, strides)


@dataclass(slots=True, weakref_slot=True)
class Plan:
    """`run(leaves, scalars, given)` computes the live values.

    `root`, `lasting` and `parts_of_leaves` are the graph's, for `failure` and `flush`. `peak_bytes`
    is the most memory that values made by the plan take at a time, those inside a kernel left out.
    `communicates` says whether it has collectives: other ranks wait for it.

    `n_there` counts its ops in kernels that are built, `n_under_way` those in kernels being built,
    as of the last `told()`; the policy compares the two. `is_checked` says whether its calls were
    seen to give the recorded metadata. `tier` runs the plan in its place while a program that was
    compiled whole is looked for and compared. It is made once `spent_s` reaches `tier_from_s`:
    seconds of its runs, and of blocks that were bypassed because the plan was slower.
    """

    program: program.Program
    steps: list[Step]
    fusions: tuple[Fusion, ...]
    root: dict[int, int]
    lasting: frozenset[int]
    parts_of_leaves: tuple[tuple[int, int], ...]
    peak_bytes: int
    communicates: bool
    scalar_types: list[type]
    _distinct: tuple[Fusion, ...] = field(init=False)
    _told: tuple[Any, ...] = ()
    n_there: int = 0
    n_under_way: int = 0
    is_checked: bool = True
    tier: SecondTier | None = None
    tier_from_s: float = field(default_factory=lambda: TIER_FROM_S)
    spent_s: float = 0.0
    tier_says: str = ""  # what came of compiling it whole, and the times of both, for `explain()`

    def __post_init__(self) -> None:
        self._distinct = tuple(dict.fromkeys(self.fusions))

    def replace_by(self, other: Plan) -> None:
        """Run as another plan for the same trace and live values from now on.

        This plan is looked up in states and held by captured calls, so it stays the same object.
        """
        self.steps, self.fusions, self._distinct = other.steps, other.fusions, other._distinct
        self.peak_bytes, self.program, self._told = other.peak_bytes, other.program, ()

    def told(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The status of each fusion, and the reason for it. Both, and the counts of ops, are made
        anew only when a fusion has changed: this is asked at every flush."""
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
        """Whether more of its ops are in kernels being built than in kernels that are there."""
        self.told()
        return self.n_under_way > self.n_there

    def may_get_better(self) -> bool:
        """Whether its next runs compare it with a program that was compiled whole."""
        return self.tier is not None and self.tier.is_ready()

    def run(self, leaves: list[torch.Tensor], scalars: list[complex], given: Given) -> None:
        """Append the live values to `given`, as one tuple, and empty `leaves`.

        After an exception `failure` looks for this function in the traceback.
        """
        if self.tier is None:
            self.program.run(leaves, scalars, given)
        else:
            self.tier.run(leaves, scalars, given)

    def run_observed(
        self,
        leaves: list[torch.Tensor],
        scalars: list[complex],
        given: Given,
        around: Callable[[int], AbstractContextManager[Any]] | None = None,
    ) -> None:
        """The same, with step `i` run within the context `around(i)`.

        Unless the plan `is_checked`, results of single calls are compared with the recorded
        metadata, as by `interpret`.
        """
        check = None if self.is_checked else partial(self._check, set())
        self.program.run(leaves, scalars, given, around, check)

    def _check(
        self, wrong: set[int], number: int, tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The results of step `number` with the recorded strides.

        Slots whose shape or dtype is wrong are added to `wrong`: ops that read them aren't blamed.
        """
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
        return found


class Planner:
    """Emits a plan's steps in the order of the units, and each view where it is first needed.

    A wait for a collective counts as a view of its result. So it comes where the result is first
    used, and the rank computes until then.
    """

    def __init__(
        self,
        graph: Graph,
        scalar_types: list[type],
        fusible: Fusibility | None,
        varying: frozenset[int] = frozenset(),
    ) -> None:
        """`scalar_types` are those of the trace's numbers. The sizes of the slots in `varying` are
        others in each run."""
        self.varying = varying
        self.graph = graph
        self.fusible = fusible
        self.scalar_types = scalar_types
        self.steps: list[Step] = []
        self.fusions: list[Fusion] = []
        self.made = {leaf.slot for leaf in graph.leaves}
        self.users = _users(graph)
        # by owner of memory that collectives under way read: the slots of their waits
        self.in_flight: dict[int, list[int]] = {}
        self.reductions: list[int] = []  # the slots of the waits for the last reduction
        # by slot that a collective gives: the slot of the wait for it
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
        # every collective is waited for within the plan: its input may be freed afterwards
        for slot in (*self.graph.live, *self.waits.values()):
            self._need(slot)
        return self._compiled()

    def _need(self, slot: int) -> None:
        """Make `slot` if it is a view that isn't made yet. Units make all other slots in time."""
        if slot in self.made:
            return
        node = self.graph.producer[slot]
        assert node.view_of is not None, "a unit runs after what it depends on"
        self._add_call(node)

    def _await_readers(self, nodes: Sequence[Node]) -> None:
        """Wait for collectives that still read memory which `nodes` are about to write."""
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
            waits = [self.waits[slot] for slot in node.makes if slot in self.waits]
            # One reduction is under way at a time, because its input stays in memory until then.
            if gives_less(node.facts.op):
                for wait in self.reductions:
                    self._need(wait)
                self.reductions = waits
            for slot in reads:
                self.in_flight.setdefault(self.graph.root[slot], []).extend(waits)
        self._add(Step(reads, node.makes, (node,), reason=self._reason(node)))

    def _add_segment(self, unit: Unit, fusion_of: FusionOf) -> None:
        assert self.fusible is not None
        segmenter = Segmenter(self.graph, self.fusible, self.users)
        segment, inputs, scalars, outputs = segmenter.build(unit.nodes, self.scalar_types)
        for slot in inputs:
            self._need(slot)
        self._await_readers(unit.nodes)
        fusion = fusion_of(segment)
        self.fusions.append(fusion)
        inside = tuple(segmenter.inside)
        self._add(Step(tuple(inputs), tuple(outputs), inside, fusion, tuple(scalars)))

    def _add(self, step: Step) -> None:
        self.made.update(step.sets)
        self.steps.append(step)

    def _reason(self, node: Node) -> str:
        """Why `node` runs by itself, for `explain()`."""
        if node.view_of is not None:
            return "a view"
        if self.fusible is None:
            return NOTHING_FUSED
        return self.fusible.reason_against(node) or "nothing beside it can be fused with it"

    def _compiled(self) -> Plan:
        graph = self.graph
        dying = last_uses([(*step.reads, *step.sets) for step in self.steps], graph.live)
        leaves = [leaf.slot for leaf in graph.leaves]
        instructions = [
            step.instruction(dead, graph.spec, self.varying)
            for step, dead in zip(self.steps, dying, strict=True)
        ]
        n_slots = max((*leaves, *graph.spec), default=-1) + 1
        peak_bytes = self._peak_bytes(dying)
        return Plan(
            program=program.program_of(
                n_slots, leaves, graph.live, instructions, peak_bytes=peak_bytes
            ),
            steps=self.steps,
            fusions=tuple(self.fusions),
            root=graph.root,
            lasting=graph.lasting,
            parts_of_leaves=graph.parts_of_leaves,
            peak_bytes=peak_bytes,
            communicates=any(node.facts.communicates for node in graph.nodes),
            scalar_types=self.scalar_types,
        )

    def _peak_bytes(self, dying: list[list[int]]) -> int:
        """The most bytes that values made by the plan take at a time.

        Memory is freed with the last of the slots on it, which may be a view.
        """
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


def _users(graph: Graph) -> dict[int, set[int]]:
    """For each owner of memory the `id`s of the nodes that read it, views left out."""
    users: dict[int, set[int]] = defaultdict(set)
    for node in graph.nodes:
        if node.view_of is None:
            for slot in node.reads:
                users[graph.root[slot]].add(id(node))
    return users


class Segmenter:
    """Makes a segment of one unit's nodes.

    Slots and scalars are numbered anew, in the order in which the nodes name them. So equal
    computations give equal segments wherever they stand in a trace, and share a kernel. Views that
    the kernel can make itself become calls of the segment.
    """

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
        """The segment; the slots and the scalars that it takes; the slots that it gives."""
        for node in nodes:
            self._take(node)
        # inputs first, then an entry for each output of each call, undefined ones too (`segment`)
        entries = (*self.inputs, *(slot for node in self.inside for slot in node.outs))
        numbers = {slot: i for i, slot in enumerate(entries) if slot is not None}
        calls = tuple(
            Call(
                MARKED_VIEWS.get(node.facts.op, node.facts.op),
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
        """Put a node into the segment, behind what it reads."""
        for slot in node.reads:
            self._bring_in(slot)
        self.inside.append(node)
        self.made.update(node.makes)

    def _bring_in(self, slot: int) -> None:
        """Make a slot an input, or put the view that makes it into the segment."""
        if slot in self.made or slot in self.inputs:
            return
        entry = entry_of(self.graph, slot, self.fusible)
        if entry == slot:
            self.inputs.append(slot)
        else:
            self._take(self.graph.producer[slot])

    def _local(self, argument: Any, numbers: dict[int, int]) -> Any:
        """An argument by the segment's own numbers."""
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
        """The values that the unit's nodes create and that are live or used outside it.

        Uses through views count for their owner: such a view is made outside, of the output.
        """
        members = {id(node) for node in nodes}
        live = {self.graph.root[slot] for slot in self.graph.live}
        created = [slot for node in nodes for slot in node.makes]
        return [slot for slot in created if slot in live or self.users.get(slot, set()) - members]
