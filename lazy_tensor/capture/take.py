"""Records one call of a function, and notes what it read, left behind and returned.

In: a function, its arguments, and the objects that it can look into. Out: its result, and a `Take`,
or the obstacle that keeps the call from being replayed. Called by `replay`.

A tape is on the trace during the call. An `ObjectGraph` before it and one after it show what
changed.
"""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lazy_tensor.capture.counts import Count, Counts, Formulas
from lazy_tensor.capture.object_graph import ObjectGraph
from lazy_tensor.capture.watched_object import (
    Unreachable,
    WatchedObject,
    is_atom,
    is_same,
)
from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.metadata.infer import is_marked, meta_of
from lazy_tensor.dispatch.record.extend_trie import wrapper_arguments
from lazy_tensor.dispatch.run import hits, watch
from lazy_tensor.dispatch.run.tape import Draw, Read, Tape
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.dispatch.trie.trace import Leaf, Node, State, Trace, live_values, local
from lazy_tensor.dispatch.wording import op_name, with_article
from lazy_tensor.kernels.segment import Ref, ScalarRef
from lazy_tensor.tensor import LazyTensor


@dataclass(frozen=True, slots=True)
class Source:
    """Where a leaf of the trace came from: `kind` says what `name` is.

    "argument" and "draw": its number. "place": its holding and the number of the key there.
    "constant": the contents of a small tensor that the call made. "object": `Same` as a tensor that
    `state` doesn't lead to. `view` is set if the leaf is another tensor on the memory of that one,
    as `Tensor.data` gives: size, stride, and offset from that tensor's. `is_copy`: others, such as
    an array, may write that memory, so the trace copied what lay there.
    """

    kind: str
    name: Any
    view: tuple[Any, ...] | None = None
    is_copy: bool = False


