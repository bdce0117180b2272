"""What is being recorded: values, the trie of states, and one trace for each thread.

A state is a point in a program that was seen before. It maps the key of each call that followed to
the next state. In: the steps that `record` takes. Out: the current state with its leaves, numbers
and values, all of which `flush` takes at once. The last third is about threads: which trace is
whose, and how one thread flushes the trace of another.
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
from lazy_tensor.kernels.segment import Call, Ref, TensorSpec

ONE, SELF, MANY, ALIAS, NOTHING, MARKED = range(6)
"""Kinds of a call's result, as C++ has them too: one new tensor, the argument that the call wrote,
several tensors, another handle on the argument's value (`detach`), None, a view with the conjugate
or the negative bit."""


class Slot:
    """A value's place in a trace. Each trace has one object for each place, so that keys compare
    slots by identity."""

    __slots__ = ("index", "trace")

    def __init__(self, trace: Trace, index: int) -> None:
        self.trace = trace
        self.index = index

    def __repr__(self) -> str:
        return f"%{self.index}"


class Value:
    """The handle that a lazy tensor owns: its place in a trace, its data, or both.

    A pending value has a slot. A computed one has data, and a slot too while it is a leaf of a
    trace. Several tensors own one value after `detach()`. A trace finds out which values are alive
    by their reference counts. So only it and tensors may keep a value, or dead ones are computed.
    """

    slot: Slot | None = None
    data: torch.Tensor | None = None
    failure: BaseException | None = None  # why it couldn't be computed; reading it raises this
    # A view of a leaf with a storage offset: that leaf's slot. The offset may differ in each run.
    leaf: int | None = None
    watch: Any = None  # see `dispatch.run.watch`


@dataclass(slots=True)  # to be frozen would cost 2 us a node
class Node:
    """One recorded call, never changed.

    `args` and `kwargs` hold `Ref(slot index)` for tensors and `ScalarRef(index)` for numbers that
    are given at run time. `outs` are the slots of its results, with their `specs`. `writes` are the
    slots that it writes, `view_of` is the slot that its result is a view of. `reads` are the slots
    in its arguments, in order, repeats included. `after` are slots that must be made first though
    they are not read.
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
    def makes(self) -> tuple[int, ...]:
        """The slots of its results, without those that the op leaves undefined."""
        return tuple([slot for slot in self.outs if slot is not None])

    @property
    def call(self) -> Call:
        """The call as backends ask for it, with slots in place of a segment's values."""
        return Call(self.facts.op, self.args, self.kwargs, self.specs)

    @property
    def issues(self) -> bool:
        """Whether it starts a collective. A wait for one counts as a view of what that gives."""
        return self.facts.communicates and self.view_of is None


