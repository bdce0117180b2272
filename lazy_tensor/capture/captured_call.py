"""A captured call: its plan, what must not have changed, and where its results go.

In: the take of a call that did the same as an earlier call. Out: a `CapturedCall`. For a further
call it checks that nothing has changed, finds the leaves, and runs the plan on them. Made and
called by `replay`. This file decides once what each replay has to do, and handles the rare cases.
`dispatch/native/captured.h` does the work of each replay.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from lazy_tensor.capture.arguments import Arguments
from lazy_tensor.capture.cuda_graph import CudaGraph
from lazy_tensor.capture.numbers.call_numbers import CallNumbers
from lazy_tensor.capture.numbers.kept_numbers import put
from lazy_tensor.capture.numbers.op_numbers import OpNumbers
from lazy_tensor.capture.numbers.step_counts import CountValues, unmoved_in
from lazy_tensor.capture.object_graph import ObjectGraph
from lazy_tensor.capture.outline import Constant, Outline, Returned, Source
from lazy_tensor.capture.sizes.any_size import ANY_SIZE, AnySize
from lazy_tensor.capture.take import Take, concrete, in_order, words_of
from lazy_tensor.capture.watched_object import (
    ANY_OF,
    ATOMS,
    DICTS,
    MISSING,
    NUMBER,
    OPEN,
    Newest,
    Obstacle,
    Place,
    Watch,
    WatchedObject,
    is_atom,
    is_same,
)
from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.metadata.infer import meta_of
from lazy_tensor.dispatch.plan.plan import Given, Plan
from lazy_tensor.dispatch.record.extend_trie import wrapper_arguments
from lazy_tensor.dispatch.run import hits, input_snapshots, profiling, watch
from lazy_tensor.dispatch.run.aside import Aside
from lazy_tensor.dispatch.run.failure import rescue, without_frames
from lazy_tensor.dispatch.run.flush import note_plan
from lazy_tensor.dispatch.run.plan_cache import add_tier, build_plan, plan_of
from lazy_tensor.dispatch.run.tape import Read, number_in
from lazy_tensor.dispatch.stats import STATS, FlushRecord
from lazy_tensor.dispatch.traced_number import computes, counts_in, is_plain, reads_in
from lazy_tensor.dispatch.trie import memory_sharing, tensor_types
from lazy_tensor.dispatch.trie.trace import Pending, Value, local
from lazy_tensor.dispatch.user_frame import user_line
from lazy_tensor.tensor import LazyTensor

Tensors = list[torch.Tensor]
Drawn = tuple[Tensors, list[tuple[torch.Generator, torch.Tensor, torch.Tensor]]]
"""What was drawn, and the generators with their states before and after that."""
Found = tuple[list[torch.Tensor], list[complex], Tensors, Drawn | None]
"""What a run needs: the leaves of the plan, with None where a draw goes; its numbers; the tensors
at open places; and the draws, if they were made first because a value that is read needs them."""

MOST_TAUGHT = 8
"""Forward calls that are recorded, though they could be replayed, for backward to be learnt from
their graphs. The bound is for programs that never run backward."""


TIER_AFTER_S = 2.0
"""Seconds that a plan runs before it is compiled whole: fewer than `plan.TIER_FROM_S`, since a
captured call spends most of its time in its plan, and so gains more."""


Look = Callable[[list[tuple[str, Any]] | None], ObjectGraph]
"""Tells what a call can see from these objects; from all that it can look into, for None."""

hits.use(obstacle_class=Obstacle, nothing=MISSING, any_tensor=OPEN, atoms=frozenset(ATOMS))


class Way(NamedTuple):
    """How C++ finds a tensor when a call begins: `kind` says what the other fields mean.

    "object": `holder` itself. "argument": the argument `number`. "open": the tensor at open place
    `number`. "item": dict `holder` under `key`. "gradient": that of `holder`, or of argument
    `number` if that is not negative. "ask": what `holder` returns, called with the tensors among
    the arguments.
    """

    kind: str
    holder: Any = None
    key: Any = None
    number: int = -1


class CapturedCall:
    """The plan of a call, where its leaves come from, and where its results go.

    Made when the call's ops have run. `before` is the outline of an earlier call that did the same.
    `tensors` are those among the arguments. `name` stands for the runs in the flush log. With
    `cuda_graphs` the plan is captured in a CUDA graph if possible. With `gives_plain` it returns
    plain tensors. RuntimeError if its ops can't be planned.

    A place is *open* if the call replaces its tensor, or if it is a gradient. A replay takes
    whatever tensor lies there, as long as its metadata are the same, and gives it the new value. At
    all other places the very objects must lie that lay there when the call was captured.
    """

    def __init__(
        self,
        take: Take,
        before: Outline,
        tensors: Tensors,
        name: str,
        *,
        cuda_graphs: bool = False,
        gives_plain: bool = False,
        plan: Plan | None = None,
    ) -> None:
        self.outline = outline = take.outline
        self.name = name
        self.objects = take.objects
        """The objects among the arguments that it is for."""
        self.argument_words = take.argument_words
        self._gives_plain = gives_plain
        self.n_runs = 0
        self.next_check = 0  # the number of runs at which `Replay` records a call and compares
        self.companion: Any = None
        """The `Replay` of backward, if this is a module's forward."""
        self.n_to_teach = MOST_TAUGHT  # calls still to be recorded for the companion to learn
        # numbers of the tensors that may not be written before backward: see `replay_module`
        self.shared: list[int] | None = None
        self.any_size: AnySize | None = take.any_size
        # the sizes that texts are about; of a call of any size those of the replay that runs
        self._sizes: dict[Any, int] = {str(i): n for i, n in enumerate(outline.sizes_read)}
        self._note_numbers(take, before)
        is_moved = plan is not None
        self.plan = plan = plan or _plan_of(outline, self.any_size)
        self.cuda_graph: CudaGraph | None = None
        if is_moved or self.any_size is not None:
            pass  # graphs and libraries are for one size
        elif cuda_graphs:
            self.cuda_graph = CudaGraph(
                plan, outline.state, take.written, numbers_change=bool(self._op_numbers)
            )
        else:
            add_tier(plan, outline.state, after_s=TIER_AFTER_S)
        self._given_numbers: Sequence[float] = ()
        self._given_tensors: Tensors = []
        self._note_draws_and_reads(take, before)
        computes_first = bool(self._first or self._checks or self._op_numbers or self.any_size)
        self._stepped = take.stepped
        self._flags = [(*flag.place, flag.new) for flag in take.flags]
        self._holdings = take.after.holdings
        self._instances = take.after.instances
        # the number of an argument, by the name of its holding
        self._argument_of = {name: i for i, name in take.after.arguments.items()}
        # what each result of a run is: first the plan's, in their order, then the draws
        self._slots = (*outline.live, *(-1 - i for i in range(len(take.draws))))
        self._left = in_order(outline.left)
        self._n_renewed = sum(not one.was_empty for one in self._left)
        # results on the memory of leaves, which plain tensors have as well
        shared = [place for place, _ in plan.parts_of_leaves]
        fields = {
            "plan": plan,
            "scalars": list(outline.scalars),
            "ask_reads": self._later(CapturedCall._check_reads) if computes_first else None,
            "run_otherwise": self._later(CapturedCall._run_otherwise),
            "runs_otherwise": self.cuda_graph is not None,
            "fail": self._later(CapturedCall._fail),
            "account": self._later(CapturedCall._account),
            "note_writes": watch.note_writes,
            "share": partial(_share, shared) if shared else None,
            "put": self._later(CapturedCall._put),
            "targets": self._targets(),
            "n_renewed": self._n_renewed,
            "any_size": self.any_size is not None,
        }
        fields |= self._what_must_stay(take, tensors)
        fields |= self._sources(take)
        fields |= self._results(gives_plain=gives_plain)
        self._native: Any = hits.loaded.CapturedCall(fields)
        if self.objects:
            self._made_of = take.without_objects(), before

    def _later(self, method: Callable[..., Any], *args: Any) -> Callable[..., Any]:
        """A method for C++ to call, by a weak reference: so a dropped call is freed at once, with
        the tensors that it holds."""
        return partial(method, weakref.proxy(self), *args)

    def _note_numbers(self, take: Take, before: Outline) -> None:
        now, counts = take.outline, (take.outline.counts, before.counts)
        alike = [now, before] if self.any_size is None else self.any_size.outlines
        self._op_numbers = OpNumbers(
            [one.given for one in alike], [one.scalars for one in alike], take.constants.values(),
            unmoved_in(counts),
        )  # fmt: skip
        texts = [*self._op_numbers.texts, *(check.text for check in take.numbers.checks)]
        self._counts = CountValues(counts, texts, self._op_numbers.computed_by, now.scalars)

    def _note_draws_and_reads(self, take: Take, before: Outline) -> None:
        sources, values = take.outline.sources, take.outline.numbers_returned
        leaf_drawn = {one.name: i for i, one in enumerate(sources) if one.kind == "draw"}
        self._draws = take.draws
        self._leaves_drawn = [leaf_drawn.get(i, -1) for i in range(len(take.draws))]
        # a number that was twice the same may be a constant that is returned in its place
        numbers = take.numbers
        same = [i for i in numbers.returned if values[i] == before.numbers_returned[i]]
        deciding = [*numbers.deciding, *(numbers.returned[i] for i in same)]
        checks = [check for check in numbers.checks if not self._op_numbers.covers(check)]
        if self.any_size is None:  # then sizes decide nothing
            checks = [one for one in checks if reads_in(one.text) or counts_in(one.text)]
        self._checks = [(check, computes(check.text)) for check in checks]
        self._kept, self._arguments = numbers.kept, numbers.arguments
        texts = [*self._op_numbers.texts, *(check.text for check in numbers.checks)]
        texts += self._counts.texts
        needed, self._constants = numbers.needed_for(texts)
        # what a replay reads before its plan, each with whether it has to be the same
        self._first = [
            (i, read, read in deciding)
            for i, read in enumerate(numbers.reads)
            if i in needed or read in deciding
        ]
        self._asides = self._asides_for(numbers)
        for _, aside in self._asides:
            aside.plan(take.outline.scalars)
        read = {i for _, aside in self._asides for i in aside.leaves}
        self._draws_first = not read.isdisjoint(leaf_drawn.values())

    def _asides_for(self, numbers: CallNumbers) -> list[tuple[list[tuple[int, Read, bool]], Aside]]:
        """How the reads in `_first` are computed: together, as they have calls in common. Apart are
        those whose memory is written later, and all if ops get numbers that come from them."""
        together = [one for one in self._first if one[0] not in numbers.written]
        if len(together) < 2 or self._op_numbers.needs_reads:
            return [([one], one[1].aside) for one in self._first]
        apart = [one for one in self._first if one not in together]
        slots = dict.fromkeys(read.slot for _, read, _ in together)
        both = Aside(together[-1][1].aside.state, *slots)
        return [*(([one], one[1].aside) for one in apart), (together, both)]

    def find(self, tensors: Tensors, numbers: Sequence[float] = ()) -> Found:
        """What to run the plan on, for a call with these tensors, and numbers that are followed,
        among its arguments.

        Raises Obstacle if the call might do something else than the captured one. What raises here
        does too: the call is recorded then, and raises where eager does.
        """
        self._given_numbers = numbers
        if self.any_size is not None:
            self._given_tensors = tensors
        try:
            found: Found = self._native.find(tensors)
        except Obstacle:
            raise
        except Exception as error:
            raise Obstacle(f"what a replay looks at, or computes, raises {error!r}") from None
        finally:
            self._given_tensors = []
        return found

    def drop(self, found: Found) -> None:
        """Undo `find`, whose result won't be run."""
        _put_back(found[3])

    def run(self, found: Found, tensors: Tensors) -> Any:
        """Run the plan and its effects; return what the call would have returned.

        An exception says, in a note, which recorded line it came from. Effects that don't depend on
        it are done all the same, as those of Python in a block: its ops raise at the block's end.
        """
        self.n_runs += 1
        try:
            return self._native.run(found, tensors, profiling.is_looked_at())
        except BaseException:
            self._put_known_numbers()
            raise
        finally:
            for name, key, value in self._flags:
                put(self._holdings[name], self._holdings[name].keys[key], value)
            for scheduler in self._stepped:
                scheduler.step()

    def _put_known_numbers(self) -> None:
        """Put those numbers for the next call that can be told without the plan's results."""
        numbers, left = self._numbers_before(), {}
        for place, compute in self._left_numbers.items():
            with suppress(KeyError, ArithmeticError, ValueError):
                left[place] = compute(numbers)
        self._put_numbers(left)

    def _numbers_before(self) -> dict[Any, float]:
        """The numbers known before the plan runs: those that were kept, arguments, constants and
        sizes."""
        numbers: dict[Any, float] = {
            i: self._look_up(place, []) for i, (place, *_) in self._kept.items()
        }
        numbers |= {i: self._given_numbers[k] for i, k in self._arguments.items()}
        return numbers | self._constants | self._sizes

    def _put_numbers(self, left: dict[Place, Any]) -> None:
        for (name, key), number in left.items():
            put(self._holdings[name], self._holdings[name].keys[key], number)

    def moved_to(self, arguments: Arguments, look: Look) -> CapturedCall:
        """The call with other objects among its arguments, which hold the same as those did.
        Obstacle if they don't."""
        if self.cuda_graph is not None:
            raise Obstacle("a CUDA graph is for the objects that it was captured with")
        returned = [one.name for one in self.outline.returned if one.kind == "constant"]
        if self._stepped or not all(is_atom(x) or isinstance(x, Constant) for x in returned):
            raise Obstacle("it steps, or returns, what an object among its arguments holds")
        graph = self._seen_with(arguments, look)
        self._check_fits(graph, arguments)
        take, before = self._made_of
        moved = CapturedCall(
            take.with_objects(graph, arguments.objects), before, arguments.tensors, self.name,
            gives_plain=self._gives_plain, plan=self.plan,
        )  # fmt: skip
        moved.n_runs, moved.next_check = self.n_runs, self.next_check
        moved.companion, moved.n_to_teach = self.companion, self.n_to_teach
        moved.shared = self.shared
        # a lazy tensor may lie where a plain one lay, but tensors that were one object still are
        if moved._tensors_seen != self._tensors_seen:
            raise Obstacle("an object among its arguments holds other tensors")
        return moved

    def _seen_with(self, arguments: Arguments, look: Look) -> ObjectGraph:
        """What the call can see with these arguments. If it puts tensors nowhere but in objects
        that are others now, only these are looked at."""
        pairs = zip(arguments.objects, self.objects, strict=True)
        others = [new for new, old in pairs if new[1] is not old[1]]
        labels = tuple([label for label, _ in others])
        names = {name for name in self._holdings if name.startswith(labels)}
        if names.issuperset(one.place[0] for one in self._left) and not (self._flags or self._kept):
            graph = look(others)
            if graph.holdings.keys() == names | self._argument_of.keys():
                holders = {id(self._holdings[name].holder) for name in names}
                graph.instances += [
                    one for one in self._instances
                    if holders.isdisjoint((id(one), id(getattr(one, "__dict__", None))))
                ]  # fmt: skip
                same = {name: copy.copy(one) for name, one in self._holdings.items()}
                graph.holdings = same | graph.holdings
                return graph
        return look(None)

    def _check_fits(self, graph: ObjectGraph, arguments: Arguments) -> None:
        """Obstacle unless the graph has the same holdings, up to the objects that hold, and tensors
        that are one object are one there, too."""
        held = {id(one.holder) for one in graph.holdings.values()}
        pairs = zip(arguments.objects, self.objects, strict=True)
        if not all(new is old or _is_told(new, held) for (_, new), (_, old) in pairs):
            raise Obstacle("an object among its arguments can't be looked into")
        new_of: dict[int, torch.Tensor] = {}
        old_of: dict[int, torch.Tensor] = {}
        if graph.holdings.keys() != self._holdings.keys():
            raise Obstacle("an object among its arguments holds others")
        for name, then in self._holdings.items():
            now = graph.holdings[name]
            have_same_keys = len(now.keys) == len(then.keys) and all(
                map(is_same, then.keys, now.keys)
            )
            if now.kind is not then.kind or not have_same_keys:
                raise Obstacle(f"{now.spoken()} holds something else")
            for i, (old, new) in enumerate(zip(then.values, now.values, strict=True)):
                # an object with a holding of its own is compared there
                has_place = bool(now.kind.form) and now.label_of(i) in graph.holdings
                is_held = has_place and type(old) is type(new) and _is_told(new, held)
                if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
                    is_held = new_of.setdefault(id(old), new) is new
                    is_held &= old_of.setdefault(id(new), old) is old
                if not (is_held or is_same(old, new)):
                    raise Obstacle(f"{now.spoken(i)} is another one")

    # Places

    def _value(self, place: Place) -> Any:
        """What lay at a place when the call was captured; OPEN if the place is open."""
        name, key = place
        return self._holdings[name].values[key]

    def _look_up(self, place: Place, tensors: Tensors) -> Any:
        """What lies at a place: where C++ can't look, it asks for this."""
        holding, holder = self._held(place[0], tensors)
        assert holding.kind.get is not None, "a tensor or a number lies there"
        return holding.kind.get(holder, holding.keys[place[1]])

    def _put(self, i: int, tensor: torch.Tensor, tensors: Tensors) -> None:
        """Put a new tensor at the `i`-th place in `_left`."""
        name, key = self._left[i].place
        holding, holder = self._held(name, tensors)
        assert holding.kind.put is not None, "a take leaves nothing where nothing can be put"
        holding.kind.put(holder, holding.keys[key], tensor)

    def _held(self, name: str, tensors: Tensors) -> tuple[WatchedObject, Any]:
        """A holding, and its holder in the call that has these tensors among its arguments."""
        holding, argument = self._holdings[name], self._argument_of.get(name)
        return holding, holding.holder if argument is None else tensors[argument]

    def _way_to(self, place: Place) -> Way:
        """How C++ finds what lies at a place."""
        name, key = place
        holding = self._holdings[name]
        if holding.is_of_tensor and key == 0:
            return Way("gradient", holding.holder, number=self._argument_of.get(name, -1))
        if type(holding.holder) in DICTS:
            return Way("item", holding.holder, holding.keys[key])
        return Way("ask", self._later(CapturedCall._look_up, place))

    # Where results go

    def _targets(self) -> list[tuple[Any, ...]]:
        """Where the plan's results go, for each place in `_left`.

        For each: (number of the result, layout of a sharded tensor, a template for the tensor, the
        way to the place, whether a new tensor requires a gradient). The way is "object" to a place
        where nothing can be put: the tensor there has to take the value. The number is -1 - k for
        the tensor that lay at the `k`-th place.
        """
        targets: list[tuple[Any, ...]] = []
        places = [one.place for one in self._left]
        for one in self._left:
            if one.moved_from is not None:
                k = places.index(one.moved_from)
                targets.append((-1 - k, None, None, self._way_to(one.place), False))
                continue
            name, _ = one.place
            tensor, holding = self._value(one.place), self._holdings[name]
            layout = tensor_types.layout_of(tensor)
            like = None  # the new value of a tensor may have another storage offset
            if layout is not None and self.any_size is not None:
                raise RuntimeError("a sharded tensor's size varies")
            if layout is not None or (one.was_empty and self.any_size is None):
                like = _lazy_like(wrapper_arguments(meta_of(tensor)), layout)
            way = Way("object") if holding.kind.put is None else self._way_to(one.place)
            requires_grad = not one.was_empty and tensor.requires_grad and tensor.is_leaf
            targets.append((self._slots.index(one.slot), layout, like, way, requires_grad))
        return targets

    # What must not have changed

    def _what_must_stay(self, take: Take, tensors: Tensors) -> dict[str, Any]:
        """What to check before each replay, for C++.

        "pinned" are arguments that the call finds elsewhere too: the same objects must come again.
        "autograd_fields" are those that the other arguments must have, "open_fields" those of the
        tensors that the call replaces. "watched" are tensors that must keep their metadata. "open"
        says how to find the tensors at open places.
        """
        # of a tensor at several places the first number: the renewed ones come first
        number_of: dict[int, int] = {}
        for k, one in enumerate(self._left):
            number_of.setdefault(id(self._value(one.place)), k)
        found = {flag.place: flag.old for flag in take.flags}
        self._expect_what_a_call_finds({**take.found_stepped, **found})
        self._places = {
            place: one for place, one in take.places.items() if self._value(place) is not OPEN
        }
        fixed: list[WatchedObject] = []
        autograd_fields: list[tuple[int, tuple[Any, ...], Newest]] = []
        open_fields: list[tuple[int, tuple[Any, ...], Newest]] = []
        for name, holding in self._holdings.items():
            if name in self._argument_of:
                autograd_fields.append((self._argument_of[name], holding.values, (-1, None)))
                holding.holder = None  # the next call has another argument: this one may die
            elif id(holding.holder) not in number_of:
                fixed.append(holding)
            else:
                k = number_of[id(holding.holder)]
                if k < self._n_renewed:  # else nothing lies there when a call begins
                    open_fields.append((k, holding.values, holding.newest))
                holding.holder = None  # another tensor may take its place
        self._fixed = Watch(fixed)
        watched = [holding.holder for holding in fixed if holding.is_of_tensor]
        # renewed places come first, as in `_left`; then gradients that the call doesn't replace
        places = [one.place for one in self._left]
        gradients = [(name, 0) for name, one in self._holdings.items() if one.is_of_tensor]
        open_places = places[: self._n_renewed]
        open_places += [
            place for place in gradients if self._value(place) is OPEN and place not in places
        ]
        self._at_open = {place: k for k, place in enumerate(open_places)}
        lasting = [self._look_up(place, tensors) for place in open_places]
        any_size = self.any_size is not None
        self._tensors_seen = hits.loaded.argument_words([], watched + lasting, any_size)
        return {
            "pinned": [
                (i, tensor) for i, tensor in enumerate(tensors) if i not in take.after.arguments
            ],
            "watched_ids": {id(tensor) for tensor in watched},
            "instances": take.after.instances,
            "watch_list": self._fixed.for_native,
            "watch_asks_always": bool(self._fixed.others),
            "ask_watch": self._later(CapturedCall._check_fixed),
            "autograd_fields": autograd_fields,
            "open_fields": open_fields,
            "watched": watched,
            "open": [self._way_to(place) for place in open_places],
            "words": hits.loaded.argument_words(watched, lasting, any_size),
        }

    def _expect_what_a_call_finds(self, found: dict[Place, Any]) -> None:
        """Have the holdings, which show the end of the call, say what the next one begins with."""
        for one in self._left:
            name, key = one.place
            self._holdings[name].expect(key, None if one.was_empty else OPEN)
        for (name, key), value in found.items():
            self._holdings[name].expect(key, value)
        for name, key in self._counts.places:
            self._holdings[name].expect(key, NUMBER)
        for (name, key), _, kind in self._kept.values():
            self._holdings[name].expect(key, ANY_OF[kind])
        for holding in self._holdings.values():
            if holding.is_of_tensor and isinstance(holding.values[0], torch.Tensor):
                holding.expect(0, OPEN)

    def _check_fixed(self) -> None:
        """Obstacle if a holding has changed: C++ asks where it found a difference or can't read."""
        change = self._fixed.change()
        if change is not None:
            raise Obstacle(f"{change} changed")

    def _check_reads(self, leaves: Tensors, scalars: list[complex]) -> Drawn | None:
        """Compute the values that the call would read; Obstacle if one differs, or decides another
        way. Puts the numbers among the `scalars` that depend on them. Returns what had to be drawn
        for that."""
        if self.any_size is not None:
            lying = [self._look_up(one.place, self._given_tensors) for one in self._left]
            words = words_of(self._given_tensors) + words_of(lying)
            self._sizes = self.any_size.read(hits.loaded.leaf_words(leaves) + words)
        numbers = self._numbers_before()
        counts = self._counts(leaves, numbers, lambda place: self._look_up(place, []))
        self._op_numbers.put(scalars, numbers, counts, -1)
        drawn = self._drawn(leaves) if self._draws_first else None
        try:
            for some, aside in self._asides:
                found = dict(zip(aside.slots, aside(leaves, scalars), strict=True))
                for i, read, is_deciding in some:
                    numbers[i] = number = number_in(found[read.slot], is_list=read.is_list)
                    if is_deciding and repr(number) != read.text:
                        raise Obstacle(f"it reads {number!r} at {read.where}, it was {read.text}")
                    self._op_numbers.put(scalars, numbers, counts, i)
            for check, evaluate in self._checks:
                found = evaluate(numbers, counts)
                if check.outcome is not found and not (check.outcome is None and is_plain(found)):
                    raise Obstacle(f"a comparison at {check.where} goes another way")
        except BaseException:
            _put_back(drawn)
            raise
        return drawn

    def _drawn(self, leaves: Tensors) -> Drawn:
        """Draw all that the call draws, and put it among the leaves."""
        generators = {id(draw.generator): draw.generator for draw in self._draws}
        with torch_private.no_inference(), torch_private.kernels_only():
            before = [(one, one.get_state()) for one in generators.values()]
            try:
                drawn = [draw() for draw in self._draws]
            except BaseException:
                for one, state in before:
                    one.set_state(state)
                raise
            for leaf, data in zip(self._leaves_drawn, drawn, strict=True):
                if leaf >= 0:
                    leaves[leaf] = data
            return drawn, [(one, state, one.get_state()) for one, state in before]

    # Where leaves come from

    def _sources(self, take: Take) -> dict[str, Any]:
        """How C++ finds the leaves, draws random numbers, and notes which tensors were written."""
        sources = take.outline.sources
        shown = {one.name for one in take.outline.returned if one.kind == "leaf"}
        shown |= {take.leaf_at[owner] for _, owner in self.plan.parts_of_leaves}
        # what the plan writes, or the caller may write, must not show in the next run
        self._copied = shown | take.written.keys()
        ways = [self._way_to_leaf(i, source, take) for i, source in enumerate(sources)]
        # draws and constants are left out: the program has no tensor on their memory. A write to a
        # view such as `.data` doesn't count for its tensor.
        written = [
            (ways[i], n_writes)
            for i, n_writes in take.written.items()
            if sources[i].view is None and sources[i].kind in ("argument", "place", "object")
        ]
        read = {source.name for source in sources if source.kind == "place"}
        # renewed tensors that the plan doesn't read give up their memory before it runs
        read |= {one.moved_from for one in self._left}
        renewed = [one.place for one in self._left[: self._n_renewed]]
        return {
            "leaves": ways,
            "leaf_words": take.metadata,  # of any size: `_check_reads` looks at the sizes
            "draws": list(zip(self._leaves_drawn, self._draws, strict=True)),
            "written": written,
            "unread": [i for i, place in enumerate(renewed) if place not in read],
        }

    def _way_to_leaf(self, i: int, source: Source, take: Take) -> Way:
        """How a replay finds leaf `i`."""
        if source.kind == "draw":
            return Way("object")  # None, until C++ has drawn
        if source.kind == "object":
            return Way("object", source.tensor)
        if source.kind == "constant":
            constant = take.constants[i]
            if i in self._copied:
                return Way("ask", lambda _: torch_private.copy_of(constant))
            return Way("object", constant)
        if source.is_copy or source.view is not None:
            return Way("ask", self._later(CapturedCall._on_memory, source))
        if source.kind == "argument":
            return Way("argument", number=source.name)
        if source.name in self._at_open:
            return Way("open", number=self._at_open[source.name])
        return Way("object", self._places[source.name])

    def _on_memory(self, source: Source, tensors: Tensors) -> torch.Tensor:
        """The leaf that is a view, or a copy, of a tensor; see `Source`."""
        if source.kind == "argument":
            tensor = tensors[source.name]
        elif source.name in self._places:
            tensor = self._places[source.name]
        else:
            tensor = self._look_up(source.name, tensors)
        data = concrete(tensor)
        assert data is not None, "what is pending was flushed"
        if source.view is not None:
            size, stride, moved = source.view
            with torch_private.no_dispatch(), torch_private.below_autograd():
                data = data.as_strided(size, stride, data.storage_offset() + moved)
        # a copy, as the trace takes one, of memory that others may write
        return input_snapshots.copied(data) if source.is_copy else data

    # What is returned

    def _results(self, *, gives_plain: bool) -> dict[str, Any]:
        """How C++ makes what the call returns."""
        outline = self.outline
        # None: one leaf, True: a flat list, both made in C++; else pytree makes the structure
        structure: Any = outline.structure.unflatten
        self._computed = {
            i: computes(one.name)
            for i, one in enumerate(outline.returned)
            if one.kind == "computed"
        }
        self._left_numbers = {
            place: computes(text) for i, (place, text, _) in self._kept.items() if text != f"r[{i}]"
        }
        if self._computed or self._left_numbers:
            structure = self._later(CapturedCall._with_computed, structure)
        elif outline.structure.is_leaf():
            structure = None
        elif torch_private.is_flat_list(outline.structure):
            structure = True
        given = (*outline.returned, *outline.computed_from.values())
        return {
            "given": [self._given(one, gives_plain) for one in given],
            "keeps_leaves": any("leaf" in one.kind for one in given),
            "structure": structure,
        }

    def _given(self, one: Returned, gives_plain: bool) -> tuple[Any, ...]:
        """(kind, number, object, finish): see `Given` in `dispatch/native/captured.h`."""
        if one.kind == "slot":
            assert one.meta is not None, "what makes a tensor has its metadata"
            number = self._slots.index(one.name)
            if gives_plain and one.layout is None:
                # a lazy tensor at a place has the same memory: note that a plain one has it, too
                is_left = any(left.slot == one.name for left in self._left)
                return "plain", number, None, _shared if is_left else None
            like = None if one.meta is ANY_SIZE else _lazy_like(one.meta, one.layout)
            return "lazy", number, like, _FINISH[one.grad]
        if one.kind in ("number", "list"):
            finish = partial(number_in, is_list=one.kind == "list")
            return "plain", self._slots.index(one.name), None, finish
        if one.kind in ("leaf number", "leaf list"):
            is_list = one.kind == "leaf list"
            return "ask", 0, lambda leaves: number_in(leaves[one.name], is_list=is_list), None
        if one.kind == "number argument":
            return "ask", 0, self._later(CapturedCall._given_number, one.name), None
        if one.kind == "kept":
            return "ask", 0, self._later(CapturedCall._look_up, one.name), None
        if one.kind == "computed":
            return "place", 0, Way("object"), None  # when all numbers are there
        if one.kind == "again":
            return "again", one.name, None, None
        if one.kind == "data":
            dtype, _, _, _, values = one.name
            data = torch.tensor(values, dtype=dtype)
            return "ask", 0, lambda _: torch_private.copy_of(data), None
        if one.kind == "leaf":
            return "ask", 0, partial(_leaf, one), _FINISH[one.grad]
        if one.kind == "object":
            return "place", 0, Way("object", self.objects[one.name][1]), None
        way = Way("object", one.name)  # of a constant
        if one.kind == "argument":
            way = Way("argument", number=one.name)
        elif one.kind == "place" and one.name in self._places:
            way = Way("object", self._places[one.name])
        elif one.kind == "place":
            way = self._way_to(one.name)
        return "place", 0, way, None

    def _given_number(self, i: int, _: Tensors) -> float:
        """The `i`-th number among the arguments of the call that runs."""
        return self._given_numbers[i]

    def _with_computed(self, put_together: Callable[[list[Any]], Any], found: list[Any]) -> Any:
        """What the call returns, some of it computed by Python from numbers that lie behind it; and
        put what it keeps for the next call."""
        sources = self.outline.computed_from
        n = len(found) - len(sources)
        numbers = dict(zip(sources, found[n:], strict=True)) | self._sizes
        del found[n:]
        for i, compute in self._computed.items():
            found[i] = compute(numbers)
        self._put_numbers(
            {place: compute(numbers) for place, compute in self._left_numbers.items()}
        )
        return put_together(found)

    # What is rare

    def _run_otherwise(
        self, leaves: list[torch.Tensor], scalars: list[complex], given: Given
    ) -> None:
        """Run the plan where C++ doesn't do so itself: if it is profiled or timed, is unchecked
        (see `Plan`), or may be a CUDA graph."""
        run = profiling.run_of(self.plan)
        # a CUDA graph has no steps to observe
        if self.cuda_graph is not None and run == self.plan.run:
            run = self.cuda_graph
        run(leaves, scalars, given)

    def _fail(
        self, error: BaseException, found: Found, given: Given, drawn: Tensors, tensors: Tensors
    ) -> None:
        """Put what was computed where it belongs, as after a flush. A lazy tensor whose value is
        lost keeps `error`, and raises it when it is read."""
        leaves, scalars, lasting, _ = found
        with torch_private.kernels_only():
            computed = None if given else rescue(error, self.plan, scalars)
            if computed is None and leaves and not given and not profiling.is_looked_at():
                # an interrupt came before the plan began: run it, as after a flush
                self.plan.run(leaves, scalars, given)
        if given:
            computed = dict(zip(self._slots, (*given[0], *drawn), strict=True))
        failure = without_frames(error)
        results = [(computed or {}).get(slot) for slot in self._slots]
        self._native.leave(results, lasting, tensors)
        for tensor in lasting[: self._n_renewed]:
            if isinstance(tensor, LazyTensor) and tensor._value.data is None:
                tensor._value.failure = failure

    def _account(self, began_s: float, seconds: float, raised: str) -> None:
        """Add a run to the flush log."""
        state = self.outline.state
        record = FlushRecord(
            thread=local.thread.name,
            cause=self.name,
            where=user_line(),
            n_ops=state.n_ops,
            began_s=began_s,
            seconds=seconds,
            raised=raised,
            state=state,
        )
        note_plan(record, self.plan)
        STATS.log.append(record)