class Constant:
    """What a replay returns as it is. An instance never changes, and equal ones are the same."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class Same:
    """A tensor compared by identity, where `==` of tensors compares elements."""

    tensor: torch.Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.tensor is other.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


@dataclass(frozen=True, slots=True)
class Left:
    """A place where the call put a new tensor: its holding, the number of the key there, and the
    tensor's slot in the trace (-1 - i for draw i).

    `was_empty`: None lay there before. Else the tensor that lies there gets the new value, and
    stays the same object.
    """

    holding: str
    key: int
    slot: int
    was_empty: bool


@dataclass(frozen=True, slots=True)
class Returned:
    """How to make one leaf of what the call returned: `kind` says what `name` is.

    "slot": a new tensor of `meta` on that result of the plan. "leaf": a new tensor of `meta` on the
    memory of that leaf. "data": a new tensor of these values. "argument", "place", "left": the very
    object there. "again": the object returned as that earlier leaf. "constant": `name` itself,
    which is no tensor. `layout` is that of a sharded tensor. `grad` is "leaf" for a tensor that
    requires a gradient, "spent" for one whose graph a backward pass has freed, else "".
    """

    kind: str
    name: Any
    meta: tuple[Any, ...] | None = None
    grad: str = ""
    layout: tensor_types.Layout | None = None


@dataclass(frozen=True, slots=True)
class Outline:
    """What a call did, without the tensors it worked on: equal for calls that did the same."""

    state: State
    scalars: tuple[complex, ...]
    formulas: Formulas
    numbers: int  # digest of all numbers that the call can see, less those of `formulas`
    draws: tuple[Any, ...]
    reads: tuple[Any, ...]
    sources: tuple[Source, ...]
    left: tuple[Left, ...]
    live: tuple[int, ...]
    returned: tuple[Returned, ...]
    structure: Any

    def difference(self, before: Outline) -> str | None:
        """The first difference from an earlier call, in words; None if there is none."""
        # another thread has another trie: there equal traces end in different states
        if self.state is not before.state:
            found = _first_difference(before, self)
            if found is not None:
                return found
        # a value read at the same line is named with its line, which `_WORDS` can't do
        for now, then in zip(self.reads, before.reads, strict=False):
            if now != then and now[0] == then[0]:
                return f"it reads {now[1]} at {now[0]} where the call before read {then[1]}"
        for name, words in _WORDS.items():
            if getattr(self, name) != getattr(before, name):
                return words
        if self.formulas.read_another(before.formulas):
            return "an optimizer's step count or rate is turned into a plain number, or into text"
        # if other numbers changed too, an equal number of an optimizer explains nothing: it may be
        # equal by chance, or follow the other number for a while
        is_known = self.numbers == before.numbers
        explained = self.formulas.explained(before.formulas) if is_known else {}
        for i, (now, then) in enumerate(zip(self.scalars, before.scalars, strict=True)):
            if not is_same(now, then) and (repr(now), repr(then)) not in explained:
                return self._other_number(i, now, then)
        return None

    def _other_number(self, i: int, now: complex, before: complex) -> str:
        nodes = [step for step in self.state.steps() if isinstance(step, Node)]
        where = next((_named(n) for n in nodes if ScalarRef(i) in _flat(n)), "an op")
        return f"{where} gets {now!r} where the call before gave it {before!r}"


@dataclass(frozen=True, slots=True)
class Take:
    """A recorded call: its outline, and what a replay of it needs.

    `constants` are copies of the small tensors that the call made, by leaf. `written` are the
    numbers of the leaves that it wrote. `n_writes` says how many writes autograd counted of each:
    none of a batch norm's to its running mean. `metadata` describes all leaves that are not draws.
    `after` shows what the call could see when it ended. `places` are the tensors that it found when
    it began, and read or returned.
    """

    outline: Outline
    draws: tuple[Draw, ...]
    reads: tuple[Read, ...]
    constants: dict[int, torch.Tensor]
    written: tuple[int, ...]
    n_writes: dict[int, int]
    metadata: Any
    after: ObjectGraph
    places: dict[tuple[str, int], torch.Tensor]


# What to say if a field of two outlines differs. Fields are compared in this order.
_WORDS = {
    "formulas": "it computes other numbers from its step counts each call",
    "draws": "it draws other random numbers each call",
    "reads": "it reads values at other places each call",
    "sources": "it reads other tensors each call",
    "left": "it leaves tensors in other places each call",
    "live": "other results outlive it each call",
    "returned": "it returns something else each call",
    "structure": "it returns something else each call",
}


def _flat(node: Node) -> list[Any]:
    """The arguments of a recorded call, with those inside lists."""
    leaves: list[Any] = pytree.tree_leaves((node.args, [value for _, value in node.kwargs]))
    return leaves


def _first_difference(before: Outline, now: Outline) -> str | None:
    """Where two traces diverge, with the user's line; None if their steps are equal."""
    old, new = before.state.steps(), now.state.steps()
    if old == new:
        return None
    for one, other in zip(old, new, strict=False):
        if one == other:
            continue
        if isinstance(one, Leaf) or isinstance(other, Leaf):
            specs = [s.spec if isinstance(s, Leaf) else None for s in (one, other)]
            return f"it reads a tensor {specs[1]} where the call before read {specs[0]}"
        if one.facts.op is not other.facts.op:
            called = op_name(one.facts.op)
            return f"it calls {_named(other)} where the call before called {called}"
        for a, b in zip(_flat(one), _flat(other), strict=False):
            shown = _shown(b, now), _shown(a, before)
            if shown[0] != shown[1]:
                return f"{_named(other)} gets {shown[0]} where the call before gave it {shown[1]}"
        return f"{_named(other)} gives something else than before"
    return f"it has {len(new)} steps where the call before had {len(old)}"


def _named(node: Node) -> str:
    return f"{op_name(node.facts.op)} at {node.where}"


def _shown(argument: Any, outline: Outline) -> str:
    if isinstance(argument, ScalarRef):
        return repr(outline.scalars[argument.index])
    return f"tensor {argument.index}" if isinstance(argument, Ref) else repr(argument)


MOST_SHOWN = 100
"""Characters of an obstacle that show a changed value; a longer text is left out."""

