"""What is being recorded: values, the trie of states, and one trace a thread.

In: transitions from `record`. Out: the current state, leaves, scalars and values, taken whole by
`flush`. A state is a point in a program seen before; it maps the next call's key to the next state.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lazy_tensor.dispatch import settings, torch_private
from lazy_tensor.dispatch.ops.schema import OpFacts
from lazy_tensor.dispatch.tiering.policy import Policy
from lazy_tensor.dispatch.trie.liveness import live_values as live_values
from lazy_tensor.kernels.cache import Cache
from lazy_tensor.kernels.segment import Ref, TensorSpec

ONE, SELF, MANY, ALIAS, NOTHING, MARKED = range(6)
"""What a call gives: one new tensor, the argument it wrote, several, another handle, None, a view
with the conjugate or the negative bit."""


SLOW = 16
"""Added to a kind that the hot path would take, for states that need more than it does."""
KIND_MASK = SLOW - 1


class Slot:
    """A value's place in a trace. Interned by the trace, so that keys compare slots by identity."""

    __slots__ = ("index", "trace")

    def __init__(self, trace: Trace, index: int) -> None:
        self.trace = trace
        self.index = index

    def __repr__(self) -> str:
        return f"%{self.index}"


class Value:
    """The handle that a lazy tensor owns: `slot` while a trace knows it, `data` once it is
    computed.

    Several tensors own one value after `detach()`. A trace finds out which values are alive by
    their reference counts, so nothing else may keep one.
    """

    slot: Slot | None = None
    data: torch.Tensor | None = None
    failure: BaseException | None = None
    leaf: int | None = None  # the leaf with a storage offset that this is a view of
    watch: Any = None  # see `dispatch.run.watch`


@dataclass(slots=True)  # to be frozen would cost 2 us a node
class Node:
    """One recorded call, never changed.

    `args` and `kwargs` hold `Ref(slot index)` and `ScalarRef(index)`. `reads` are the slots they
    name, in order, repeats included; `after` are slots that must be made first though they are not
    read.
    """

    facts: OpFacts
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outs: tuple[int | None, ...]
    specs: tuple[TensorSpec | None, ...]
    is_single: bool
    writes: tuple[int, ...]
    view_of: int | None
    where: str = field(compare=False)  # another thread may call the same from elsewhere
    in_backward: bool
    after: tuple[int, ...] = ()
    reads: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        found: list[int] = []
        _collect_refs(self.args, found)
        for _, argument in self.kwargs:
            _collect_refs((argument,), found)
        self.reads = tuple(found)

    @property
    def issues(self) -> bool:
        """Whether it starts a collective, as against waiting for one."""
        return self.facts.communicates and self.view_of is None


def _collect_refs(arguments: tuple[Any, ...], found: list[int]) -> None:
    for argument in arguments:
        if type(argument) is Ref:
            found.append(argument.index)
        elif type(argument) is tuple:
            _collect_refs(argument, found)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A concrete tensor that enters a trace; `shares` is an earlier leaf with the same storage."""

    slot: int
    spec: TensorSpec
    shares: int | None


class State(dict[tuple[Any, ...], "State"]):
    """A point in the trie of programs: the calls that followed, and what led here.

    `meta` holds `make_wrapper`'s arguments for each output, `layout` the layouts of sharded ones.
    A sharded call may take several steps at once: `call_site` is then where it was called.
    `generic` maps keys in which numbers are replaced by their types, for places that have seen
    several; `seen` has the last child under each such key, for places that may have.
    `counts_writes` says whether a kernel that runs here counts for autograd what it writes (see
    `versions_kept`). `call` is the number of the call in the past.
    """

    __slots__ = ("call", "closes", "counts_writes", "edges", "ends_turn", "generic", "key", "kind",
                 "layout", "meta", "n_bytes", "n_ops", "n_scalars", "n_slots", "call_site",
                 "offset_fixup", "parent", "plans", "remembered", "seen", "slot",
                 "step")  # fmt: skip

    kind: int
    meta: Any
    slot: Any

    def __init__(
        self, parent: State | None, key: tuple[Any, ...], step: Node | Leaf | None
    ) -> None:
        self.parent = parent
        self.key = key
        self.step = step
        self.n_slots: int = parent.n_slots if parent is not None else 0
        self.n_scalars: int = parent.n_scalars if parent is not None else 0
        self.n_ops: int = parent.n_ops if parent is not None else 0
        self.n_bytes: int = parent.n_bytes if parent is not None else 0
        self.plans: dict[tuple[Any, ...], Any] | None = None
        self.generic: dict[tuple[Any, ...], State] | None = None
        self.seen: dict[tuple[Any, ...], State] | None = None
        self.edges: object | None = None  # what `hits` knows of the calls that followed
        self.offset_fixup: tuple[int, int] | None = None
        self.layout: Any = None
        self.call_site: State | None = None
        self.closes = self.ends_turn = False
        self.call: int | None = None
        self.remembered: int | None = None  # flushes at new states, at the last flush here
        self.counts_writes: bool = parent is not None and parent.counts_writes

    def steps(self) -> list[Node | Leaf]:
        """What was recorded from the root to here, in program order."""
        found: list[Node | Leaf] = []
        state: State | None = self
        while state is not None:
            if state.step is not None:
                found.append(state.step)
            state = state.parent
        found.reverse()
        return found


@dataclass(slots=True)
class Pending:
    """A trace's content, taken out of it for a flush. `plain` are its leaves that are no lazy
    tensors'; up to `noted` its calls are in the past."""

    state: State
    noted: State
    values: list[Value]
    leaf_values: list[Value]
    leaves: list[torch.Tensor]
    plain: dict[int, Slot]
    scalars: list[complex]


