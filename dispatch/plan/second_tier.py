"""The second tier of a plan: it is compiled whole, library calls included, once it ran for long.

In: a plan, and the state and live values that it was made of. Out: the plan with other steps, if
these give the same results in less time. `plan_cache.add_tier` says which plans get a second tier.
While the plan has one, `Plan.run` calls it.
"""

from __future__ import annotations

import copy
from statistics import median
from time import perf_counter
from typing import Any

import torch

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.plan.foreach import expand_foreach
from lazy_tensor.dispatch.plan.graph import eliminate_common_subexpressions, graph_of
from lazy_tensor.dispatch.plan.partition import Fusibility, whole_units
from lazy_tensor.dispatch.plan.plan import Given, Plan, Planner
from lazy_tensor.dispatch.trie.trace import State
from lazy_tensor.kernels.backends.whole import WHOLE
from lazy_tensor.kernels.logs import COMPILES
from lazy_tensor.kernels.segment import n_bytes
from lazy_tensor.kernels.service.compile import Compiler
from lazy_tensor.kernels.service.verify import copy_of, difference, largest

N_ROUNDS = 9
"""Runs of each of the two plans whose times are compared."""
GAINS = 0.97
"""The whole plan takes over if it needs less than this share of the first plan's time."""

MOST_COPIED = 1 << 30
"""Bytes of leaves that a plan may write and still be compared: they are copied for that."""
CANNOT = "it can't be compiled whole"


class SecondTier:
    """Runs a plan and finds out whether it is faster if it is compiled whole.

    The runs go through four phases. Until the plan has run for `after_s` seconds, they are timed.
    While the whole plan is being compiled, the first one runs. Then one run does both, and compares
    results and written leaves. After that the two run in turns, and their times are compared.
    `_settle` ends it in any phase.
    """

    def __init__(
        self, plan: Plan, state: State, live: tuple[int, ...], service: Compiler, after_s: float
    ) -> None:
        self._plan = plan
        # `replace_by` changes the plan in place, so its first form is kept to come back to
        self._first = copy.copy(plan)
        self._made_of = state, live
        self._service = service
        self._after_s = after_s
        self._whole: Plan | None = None
        self._written: frozenset[int] = frozenset()  # numbers of leaves whose memory is written
        self._is_compared = False
        self._times_s: tuple[list[float], list[float]] = ([], [])

    def run(self, leaves: list[torch.Tensor], scalars: list[complex], given: Given) -> None:
        """Run the plan once, and go on with the comparison."""
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
        except Exception as error:  # the plan has run, and its results must not be lost
            self._settle(self._first, f"{CANNOT}: {error!r}")

    def _ask(self) -> None:
        """Plan the same trace once more, and have it compiled whole in the background."""
        state, live = self._made_of
        graph = eliminate_common_subexpressions(expand_foreach(graph_of(state.steps(), live)))
        fusible = Fusibility(graph, lambda _: WHOLE)
        units = whole_units(graph, fusible)
        written = {graph.root[slot] for node in graph.nodes for slot in node.writes}
        self._written = frozenset(
            i for i, leaf in enumerate(graph.leaves) if graph.root[leaf.slot] in written
        )
        n_copied = sum(n_bytes(graph.leaves[i].spec) for i in self._written)
        is_on_cpu = all(spec.device.type == "cpu" for spec in graph.spec.values())
        # nothing is gained where no unit is a kernel, and `WHOLE` makes kernels for the CPU alone
        if not is_on_cpu or units is None or not any(unit.is_fused for unit in units):
            self._settle(self._first, CANNOT)
            return
        if n_copied > MOST_COPIED:
            self._settle(self._first, "it writes too much to be compared with one compiled whole")
            return

        # asked for at once, and adopted without a trial of its own: here the whole plan is timed
        def fusion_of(segment: Any) -> Any:
            return self._service.fusion_of(
                segment, WHOLE, mode="background", threshold=0, measure=False
            )

        self._plan.tier_says = "being compiled whole"
        with torch_private.no_modes():
            self._whole = Planner(graph, self._plan.scalar_types, fusible).plan(units, fusion_of)

    def is_ready(self) -> bool:
        """Whether the whole plan is compiled, or turned out to be impossible."""
        whole = self._whole
        waits_for = ("aten", "queued", "compiling")
        return whole is not None and all(one.status not in waits_for for one in whole.fusions)

    def _is_there(self, whole: Plan) -> bool:
        """Whether all kernels of the whole plan are there. Gives it up if one can't be made."""
        statuses = {fusion.status for fusion in whole.fusions}
        if not statuses.isdisjoint(("failed", "declined")):
            self._settle(self._first, CANNOT)
        return statuses == {"ready"}

    def _settle(self, plan: Plan, says: str) -> None:
        """End the comparison: run as `plan` for good. `says` tells `explain()` why."""
        COMPILES.info("a plan of %d steps: %s", len(self._first.steps), says)
        self._plan.replace_by(plan)
        self._plan.tier, self._plan.tier_says = None, says

    def _compare(
        self, whole: Plan, leaves: list[torch.Tensor], scalars: list[complex], given: Given
    ) -> None:
        """Run the first plan, and the whole one on copies of the leaves that it writes; compare.

        The program gets the first plan's results. The whole one's are compared up to rounding.
        """
        # copied before the first plan runs and writes the originals
        mine = [copy_of(leaf) if i in self._written else leaf for i, leaf in enumerate(leaves)]
        written = [(mine[i], leaves[i]) for i in sorted(self._written)]
        magnitude = max(map(largest, leaves), default=0.0)
        self._plan.program.run(leaves, [*scalars], given)  # empties `leaves`: `written` has them
        found: Given = []
        try:
            whole.program.run(mine, [*scalars], found)
        except Exception as error:
            reason: str | None = f"it raised {error!r}"
        else:
            actual = [*found[0], *(one for one, _ in written)]
            expected = [*given[0], *(other for _, other in written)]
            reason = difference(actual, expected, magnitude)
        # not before: an op of the program may have raised, and then nothing was compared
        self._is_compared = True
        if reason is not None:
            self._settle(self._first, f"compiled whole it isn't used: {reason}")

    def _take_turns(
        self, whole: Plan, leaves: list[torch.Tensor], scalars: list[complex], given: Given
    ) -> None:
        """Run one of the two plans, by turns, and choose when both have run `N_ROUNDS` times."""
        first_s, whole_s = self._times_s
        is_whole = len(first_s) > len(whole_s)
        # If the run raises, `failure` looks for the steps of the program that ran in `self._plan`.
        self._plan.replace_by(whole if is_whole else self._first)
        start = perf_counter()
        self._plan.program.run(leaves, scalars, given)
        self._times_s[is_whole].append(perf_counter() - start)
        if len(whole_s) >= N_ROUNDS:
            is_better = median(whole_s) < GAINS * median(first_s)
            times = f"compiled whole {median(whole_s) * 1e3:.2f} ms, "
            times += f"in parts {median(first_s) * 1e3:.2f} ms"
            self._settle(whole if is_better else self._first, times)
