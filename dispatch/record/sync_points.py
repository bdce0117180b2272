"""Calls on their way into the past: hits only where they are wanted there.

In: a call, a sync point. Out: the policy knows whether the call was made in this place before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import get_ident
from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.ops.request import Request
from lazy_tensor.dispatch.ops.rules import Rule, reads_values, rule_of
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.run.compile_service import ask_for_hits, begin_hits
from lazy_tensor.dispatch.run.flush import flush, must_record
from lazy_tensor.dispatch.stats import NEW, STATS
from lazy_tensor.dispatch.tiering.policy import ASLEEP, BYPASSED_TURNS
from lazy_tensor.dispatch.torch_private import in_backward, is_part
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.dispatch.trie.recompile_reason import latest_difference, reason_of_miss
from lazy_tensor.dispatch.trie.trace import MOST_UNNOTED, Leaf, State, Trace
from lazy_tensor.dispatch.user_frame import warn_user

NOT_THE_PROGRAMS = frozenset({"profiler", "lazy_tensor"})
"""Namespaces of ops that come or don't as others see fit: of marks in profiles, and of
`fully_shard`'s own ops, which are others while nothing is recorded."""
UNCOUNTED = -1
"""The number of a call that is no part of the past."""

asleep: set[int] = set()
"""Threads whose ops don't come here: who reads a value calls `pass_read`."""