def _collect_refs(arguments: tuple[Any, ...], found: list[int]) -> None:
    for argument in arguments:
        if type(argument) is Ref:
            found.append(argument.index)
        elif type(argument) is tuple:
            _collect_refs(argument, found)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A computed tensor that enters a trace. `shares` is the slot of the first leaf with the same
    storage, if there is one."""

    slot: int
    spec: TensorSpec
    shares: int | None


class State(dict[tuple[Any, ...], "State"]):
    """A point in the trie of programs. As a dict it maps the key of each call that followed to the
    next state.

    A state also says what led to it: `parent` by `key`, with the call or the leaf in `step`; and
    what the call gives. `kind` says how its result is made, `meta` has `make_wrapper`'s arguments
    for it, `slot` its place, `layout` the layouts of sharded results. If the call gives an argument
    back, `meta` is the name of that, None for the first. `n_slots`, `n_scalars`, `n_ops` and
    `n_bytes` count from the root to here.
    """

    __slots__ = ("call", "closes", "counts_writes", "edges", "ends_turn", "generic", "key", "kind",
                 "layout", "meta", "n_bytes", "n_ops", "n_scalars", "n_slots", "call_start",
                 "offset_fixup", "parent", "plans", "remembered", "seen", "slot",
                 "step")  # fmt: skip

    kind: int
    meta: Any
    slot: Any
    varying: frozenset[int] = frozenset()
    """Slots whose specs are examples, as the sizes vary. There are none in the trie."""

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
        # By the slots that are alive and `Settings.plans_by`; None until a first flush here.
        self.plans: dict[tuple[Any, ...], Any] | None = None
        # Children by keys in which numbers are replaced by their types: calls that came with
        # several numbers take these at run time.
        self.generic: dict[tuple[Any, ...], State] | None = None
        # By the same keys, the last child whose own key has the numbers: a call that is found here,
        # but not by its own key, has changed its numbers. `moving_index` notes its views here too.
        self.seen: dict[tuple[Any, ...], State] | None = None
        self.edges: object | None = None  # the children as C++ keeps them; dropped if one leaves
        # For a view of a leaf with a storage offset: the leaf, and its offset then, in bytes.
        self.offset_fixup: tuple[int, int] | None = None
        self.layout: Any = None
        # For a sharded call, which takes several steps at once: the state it was called in, which
        # leads here directly. `parent` is the last of these steps.
        self.call_start: State | None = None
        # Whether the trace is flushed behind this call, as it closes a segment or ends a turn of a
        # loop.
        self.closes = self.ends_turn = False
        self.call: int | None = None  # the call's number in `Policy.past`
        # `Trace._n_finals` at the last flush here; None if there was none.
        self.remembered: int | None = None
        # A kernel on the way here counts for autograd what it writes, which was counted when it was
        # recorded. So versions are put back after the run (see `versions_kept`).
        self.counts_writes: bool = parent is not None and parent.counts_writes

    def path(self, since: State | None = None) -> list[State]:
        """The states from the root to here, or those behind `since`, in program order."""
        found: list[State] = []
        state: State | None = self
        while state is not None and state is not since:
            found.append(state)
            state = state.parent
        found.reverse()
        return found

    def steps(self, since: State | None = None) -> list[Node | Leaf]:
        """What was recorded from the root to here, or behind `since`, in program order."""
        return [state.step for state in self.path(since) if state.step is not None]


@dataclass(slots=True)
class Pending:
    """A trace's content, taken out of it for a flush. `plain` has the slots of plain leaves by
    `id()`. The calls up to `noted` are in `Policy.past`."""

    state: State
    noted: State
    values: list[Value]
    leaf_values: list[Value]
    leaves: list[torch.Tensor]
    plain: dict[int, Slot]
    scalars: list[complex]


class Copy(NamedTuple):
    """A trace's copy of memory that others may write, as of an array. `tensor` is on that memory:
    it is kept so that no other storage gets its `storage_id`."""

    tensor: torch.Tensor
    offset: int
    data: torch.Tensor
    slot: Slot


class Trace:
    """What one thread has recorded and not yet run, and the trie of what it recorded before."""

    # Not to save memory: C++ finds what it needs by the offsets of slots.
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
        self.slots: list[Slot] = []  # by index
        self.roots: dict[tuple[object, ...], State] = {}  # by the environment (see `_environment`)
        # Calls, as op and types of the arguments, whose numbers have changed somewhere. Elsewhere
        # such a call takes its numbers at run time from the first time on.
        self.varying: set[tuple[Any, ...]] = set()
        self.policy = Policy()
        self.call: int | None = None  # the number of the call under way (see `sync_points`)
        # Flushes since the last sync point: each from where, and to where, its calls are hits that
        # `Policy.past` doesn't have. They are noted only if a call comes that is no hit.
        self.unnoted_hits: deque[tuple[State, State]] = deque(maxlen=MOST_UNNOTED)
        self.claimed = False  # another thread flushes the trace: its own thread waits in `begin`
        self.is_outdated = False  # its root is for an environment that has changed
        self.busy = False  # its own thread is within a call
        # Within a call that takes several steps: whether one of them closes a segment, for which
        # the trace is flushed at the end of the call. None outside of such calls.
        self.defers_close: bool | None = None
        self.tape: Any = None  # see `dispatch.run.tape`
        self.lock = threading.RLock()  # held while the trace is flushed
        # The states where the trace was flushed, by `id()`. They bound the trie: the path of each
        # that leaves is cut.
        self.flush_states: Cache[int, State] = Cache("", MAX_STATES, _prune, _weight)
        self._n_finals = 0  # states that came into `flush_states` so far
        self._n_forgotten = _n_forgotten  # as the global was when the trie was dropped last
        self._as_of = -1  # `_n_changes` when `_told_by` was emptied
        # Environments by settings, inference mode and tape. To gather one for each trace would take
        # long.
        self._told_by: dict[Any, tuple[object, ...]] = {}
        self.reset()

    def reset(self, pending: Pending | None = None) -> bool:
        """Start an empty trace at the root for the environment (default dtype, flags) in force.

        `pending` is what the caller has taken out of the trace. False, with nothing changed, if the
        trace holds something else by now.
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
        # All that is new is made before any of it takes its place. Making it may run the garbage
        # collector's finalizers, and handlers of signals, which may call ops. None of them may find
        # a trace that is half empty.
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
        root_is_for = (*told_by, self._as_of)
        if pending is not None and (
            self.values is not pending.values or self.state is not pending.state
        ):
            return False
        self._root_is_for = root_is_for
        self.environment = environment
        self.root = self.state = root
        # Up to `noted` calls are in `Policy.past`; `begun` is where the last sync point was.
        self.noted = self.begun = root
        self.is_outdated = False
        self.leaf_values = leaf_values  # of leaves that are lazy tensors
        self.leaves = leaves  # all of them as tensors with data, in order of their slots
        self.leaf_slots = leaf_slots  # of plain leaves, by their id()
        self.leaf_offsets = leaf_offsets  # storage offsets other than 0, in bytes, by slot
        # Slots of plain tensors that Python let in outside of modes, by id(). Ops that write them
        # there are not seen, so each call that reads one lets in a new snapshot of it.
        self.snapshot_slots = snapshot_slots
        # What is in the trace for the call under way alone, and taken out behind it: values, and
        # plain tensors by their id().
        self.one_call_inputs = one_call_inputs
        self.copies = copies  # of memory that others may write, by storage; the latest last
        self.kept = kept  # tensors of `snapshot_slots`: no other may get their id()
        self.storages = storages  # the first leaf with each storage: slots by `storage_id`
        self.scalars = scalars  # numbers that are given at run time, in order of their `ScalarRef`s
        # A new state, and the state to which the same calls led before with other numbers.
        self.similar_path: tuple[State, State] | None = None
        self.first_new: State | None = None  # the first state that was made since the last flush
        # The last op that ran at once, and the state in which it did.
        self.ran: tuple[Any, State] | None = None
        # For `root_of`: owners of memory by slot, filled in up to the state `_rooted`.
        self._rooted: State | None = None
        self._roots = roots
        self.values = values  # the last: `has` tells by it whether the trace was emptied
        if pending is not None and pending.noted is not pending.state:
            self.unnoted_hits.append((pending.noted, pending.state))
        return True

    def restart(self) -> bool:
        """Start at the root for the environment in force. False, with nothing changed, if the trace
        isn't empty: finalizers and handlers of signals may call ops at any time."""
        pending = self.pending()
        return pending.state is self.root and self.reset(pending)

    def goes_on_at(self, now: settings.Settings) -> bool:
        """Whether `reset` would start at the same root again, with these settings in force. C++
        then empties the trace by itself."""
        is_inference, has_tape = torch.is_inference_mode_enabled(), self.tape is not None
        return self._root_is_for == (now, is_inference, has_tape, _n_changes)

    def pending(self) -> Pending:
        """The trace's content. A flush takes it, and then empties the trace by `reset`."""
        return Pending(
            self.state, self.noted, self.values, self.leaf_values, self.leaves, self.leaf_slots,
            self.scalars,
        )  # fmt: skip

    def has(self, pending: Pending) -> bool:
        """Whether the trace still holds this content."""
        return self.values is pending.values

    def last_op(self) -> Any:
        """What was called last: an op that ran at once, or the builtin of a recorded op."""
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
        return first is not None and self.is_written(first)

    def is_written(self, index: int) -> bool:
        """Whether a pending call writes the memory of slot `index`."""
        root = self.root_of(index)
        return any(
            self.root_of(written) == root
            for step in self.state.steps()
            if isinstance(step, Node)
            for written in step.writes
        )

    def note_new(self, state: State) -> None:
        """Note a state that was just made."""
        if self.first_new is None:
            self.first_new = state

    def similar_to(self, state: State) -> State | None:
        """The state to which the same calls as to `state`, a new one, led before with other
        numbers; None if there is none."""
        found = self.similar_path
        return found[1] if found is not None and found[0] is state else None

    def root_of(self, index: int) -> int:
        """The slot that owns the memory of slot `index`: a base, or the storage's first leaf."""
        # Only the steps since the last call of this method are walked: a trace only grows.
        unknown = [] if self.state is self._rooted else self.state.steps(self._rooted)
        self._rooted = self.state
        roots = self._roots
        for step in unknown:
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
            # The flush log may hold the state for long. Plans hold kernels.
            state.plans = state.remembered = None
        self.roots.clear()
        self.varying.clear()
        self.flush_states.clear()
        self.policy.reset()
        self.unnoted_hits.clear()

    def slot_at(self, index: int) -> Slot:
        """The one `Slot` of this trace with this index."""
        slots = self.slots
        while len(slots) <= index:
            slots.append(Slot(self, len(slots)))
        return slots[index]

    def mark(self, key: tuple[Any, ...]) -> None:
        """Take a step that isn't a call. Calls behind it lead to other states than without it."""
        state = self.state.get(key)
        if state is None:
            state = self.state[key] = State(self.state, key, None)
        self.state = state

    def remember(self, state: State) -> None:
        """Note a flush at `state`; the least recently used paths leave when there are too many."""
        # As long as no new state comes nothing leaves, so its place in the order doesn't matter
        # before. A loop pays for this comparison alone.
        if state.remembered == self._n_finals:
            return
        self._n_finals += state.remembered is None
        state.remembered = self._n_finals
        self.flush_states.put(id(state), state)
        if len(_all) > MOST_SPARE:
            _drop_spare()


