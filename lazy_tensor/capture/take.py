"""Records one call of a function, and notes what it read, left behind and returned.

In: a function, its arguments, and what the call depends on besides. Out: its result, and a `Take`,
or the obstacle that keeps the call from being replayed. Called by `replay`.

A tape is on the trace during the call. An `ObjectGraph` before it and one after it show what
changed.
"""

from __future__ import annotations

import copy
import gc
import random
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lazy_tensor.capture import watched_object as kinds
from lazy_tensor.capture.arguments import Arguments
from lazy_tensor.capture.numbers.call_numbers import CallNumbers
from lazy_tensor.capture.numbers.followed_numbers import FollowedNumbers
from lazy_tensor.capture.numbers.kept_numbers import MovedNumbers
from lazy_tensor.capture.numbers.step_counts import Count
from lazy_tensor.capture.object_graph import ObjectGraph, explore
from lazy_tensor.capture.outline import Constant, Flag, Left, Outline, Returned, Source, named
from lazy_tensor.capture.watched_object import Obstacle, Place, WatchedObject, is_atom, is_same
from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.metadata.infer import is_marked, meta_of
from lazy_tensor.dispatch.record.extend_trie import wrapper_arguments
from lazy_tensor.dispatch.run import hits, watch
from lazy_tensor.dispatch.run.tape import Tape
from lazy_tensor.dispatch.traced_number import TRACED, counts_in, without_traced
from lazy_tensor.dispatch.traced_sizes import sizes_noted
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.dispatch.trie.trace import Leaf, Node, Trace, live_values, local
from lazy_tensor.dispatch.wording import op_name, with_article
from lazy_tensor.tensor import LazyTensor

SETTABLE = (kinds.ATTRIBUTES, kinds.SLOTS, kinds.CELL, kinds.GLOBALS, kinds.ITEMS, kinds.ELEMENTS)
"""Kinds of places where a replay puts a flag, number or text that the call has put there."""

MOST_CONSTANTS = 16
"""Elements of a tensor made inside, such as `torch.tensor(0.5)`, that is treated as a number: calls
do the same only if its values are equal."""

UNHELD = 5
"""References to a leaf that nobody but the trace holds, as `_made_inside` counts them: the trace's,
two of its caller, its own, and that of `sys.getrefcount`."""
NUMBER_USED = "it uses a number among its arguments otherwise than to compute with it"
KEEPS_NUMBER = "it keeps a number where replay can't see it"


def take(
    function: Callable[..., Any],
    arguments: Arguments,
    root: tuple[str, Any],
    names: set[str],
    moved: MovedNumbers,
    *,
    follows_code: bool = True,
    may_have_graphs: bool = False,
    earlier: Iterable[Outline] = (),
    like: Outline | None = None,
    notes_sizes: bool = False,
) -> tuple[Any, Take | str]:
    """Call the function with a tape on. Return its result, and the take or the obstacle to one.

    `root` is what the call can look into besides its arguments, with a label; `names` are those
    that code is known to mention, `moved` the numbers that others change. The pictures follow code
    or not. `earlier` are outlines of calls that may have done the same, `like` is one that should
    have. If it `notes_sizes`, the outline tells what Python did with sizes of tensors. Called in
    `lazy_mode`, with nothing pending; leaves the call's ops pending.
    """
    tensors = arguments.tensors
    try:
        have_graphs = any(_graph_of(tensor) is not None for tensor in tensors)
        if torch.is_grad_enabled() and have_graphs and not may_have_graphs:
            raise Obstacle("an argument has a graph, which each call has another of; detach it")
        before = seen_by(root, arguments, names, follows_code=follows_code)
        _check_numbers(function, arguments, before)
        versions = _versions_of([*before.tensors().values(), *tensors])
        arguments.words = words_of(tensors)
    except Exception as error:  # an object that can't be looked at, such as a dead weakref.proxy
        raised = "" if isinstance(error, Obstacle) else "to look at what it can see raises "
        return function(*arguments.args, **arguments.kwargs), f"{raised}{error}"
    trace, state = local.trace, _GlobalState()
    # a cast of a weight that autocast kept from an earlier call would be a leaf from nowhere: each
    # call casts anew
    torch.clear_autocast_cache()
    tape = Tape(trace, before.generators, Arguments.call.__code__)
    try:
        followed = FollowedNumbers(trace, tape, function, before, moved.found_by(before))
        n_kept = len(followed.kept.places)
        with followed.lent(), sizes_noted(tape.numbers) if notes_sizes else nullcontext():
            result = arguments.call(function, tape.numbers, n_kept)
    except BaseException:
        tape.stop("it raised an exception")
        tape.numbers.repair()
        raise
    tape.take_off()
    torch.clear_autocast_cache()
    taken: Take | str
    try:
        if tape.obstacle is not None:
            raise Obstacle(tape.obstacle)
        # drops what was derived from values that the call has written: else it would count as live
        watch.before_flush(trace)
        state.check()
        if arguments.note_used([-1 - n_kept - i for i in tape.numbers.fixed if i < -n_kept]):
            raise Obstacle(NUMBER_USED)
        _check_arguments(arguments, result)
        after = seen_by(root, arguments, names, follows_code=follows_code)
        moved.left_by(after)
        taken = Take(
            trace, tape, followed, before, after, arguments, versions, result, earlier, like
        )
    except Obstacle as reason:
        taken = str(reason)
    except Exception as error:  # the call has run, and its result must not be lost
        taken = f"it can't be taken down: {error!r}; please report it"
    result = without_traced(result)
    if tape.numbers.repair() and isinstance(taken, Take):
        taken = KEEPS_NUMBER
    return result, taken