class Copy(NamedTuple):
    """What a trace knows of memory that others may write: a tensor there, kept, its offset, and its
    copy."""

    tensor: torch.Tensor
    offset: int
    data: torch.Tensor
    slot: Slot


class Trace:
    """What one thread has recorded and not yet run, and the trie of what it recorded before."""

    # not for size: `hits` finds what it needs by their offsets
    __slots__ = ("_as_of", "_n_finals", "_n_forgotten", "_root_is_for", "_rooted", "_roots",
                 "_told_by", "begun", "unnoted_hits", "busy", "call", "claimed", "copies",
                 "environment", "flush_states", "first_new", "defers_close", "is_outdated", "kept",
                 "leaf_offsets", "leaf_slots", "leaf_values", "leaves", "lock", "noted",
                 "one_call_inputs", "policy", "ran", "root", "roots", "scalars", "slots",
                 "snapshot_slots", "state", "storages", "tape", "similar_path", "values",
                 "varying")  # fmt: skip

    state: State
    root: State
    begun: State
    values: list[Value]

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.roots: dict[tuple[object, ...], State] = {}
        self.varying: set[tuple[Any, ...]] = set()
        self.policy = Policy()
        self.call: int | None = None  # the one under way, as a number (see `sync_points`)
        self.unnoted_hits: deque[tuple[State, State]] = deque(maxlen=MOST_UNNOTED)  # hits not noted
        self.claimed = False
        self.is_outdated = False
        self.busy = False
        # within a call of several steps: whether one of them closes a segment
        self.defers_close: bool | None = None
        self.tape: Any = None  # see `dispatch.run.tape`
        self.lock = threading.RLock()  # held while the trace is flushed
        self.flush_states: Cache[int, State] = Cache("", MAX_STATES, _prune, _weight)
        self._n_finals = 0  # new ones so far
        self._n_forgotten = _n_forgotten  # see `forget_all`
        self._as_of = -1  # changes when `_told_by` was empty
        self._told_by: dict[Any, tuple[object, ...]] = {}  # environments, by what tells them
        self.reset()

    def reset(self, pending: Pending | None = None) -> bool:
        """Start an empty trace at the root for the environment (default dtype, flags) in force.

        Not if the trace holds anything else than `pending`, if that is given: False then.
        """
        if self._n_forgotten != _n_forgotten:
            self._n_forgotten = _n_forgotten
            self._drop_trie()
        if self._as_of != _n_changes or len(self._told_by) > MOST_TOLD:
            self._as_of = _n_changes
            self._told_by.clear()
        told_by = (settings.current(), torch.is_inference_mode_enabled(), self.tape is not None)
        environment = self._told_by.get(told_by)
        if environment is None:
            environment = self._told_by[told_by] = _environment(*told_by)
        root = self.roots.get(environment)
        if root is None:
            root = self.roots[environment] = State(None, (), None)
        # All that is new is made before any of it takes its place. So no signal's handler, and no
        # finalizer that the garbage collector runs, finds a trace that is half empty.
        values: list[Value] = []
        leaf_values: list[Value] = []
        leaves: list[torch.Tensor] = []
        leaf_slots: dict[int, Slot] = {}
        leaf_offsets: dict[int, int] = {}
        snapshot_slots: dict[int, Slot] = {}
        one_call_inputs: list[Value | int] = []
        copies: dict[int, list[Copy]] = {}
        kept: list[torch.Tensor] = []
        storages: dict[int, int] = {}
        scalars: list[complex] = []
        roots: dict[int, int] = {}
        if pending is not None and (
            self.values is not pending.values or self.state is not pending.state
        ):
            return False
        self._root_is_for = (*told_by, self._as_of)
        self.environment = environment
        self.root = self.state = root
        self.noted = self.begun = root  # up to here calls are in the past; the last sync point
        self.is_outdated = False
        self.leaf_values = leaf_values
        self.leaves = leaves
        self.leaf_slots = leaf_slots
        self.leaf_offsets = leaf_offsets
        self.snapshot_slots = snapshot_slots
        # in the trace for the call under way alone, plain ones by their id()
        self.one_call_inputs = one_call_inputs
        self.copies = copies  # of memory that others may write, by storage; the latest last
        self.kept = kept  # plain tensors whose id() stands in a dict above
        self.storages = storages
        self.scalars = scalars
        self.similar_path: tuple[State, State] | None = None
        self.first_new: State | None = None  # made since the trace was empty
        self.ran: tuple[Any, State] | None = None  # the op that ran at once, last, and when
        self._rooted: State | None = None  # up to here `_roots` is filled in
        self._roots = roots
        self.values = values  # last: see `has`
        if pending is not None and pending.noted is not pending.state:
            self.unnoted_hits.append((pending.noted, pending.state))
        return True

    def goes_on_at(self, now: settings.Settings) -> bool:
        """Whether the next trace begins at the root of this one, if these settings are in force."""
        is_inference, has_tape = torch.is_inference_mode_enabled(), self.tape is not None
        return self._root_is_for == (now, is_inference, has_tape, _n_changes)

    def pending(self) -> Pending:
        """All that is pending. A flush takes it on, and then empties the trace by `reset`."""
        return Pending(
            self.state, self.noted, self.values, self.leaf_values, self.leaves, self.leaf_slots,
            self.scalars,
        )  # fmt: skip

    def has(self, pending: Pending) -> bool:
        """Whether the trace isn't yet empty of it."""
        return self.values is pending.values

    def last_op(self) -> Any:
        """What was called last: an op that ran at once, or the recorded op's builtin."""
        state: State | None = self.state
        while state is not None:
            if self.ran is not None and self.ran[1] is state:
                return self.ran[0]
            if not isinstance(state.step, Leaf):
                return state.key[0] if state.key else None
            state = state.parent
        return None

    def has_write_to(self, value: Value) -> bool:
        """Whether a pending call writes the memory of a computed value."""
        if value.data is None or not self.storages:
            return False
        first = self.storages.get(torch_private.storage_id(value.data))
        if first is None:
            return False
        root = self.root_of(first)
        return any(
            self.root_of(index) == root
            for step in self.state.steps()
            if isinstance(step, Node)
            for index in step.writes
        )

    def note_new(self, state: State) -> None:
        """Note a state that was just made."""
        if self.first_new is None:
            self.first_new = state

    def similar_to(self, state: State) -> State | None:
        """Where the calls that led to a new state led before, with other numbers among them."""
        found = self.similar_path
        return found[1] if found is not None and found[0] is state else None

    def root_of(self, index: int) -> int:
        """The slot that owns the memory of slot `index`: a base, or the storage's first leaf."""
        state: State | None = self.state
        unknown: list[Node | Leaf] = []
        while state is not None and state is not self._rooted:
            if state.step is not None:
                unknown.append(state.step)
            state = state.parent
        self._rooted = self.state
        roots = self._roots
        for step in reversed(unknown):
            if isinstance(step, Leaf):
                roots[step.slot] = step.slot if step.shares is None else roots[step.shares]
                continue
            for out in step.outs:
                if out is not None:
                    roots[out] = out if step.view_of is None else roots[step.view_of]
        return roots[index]

    def forget(self) -> None:
        """Drop the trie (`cache_clear`); what is pending must have been flushed."""
        self._drop_trie()
        self.reset()

    def _drop_trie(self) -> None:
        for state in self.flush_states.values():
            state.plans = state.remembered = None  # the log may hold the state
        self.roots.clear()
        self.varying.clear()
        self.flush_states.clear()
        self.policy.reset()
        self.unnoted_hits.clear()

    def slot_at(self, index: int) -> Slot:
        slots = self.slots
        while len(slots) <= index:
            slots.append(Slot(self, len(slots)))
        return slots[index]

    def mark(self, key: tuple[Any, ...]) -> None:
        """Take a step that isn't a call: what follows is kept apart from what follows without."""
        state = self.state.get(key)
        if state is None:
            state = self.state[key] = State(self.state, key, None)
        self.state = state

    def remember(self, state: State) -> None:
        """Note a flush at `state`; the least recently used paths leave when there are too many.

        Those used since the last new one count as equally recent.
        """
        if state.remembered == self._n_finals:
            return
        self._n_finals += state.remembered is None
        state.remembered = self._n_finals
        self.flush_states.put(id(state), state)
        if len(_all) > MOST_SPARE:
            _drop_spare()