MOST_TOLD = 64
"""Environments that a trace keeps in `_told_by`."""
MOST_UNNOTED = 64
"""Flushes since the last sync point whose hits are kept for `Policy.past`. In a longer region the
first ones are not noted."""
MAX_STATES = 40_000
"""States that a trie may hold, of 2 to 5 KB each with what C++ keeps of them."""


def _weight(state: State) -> float:
    """What the path to a flush's state counts in `flush_states`: its ops, but at least so much that
    there are no more paths than `segment_cache_size`."""
    least = MAX_STATES / settings.current().segment_cache_size
    return min(max(state.n_ops, least), MAX_STATES)


def _prune(_: int, state: State) -> None:
    """Cut `state`'s path from the trie, up to where another path needs it."""
    state.plans = state.remembered = None
    current: State = state
    while current.parent is not None and not (_goes_on(current) or current.plans):
        parent = current.parent
        for owner in (parent, current.call_start):
            if owner is None:
                continue
            for children in (owner, owner.generic or {}):
                if children.get(current.key) is current:
                    del children[current.key]
            # They may hold children that are gone. C++ learns the others again, call by call.
            owner.seen = owner.edges = None
        current = parent


def _goes_on(state: State) -> bool:
    """Whether calls follow `state`. Aliases don't count: no trace takes a step for them."""
    following = state.values()
    return bool(state.generic) or any(getattr(s, "kind", ONE) != ALIAS for s in following)


