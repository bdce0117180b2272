"""Tells the policy of calls and sync points, by which it decides what is recorded.

In: a call that is no hit, a read, the end of an optimizer's step or of a loop's turn. Out: the call
history (`Policy.past`) has the calls in program order, and regions, rounds and turns end where they
should. A hit costs nothing: it is noted only if a call that is no hit follows in its region.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.ops.request import Request
from lazy_tensor.dispatch.ops.rules import is_part_of_past, reads_values
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
"""Namespaces of ops that are no calls of the program.

They are marks in profiles, and `fully_shard`'s own ops, which differ while nothing is recorded.
"""
UNCOUNTED = -1
"""`Trace.call` during a call that the history doesn't count."""

asleep: set[int] = set()
"""Threads in a block whose present round is bypassed: their ops don't come here.

C++ has taken the mode off torch's stack, and whoever reads a value calls `pass_read`. A block that
is bypassed as a whole never enters the mode: its thread isn't in this set.
"""


def begin(trace: Trace, op: Any) -> None:
    """Note a call that isn't a hit in the history, behind the hits that came before it."""
    trace.call = UNCOUNTED
    if not isinstance(op, OpOverload) or op.namespace in NOT_THE_PROGRAMS:
        return
    if not is_part_of_past(op):
        return
    catch_up(trace)
    # Without C++ there is no history: the region only has one call more.
    if hits.native is None:
        trace.policy.past.note(UNCOUNTED)
        return
    # The number is 0 of a call on 0-dim CPU tensors alone: it may run at once, and isn't counted.
    trace.call = hits.native.call_under_way()
    # A turn of a loop has come round in which no call was new.
    if trace.call and trace.policy.past.note(trace.call):
        trace.policy.n_turns_noted += 1
        if trace.policy.cold == 1:
            trace.policy.cold = 0
            trace.policy.n_turns += 1
        elif trace.policy.cold == BYPASSED_TURNS:
            at_turn(trace)


def end(trace: Trace) -> None:
    """End the call under way: it has run, or is recorded."""
    arrived(trace)
    trace.call = None


COMPILES_AFTER_OPS = 20_000
"""Unrecorded ops in Python, which cost half a second, after which C++ for them is compiled."""
CHECKS_EVERY_OPS = 256
"""Unrecorded ops between two looks whether the C++ is there."""
_n_cold = 0  # unrecorded ops so far, of all threads


def count_cold() -> None:
    """Count an unrecorded op in Python, and ask for the C++ if it isn't there.

    The C++ knows which calls repeat, and runs unrecorded calls below Python. It is loaded from
    disk, or compiled once many such ops have run.
    """
    global _n_cold
    if hits.native is not None:
        return
    _n_cold += 1
    if _n_cold == COMPILES_AFTER_OPS:
        ask_for_hits()
    elif _n_cold % CHECKS_EVERY_OPS == 1:
        begin_hits()


def run_at_once(trace: Trace, op: Any) -> None:
    """Account for a call that runs at once while the trace is cold."""
    count_cold()
    # within another call it isn't counted
    if trace.call is None:
        begin(trace, op)
        end(trace)
    trace.ran = op, trace.state
    trace.busy = False


def arrived(trace: Trace) -> None:
    """Give the state that the trace has reached the number of the call under way.

    By this number later hits that lead to the state are noted in the history.
    """
    if trace.call is None or trace.call == UNCOUNTED:
        return
    state = trace.state
    if state is not trace.noted and not isinstance(state.step, Leaf) and state.call is None:
        state.call = trace.call
    trace.noted = state


def catch_up(trace: Trace) -> None:
    """Note the hits since the last call that was noted, in program order."""
    # those in traces that were flushed meanwhile, then those in the present trace
    for noted, state in (*trace.unnoted_hits, (trace.noted, trace.state)):
        for call in _calls_between(noted, state):
            trace.policy.n_turns_noted += trace.policy.past.note(call)
    trace.unnoted_hits.clear()
    trace.noted = trace.state