MOST_TOLD = 64
"""Settings whose environments a trace knows."""
MOST_UNNOTED = 64
"""Flushes since the last sync point whose hits are kept for the past."""
MAX_STATES = 40_000
"""States a trie may hold, 2 to 5 KB each with what `hits` knows; `segment_cache_size` bounds its
paths."""


def _weight(state: State) -> float:
    least = MAX_STATES / settings.current().segment_cache_size
    return min(max(state.n_ops, least), MAX_STATES)


def _prune(_: int, state: State) -> None:
    """Cut `state`'s path from the trie, up to where another path needs it."""
    state.plans = state.remembered = None
    current: State = state
    while current.parent is not None and not (_goes_on(current) or current.plans):
        parent = current.parent
        for owner in (parent, current.call_site):
            if owner is None:
                continue
            for children in (owner, owner.generic or {}):
                if children.get(current.key) is current:
                    del children[current.key]
            owner.seen = owner.edges = None  # they may hold children long gone
        current = parent


def _goes_on(state: State) -> bool:
    """Whether calls follow `state`. Aliases, which are no steps, don't keep a path."""
    return bool(state.generic) or not all(map(_is_alias, state.values()))


def _is_alias(state: State) -> bool:
    return getattr(state, "kind", ONE) & KIND_MASK == ALIAS