_apart: Counter[str] = Counter()
"""What changes the meaning of some ops at present, in all threads: names, with the numbers of their
users. What is recorded under different names is kept apart (see `setting_apart`)."""


class _ApartHere(threading.local):
    def __init__(self) -> None:
        self.names: Counter[str] = Counter()


_apart_here = _ApartHere()
"""The same of what concerns this thread alone."""


def _environment(now: settings.Settings, _is_inference: bool, has_tape: bool) -> tuple[object, ...]:
    """What the meaning of recorded calls depends on besides their arguments. Each has a root.

    The metadata of results depend on the first two items alone: the schema cache has these in its
    keys. Inference mode, a part of the first, is an argument because `_told_by` goes by it.
    """
    return (
        torch_private.environment(),
        names_in_force(),
        now.debug,
        "redistribute" in now.forbid,
        now.bucket_bytes,
        now.backend,  # which calls close a segment
        now.flush_policy,
        has_tape,
    )


def names_in_force() -> frozenset[str]:
    """The names that are in force in this thread."""
    return frozenset(_apart).union(_apart_here.names)


@contextmanager
def setting_apart(name: str, *, here_only: bool = False) -> Iterator[None]:
    """Context manager: calls inside lead to other states than equal calls outside, in all threads,
    or `here_only`."""
    names = _apart_here.names if here_only else _apart
    _count(names, name, 1)
    try:
        yield
    finally:
        _count(names, name, -1)