def _calls_between(noted: State, state: State) -> list[int]:
    """The numbers of the calls that lead from `noted` to `state`, in program order."""
    found: list[int] = []
    current: State | None = state
    while current is not noted and current is not None:
        if current.call:
            found.append(current.call)
        # a sharded call takes several steps, which are no calls of the program: pass over them
        current = current.parent if current.call_start is None else current.call_start
    found.reverse()
    return found


ITEM = torch.ops.aten._local_scalar_dense.default
"""What reads a number, for `.item()`, or for an op that gets a tensor as a number."""


def is_sync_point(request: Request) -> bool:
    """Whether the call reads values and so ends a region of the program.

    Reading a step count doesn't: optimizers read one for each parameter at each step. Nor does
    `ITEM`: methods such as `Tensor.item` end the region themselves.
    """
    if not (isinstance(request.op, OpOverload) and reads_values(request.op) and request.tensors):
        return False
    if request.op is ITEM:
        return False
    return ends_region(request.tensors[0])


def ends_region(tensor: torch.Tensor) -> bool:
    """Whether reading the tensor's values ends a region: not if it may be a step count.

    A step count is a 0-dim tensor, written in place, with memory of its own. An element of a
    parameter is a part of larger memory.
    """
    if tensor.dim() or tensor.is_inference() or not tensor._version:
        return True
    if type(tensor) is not tensor_types.tensor_class:
        return type(tensor) is torch.Tensor and is_part(tensor)
    value = tensor._value
    if value.slot is not None:
        # pending: a view's memory has another slot as its root
        return value.slot.trace.root_of(value.slot.index) != value.slot.index
    return value.data is not None and is_part(value.data)


_was_said = False


def say_so() -> None:
    """Warn, once in a process, that little of the program is recorded, and why."""
    global _was_said
    if _was_said or not settings.current().warn:
        return
    if hits.native is None and hits.EXTENSION.status in ("compiling", "compiled"):
        return  # the program may repeat itself: the C++ that would know is on its way
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
    """Whether blocks with these options are recorded only where that pays. Ranks of one program
    measure different times, but must all record the same."""
    return not (must_record(trace, options) or trace.policy.spans_ranks)


def at_sync_point(trace: Trace) -> None:
    """End a region of the program and begin the next."""
    if hits.native is None:
        begin_hits()
    elif hits.native.end_region_of_hits(trace, False):
        return
    state, policy = trace.state, trace.policy
    # Ops of the region that were flushed before its end aren't counted one by one. Any number above
    # `policy.SHORT` will do: the policy asks only whether there were ops, and more than a few.
    n_flushed = MOST_UNNOTED if trace.unnoted_hits else 0
    policy.at_sync_point(n_recorded=state.n_ops - trace.begun.n_ops + n_flushed)
    trace.unnoted_hits.clear()
    trace.noted = trace.begun = state
    if STATS.repeats_little() and not must_record(trace):
        say_so()
    # A cold trace must be empty: unrecorded ops on plain tensors run without a look at what is
    # pending.
    if policy.cold and state is not trace.root:
        flush(trace, "recording doesn't pay", quiet=True)


def at_op(trace: Trace) -> None:
    """End a region of the program at an op whose result depends on values, such as `nonzero`.

    It counts as no read of a round: nobody sees it in a block that is asleep.
    """
    policy = trace.policy
    if policy.has_wrapped:
        see_outside_blocks(trace)
    if policy.is_paused:  # its regions aren't accounted for
        policy.past.at_sync_point()
    elif not policy.is_asleep:
        at_sync_point(trace)


def at_read(trace: Trace) -> None:
    """End a region where Python reads a value by a method such as `Tensor.item`.

    A number of reads within a block is a round, which counts as a block of its own (see
    `sites.ROUND`). A block that is asleep calls `pass_read` instead.
    """
    if hits.native is not None and hits.native.end_region_of_hits(trace, True):
        return
    at_op(trace)
    policy = trace.policy
    if not (policy.is_paused or policy.is_asleep) and policy.ends_round():
        policy.end_round()
        _begin_round(trace)


def see_outside_blocks(trace: Trace) -> None:
    """See ops outside blocks again, if a block was bypassed before `wrap` was called.

    A bypassed block leaves the policy asleep. But ops on wrapped tensors come without a block.
    """
    if trace.policy.is_asleep and get_ident() not in asleep:
        trace.policy.cold = 1