def seen_by(
    root: tuple[str, Any], arguments: Arguments, names: set[str], *, follows_code: bool
) -> ObjectGraph:
    """What a call can see now; for what the parameters mean see `take`."""
    # torch runs these hooks for every module and optimizer, but its code isn't followed
    roots = [root, *arguments.objects, *torch_private.hooks_of_all_modules()]
    return explore(roots, arguments.tensors, names, follows_code=follows_code)


def _check_numbers(function: Callable[..., Any], arguments: Arguments, seen: ObjectGraph) -> None:
    """Obstacle if code that the call can see does more with a followed number than compute."""
    seen.is_given_complex = any(part is complex for part in arguments.key[0])
    if arguments.numbers and arguments.note_unfollowed(function, seen.names_of_users):
        raise Obstacle(NUMBER_USED)


def in_order(left: Iterable[Left]) -> list[Left]:
    """The places in the order in which C++ numbers them: first renewed ones, then those that were
    empty."""
    return sorted(left, key=lambda one: one.was_empty)


def words_of(tensors: Iterable[Any]) -> bytes:
    """What describes tensors whose sizes may count though no op reads them."""
    found = [concrete(one) for one in tensors if isinstance(one, torch.Tensor)]
    words: bytes = hits.loaded.leaf_words([
        one for one in found if one is not None and is_strided(one)
    ])  # fmt: skip
    return words


def _versions_of(tensors: list[torch.Tensor]) -> dict[int, int]:
    """How often each was written, by its id: a reference would make what the call throws away look
    like a result."""
    return {id(tensor): tensor._version for tensor in tensors if not tensor.is_inference()}


class _GlobalState:
    """Python's and NumPy's random generators and torch's settings, as they are now."""

    def __init__(self) -> None:
        self._found = _random_states(), hits.loaded.call_environment()

    def check(self) -> None:
        """Obstacle if they aren't as they were."""
        states, environment = self._found
        if states != _random_states():
            raise Obstacle("it, or a thread, draws from Python's or numpy's random numbers")
        if environment != hits.loaded.call_environment():
            raise Obstacle("it leaves a setting of torch changed, such as the grad mode")


def _check_arguments(arguments: Arguments, result: Any) -> None:
    """Obstacle if the call has changed its arguments, or returns a container that is one."""
    if not arguments.are_unchanged():
        raise Obstacle("it changes lists, dicts or objects that are arguments")
    given = _containers_in(*arguments.args, *arguments.kwargs.values())
    if any(i in given and type(one) is not tuple for i, one in _containers_in(result).items()):
        raise Obstacle("it returns a list or a dict that is an argument; return a copy")