_apart: Counter[str] = Counter()
"""Names of what changes the meaning of some ops at present, for all threads, and how often."""


class _ApartHere(threading.local):
    def __init__(self) -> None:
        self.names: Counter[str] = Counter()


_apart_here = _ApartHere()
"""The same for this thread alone."""


def _environment(now: settings.Settings, _is_inference: bool, has_tape: bool) -> tuple[object, ...]:
    """What the meaning of recorded calls depends on besides their arguments: first what the
    metadata of their results does."""
    return (
        torch_private.environment(),
        _in_force(),
        now.debug,
        "redistribute" in now.forbid,
        now.bucket_bytes,
        now.backend,  # which calls close a segment
        now.flush_policy,
        has_tape,
    )


def _in_force() -> frozenset[str]:
    return frozenset(+_apart) | frozenset(+_apart_here.names)


@contextmanager
def setting_apart(name: str, *, here_only: bool = False) -> Iterator[None]:
    """Keep what is recorded inside apart from what is recorded outside, though the calls be the
    same; by all threads, or `here_only`."""
    names = _apart_here.names if here_only else _apart
    _count(names, name, 1)
    try:
        yield
    finally:
        _count(names, name, -1)


def set_apart(name: str, user: object) -> None:
    """The same from now on, as long as `user` lives."""
    _count(_apart, name, 1)
    restart_empty_traces()
    weakref.finalize(user, _note_change, _apart, name, -1)  # traces that start later are told


def is_apart(name: str) -> bool:
    """Whether something of this name is in force."""
    return bool(_apart[name])


_n_forgotten = 0
"""How often all tries were dropped, in any thread."""
_n_changes = 0
"""Changes, in any thread, of what environments are made of."""


def _note_change(names: Counter[str], name: str, change: int) -> None:
    global _n_changes
    with _lock:
        names[name] += change
        _n_changes += 1


def _count(names: Counter[str], name: str, change: int) -> None:
    _note_change(names, name, change)
    trace = local.trace
    if trace.state is trace.root:
        trace.reset()
    else:
        trace.mark(("apart", _in_force()))


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.trace, orphans = _adopt()
        for trace in orphans:
            for run in run_orphan:
                run(trace)