def pass_read(trace: Trace) -> None:
    """Account for a read by this thread, which is asleep, as `at_read` does for others.

    C++ counts most of its reads. This is called at the end of a round, or where Python must look.
    """
    trace.policy.add_reads(hits.native.passed_reads())
    if not trace.policy.is_asleep:  # another thread has begun the policy anew
        _wakes(trace)
    elif trace.policy.ends_round() and not in_backward() and listen(trace):
        _begin_round(trace)


def close_segment(trace: Trace) -> None:
    """Flush the trace, because its state closes a segment or ends a loop's turn.

    A sharded call takes several steps: within one, only note that it has to flush at its end.
    """
    if trace.defers_close is not None:
        trace.defers_close = True
        return
    state, n_recorded = trace.state, trace.state.n_ops - trace.begun.n_ops
    flush(trace, "segment closed", quiet=True)
    if state.ends_turn:
        at_turn(trace, n_recorded)


def at_turn(trace: Trace, n_recorded: int = 0) -> None:
    """End a region where a turn ends, in a loop that reads nothing.

    The ops of such a loop are counted even while it is bypassed: nothing else tells where a turn
    ends.
    """
    policy = trace.policy
    policy.n_turns += 1
    if policy.is_paused or in_backward() or not may_choose(trace, settings.current()):
        return
    policy.at_turn(n_recorded=n_recorded)
    if policy.ends_round(by_turn=True):
        policy.end_round()
        if not policy.begin_round(may_choose=True):
            flush(trace, "recording doesn't pay", quiet=True)
            policy.bypass_turns()


def look_for_turn(trace: Trace) -> None:
    """End a turn of a loop, if one has come round behind a call that is no hit.

    A loop in which an op runs at once again and again has no state that ends a turn.
    """
    policy = trace.policy
    if policy.n_turns_noted > policy.n_turns and not (policy.cold or trace.tape):
        policy.ends_unmarked_turn()
        at_turn(trace, n_recorded=1)


def at_step(trace: Trace) -> None:
    """End a region where an optimizer's step ends, in a loop that hardly ever reads a value.

    What is pending runs, so that each step is the same program as the last.
    """
    policy = trace.policy
    # `ends_step` needs to know of reads that C++ has counted
    if asleep:
        policy.add_reads(hits.native.passed_reads())
        hits.native.see_next_read()  # a round ends with the first read behind a step
    if not policy.ends_step() or policy.is_paused or must_record(trace) or in_backward():
        return
    if get_ident() in asleep:
        pass_read(trace)
    elif not policy.is_asleep or policy.has_wrapped:
        at_read(trace)
        flush(trace, "optimizer.step()", quiet=True)
    # set just now, for the step itself: that is no read
    policy.has_read = False


def _begin_round(trace: Trace) -> None:
    """Begin a round of a block; whether it is bypassed is decided here."""
    policy = trace.policy
    if not (must_record(trace) or policy.begin_round(may_choose=not policy.spans_ranks)):
        fall_asleep(trace)


def fall_asleep(trace: Trace) -> None:
    """Flush, and bypass the round that begins: at its first op C++ takes the mode off torch's
    stack."""
    flush(trace, "recording doesn't pay", quiet=True)
    trace.policy.cold = ASLEEP
    asleep.add(get_ident())


def listen(trace: Trace) -> bool:
    """See the ops of the block that runs, if it is asleep; whether they are seen now.

    They can't be while another mode lies on top of ours.
    """
    if not asleep:
        return True
    was_asleep = trace.policy.is_asleep
    if get_ident() in asleep and not _wakes(trace):
        return False
    if was_asleep:
        # the region that passed unseen ends before its round: so its time counts as bypassed
        at_sync_point(trace)
        trace.policy.end_round()
        at_sync_point(trace)
    return True


def _wakes(trace: Trace) -> bool:
    """Put the mode back on torch's stack; False if another mode must be left first."""
    if not hits.native.wake_up():
        return False
    asleep.discard(get_ident())
    trace.policy.add_reads(hits.native.passed_reads())
    if trace.policy.is_asleep:
        trace.policy.cold = 1
    return True
