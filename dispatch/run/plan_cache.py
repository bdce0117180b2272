"""The plans that a trie's states hold: looks them up, or builds one where it pays.

In: a state, its live values, the settings in force. Out: a plan, or None: then the caller runs the
trace op by op. Also decides which plans get a second tier, and asks for the C++ that runs plans.
Called by `flush` and by captured calls.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from lazy_tensor.dispatch import settings, torch_private
from lazy_tensor.dispatch.plan.foreach import expand_foreach
from lazy_tensor.dispatch.plan.graph import Graph, eliminate_common_subexpressions, graph_of
from lazy_tensor.dispatch.plan.out_forms import expand_out_forms
from lazy_tensor.dispatch.plan.partition import Fusibility, units_of
from lazy_tensor.dispatch.plan.plan import Plan, Planner
from lazy_tensor.dispatch.plan.remat import rematerialized
from lazy_tensor.dispatch.plan.second_tier import SecondTier
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.run.compile_service import chosen_backend, compiler
from lazy_tensor.dispatch.stats import STATS
from lazy_tensor.dispatch.trie.trace import Pending, State
from lazy_tensor.kernels.extension import program

NO_PLAN: Any = object()
"""Stands for a plan that could not be built, so that it isn't tried at every flush."""
MAX_PLANS_OF_A_STATE = 8
"""Plans that one state keeps: for different live values, or settings. One more drops them all."""
MOST_STEPS = 600
"""Steps up to which a plan is compiled whole: each takes 20 to 60 ms of the compiler's time."""


def with_remat(graph: Graph) -> Graph:
    """The graph, rematerialized if the option `remat_interval` says so."""
    interval = settings.current().remat_interval
    return rematerialized(graph, interval) if interval else graph


def plan_of(pending: Pending, live: tuple[int, ...], *, at_once: Callable[[], bool]) -> Plan | None:
    """The plan for a state and its live values; None if the trace is to be interpreted.

    That is so the first time that the state is flushed, because a plan pays only for states that
    come again, unless `at_once()`. It is also so while there is no C++ that runs plans, and where a
    plan could not be built.
    """
    state, now = pending.state, settings.current()
    key = (live, now.plans_by)
    plan: Plan | None = None if state.plans is None else state.plans.get(key)
    if plan is NO_PLAN:
        return None
    if plan is not None:
        STATS.counts["plans_reused"] += 1
        return plan
    # An empty dict in place of None is the mark that the state was flushed before.
    seen_before = state.plans is not None
    plans = state.plans  # another thread may clear the caches meanwhile
    if plans is None or len(plans) >= MAX_PLANS_OF_A_STATE:
        plans = state.plans = {}
    if not (seen_before or now.compile == "blocking" or at_once()) or not may_plan():
        return None
    try:
        plan = build_plan(pending, live)
    except Exception as error:
        # The trace can still be run call by call: an error in planning must not lose its values.
        STATS.counts["plans_failed"] += 1
        warnings.warn(
            f"a trace of {state.n_ops} ops can't be planned and runs op by op: {error!r}; "
            "please report it",
            stacklevel=2,
        )
        plans[key] = NO_PLAN
        return None
    # `interpret` compares each result with the recorded metadata. A plan that is built at first
    # sight has to do that itself, in its first run.
    plan.is_checked = seen_before
    plans[key] = plan
    STATS.counts["plans_built"] += 1
    return plan


def add_tier(plan: Plan, state: State, *, after_s: float = 0.0) -> None:
    """Give a plan of this state a second tier, which compiles it whole after `after_s` of runs.

    Only if the settings in force allow it and it may gain anything.
    """
    plan.tier_from_s = math.inf  # whatever comes of it, `flush` doesn't ask again
    now = settings.current()
    may_gain = 1 < len(plan.steps) <= MOST_STEPS and not plan.communicates
    may_compile = now.compile == "background" and chosen_backend("cpu").name == "inductor"
    # A plan that is compiled whole has no rematerialization. Inductor's kernels in it may add in
    # any order, and after the first comparison nothing verifies them.
    is_plain = not (
        now.verify_every or now.remat_interval or torch.are_deterministic_algorithms_enabled()
    )
    # The plan doesn't know for which live values it was built, but the key in its state does.
    of_state = state.plans or {}  # another thread may clear the caches meanwhile
    live = next((live for (live, _), one in of_state.items() if one is plan), None)
    if may_gain and may_compile and is_plain and live is not None and plan.tier is None:
        plan.tier = SecondTier(plan, state, live, compiler(), after_s)


def may_plan() -> bool:
    """Whether plans can be made.

    If not, asks for the C++ that runs them: from disk, or compiled once the program has worked for
    long, as kernels are.
    """
    return program.are_there() or program.ask_for(
        compiler().disk, **_how_to_ask(STATS.has_worked_long())
    )


def may_capture() -> bool:
    """Whether calls can be captured; if not, asks for the C++ that runs and checks them."""
    how = _how_to_ask(True)
    # a list, not a generator: both are asked for, even if the first isn't there
    return all([one.ask_for(compiler().disk, **how) for one in (program, hits)])


def _how_to_ask(is_worth_it: bool) -> dict[str, bool]:
    now = settings.current().compile
    return {
        "may_compile": now == "blocking" or (now != "off" and is_worth_it),
        "wait": now == "blocking",
    }


def build_plan(
    pending: Pending, live: tuple[int, ...], varying: frozenset[int] = frozenset()
) -> Plan:
    """Build the plan of a trace: graph, units, segments with their fusions, steps.

    With `varying`, the slots of tensors whose sizes are others in each run, the plan runs calls of
    any size, whose ops get sizes as numbers. It fuses what doesn't vary. RuntimeError if an op
    chooses its results' strides by their sizes.
    """
    now = settings.current()
    graph = graph_of(pending.state.steps(), live)
    backend_on = cache(chosen_backend)
    devices = {spec.device.type for spec in graph.spec.values()}
    fuses = now.compile != "off" and any(backend_on(d).name != "aten" for d in devices)
    # Calls are taken apart only to be fused: by themselves their parts are slower. Remat comes
    # last: its calls repeat others on purpose, and must not be merged with them.
    if fuses:
        graph = expand_out_forms(expand_foreach(graph))
    graph = with_remat(eliminate_common_subexpressions(graph))
    fusible = Fusibility(graph, backend_on, varying) if fuses else None
    units = units_of(graph, fusible)

    def fusion_of(segment: Any) -> Any:
        return compiler().fusion_of(
            segment,
            backend_on(segment.device.type),
            mode=now.compile,
            threshold=now.compile_threshold,
            verify_every=now.verify_every,
            waits=False,  # "blocking" waits below for all of them at once
        )

    with torch_private.no_modes():  # a backend may call ops, which aren't the program's
        types = list(map(type, pending.scalars))
        planner = Planner(graph, types, fusible, varying)
        plan = planner.plan(units, fusion_of)
        if now.compile == "blocking":
            compiler().finish(plan.fusions)
    return plan