def switch_apart(name: str, on: bool) -> None:
    """Begin or end what `setting_apart` does in this thread, for a flag that is no block."""
    _count(_apart_here.names, name, 1 if on else -1)


def set_apart(name: str, user: object) -> None:
    """The same without an end, in all threads, as long as `user` lives."""
    _count(_apart, name, 1)
    restart_empty_traces()
    # A finalizer may run in the middle of anything: it resets no trace. Each trace sees the change
    # when it starts anew.
    weakref.finalize(user, _note_change, _apart, name, -1)


def is_apart(name: str) -> bool:
    """Whether something of this name is in force."""
    return bool(_apart[name])


_n_forgotten = 0
"""How often all tries were dropped. Each trace compares it with its own when it starts anew."""
_n_changes = 0
"""Changes, by any thread, of what environments are made of. Traces compare it in the same way."""


def _note_change(names: Counter[str], name: str, change: int) -> None:
    global _n_changes
    with _lock:
        names[name] += change
        if not names[name]:
            del names[name]
        _n_changes += 1


def _count(names: Counter[str], name: str, change: int) -> None:
    """Change how many users a name has; this thread's trace goes on apart from now on."""
    _note_change(names, name, change)
    trace = local.trace
    if not trace.restart():
        trace.mark(("apart", names_in_force()))