HELD_WHOLE = (dict, list, tuple, set, frozenset, *DICTS)
"""Classes in C of which a holding has all that an instance holds."""


def _is_told(value: Any, held: set[int]) -> bool:
    """Whether the objects with these ids, which holdings have, tell all of an object's state: those
    of classes in C, such as generators and functions of torch's, may have state of their own."""
    is_held = id(value) in held or id(getattr(value, "__dict__", None)) in held
    classes = type(value).__mro__[:-1]
    return is_held and all(one in HELD_WHOLE or one.__flags__ & HEAP_TYPE for one in classes)


HEAP_TYPE = 1 << 9
"""The flag of classes that Python code has made (`Py_TPFLAGS_HEAPTYPE`)."""


def _lazy_like(
    meta: Any, layout: tensor_types.Layout | None, data: torch.Tensor | None = None
) -> torch.Tensor:
    """A lazy tensor, sharded if it has a layout. Without data it is a template: C++ makes others
    like it."""
    value = Value()
    value.data = data
    # what replays give is no inference tensor, as it was made without the mode
    with torch_private.no_inference():
        if layout is not None:
            return tensor_types.new_sharded(value, layout)
        return tensor_types.new_tensor(value, meta)


def _leaf(one: Returned, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """A new tensor on the memory of a leaf, to be returned."""
    data = _shared(leaves[one.name].detach())
    meta = one.meta
    if one.layout is None:
        # the leaf may begin elsewhere in its storage than that of the captured call
        meta = wrapper_arguments(meta_of(data))
    return _lazy_like(meta, one.layout, data)


def _put_back(drawn: Drawn | None) -> None:
    """Have generators give the same numbers again, unless another thread drew meanwhile."""
    with torch_private.kernels_only():
        for generator, before, after in drawn[1] if drawn is not None else ():
            if torch.equal(generator.get_state(), after):
                generator.set_state(before)


def _plan_of(outline: Outline, any_size: AnySize | None) -> Plan:
    """The plan of what a call did; RuntimeError if it can't be planned."""
    state, scalars = outline.state, list(outline.scalars)
    pending = Pending(state, state, [], [], [], {}, scalars)
    if any_size is not None:
        return build_plan(pending, outline.live, any_size.varying)
    plan = plan_of(pending, outline.live, at_once=lambda: True)
    if plan is None:
        raise RuntimeError("its ops can't be planned")
    return plan


def _share(places: list[int], results: Tensors) -> None:
    for i in places:
        memory_sharing.share(results[i])


def _shared(data: torch.Tensor) -> torch.Tensor:
    """The tensor, after noting that a plain tensor and a lazy one have its memory."""
    memory_sharing.share(data)
    return data


_FINISH: dict[str, Any] = {
    "": None,
    "leaf": torch.Tensor.requires_grad_,
    "spent": torch_private.differentiated,
}
"""What to call with a returned tensor, by `Returned.grad`: it then requires a gradient, or raises
in backward as a tensor does whose graph was freed."""