MOST_CONSTANTS = 16
"""Elements of a tensor made inside, such as `torch.tensor(0.5)`, that is treated as a number: calls
do the same only if its values are equal."""


class Obstacle(Exception):
    """Why a call can't be replayed."""


def _found(
    leaf: torch.Tensor,
    known: dict[int, Source],
    by_storage: dict[int, tuple[Source, torch.Tensor]],
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


def concrete(tensor: torch.Tensor) -> torch.Tensor | None:
    """The plain tensor by which a trace knows `tensor`; None while its value is pending."""
    return tensor._value.data if isinstance(tensor, LazyTensor) else tensor


def described(tensors: list[torch.Tensor]) -> Any:
    """Metadata that decides whether a call may treat such tensors alike, to be compared only.

    For each tensor: its class, size, strides, dtype and device; whether it requires a gradient, has
    a graph, has a storage offset, is a conjugate or negative view; the first place of the same
    object; and how it is sharded.
    """
    try:
        return hits.loaded.argument_words(tensors, True)
    except RuntimeError:
        return object()  # equal to nothing: autograd raises for a view whose base was written


def take(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[torch.Tensor],
    objects: list[tuple[str, Any]],
    is_unchanged: Callable[[], bool],
    *,
    follows_code: bool = True,
    may_have_graphs: bool = False,
) -> tuple[Any, Take | str]:
    """Call the function with a tape on. Return its result, and the take or the obstacle to one.

    `tensors` are those among the arguments. `objects` are the others that the call can look into,
    with their labels: the roots of the pictures, which follow code or not. `is_unchanged` tells
    after the call whether the arguments hold the same objects.
    Called inside `lazy_mode`, with nothing pending; leaves the call's ops pending.
    """
    # torch runs these hooks for every module and optimizer, but its code isn't followed
    roots = [*objects, *torch_private.hooks_of_all_modules()]
    try:
        have_graphs = any(_graph_of(tensor) is not None for tensor in tensors)
        if torch.is_grad_enabled() and have_graphs and not may_have_graphs:
            raise Obstacle("an argument has a graph, which each call has another of; detach it")
        before = ObjectGraph(roots, tensors, follows_code=follows_code)
    except (Obstacle, Unreachable) as reason:
        return function(*args, **kwargs), str(reason)
    # ids, not tensors: a reference would make what the call throws away look like a result
    versions = {
        id(tensor): tensor._version
        for tensor in (*before.tensors().values(), *tensors)
        if not tensor.is_inference()
    }
    trace = local.trace
    numbers = _random_states()
    # a cast of a weight that autocast kept from an earlier call would be a leaf from nowhere: each
    # call casts anew
    torch.clear_autocast_cache()
    tape = Tape(trace, before.generators)
    counts = Counts(trace)
    try:
        # optimizers get step counts and rates as `Count`s, which note what is computed of them
        with torch_private.step_counts_read_by(counts.read), counts.counts_in_param_groups(before):
            result = function(*args, **kwargs)
    except BaseException:
        tape.stop("it raised an exception")
        raise
    tape.take_off()
    torch.clear_autocast_cache()
    if tape.obstacle is not None:
        return result, tape.obstacle
    # drops what was derived from values that the call has written: else it would count as live
    watch.before_flush(trace)
    try:
        if numbers != _random_states():
            raise Obstacle("it, or a thread, draws from Python's or numpy's random numbers")
        if not is_unchanged():
            raise Obstacle("it changes lists, dicts or objects that are arguments")
        after = ObjectGraph(roots, tensors, follows_code=follows_code)
        return result, _Reading(
            trace, tape, counts.formulas(), before, after, tensors, versions, result
        ).take()
    except (Obstacle, Unreachable) as reason:
        return result, str(reason)
    except Exception as error:  # the call has run, and its result must not be lost
        return result, f"it can't be taken down: {error!r}; please report it"


def _random_states() -> tuple[Any, ...]:
    """The states of Python's and numpy's random generators, which a tape doesn't see."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    kind, words, *rest = numpy.random.get_state()
    return (random.getstate(), kind, words.tobytes(), *rest)


class _Reading:
    """Makes the take of a call from the trace that holds just this call."""

    def __init__(
        self,
        trace: Trace,
        tape: Tape,
        formulas: Formulas,
        before: ObjectGraph,
        after: ObjectGraph,
        tensors: list[torch.Tensor],
        versions: dict[int, int],
        result: Any,
    ) -> None:
        self.trace = trace
        self.tape = tape
        self.formulas = formulas
        self.before = before
        self.after = after
        self.tensors = tensors  # among the arguments
        self.versions = versions  # autograd's counts of writes before the call, by `id` of a tensor
        self.result = result
        # the number of each leaf, by its slot
        self.leaf_at = {
            step.slot: i
            for i, step in enumerate(s for s in trace.state.steps() if isinstance(s, Leaf))
        }
        self.live = self._live()  # slots of results that something besides the trace still holds
        self.claimed: set[int] = set()  # those of them that replay knows the holder of
        tensors_given = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        data = [concrete(tensor) for tensor in tensors_given]
        # how many tensors the call returns on each memory, for `_made_inside`
        self.n_given = Counter(
            torch_private.storage_id(one)
            for one in data
            if one is not None and one.layout is torch.strided and not one.is_nested
        )

    def _live(self) -> tuple[int, ...]:
        values = live_values(self.trace.values)
        return tuple(value.slot.index for value in values if value.slot is not None)

    def take(self) -> Take:
        places = self.before.tensors()
        sources = self._sources(places)
        left = self._left()
        self._check_identities(left)
        leaves, structure = pytree.tree_flatten(self._whole(self.result))
        returned = self._all_returned(leaves, left, places)
        # keep only the tensors that a replay must find by identity; `left` ones are looked up
        kept = {one.name for one in sources if one.kind == "place"}
        kept |= {one.name for one in returned if one.kind == "place"}
        kept -= {(one.holding, one.key) for one in left}
        places = {place: tensor for place, tensor in places.items() if place in kept}
        # `before` keeps alive what the call has thrown away: let go of it, and look again
        self.before.forget()
        self.live = self._live()
        if self._unclaimed():
            gc.collect()  # it may be held by a cycle of objects that nobody can reach
            self.live = self._live()
        for slot in self._unclaimed():
            raise Obstacle(
                f"{self._made_by(slot)} outlives it where replay can't see it: in a graph that "
                "backward() hasn't freed, or with an object that keeps tensors to itself"
            )
        # a replay computes what the call reads before it draws: it can't read a draw
        drawn = {id(data) for _, data in self.tape.draws}
        for read in self.tape.reads:
            if any(id(self.trace.leaves[i]) in drawn for i in read.aside.leaves):
                raise Obstacle(
                    f"it reads a random number at {read.where}; torch.distributions reads what it "
                    "samples to check it, unless validate_args=False"
                )
        leaves_now = [None if id(leaf) in drawn else leaf for leaf in self.trace.leaves]
        draws = tuple(draw for draw, _ in self.tape.draws)
        outline = Outline(
            state=self.trace.state,
            scalars=tuple(self.trace.scalars),
            formulas=self.formulas,
            numbers=self.after.numbers(self.formulas.places()) if self.formulas.code else 0,
            draws=tuple(draw.key for draw in draws),
            reads=tuple(read.key for read in self.tape.reads),
            sources=sources,
            left=left,
            live=self.live,
            returned=returned,
            structure=structure,
        )
        constants = {
            i: torch_private.copy_of(self.trace.leaves[i])
            for i, source in enumerate(sources)
            if source.kind == "constant"
        }
        told = hits.loaded.leaf_words(leaves_now)
        reads = tuple(self.tape.reads)
        written = self._written()
        return Take(
            outline, draws, reads, constants, written, self._n_writes(written, sources, places),
            told, self.after, places,
        )  # fmt: skip

    def _unclaimed(self) -> list[int]:
        """Slots of results that outlive the call and lie nowhere that replay looks. A view that is
        claimed keeps its base alive, which nobody else can see."""
        roots = {self.trace.root_of(slot) for slot in self.claimed if slot >= 0}
        return [
            slot
            for slot in self.live
            if slot not in self.claimed and self.trace.root_of(slot) not in roots
        ]

    def _check_identities(self, left: tuple[Left, ...]) -> None:
        """Obstacle if two places held one tensor before the call and hold two now, or the reverse.

        These are the places whose tensors a replay renews one by one, and gradients.
        """
        places = [(one.holding, one.key) for one in left if not one.was_empty]
        places += [(name, 0) for name, h in self.after.holdings.items() if h.is_of_tensor]
        patterns: list[list[int]] = []
        for picture in (self.before, self.after):
            first: dict[int, int] = {}
            found = [
                picture.holdings[name].values[key] if name in picture.holdings else None
                for name, key in places
            ]
            patterns.append([
                first.setdefault(id(value), i) if isinstance(value, torch.Tensor) else -1
                for i, value in enumerate(found)
            ])  # fmt: skip
        for before, after in zip(*patterns, strict=True):
            if before != after and before >= 0 and after >= 0:
                raise Obstacle("tensors that were one object are two now, or the other way round")

    def _whole(self, result: Any) -> Any:
        """The call's result. A container that the function itself keeps becomes one leaf, so that
        a replay returns that very container."""
        is_kept = isinstance(result, (list, dict)) and self.after.has(result)
        return _Kept(result) if is_kept else result

    def _all_returned(
        self,
        leaves: list[Any],
        left: tuple[Left, ...],
        places: dict[tuple[str, int], torch.Tensor],
    ) -> tuple[Returned, ...]:
        found: dict[int, Returned] = {
            id(self.after.holdings[one.holding].values[one.key]): Returned(
                "left", (one.holding, one.key)
            )
            for one in left
        }
        replaced = {(one.holding, one.key) for one in left}
        returned: list[Returned] = []
        for i, leaf in enumerate(leaves):
            returned.append(found.get(id(leaf)) or self._returned(leaf, places, replaced))
            if isinstance(leaf, torch.Tensor):
                found[id(leaf)] = Returned("again", i)
        return tuple(returned)

    def _sources(self, places: dict[tuple[str, int], torch.Tensor]) -> tuple[Source, ...]:
        known: dict[int, Source] = {}
        by_storage: dict[int, tuple[Source, torch.Tensor]] = {}
        of_arguments: dict[int, tuple[Source, torch.Tensor]] = {}
        shared: set[int] = set()  # storages of an argument that another tensor has too
        for i, (_, data) in enumerate(self.tape.draws):
            known[id(data)] = Source("draw", i)
        # an argument that the picture finds elsewhere too is a place: replays pin it by identity
        named = [(Source("place", path), tensor) for path, tensor in places.items()]
        named += [
            (Source("argument", i), tensor)
            for i, tensor in enumerate(self.tensors)
            if i in self.before.arguments
        ]
        for source, tensor in named:
            found = concrete(tensor)
            if found is None or found.layout is not torch.strided or found.is_nested:
                continue
            known.setdefault(id(found), source)
            storage = torch_private.storage_id(found)
            if source.kind != "argument":
                by_storage.setdefault(storage, (source, found))
            elif storage in of_arguments or storage in by_storage:
                shared.add(storage)
            else:
                of_arguments[storage] = source, found
        # views of an argument are found by its storage. In a storage that another tensor shares,
        # the next call's argument may lie elsewhere, so such a view can't be told.
        views_of = {k: base for k, base in (of_arguments | by_storage).items() if k not in shared}
        copied = self._copied()
        sources: list[Source] = []
        for leaf in self.trace.leaves:
            original = copied.get(id(leaf))
            if original is None:
                sources.append(_found(leaf, known, by_storage) or self._made_inside(leaf))
                continue
            copied_from = _found(original, known, views_of)
            if copied_from is None:
                raise Obstacle(
                    f"it reads a tensor of shape {tuple(leaf.shape)} on memory of an array or a "
                    "file that replay can't find again: make it by torch.from_numpy outside, and "
                    "pass it as an argument"
                )
            sources.append(replace(copied_from, is_copy=True))
        return tuple(sources)

    def _copied(self) -> dict[int, torch.Tensor]:
        """The tensors that were copied because others may write their memory, by `id` of the copy.
        Obstacle if one was copied twice: it was written during the call."""
        copied: dict[int, torch.Tensor] = {}
        for copies in self.trace.copies.values():
            for i, copy in enumerate(copies):
                meta = meta_of(copy.tensor)
                if any(meta_of(before.tensor) == meta for before in copies[:i]):
                    raise Obstacle("an array that it reads is written meanwhile")
                copied[id(copy.data)] = copy.tensor
        return copied

    def _made_inside(self, leaf: torch.Tensor) -> Source:
        """The source of a leaf that is no draw, no argument and at no place."""
        # a constant if only the trace and the returned tensors have its memory: else somebody keeps
        # it, and may give it other values before the next call
        n_given = self.n_given[torch_private.storage_id(leaf)]
        if _is_small(leaf) and torch_private.n_users(leaf) <= 1 + n_given:
            return Source("constant", _contents(leaf))
        if not self.after.follows_code:
            return Source("object", Same(leaf))
        slot = next(s for s, i in self.leaf_at.items() if self.trace.leaves[i] is leaf)
        users = [n for n in self._nodes() if slot in n.reads]
        used = f", first used by {_named(users[0])}" if users else ""
        raise Obstacle(
            f"a tensor of shape {tuple(leaf.shape)}{used} is neither an argument nor anywhere that "
            "replay looks: made from data inside, or handed over by an object that keeps it to "
            "itself; pass it as an argument"
        )

    def _nodes(self) -> list[Node]:
        return [step for step in self.trace.state.steps() if isinstance(step, Node)]

    def _made_by(self, slot: int) -> str:
        node = next(n for n in self._nodes() if slot in n.outs)
        return f"what {op_name(node.facts.op)} gives at {node.where}"

    def _slot_of(self, tensor: torch.Tensor) -> int | None:
        """The slot of a pending result, -1 - i for draw i; None for any other tensor."""
        if not isinstance(tensor, LazyTensor):
            return None
        value = tensor._value
        for i, (_, data) in enumerate(self.tape.draws):
            if data is value.data:
                return -1 - i
        slot = value.slot
        return slot.index if slot is not None and slot.index in self.live else None

    def _left(self) -> tuple[Left, ...]:
        """The places that hold another tensor than before the call; Obstacle for other changes."""
        before, after = self.before.holdings, self.after.holdings
        left: list[Left] = []
        for name, now in after.items():
            then = before.get(name)
            if then is None:
                if isinstance(now.holder, torch.Tensor):
                    continue  # the tensor is new itself: its place is noted, or is an obstacle
                raise Obstacle(f"it makes {now.spoken()}; the next call may find it")
            if len(now.values) != len(then.values) or now.keys != then.keys:
                raise Obstacle(f"it adds to {now.spoken()}, or takes from it")
            for i, (old, new) in enumerate(zip(then.values, now.values, strict=True)):
                if old is not new and not is_same(old, new):
                    found = self._change(name, now, i, old, new)
                    if found is not None:
                        left.append(found)
        return tuple(left)

    def _change(self, name: str, holding: WatchedObject, i: int, old: Any, new: Any) -> Left | None:
        """What a replay does about the `i`-th place, where the call put `new` for `old`; None if it
        need do nothing."""
        place = holding.spoken(i)
        if isinstance(new, torch.Tensor):
            slot = self._slot_of(new)
            was_empty = old is None
            if slot is None or not (was_empty or isinstance(old, torch.Tensor)):
                raise Obstacle(f"it puts a tensor that it didn't compute at {place}")
            # a replay makes no conjugate or negative views, and needs a way to write the place
            if is_marked(new) or (was_empty and (holding.write is None or new.requires_grad)):
                raise Obstacle(f"it puts a tensor at {place}, which replay can't")
            if _graph_of(new) is not None and not _is_spent(new):
                raise Obstacle(f"it puts a tensor with a graph at {place}")
            self.claimed.add(slot)
            return Left(name, i, slot, was_empty)
        path = holding.label_of(i)
        are_atoms = is_atom(old) and is_atom(new)
        are_held = path in self.before.holdings and path in self.after.holdings
        if are_held and not are_atoms and type(old) is type(new):
            return None  # a new container: its contents have a holding, which is compared itself
        shown = f" from {old!r} to {new!r}" if are_atoms else ""
        if len(shown) > MOST_SHOWN:
            shown = ""
        raise Obstacle(f"it changes {place}{shown}, which a replay would not")

    def _returned(
        self,
        leaf: Any,
        places: dict[tuple[str, int], torch.Tensor],
        replaced: set[tuple[str, int]],
    ) -> Returned:
        """How a replay gives `leaf` back. It is not looked up at places in `replaced`, where the
        call has put another tensor."""
        if isinstance(leaf, _Kept):
            return Returned("constant", leaf.value)
        if type(leaf) is Count:
            raise Obstacle("it returns an optimizer's step count or rate")
        if not isinstance(leaf, torch.Tensor):
            if is_atom(leaf) or isinstance(leaf, Constant) or self.after.has(leaf):
                return Returned("constant", leaf)
            given = with_article(type(leaf).__name__)
            raise Obstacle(f"it returns {given}; return tensors in lists or dicts")
        for i, tensor in enumerate(self.tensors):
            if leaf is tensor:
                return Returned("argument", i)
        slot = self._slot_of(leaf)
        if slot is None:
            for path, tensor in places.items():
                if leaf is tensor and path not in replaced:
                    return Returned("place", path)
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
            self.claimed.add(slot)
            return Returned("slot", slot, meta, grad, layout)
        if isinstance(leaf, LazyTensor) and leaf._value.slot is not None:
            # another tensor object on a leaf, as `detach()` of a parameter gives
            return Returned("leaf", self.leaf_at[leaf._value.slot.index], meta, grad, layout)
        # made from Python data: its values are in the outline, so they are equal at each replay
        if type(leaf) is torch.Tensor and _is_small(leaf) and leaf.is_contiguous() and not grad:
            return Returned("data", (*_contents(leaf), torch_private.values_of(leaf)))
        raise Obstacle("it returns a tensor that it didn't compute")

    def _n_writes(
        self,
        written: tuple[int, ...],
        sources: tuple[Source, ...],
        places: dict[tuple[str, int], torch.Tensor],
    ) -> dict[int, int]:
        """How many writes autograd counted of the tensors behind these leaves, by leaf. Leaves that
        are views of such a tensor are left out."""
        found: dict[int, int] = {}
        for i in written:
            source, tensor = sources[i], None
            if source.kind == "argument":
                tensor = self.tensors[source.name]
            elif source.kind == "place":
                tensor = places.get(source.name)
            if tensor is not None and source.view is None and id(tensor) in self.versions:
                found[i] = tensor._version - self.versions[id(tensor)]
        return found

    def _written(self) -> tuple[int, ...]:
        """The indices of the leaves whose memory the call writes."""
        roots = {self.trace.root_of(slot) for node in self._nodes() for slot in node.writes}
        return tuple(
            i for slot, i in self.leaf_at.items() if roots and self.trace.root_of(slot) in roots
        )


def _is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor made inside the call is treated as a number: see `MOST_CONSTANTS`."""
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    return is_plain and tensor.device.type == "cpu" and tensor.numel() <= MOST_CONSTANTS


def _contents(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What two small tensors must have in common; values as text, in which nan equals nan."""
    values = torch_private.values_of(tensor)
    return (tensor.dtype, tensor.size(), tensor.stride(), repr(values))


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A container that a replay returns as it is: pytree takes this wrapper for a leaf."""

    value: Any


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