def begin(trace: Trace, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Note a call that isn't a hit, behind the hits that came before it."""
    trace.call = UNCOUNTED
    if not isinstance(op, OpOverload) or op.namespace in NOT_THE_PROGRAMS:
        return
    if reads_values(op) or rule_of(op) is Rule.ALIAS:
        return
    catch_up(trace)
    if hits.native is None:
        trace.policy.past.note(UNCOUNTED)
        return
    trace.call = hits.native.call_under_way()
    if trace.call and trace.policy.past.note(trace.call):
        if trace.policy.cold == 1:
            trace.policy.cold = 0
        elif trace.policy.cold == BYPASSED_TURNS:
            at_turn(trace)


def end(trace: Trace) -> None:
    """The call has run, or is recorded."""
    arrived(trace)
    trace.call = None


COMPILES_AFTER_OPS = 20_000
"""Unrecorded ops in Python, which cost half a second, after which C++ for them is wanted."""
CHECKS_EVERY_OPS = 256
_n_cold = 0


def count_cold() -> None:
    """Have the C++ that knows what repeats, and runs unrecorded calls below Python: from disk, or
    compiled when many ran here."""
    global _n_cold
    if hits.native is not None:
        return
    _n_cold += 1
    if _n_cold == COMPILES_AFTER_OPS:
        ask_for_hits()
    elif _n_cold % CHECKS_EVERY_OPS == 1:
        begin_hits()


def run_at_once(trace: Trace, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Account for a call that runs at once, as nothing is recorded."""
    count_cold()
    if trace.call is None:
        begin(trace, op, args, kwargs)
        end(trace)
    trace.ran = op, trace.state
    trace.busy = False


def arrived(trace: Trace) -> None:
    """Let the state that the trace is in stand for the call under way from now on."""
    if trace.call is None or trace.call == UNCOUNTED:
        return
    state = trace.state
    if state is not trace.noted and not isinstance(state.step, Leaf) and state.call is None:
        state.call = trace.call
    trace.noted = state


def catch_up(trace: Trace) -> None:
    """Note the hits since the last call that was noted."""
    for noted, state in (*trace.unnoted_hits, (trace.noted, trace.state)):
        for call in _calls_between(noted, state):
            trace.policy.past.note(call)
    trace.unnoted_hits.clear()
    trace.noted = trace.state


def _calls_between(noted: State, state: State) -> list[int]:
    found: list[int] = []
    current: State | None = state
    while current is not noted and current is not None:
        if current.call:
            found.append(current.call)
        # the steps that a sharded call takes are no calls of the program
        current = current.parent if current.call_site is None else current.call_site
    found.reverse()
    return found


def is_sync_point(request: Request) -> bool:
    """Whether the call reads values, and ends a region of the program. Reading step counts, which
    optimizers write in place and read for each parameter, doesn't."""
    if not (isinstance(request.op, OpOverload) and reads_values(request.op) and request.tensors):
        return False
    return ends_region(request.tensors[0])


def ends_region(tensor: torch.Tensor) -> bool:
    """Whether reading the tensor does. Step counts have memory of their own, which elements of
    parameters don't."""
    if tensor.dim() or tensor.is_inference() or not tensor._version:
        return True
    if type(tensor) is not tensor_types.tensor_class:
        return type(tensor) is torch.Tensor and is_part(tensor)
    value = tensor._value
    if value.slot is not None:
        return value.slot.trace.root_of(value.slot.index) != value.slot.index
    return value.data is not None and is_part(value.data)


_was_said = False


def say_so() -> None:
    """Warn, once in a process, that little of it is recorded, and why."""
    global _was_said
    if _was_said or not settings.current().warn:
        return
    if hits.native is None and hits.EXTENSION.status in ("compiling", "compiled"):
        return  # it may repeat itself: what knows of it is on its way
    _was_said = True
    misses = [(one.first_new, one.state) for one in STATS.log if one.first_new is not None]
    difference = latest_difference(reason_of_miss(*miss) for miss in misses)
    reason = "since hardly anything in it comes twice"
    if hits.native is None:
        reason = (
            "as the C++ that finds what comes twice is missing "
            f'({hits.status()}; record="always" does without)'
        )
    seconds = f"{STATS.regions_s[NEW]:.0f} s of {sum(STATS.regions_s.values()):.0f} s did not"
    lately = f"; what was new lately: {difference}" if difference else ""
    warn_user(
        f"lazy_tensor runs this program as in eager, {reason}: {seconds}{lately}. explain() says "
        "more, configure(warn=False) silences this"
    )


def may_choose(trace: Trace, options: settings.Settings) -> bool:
    """Whether recording has to pay in a block of these options."""
    return not must_record(trace, options) and _may_choose(trace)


def _may_choose(trace: Trace) -> bool:
    """Whether times may decide: the ranks of a program must not choose differently."""
    return not trace.policy.spans_ranks


def at_sync_point(trace: Trace) -> None:
    """End a region of the program and begin the next."""
    if hits.native is None:
        begin_hits()
    state, policy = trace.state, trace.policy
    # at least: the region had flushes of its own
    n_flushed = MOST_UNNOTED if trace.unnoted_hits else 0
    policy.at_sync_point(n_recorded=state.n_ops - trace.begun.n_ops + n_flushed)
    trace.unnoted_hits.clear()
    trace.noted = trace.begun = state
    if STATS.repeats_little() and not must_record(trace):
        say_so()
    if policy.cold and state is not trace.root:
        flush(trace, "recording doesn't pay", quiet=True)  # what runs unrecorded reads memory


def at_read(trace: Trace) -> None:
    """Begin a region of the program where values are read: of a block, each round of these is a
    block of its own (see `sites.ROUND`). A block that is asleep has them by `pass_read`."""
    policy = trace.policy
    if policy.has_wrapped:
        see_outside_blocks(trace)
    if policy.is_asleep:
        return
    policy.has_read = True
    at_sync_point(trace)
    if policy.ends_round():
        policy.end_round()
        _begin_round(trace)


def see_outside_blocks(trace: Trace) -> None:
    """See ops outside blocks again, where blocks were bypassed before `wrap` was called."""
    if trace.policy.is_asleep and get_ident() not in asleep:
        trace.policy.cold = 1


def pass_read(trace: Trace) -> None:
    """The same of a block that is asleep, by its own thread; C++ has counted most of its reads."""
    trace.policy.add_reads(hits.native.passed_reads())
    trace.policy.has_read = True
    if not trace.policy.is_asleep:  # another thread began all anew
        _wakes(trace)
    elif trace.policy.ends_round() and not in_backward() and listen(trace):
        _begin_round(trace)


def close_segment(trace: Trace) -> None:
    """Hand the trace to the device, as `closes_segment` wants it, or at the end of a loop's turn;
    within a call of several steps that is left to its end."""
    if trace.defers_close is not None:
        trace.defers_close = True
        return
    state, n_recorded = trace.state, trace.state.n_ops - trace.begun.n_ops
    flush(trace, "segment closed", quiet=True)
    if state.ends_turn:
        at_turn(trace, n_recorded)


def at_turn(trace: Trace, n_recorded: int = 0) -> None:
    """End a region at the end of a turn of a loop without reads. Ops of such a loop are counted
    even while it runs as in eager: nothing else tells where its turns end."""
    policy = trace.policy
    if policy.is_paused or in_backward() or not may_choose(trace, settings.current()):
        return
    policy.at_turn(n_recorded=n_recorded)
    if policy.ends_round(by_turn=True):
        policy.end_round()
        if not policy.begin_round(may_choose=True):
            flush(trace, "recording doesn't pay", quiet=True)
            policy.bypass_turns()


def at_step(trace: Trace) -> None:
    """End a region where an optimizer's step ends, as a read does, of a loop that reads no value or
    seldom one. What is pending is run, so that each step may repeat the last."""
    policy = trace.policy
    if asleep:
        policy.add_reads(hits.native.passed_reads())
    if not policy.ends_step() or policy.is_paused or must_record(trace) or in_backward():
        return
    if get_ident() in asleep:
        pass_read(trace)
    elif not policy.is_asleep or policy.has_wrapped:
        at_read(trace)
        flush(trace, "optimizer.step()", quiet=True)
    policy.has_read = False


def _begin_round(trace: Trace) -> None:
    if not (must_record(trace) or trace.policy.begin_round(may_choose=_may_choose(trace))):
        flush(trace, "recording doesn't pay", quiet=True)
        trace.policy.cold = ASLEEP
        asleep.add(get_ident())


def listen(trace: Trace) -> bool:
    """See the ops of the block that runs, if it is asleep; whether they are seen now."""
    if not asleep:
        return True
    was_asleep = trace.policy.is_asleep
    if get_ident() in asleep and not _wakes(trace):
        return False
    if was_asleep:
        at_sync_point(trace)
        trace.policy.end_round()
        at_sync_point(trace)
    return True


def _wakes(trace: Trace) -> bool:
    if not hits.native.wake_up():
        return False
    asleep.discard(get_ident())
    trace.policy.add_reads(hits.native.passed_reads())
    if trace.policy.is_asleep:
        trace.policy.cold = 1
    return True