class _Local(threading.local):
    """What each thread has of its own: its trace. Made when the thread first asks for it."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.trace, orphans = _adopt()
        self.trace.policy.see_all_tensors()
        for trace in orphans:
            with claimed(trace, self.trace):
                for run in run_orphan:
                    run(trace)


run_orphan: list[Callable[[Trace], None]] = []
"""What runs a trace that a thread has left pending at its end: `flush`, which is above this module
and puts itself here."""
_all: dict[Trace, threading.Thread] = {}
"""Each trace with its thread, which may have ended. Loops go over a copy: a finalizer may flush in
between, which may drop some."""
# An RLock, as a finalizer may want it while its own thread holds it.
_lock = threading.RLock()


def _adopt() -> tuple[Trace, list[Trace]]:
    """A trace for this thread, and the traces that ended threads left with something pending.

    It is one that an ended thread left empty, if there is any: its trie is known already. Else a
    new one. A trace that another thread claims looks empty while that thread flushes it.
    """
    own = threading.current_thread()
    with _lock:
        left = [trace for trace, thread in _all.copy().items() if not thread.is_alive()]
        orphans = [trace for trace in left if trace.state is not trace.root]
        empty = (trace for trace in left if trace.state is trace.root and not trace.claimed)
        trace = next(empty, None) or Trace()
        _all[trace] = own
        return trace, orphans


local = _Local()


MOST_SPARE = 4
"""Traces of ended threads that are kept, with their tries, for threads that begin."""


def _drop_spare() -> None:
    """Drop the empty traces of ended threads, all but `MOST_SPARE`."""
    with _lock:
        spare = [
            trace
            for trace, thread in _all.copy().items()
            if not thread.is_alive() and trace.state is trace.root
        ]
        for trace in spare[MOST_SPARE:]:
            _all.pop(trace, None)


def _after_fork_in_child() -> None:
    """Renew what other threads may have held: the child lacks these threads, so nobody would let go
    of their locks and claims."""
    global _lock
    _lock = threading.RLock()
    for trace in _all.copy():
        trace.lock = threading.RLock()
        trace.claimed = False


os.register_at_fork(after_in_child=_after_fork_in_child)


def all_traces() -> list[Trace]:
    with _lock:
        return [*_all.copy()]


def only_one_records() -> bool:
    """Whether no other living thread has a trace."""
    own = threading.current_thread()
    return not any(thread.is_alive() for thread in _all.copy().values() if thread is not own)


@contextmanager
def alone() -> Iterator[bool]:
    """Context manager: whether no other living thread has recorded anything. A thread that has no
    trace yet waits for one meanwhile."""
    own = threading.current_thread()
    with _lock:
        others = _all.copy().items()
        yield not any(
            trace.slots for trace, thread in others if thread is not own and thread.is_alive()
        )


def forget_all() -> None:
    """Drop the tries of all threads: this thread's now, as its trace is empty, others' when their
    traces start anew."""
    global _n_forgotten
    with _lock:
        _n_forgotten += 1
    restart_empty_traces()


def restart_empty_traces() -> None:
    """Have empty traces start at the root for the environment that is in force now. Others do so
    after their next flush."""
    global _n_changes
    with _lock:
        _n_changes += 1
    restart_own_trace()
    for trace in all_traces():
        if trace is not local.trace:
            trace.is_outdated = True  # only its own thread may reset it, between two ops


def restart_own_trace() -> bool:
    """The same for this thread's trace alone, for changes that concern no other. False if it isn't
    empty."""
    return local.trace.restart()


@contextmanager
def claimed(trace: Trace, own: Trace) -> Iterator[None]:
    """Context manager: wait until the thread that owns `trace` is between two ops, and keep it out.

    `own` is the caller's trace. It isn't busy meanwhile: two threads that claim each other's trace
    would wait for ever. So another thread may flush `own`, and the caller must look up again what
    it knew of it.
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
    """Claim a trace; False if another thread has it."""
    with _lock:
        if trace.claimed:
            return False
        trace.claimed = True
        return True


def _is_owned(trace: Trace) -> bool:
    """Whether the trace's thread lives. In a forked process other threads don't, and a trace that
    one of them left busy would stay so."""
    with _lock:
        thread = _all.get(trace)
        return thread is not None and thread.is_alive()


def enter(value: Value, slot: Slot) -> bool:
    """Make a computed value a leaf of the trace of `slot`; False if another thread's trace has it
    by now."""
    with _lock:
        if value.slot is not None:
            return False
        value.slot = slot
        slot.trace.leaf_values.append(value)
        return True


def begin(trace: Trace) -> None:
    """Mark this thread's trace busy with an op, once no other thread claims it.

    Each side sets its own flag first and then reads the other's: here `busy`, then `claimed`; in
    `claimed()` the reverse. So of two threads that do so at once, at least one sees the other.
    """
    trace.busy = True
    while trace.claimed:
        trace.busy = False
        time.sleep(0)
        trace.busy = True