def _containers_in(*values: Any) -> dict[int, Any]:
    """The lists, tuples and dicts in what a call gets or returns, by their ids."""
    found: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        one = waiting.pop()
        if isinstance(one, (list, tuple, dict)) and id(one) not in found:
            found[id(one)] = one
            waiting += one.values() if isinstance(one, dict) else one
    return found


def _random_states() -> tuple[Any, ...]:
    """The states of Python's and numpy's random generators, which a tape doesn't see."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    kind, words, *rest = numpy.random.get_state()
    return (random.getstate(), kind, words.tobytes(), *rest)


class Take:
    """A recorded call: its outline, and what a replay of it needs.

    Read from the trace that holds just this call; Obstacle if the call can't be replayed.
    `constants` are copies of the small tensors that the call made, by leaf. `written` are the
    numbers of the leaves that it wrote, with how many writes autograd counted of each: it counts
    none of a batch norm's to its running mean. `metadata` describes all leaves that are not draws.
    `after` shows what the call could see when it ended. `places` are the tensors that it found when
    it began, and read or returned. `numbers` are Python's that it reads and keeps. `stepped` are
    schedulers that it steps, `found_stepped` what these change, as the call found it. `flags` are
    other values that it changes.
    """

    def __init__(
        self,
        trace: Trace,
        tape: Tape,
        followed: FollowedNumbers,
        before: ObjectGraph,
        after: ObjectGraph,
        arguments: Arguments,
        versions: dict[int, int],
        result: Any,
        earlier: Iterable[Outline],
        like: Outline | None,
    ) -> None:
        self.after = after
        self.stepped = followed.schedulers.stepped
        self._explains = followed.schedulers.explains
        self.found_stepped: dict[Place, Any] = {}
        self.flags: list[Flag] = []
        self.draws = tuple([draw for draw, _ in tape.draws])
        self._trace = trace
        self._drawn = [data for _, data in tape.draws]
        self._before = before
        self._tensors = arguments.tensors
        self.objects = arguments.objects
        self._argument_sizes = arguments.sizes
        self._unread_words = arguments.words
        self.argument_words = arguments.key[1]
        self._result = result
        steps = trace.state.steps()
        self._nodes = [step for step in steps if isinstance(step, Node)]
        # the number of each leaf, by its slot
        leaves_of_steps = [step for step in steps if isinstance(step, Leaf)]
        self.leaf_at = {step.slot: i for i, step in enumerate(leaves_of_steps)}
        self._live = self._slots_alive()  # of results that something besides the trace still holds
        self._claimed: set[int] = set()  # those of them that replay knows the holder of
        self.made_anew: set[int] = set()  # ids of containers that the call put for other ones
        self.places = before.tensors()
        sources = self._sources()
        leaves, structure = self._flattened(tape)
        self.numbers = CallNumbers(
            self._nodes, self.leaf_at, trace.root_of, tape, followed.kept, before, leaves,
            (earlier, like), len(arguments.numbers),
        )  # fmt: skip
        left = self._left()
        self._unread_words += words_of(before.value_at(one.place) for one in in_order(left))
        self._check_identities(left)
        returned = self._all_returned(leaves, left)
        # keep only the tensors that a replay must find by identity; `left` ones are looked up
        tensors_named: list[Source | Returned] = [*sources, *returned]
        named = {one.name for one in tensors_named if one.kind == "place"}
        named -= {one.place for one in left}
        self.places = {place: one for place, one in self.places.items() if place in named}
        self._check_claims()
        read_later = (*returned, *self.numbers.computed_from.values())
        of_numbers = {one.name for one in read_later if one.kind in ("number", "list")}
        self._live = tuple(sorted({*self._live, *of_numbers}))
        self._check_addresses()
        counts = followed.counts.found()
        self._note_leaves(sources, versions)
        self.outline = self._outline(tape, counts, sources, left, returned, structure)
        self.any_size: Any = None  # an `AnySize` if the take stands for calls of all sizes
        del self._result  # it holds traced numbers

    def without_objects(self) -> Take:
        """The take without what the call could see: for `with_objects`."""
        bare = copy.copy(self)
        bare.after = bare._before = None  # type: ignore[assignment]
        bare._tensors, bare._drawn, bare.objects = [], [], []
        bare.places = dict.fromkeys(self.places)  # type: ignore[assignment]
        return bare

    def with_objects(self, graph: ObjectGraph, objects: list[tuple[str, Any]]) -> Take:
        """The take of a call that gets other objects and sees others, before it begins."""
        other = copy.copy(self)
        other.after, other.objects = graph, objects
        other.places = {place: graph.value_at(place) for place in self.places}
        return other

    def _flattened(self, tape: Tape) -> tuple[list[Any], Any]:
        """The leaves of what the call returned, and how they were nested."""
        # a container that the function itself keeps is one leaf: a replay returns the same one
        whole = {i for i, one in _containers_in(self._result).items() if self.after.has(one)}
        whole |= {id(read.number) for read in tape.reads}
        leaves, structure = pytree.tree_flatten(
            self._result, is_leaf=lambda one: id(one) in whole or isinstance(one, torch.Size)
        )
        return [
            without_traced(one) if type(one) is torch.Size else one for one in leaves
        ], structure

    def _outline(
        self,
        tape: Tape,
        counts: tuple[Count, ...],
        sources: tuple[Source, ...],
        left: tuple[Left, ...],
        returned: tuple[Returned, ...],
        structure: Any,
    ) -> Outline:
        numbers, trace = self.numbers, self._trace
        return Outline(
            state=trace.state,
            scalars=tuple(trace.scalars),
            counts=counts,
            numbers=self._digest(counts, is_needed=bool(counts or tape.numbers.given)),
            draws=tuple([draw.key for draw in self.draws]),
            reads=numbers.keys_of_reads,
            stepped=tuple(map(id, self.stepped)),
            flags=tuple(self.flags),
            kept=tuple(numbers.kept.values()),
            checks=tuple([(check.text, check.outcome) for check in numbers.checks]),
            sources=sources,
            left=left,
            live=self._live,
            returned=returned,
            computed_from=numbers.computed_from,
            structure=structure,
            numbers_returned=numbers.values_returned,
            given=tape.numbers.given,
            sizes_read=tuple(tape.numbers.sizes),
            leaf_words=self.metadata + self._unread_words,
            argument_sizes=self._argument_sizes,
            drawn=self.draws,
        )

    def _digest(self, counts: tuple[Count, ...], *, is_needed: bool) -> int:
        """See `Outline.numbers`."""
        kept = {place for place, _, _ in self.numbers.kept.values()}
        in_groups = {one.what for one in counts if one.kind == "place"}
        return self.after.numbers(in_groups | kept) if is_needed else 0

    def _note_leaves(self, sources: tuple[Source, ...], versions: dict[int, int]) -> None:
        trace = self._trace
        self.constants = {
            i: torch_private.copy_of(trace.leaves[i])
            for i, source in enumerate(sources)
            if source.kind == "constant"
        }
        drawn = {id(data) for data in self._drawn}
        leaves_now = [None if id(leaf) in drawn else leaf for leaf in trace.leaves]
        self.metadata = hits.loaded.leaf_words(leaves_now)
        self.written = self._written(sources, versions)

    def _slots_alive(self) -> tuple[int, ...]:
        values = live_values(self._trace.values)
        return tuple(value.slot.index for value in values if value.slot is not None)

    def _check_claims(self) -> None:
        """Obstacle if a result outlives the call and lies nowhere that replay looks."""
        # it keeps alive what the call has thrown away: let go of it, and look again
        self._before.forget()
        self._live = self._slots_alive()
        if self._unclaimed():
            gc.collect()  # it may be held by a cycle of objects that nobody can reach
            self._live = self._slots_alive()
        for slot in self._unclaimed():
            node = next(node for node in self._nodes if slot in node.outs)
            raise Obstacle(
                f"what {op_name(node.facts.op)} gives at {node.where} outlives it where replay "
                "can't see it: in a graph that backward() hasn't freed, or with an object that "
                "keeps tensors to itself"
            )

    def _unclaimed(self) -> list[int]:
        """Slots of results that outlive the call and lie nowhere that replay looks. A view that is
        claimed keeps its base alive, which nobody else can see."""
        root_of = self._trace.root_of
        roots = {root_of(slot) for slot in self._claimed if slot >= 0}
        unclaimed = [slot for slot in self._live if slot not in self._claimed]
        return [slot for slot in unclaimed if root_of(slot) not in roots]

    def _check_addresses(self) -> None:
        """Obstacle if the call views memory by a place that it counts from the storage's begin,
        where a leaf begins elsewhere: the leaf of a later call may begin at yet another place."""
        viewed = {
            slot: node.view_of
            for node in self._nodes
            if node.view_of is not None
            for slot in node.outs
        }
        for node in self._nodes:
            if node.facts.op is not AS_STRIDED:
                continue
            if node.facts.named(node.args, node.kwargs).get("storage_offset") is None:
                continue
            slot = node.view_of
            while slot in viewed:
                slot = viewed[slot]
            number = None if slot is None else self.leaf_at.get(slot)
            if number is not None and self._trace.leaves[number].storage_offset():
                raise Obstacle(f"{named(node)} gets a place in a storage, which it may have read")

    def _check_identities(self, left: tuple[Left, ...]) -> None:
        """Obstacle if two places held one tensor before the call and hold two now, or the reverse.

        These are all places of tensors, as a replay renews some of these one by one, and gradients.
        """
        places = [*self.places, *(one.place for one in left if not one.was_empty)]
        places += [(name, 0) for name, one in self.after.holdings.items() if one.is_of_tensor]
        patterns: list[list[int]] = []
        for picture in (self._before, self.after):
            found = [
                picture.holdings[name].values[key] if name in picture.holdings else None
                for name, key in places
            ]
            first: dict[int, int] = {}
            patterns.append([
                first.setdefault(id(value), i) if isinstance(value, torch.Tensor) else -1
                for i, value in enumerate(found)
            ])  # fmt: skip
        for before, after in zip(*patterns, strict=True):
            if before != after and before >= 0 and after >= 0:
                raise Obstacle("tensors that were one object are two now, or the other way round")

    # What the call read

    def _sources(self) -> tuple[Source, ...]:
        known = {id(data): Source("draw", i) for i, data in enumerate(self._drawn)}
        bases: dict[int, tuple[Source, torch.Tensor]] = {}  # by storage
        shared: set[int] = set()  # storages of an argument that another tensor has too
        # an argument that the picture finds elsewhere too is a place: replays pin it by identity
        named = [(Source("place", place), tensor) for place, tensor in self.places.items()]
        named += [(Source("argument", i), self._tensors[i]) for i in self._before.arguments]
        for source, tensor in named:
            data = concrete(tensor)
            if data is None or not is_strided(data):
                continue
            known.setdefault(id(data), source)
            storage = torch_private.storage_id(data)
            if source.kind == "argument" and storage in bases:
                shared.add(storage)
            bases.setdefault(storage, (source, data))
        # Views are found by their storage. In one that an argument shares with another tensor, the
        # next call's argument may lie elsewhere, so such a view can't be told.
        bases = {storage: base for storage, base in bases.items() if storage not in shared}
        copied = self._copied()
        sources: list[Source] = []
        for leaf in self._trace.leaves:
            original = copied.get(id(leaf), leaf)
            found = _found(original, known, bases)
            if original is leaf:
                is_view_of_argument = found is not None and found.kind == "argument" and found.view
                if found is None or is_view_of_argument:
                    found = self._made_inside(leaf)
                sources.append(found)
                continue
            if found is None:
                raise Obstacle(
                    f"it reads a tensor of shape {tuple(leaf.shape)} on memory of an array or a "
                    "file that replay can't find again: make it by torch.from_numpy outside, and "
                    "pass it as an argument"
                )
            sources.append(replace(found, is_copy=True))
        return tuple(sources)

    def _copied(self) -> dict[int, torch.Tensor]:
        """The tensors that were copied because others may write their memory, by `id` of the copy.
        Obstacle if one was copied twice: it was written during the call."""
        copied: dict[int, torch.Tensor] = {}
        for copies in self._trace.copies.values():
            metas = [meta_of(copy.tensor) for copy in copies]
            if any(meta in metas[:i] for i, meta in enumerate(metas)):
                raise Obstacle("an array that it reads is written meanwhile")
            copied |= {id(copy.data): copy.tensor for copy in copies}
        return copied

    def _made_inside(self, leaf: torch.Tensor) -> Source:
        """The source of a leaf that is no draw, no argument and at no place."""
        if _is_small(leaf):
            # a constant if only the trace and the returned tensors have its memory: else somebody
            # keeps it, and may give it other values before the next call
            leaves = pytree.tree_leaves(self._result)
            given = [one for one in leaves if _is_on(leaf, one)]
            is_returned = bool(given) or any(getattr(one, "_base", None) is leaf for one in leaves)
            is_held = not is_returned and sys.getrefcount(leaf) > UNHELD
            if torch_private.n_users(leaf) <= 1 + len(given) and not is_held:
                return Source("constant", _contents(leaf))
        if not self.after.follows_code:
            return Source("object", id(leaf), tensor=leaf)
        slot = next(s for s, i in self.leaf_at.items() if self._trace.leaves[i] is leaf)
        users = [node for node in self._nodes if slot in node.reads]
        used = f", first used by {named(users[0])}" if users else ""
        raise Obstacle(
            f"a tensor of shape {tuple(leaf.shape)}{used} is neither an argument nor anywhere that "
            "replay looks: made from data inside, or handed over by an object that keeps it to "
            "itself; pass it as an argument"
        )

    def _written(self, sources: tuple[Source, ...], versions: dict[int, int]) -> dict[int, int]:
        root_of = self._trace.root_of
        roots = {root_of(slot) for node in self._nodes for slot in node.writes}
        written: dict[int, int] = {}
        for slot, i in self.leaf_at.items():
            if not roots or root_of(slot) not in roots:
                continue
            source, tensor = sources[i], None
            if source.kind == "argument":
                tensor = self._tensors[source.name]
            elif source.kind == "place":
                tensor = self.places.get(source.name)
            written[i] = 1
            if tensor is not None and source.view is None and id(tensor) in versions:
                written[i] = tensor._version - versions[id(tensor)]
        return written

    # What the call left behind

    def _slot_of(self, tensor: torch.Tensor) -> int | None:
        """The slot of a pending result, -1 - i for draw i; None for any other tensor."""
        if not isinstance(tensor, LazyTensor):
            return None
        value = tensor._value
        for i, data in enumerate(self._drawn):
            if data is value.data:
                return -1 - i
        slot = value.slot
        return slot.index if slot is not None and slot.index in self._live else None

    def _left(self) -> tuple[Left, ...]:
        """The places that hold another tensor than before the call; Obstacle for other changes."""
        left: list[Left] = []
        for name, now in self.after.holdings.items():
            then = self._before.holdings.get(name)
            if then is None:
                if isinstance(now.holder, torch.Tensor):
                    continue  # the tensor is new itself: its place is noted, or is an obstacle
                raise Obstacle(f"it makes {now.spoken()}; the next call may find it")
            if len(now.keys) != len(then.keys) or now.keys != then.keys:
                raise Obstacle(f"it adds to {now.spoken()}, or takes from it")
            for i, (old, new) in enumerate(zip(then.values, now.values, strict=True)):
                if not is_same(old, new):
                    left += self._change(name, now, i, old, new)
        renewed = {change.place for change in left if not change.was_empty}
        for change in left:
            if change.moved_from is not None and change.moved_from not in renewed:
                name, key = change.place
                where = self.after.holdings[name].spoken(key)
                raise Obstacle(f"it puts a tensor at {where} that lies elsewhere, too")
        # such a tensor has no lasting object, so nothing is known of its gradient
        replaced = {
            id(self.after.holdings[name].values[key]) for name, key in (one.place for one in left)
        }
        for one in self.after.holdings.values():
            if one.is_of_tensor and id(one.holder) in replaced and one.values[0] is not None:
                raise Obstacle(f"it makes {one.spoken()} anew, with a gradient")
        return tuple(left)

    def _change(self, name: str, holding: WatchedObject, i: int, old: Any, new: Any) -> list[Left]:
        """What a replay does about the `i`-th place, where the call put `new` for `old`; nothing if
        it need do nothing."""
        place = holding.spoken(i)
        if self._explains(holding.holder, holding.keys[i], old, new):
            self.found_stepped[name, i] = old
            return []
        if self.numbers.is_kept((name, i)):
            return []
        if isinstance(new, torch.Tensor):
            slot, moved_from = self._slot_of(new), None
            was_empty = old is None
            if slot is None and holding.kind.put is not None and not was_empty:
                moved_from = next((at for at, one in self.places.items() if one is new), None)
            is_known = slot is not None or moved_from is not None
            if not is_known or not (was_empty or isinstance(old, torch.Tensor)):
                raise Obstacle(f"it puts a tensor that it didn't compute at {place}")
            # a replay makes no conjugate or negative views, and needs a way to write the place
            if is_marked(new) or (was_empty and (holding.kind.put is None or new.requires_grad)):
                raise Obstacle(f"it puts a tensor at {place}, which replay can't")
            if _graph_of(new) is not None and not _is_spent(new):
                raise Obstacle(f"it puts a tensor with a graph at {place}")
            if slot is not None:
                self._claimed.add(slot)
            return [Left((name, i), slot, was_empty, moved_from)]
        if type(new) in TRACED:
            raise Obstacle(f"it keeps a number at {place}, where replay doesn't follow it")
        path = holding.label_of(i)
        are_atoms = is_atom(old) and is_atom(new)
        are_held = path in self._before.holdings and path in self.after.holdings
        if are_held and not are_atoms and type(old) is type(new):
            self.made_anew.add(id(new))
            return []  # a new container: its contents have a holding, which is compared itself
        if are_atoms and holding.kind in SETTABLE and name not in self.after.arguments.values():
            self.flags.append(Flag((name, i), place, old, new))
            return []
        raise Obstacle(f"it changes {place}, which a replay would not")

    # What the call returned

    def _all_returned(self, leaves: list[Any], left: tuple[Left, ...]) -> tuple[Returned, ...]:
        found: dict[int, Returned] = {}
        for one in left:
            name, key = one.place
            found[id(self.after.holdings[name].values[key])] = Returned("place", one.place)
        replaced = {one.place for one in left}
        returned: list[Returned] = []
        for i, leaf in enumerate(leaves):
            if i in self.numbers.returned:
                returned.append(self.numbers.as_returned(self.numbers.returned[i]))
                continue
            returned.append(found.get(id(leaf)) or self._returned(leaf, replaced))
            if isinstance(leaf, torch.Tensor):
                found[id(leaf)] = Returned("again", i)
        return tuple(returned)

    def _returned(self, leaf: Any, replaced: set[Place]) -> Returned:
        """How a replay gives `leaf` back. It is not looked up at places in `replaced`, where the
        call has put another tensor."""
        if type(leaf) in TRACED and counts_in(leaf.text):
            raise Obstacle("it returns an optimizer's step count or rate")
        if type(leaf) in TRACED:
            return self.numbers.as_returned(leaf)
        if not isinstance(leaf, torch.Tensor):
            if id(leaf) in self.made_anew:
                given = with_article(type(leaf).__name__)
                raise Obstacle(f"it returns {given} that it makes anew and keeps; return a copy")
            for i, (_, given) in enumerate(self.objects):
                if leaf is given:
                    return Returned("object", i)
            if is_atom(leaf) or isinstance(leaf, Constant) or self.after.has(leaf):
                return Returned("constant", leaf)
            given = with_article(type(leaf).__name__)
            raise Obstacle(f"it returns {given}; return tensors in lists or dicts")
        for i, tensor in enumerate(self._tensors):
            if leaf is tensor:
                return Returned("argument", i)
        slot = self._slot_of(leaf)
        if slot is None:
            for place, tensor in self.places.items():
                if leaf is tensor and place not in replaced:
                    return Returned("place", place)
        if isinstance(leaf, (torch.nn.Parameter, torch.nn.Buffer)):
            raise Obstacle("it returns a parameter that it makes; make it outside")
        if is_marked(leaf):
            raise Obstacle("it returns a conjugate or negative view; return a copy")
        grad = ""
        if leaf.requires_grad:
            grad = "leaf" if _graph_of(leaf) is None else "spent"
        if grad == "spent" and not _is_spent(leaf):
            raise Obstacle(
                "it returns a tensor with its graph, which a replay doesn't build; call backward() "
                "inside, or return the tensor's detach()"
            )
        meta, layout = wrapper_arguments(meta_of(leaf)), tensor_types.layout_of(leaf)
        if slot is not None:
            self._claimed.add(slot)
            return Returned("slot", slot, meta, grad, layout)
        if isinstance(leaf, LazyTensor) and leaf._value.slot is not None:
            # another tensor object on a leaf, as `detach()` of a parameter gives
            return Returned("leaf", self.leaf_at[leaf._value.slot.index], meta, grad, layout)
        # made from Python data, and maybe written since
        for i, data in enumerate(self._trace.leaves):
            if leaf is data:
                return Returned("leaf", i, meta, grad, layout)
        # its values are in the outline, so they are equal at each replay
        if type(leaf) is torch.Tensor and _is_small(leaf) and leaf.is_contiguous() and not grad:
            return Returned("data", (*_contents(leaf), torch_private.values_of(leaf)))
        raise Obstacle("it returns a tensor that it didn't compute")


AS_STRIDED = torch.ops.aten.as_strided.default


def concrete(tensor: torch.Tensor) -> torch.Tensor | None:
    """The plain tensor by which a trace knows `tensor`; None while its value is pending."""
    return tensor._value.data if isinstance(tensor, LazyTensor) else tensor


def _found(
    leaf: torch.Tensor, known: dict[int, Source], by_storage: dict[int, tuple[Source, torch.Tensor]]
) -> Source | None:
    """The source of a leaf that is a known tensor, or lies on the memory of one."""
    found = known.get(id(leaf))
    if found is not None:
        return found
    # a replay makes the view by `as_strided`, which keeps the dtype
    source, data = by_storage.get(torch_private.storage_id(leaf), (None, leaf))
    if source is None or data.dtype is not leaf.dtype:
        return None
    moved = leaf.storage_offset() - data.storage_offset()
    return Source(source.kind, source.name, (leaf.size(), leaf.stride(), moved))


def _is_on(leaf: torch.Tensor, given: Any) -> bool:
    """Whether what a call returned is a tensor on the memory of a leaf."""
    data = concrete(given) if isinstance(given, torch.Tensor) else None
    if data is None or not is_strided(data):
        return False
    return torch_private.storage_id(data) == torch_private.storage_id(leaf)


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a storage of its elements."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor made inside the call is treated as a number: see `MOST_CONSTANTS`."""
    is_plain = is_strided(tensor) and tensor.device.type == "cpu"
    return is_plain and tensor.numel() <= MOST_CONSTANTS


def _contents(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What two small tensors must have in common; values as text, in which nan equals nan."""
    values = torch_private.values_of(tensor)
    return (tensor.dtype, tensor.size(), tensor.stride(), repr(values))


def _graph_of(tensor: torch.Tensor) -> Any:
    """The autograd node that made `tensor`. Obstacle if autograd raises, as it does for a view
    whose base was written."""
    try:
        return tensor.grad_fn
    except RuntimeError as error:
        raise Obstacle(f"it leaves a view that autograd refuses: {error}") from None


def _is_spent(tensor: torch.Tensor) -> bool:
    """Whether a backward pass freed the graph behind `tensor`: no node of it keeps tensors, and one
    that saves some has lost them."""
    seen: set[Any] = set()
    waiting = [_graph_of(tensor)]
    is_freed = False
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        keeps = torch_private.keeps_tensors(node)
        if keeps:
            return False
        is_freed |= keeps is False
        waiting += [following for following, _ in node.next_functions]
    return is_freed