run_orphan: list[Callable[[Trace], None]] = []
"""What runs a trace that a thread has left pending at its end: `flush`."""
_all: dict[Trace, threading.Thread] = {}
"""Each trace with the thread that it is, or was, of. It is read in a copy: a finalizer may flush in
between, and drop some."""
_lock = threading.RLock()  # what the collector drops may want it while it is held


def _adopt() -> tuple[Trace, list[Trace]]:
    """A trace for this thread: one that a finished thread left, trie and all, or a new one; and
    those that finished threads left with something pending."""
    own = threading.current_thread()
    with _lock:
        left = [trace for trace, thread in _all.copy().items() if not thread.is_alive()]
        orphans = [trace for trace in left if trace.state is not trace.root]
        trace = next((trace for trace in left if trace.state is trace.root), None) or Trace()
        _all[trace] = own
        return trace, orphans


local = _Local()


MOST_SPARE = 4
"""Traces of threads that have ended whose tries are kept, for threads that begin."""


def _drop_spare() -> None:
    """Leave the tries of ended threads, but for a few, to the garbage collector."""
    with _lock:
        spare = [
            trace
            for trace, thread in _all.copy().items()
            if not thread.is_alive() and trace.state is trace.root
        ]
        for trace in spare[MOST_SPARE:]:
            _all.pop(trace, None)


def _after_fork_in_child() -> None:
    """Renew the locks, and let go of what other threads, which the child lacks, were about."""
    global _lock
    _lock = threading.RLock()
    for trace in _all.copy():
        trace.lock = threading.RLock()
        trace.claimed = False


os.register_at_fork(after_in_child=_after_fork_in_child)


def all_traces() -> list[Trace]:
    with _lock:
        return [*_all.copy()]


@contextmanager
def alone() -> Iterator[bool]:
    """Whether no other living thread has recorded anything; none begins to inside."""
    own = threading.current_thread()
    with _lock:
        others = _all.copy().items()
        yield not any(
            trace.slots for trace, thread in others if thread is not own and thread.is_alive()
        )


def forget_all() -> None:
    """Drop the tries of all threads: this one's now, which holds nothing, the others' when they
    are flushed next."""
    global _n_forgotten
    with _lock:
        _n_forgotten += 1
    restart_empty_traces()


def restart_empty_traces() -> None:
    """Let traces that hold nothing start from the root for the environment now in force."""
    global _n_changes
    with _lock:
        _n_changes += 1
    restart_own_trace()
    for trace in all_traces():
        if trace is not local.trace:
            trace.is_outdated = True  # its own thread resets it, between two ops


def restart_own_trace() -> None:
    """The same for this thread's alone, where what changed is this thread's."""
    trace = local.trace
    if trace.state is trace.root:
        trace.reset()


@contextmanager
def claimed(trace: Trace, own: Trace) -> Iterator[None]:
    """Keep the thread that owns `trace` out of it, once it is between two ops.

    `own` is the caller's trace, released meanwhile so that two threads can't wait for each other:
    it may be flushed then, so that what the caller knows of it must be looked up again.
    """
    if trace is own:
        yield
        return
    was_busy, own.busy = own.busy, False
    try:
        while not _claim(trace):
            time.sleep(1e-5)
        try:
            while trace.busy and _is_owned(trace):
                time.sleep(1e-5)
            yield
        finally:
            trace.claimed = False
    finally:
        if was_busy:
            begin(own)


def _claim(trace: Trace) -> bool:
    with _lock:
        if trace.claimed:
            return False
        trace.claimed = True
        return True


def _is_owned(trace: Trace) -> bool:
    """Whether the trace's thread lives: one that isn't in a forked process is never done."""
    with _lock:
        thread = _all.get(trace)
        return thread is not None and thread.is_alive()


def enter(value: Value, slot: Slot) -> bool:
    """Make a computed value a leaf of the trace of `slot`; not if another thread has it by now."""
    with _lock:
        if value.slot is not None:
            return False
        value.slot = slot
        slot.trace.leaf_values.append(value)
        return True


def begin(trace: Trace) -> None:
    """Enter this thread's trace for an op, once no other thread is flushing it.

    Who claims a trace looks at `busy` afterwards, as who enters looks at `claimed`: one of two that
    do so at once sees the other.
    """
    trace.busy = True
    while trace.claimed:
        trace.busy = False
        time.sleep(0)
        trace.busy = True
