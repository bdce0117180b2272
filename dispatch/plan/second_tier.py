"""A plan's second tier: compiled whole, library calls within it, once it has run for long.

In: a plan, and what it was made of. Out: the plan with other steps, if they do the same in less
time. `plan_cache` says which plans have one.
"""

from __future__ import annotations

import copy
from statistics import median
from time import perf_counter
from typing import Any

import torch

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.plan.foreach import taken_apart
from lazy_tensor.dispatch.plan.graph import graph_of, without_repeats
from lazy_tensor.dispatch.plan.partition import Fusibility, whole_units
from lazy_tensor.dispatch.plan.plan import Given, Plan, Planner
from lazy_tensor.dispatch.trie.trace import State
from lazy_tensor.kernels.backends.whole import WHOLE
from lazy_tensor.kernels.logs import COMPILES
from lazy_tensor.kernels.segment import n_bytes
from lazy_tensor.kernels.service.compile import Compiler
from lazy_tensor.kernels.service.verify import copy_of, difference, largest

N_ROUNDS = 9
"""Runs of either that are compared."""
GAINS = 0.97
"""The share of the first plan's time that the whole one may take: else nothing is gained."""

MOST_COPIED = 1 << 30
"""Bytes that a plan may write in what it is given: that is copied, to compare."""
CANNOT = "it can't be compiled whole"


class SecondTier:
    """Finds out whether a plan had better be compiled whole.

    It runs the plan: first to see whether it runs for long, then while the other is being compiled,
    once beside the other to compare what both do, and at last in turns with it to compare times.
    """

    def __init__(
        self, plan: Plan, state: State, live: tuple[int, ...], service: Compiler, after_s: float
    ) -> None:
        self._plan = plan
        self._first = copy.copy(plan)
        self._made_of = state, live
        self._service = service
        self._after_s = after_s
        self._whole: Plan | None = None
        self._written: frozenset[int] = frozenset()  # leaves
        self._is_compared = False
        self._times_s: tuple[list[float], list[float]] = ([], [])

    def run(self, leaves: list[torch.Tensor], scalars: list[complex], given: Given) -> None:
        """Run the plan, or the one that may take its place."""
        if self._whole is None:
            start = perf_counter()
            self._plan.program.run(leaves, scalars, given)
            self._plan.spent_s += perf_counter() - start
            if self._plan.spent_s >= self._after_s:
                self._try_to_ask()
        elif not self._is_there(self._whole):
            self._plan.program.run(leaves, scalars, given)
        elif not self._is_compared:
            self._compare(self._whole, leaves, scalars, given)
        else:
            self._take_turns(self._whole, leaves, scalars, given)

    def _try_to_ask(self) -> None:
        try:
            self._ask()
        except Exception as error:  # the plan has run, and what it gave must not be lost
            self._settle(self._first, f"{CANNOT}: {error!r}")

    def _ask(self) -> None:
        """Have the plan compiled whole, in the background."""
        state, live = self._made_of
        graph = without_repeats(taken_apart(graph_of(state.steps(), live)))
        fusible = Fusibility(graph, lambda _: WHOLE)
        units = whole_units(graph, fusible)
        written = {graph.root[slot] for node in graph.nodes for slot in node.writes}
        self._written = frozenset(
            i for i, leaf in enumerate(graph.leaves) if graph.root[leaf.slot] in written
        )
        n_copied = sum(n_bytes(graph.leaves[i].spec) for i in self._written)
        is_on_cpu = all(spec.device.type == "cpu" for spec in graph.spec.values())
        if not is_on_cpu or units is None or not any(unit.is_fused for unit in units):
            self._settle(self._first, CANNOT)
            return
        if n_copied > MOST_COPIED:
            self._settle(self._first, "it writes too much to be compared with one compiled whole")
            return

        def fusion_of(segment: Any) -> Any:
            return self._service.fusion_of(
                segment, WHOLE, mode="background", threshold=0, measure=False
            )

        self._plan.tier_says = "being compiled whole"
        with torch_private.no_modes():
            self._whole = Planner(graph, self._plan.scalar_types, fusible).plan(units, fusion_of)

    def is_ready(self) -> bool:
        """Whether the plan has been compiled whole, or can't be."""
        whole = self._whole
        waits_for = ("aten", "queued", "compiling")
        return whole is not None and all(one.status not in waits_for for one in whole.fusions)

    def _is_there(self, whole: Plan) -> bool:
        statuses = {fusion.status for fusion in whole.fusions}
        if not statuses.isdisjoint(("failed", "declined")):
            self._settle(self._first, CANNOT)
        return statuses == {"ready"}

    def _settle(self, plan: Plan, says: str) -> None:
        """Run `plan` for good."""
        COMPILES.info("a plan of %d steps: %s", len(self._first.steps), says)
        self._plan.do_as(plan)
        self._plan.tier, self._plan.tier_says = None, says

    def _compare(
        self, whole: Plan, leaves: list[torch.Tensor], scalars: list[complex], given: Given
    ) -> None:
        """Run the first plan, and the other on copies of what it writes; compare what they do."""
        self._is_compared = True
        mine = [copy_of(leaf) if i in self._written else leaf for i, leaf in enumerate(leaves)]
        written = [(mine[i], leaves[i]) for i in sorted(self._written)]
        magnitude = max(map(largest, leaves), default=0.0)
        self._plan.program.run(leaves, [*scalars], given)
        found: Given = []
        try:
            whole.program.run(mine, [*scalars], found)
        except Exception as error:
            reason: str | None = f"it raised {error!r}"
        else:
            actual = [*found[0], *(one for one, _ in written)]
            expected = [*given[0], *(other for _, other in written)]
            reason = difference(actual, expected, magnitude)
        if reason is not None:
            self._settle(self._first, f"compiled whole it isn't used: {reason}")

    def _take_turns(
        self, whole: Plan, leaves: list[torch.Tensor], scalars: list[complex], given: Given
    ) -> None:
        first_s, whole_s = self._times_s
        is_whole = len(first_s) > len(whole_s)
        self._plan.do_as(whole if is_whole else self._first)  # where it fails, its steps are known
        start = perf_counter()
        self._plan.program.run(leaves, scalars, given)
        self._times_s[is_whole].append(perf_counter() - start)
        if len(whole_s) >= N_ROUNDS:
            is_better = median(whole_s) < GAINS * median(first_s)
            times = f"compiled whole {median(whole_s) * 1e3:.2f} ms, "
            times += f"in parts {median(first_s) * 1e3:.2f} ms"
            self._settle(whole if is_better else self._first, times)
