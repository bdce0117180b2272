"""A call that repeats itself, run as its plan alone: the same effects, a new result, no Python.

In: the take of a call that did what a call before it did. Out: `Settled`, which finds the leaves of
the next call, if everything is as it was, and runs the plan on them. Called by `replay`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from lazy_tensor.capture.captured import Captured
from lazy_tensor.capture.counts import Recount
from lazy_tensor.capture.reach import (
    FACETS,
    NUMBER,
    OPEN,
    Holding,
    Unreachable,
    Watch,
    facets_of,
    is_same,
)
from lazy_tensor.capture.take import (
    Left,
    Outline,
    Returned,
    Source,
    Take,
    concrete,
    described_in_python,
    metadata,
)
from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.metadata.infer import meta_of
from lazy_tensor.dispatch.plan.plan import Given, Plan
from lazy_tensor.dispatch.record.extend_trie import wrapper_arguments
from lazy_tensor.dispatch.run import hits, profiling, watch
from lazy_tensor.dispatch.run.compile_service import ask_for_pool
from lazy_tensor.dispatch.run.failure import rescue, without_frames
from lazy_tensor.dispatch.run.flush import note_plan
from lazy_tensor.dispatch.run.plan_cache import plan_of
from lazy_tensor.dispatch.stats import STATS, FlushRecord
from lazy_tensor.dispatch.trie import memory_sharing, tensor_types
from lazy_tensor.dispatch.trie.trace import Pending, Value, local
from lazy_tensor.dispatch.user_frame import user_line
from lazy_tensor.kernels.extension.pool import POOL
from lazy_tensor.tensor import LazyTensor

Tensors = list[torch.Tensor]
Fetch = Callable[[Tensors], torch.Tensor]
"""Finds a tensor, given those among a call's arguments."""


MOST_TAUGHT = 8
"""Calls of a module that are recorded for its backward to be learnt: of a program that runs none
there are no more."""


class Changed(Exception):
    """What is not as it was when the call settled."""


class Found(NamedTuple):
    """What a run needs: the leaves of the plan, those to be drawn left out; its numbers; the
    tensors at open places."""

    leaves: list[Any]
    scalars: list[complex]
    lasting: Tensors


class Settled:
    """The plan of a call, where its leaves come from, and where its results go.

    Made when the call's ops have run; `before` is the outline of one before it that did the same,
    `tensors` are those among its arguments, `name` is what the flush log calls its runs. With
    `cuda_graphs` the plan becomes one if it can; with `gives_plain` the results are plain tensors.
    RuntimeError if its ops can't be planned.

    A place whose tensor the call replaces, or that is a gradient, is *open*: whatever tensor of the
    same metadata lies there is read, and takes the new value. Elsewhere the objects must be the
    ones they were.
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
    ) -> None:
        self.outline = outline = take.outline
        self.name = name
        self.n_runs = 0
        self.next_check = 0  # of them, before the next call is recorded and compared
        self._scalars = list(outline.scalars)
        self._recount = Recount(
            (outline.formulas, before.formulas),
            (outline.scalars, before.scalars),
            take.constants.values(),
        )
        plan = plan_of(
            Pending(outline.state, outline.state, [], [], [], {}, self._scalars),
            outline.live,
            at_once=lambda: True,
        )
        if plan is None:
            raise RuntimeError("its ops can't be planned")
        self._plan: Plan = plan
        self.captured: Captured | None = None
        if cuda_graphs:
            self.captured = Captured(plan, outline.state, numbers_change=self._recount.is_needed)
        self._draws = take.draws
        self._reads = take.reads
        self._constants = take.constants
        self._of_leaves = _Told(take.metadata, metadata, "leaf_words")
        self._holdings = take.after.holdings
        self._argument_of = {name: i for i, name in take.after.arguments.items()}
        self._tensors = tensors
        self._pinned = [
            (i, tensor) for i, tensor in enumerate(tensors) if i not in take.after.arguments
        ]
        self._find_targets(outline.left)
        self._open_places(outline.left)
        self._find_leaves(take)
        self._returned = [self._handed_back(one, take) for one in outline.returned]
        self._gives_leaves = any(one.kind == "leaf" for one in self._returned)
        self._gives_one = outline.structure.is_leaf()
        self._gives_list = torch_private.is_flat_list(outline.structure)
        self._gives_plain = gives_plain
        self.companion: Any = None
        """Of a module's forward: the `Replay` of its backward."""
        self.n_to_teach = MOST_TAUGHT  # calls that are recorded for it
        self.shared: list[int] | None = None  # of what it sees, what backward may need
        self._left_slots = {one.slot for one in outline.left}
        self._instances = take.after.instances
        self._classes = [type(instance) for instance in self._instances]

    # Where leaves come from

    def _find_leaves(self, take: Take) -> None:
        sources = take.outline.sources
        fetches = [self._fetch(source, take) for source in sources]
        self._template: list[Any] = [None] * len(sources)
        self._opened: list[tuple[int, int]] = []  # leaf i lies at open place k
        self._fetched: list[tuple[int, Fetch]] = []
        self._drawn: list[tuple[int, int]] = []
        at_open = {place: k for k, place in enumerate(self._open)}
        for i, (source, fetch) in enumerate(zip(sources, fetches, strict=True)):
            if source.kind == "draw":
                self._drawn.append((i, source.name))
            elif source.kind == "constant":
                self._template[i] = self._constants[i]
                if i in take.written:
                    self._fetched.append((i, partial(_copied, self._constants[i])))
            elif source.view is not None:
                self._fetched.append((i, _viewing(fetch, source.view)))
            elif source.name in at_open:
                self._opened.append((i, at_open[source.name]))
            elif callable(fetch):
                self._fetched.append((i, fetch))
            else:
                self._template[i] = fetch
        written = [(fetches[i], take.n_writes.get(i, 1)) for i in take.written
                   if sources[i].view is None and fetches[i] is not None]  # fmt: skip
        self._written = [one for one, _ in written if not callable(one)]
        self._counted = [one for one, n in written if not callable(one) for _ in range(n)]
        self._found_written: list[tuple[Fetch, int]] = [one for one in written if callable(one[0])]
        read = {source.name for source in sources if source.kind == "place"}
        self._unread = [i for i, left in enumerate(self._renewed) if _place(left) not in read]

    def _fetch(self, source: Source, take: Take) -> Any:
        """How to find a leaf's tensor, or the tensor itself if it is always the same."""
        if source.kind in ("draw", "constant"):
            return None
        if source.kind == "argument":
            return lambda tensors: tensors[source.name]
        name, key = source.name
        holding = self._holdings[name]
        if holding.values[key] is OPEN:
            return self._getter(name, key)
        return take.places[source.name]

    def _getter(self, name: str, key: int) -> Fetch:
        """How to find what lies at a place."""
        holding, argument = self._holdings[name], self._argument_of.get(name)
        if argument is not None:
            facet = FACETS[key]
            return lambda tensors: getattr(tensors[argument], facet)
        if holding.is_of_tensor:
            holder, facet = holding.holder, FACETS[key]
            return lambda _: getattr(holder, facet)
        return lambda _: holding.get(key)

    def _handed_back(self, one: Returned, take: Take) -> Returned:
        """What is returned, an object at an open place by how to find it."""
        if one.kind == "data":
            dtype, _, _, _, values = one.name
            return Returned("data", torch.tensor(values, dtype=dtype))
        if one.kind not in ("left", "place"):
            return one
        name, key = one.name
        if one.kind == "left" or self._holdings[name].values[key] is OPEN:
            return Returned("open", self._getter(name, key))
        return Returned("object", take.places[one.name])

    # What must be as it was

    def _open_places(self, left: tuple[Left, ...]) -> None:
        """Note what each holding must hold when a call begins."""
        made = {id(self._holdings[one.holding].values[one.key]) for one in left if one.was_empty}
        for one in left:
            self._holdings[one.holding].expect(one.key, None if one.was_empty else OPEN)
        self._numbers_at = [(self._holdings[name], key) for name, key in self._recount.places]
        for holding, key in self._numbers_at:
            holding.expect(key, NUMBER)
        for holding in self._holdings.values():
            if holding.is_of_tensor and isinstance(holding.values[0], torch.Tensor):
                holding.expect(0, OPEN)
        fixed: list[Holding] = []
        self._facets: list[tuple[int, tuple[Any, ...]]] = []
        for name, holding in self._holdings.items():
            if name in self._argument_of:
                self._facets.append((self._argument_of[name], holding.values))
                holding.holder = None  # an argument need not live on
            elif id(holding.holder) not in made:
                fixed.append(holding)
        self._fixed = Watch(fixed)
        watched = [holding.holder for holding in fixed if holding.is_of_tensor]
        self._watched = [tensor for tensor in watched if id(tensor) not in self._left_objects]
        self._watched_ids = {id(tensor) for tensor in watched}
        self._of_watched = _Told.of(self._watched, with_types=True)
        # gradients that the call doesn't replace are open too
        replaced = {_place(one) for one in left}
        self._open += [
            (name, 0)
            for name, holding in self._holdings.items()
            if holding.is_of_tensor and holding.values[0] is OPEN and (name, 0) not in replaced
        ]
        self._getters = [self._getter(*place) for place in self._open]
        self._of_open = _Told.of([get(self._tensors) for get in self._getters], with_types=False)
        del self._tensors

    def found(self, tensors: Tensors) -> Found:
        """What to run the plan on for a call with these tensors.

        Raises Changed if the call might do something else than it did.
        """
        try:
            return self._found(tensors)
        except (RuntimeError, Unreachable) as error:
            raise Changed(f"a tensor can't be looked at any more: {error}") from None

    def _found(self, tensors: Tensors) -> Found:
        for i, tensor in self._pinned:
            if tensors[i] is not tensor:
                raise Changed(f"argument {i} is another tensor, which it also finds elsewhere")
        if sum(id(tensor) in self._watched_ids for tensor in tensors) > len(self._pinned):
            raise Changed("an argument is a tensor that it also finds elsewhere")
        if list(map(type, self._instances)) != self._classes:
            raise Changed("the class of an object changed")
        change = self._fixed.change()
        if change is not None:
            raise Changed(f"{change} changed")
        if not _have_facets(tensors, self._facets):
            raise Changed("an argument's gradient or hooks came or went")
        lasting = [get(tensors) for get in self._getters]
        if not (self._of_watched.are(self._watched) and self._of_open.are(lasting)):
            raise Changed("a tensor's class, size, strides, dtype, device or graph changed")
        found = self._template.copy()
        for i, k in self._opened:
            found[i] = lasting[k]
        for i, fetch in self._fetched:
            found[i] = fetch(tensors)
        leaves = _concrete(found)
        if not self._of_leaves.are(leaves):
            raise Changed("tensors share memory with others than they did")
        scalars = self._numbers(leaves)
        for read in self._reads:
            number = torch.Tensor.item(read.aside(leaves, scalars))
            if not is_same(number, read.number):
                raise Changed(f"it reads {number!r} at {read.where}, it was {read.number!r}")
        return Found(leaves, scalars, lasting)

    def _numbers(self, leaves: list[Any]) -> list[complex]:
        """The numbers that the trace gets."""
        if not self._recount.is_needed:
            return self._scalars
        numbers = [holding.get(key) for holding, key in self._numbers_at]
        scalars = self._recount(leaves, numbers)
        if scalars is None:
            raise Changed("step counts that were equal are not, or numbers lead elsewhere")
        return scalars

    # Where results go

    def _find_targets(self, left: tuple[Left, ...]) -> None:
        self._slots = (*self.outline.live, *(-1 - i for i in range(len(self._draws))))
        self._renewed = [one for one in left if not one.was_empty]
        objects = [self._holdings[one.holding].values[one.key] for one in left]
        self._left_objects = {id(tensor) for tensor in objects}
        self._requires_grad: list[bool] = []
        self._filled: list[tuple[Left, tuple[Any, ...], tensor_types.Layout | None]] = []
        self._layouts: list[tensor_types.Layout | None] = []
        for one, tensor in zip(left, objects, strict=True):
            if one.was_empty:
                meta = wrapper_arguments(meta_of(tensor))
                self._filled.append((one, meta, tensor_types.layout_of(tensor)))
            else:
                self._requires_grad.append(tensor.requires_grad and tensor.is_leaf)
                self._layouts.append(tensor_types.layout_of(tensor))
        self._open = [_place(one) for one in self._renewed]

    def run(self, found: Found, tensors: Tensors) -> Any:
        """What the call would have returned, its effects done.

        An exception says, in a note, which recorded line it came from; what doesn't depend on it is
        done all the same.
        """
        leaves, scalars, lasting = found
        self.n_runs += 1
        ask_for_pool(self._plan)
        written, counted = self._written, self._counted
        if self._found_written:
            found_written = [(fetch(tensors), n) for fetch, n in self._found_written]
            written = [*written, *(one for one, _ in found_written)]
            counted = [*counted, *(one for one, n in found_written for _ in range(n))]
        lasting = lasting[: len(self._renewed)]
        if self._unread:  # their memory is free for what takes its place
            layouts = [self._layouts[i] for i in self._unread]
            _renew([lasting[i] for i in self._unread], [None] * len(self._unread), layouts)
        kept, drawn = leaves, []
        with torch_private.kernels_only(), POOL.using():
            if self._draws:
                drawn = [draw() for draw in self._draws]
                for i, number in self._drawn:
                    leaves[i] = drawn[number]
            if self._gives_leaves:
                kept = leaves.copy()
            start, raised = perf_counter(), ""
            given: Given = []
            run = profiling.run_of(self._plan)
            if self.captured is not None and run == self._plan.run:
                run = self.captured
            try:
                run(leaves, scalars, given)
            except BaseException as error:
                raised = type(error).__name__
                computed = None if given else rescue(error, self._plan, scalars)
                if computed is None and leaves and run == self._plan.run:
                    run(leaves, scalars, given)  # an interrupt came before it had begun
                if given:
                    computed = dict(zip(self._slots, (*given[0], *drawn), strict=True))
                self._fail(error, computed or {}, lasting, tensors)
                raise
            finally:
                self._note(start, raised)
        results = given[0]
        of_slot = dict(zip(self._slots, (*results, *drawn), strict=True))
        for place, _ in self._plan.parts_of_leaves:
            memory_sharing.share(results[place])
        if self._renewed or self._filled:
            self._leave(of_slot, lasting, tensors)
            _count_writes(lasting)  # graphs that saved one must not use its new value
        if written:
            _count_writes(counted)
            watch.note_writes(written)
        return self._result(of_slot, kept, tensors)

    def _note(self, start: float, raised: str) -> None:
        """An entry in the flush log."""
        seconds, state = perf_counter() - start, self.outline.state
        record = FlushRecord(
            thread=local.thread.name,
            cause=self.name,
            where=user_line(),
            n_ops=state.n_ops,
            began_s=start,
            seconds=seconds,
            raised=raised,
            state=state,
        )
        note_plan(record, self._plan)
        STATS.log.append(record)

    def _leave(self, of_slot: dict[int, torch.Tensor], lasting: Tensors, tensors: Tensors) -> None:
        """Leave behind what the call does, as far as it was computed."""
        there = [i for i, one in enumerate(self._renewed) if one.slot in of_slot]
        data = [of_slot[self._renewed[i].slot] for i in there]
        layouts = [self._layouts[i] for i in there]
        for k in _renew([lasting[i] for i in there], data, layouts):
            layout = layouts[k]
            new = tensor_types.concrete(data[k]) if layout is None else _made(data[k], None, layout)
            new.requires_grad_(self._requires_grad[there[k]])
            self._put(self._renewed[there[k]], new, tensors)
        for one, meta, layout in self._filled:
            if one.slot in of_slot:
                self._put(one, _made(of_slot[one.slot], meta, layout), tensors)

    def _put(self, place: Left, tensor: torch.Tensor, tensors: Tensors) -> None:
        """Put a tensor where the call would have put it."""
        holding = self._holdings[place.holding]
        argument = self._argument_of.get(place.holding)
        assert holding.write is not None, "a take leaves nothing where nothing can be put"
        holding.write(
            holding.holder if argument is None else tensors[argument],
            holding.keys[place.key],
            tensor,
        )

    def _result(self, of_slot: dict[int, torch.Tensor], leaves: list[Any], tensors: Tensors) -> Any:
        values: dict[int, Value] = {}
        found: list[Any] = []
        for one in self._returned:
            if self._gives_plain and one.kind == "slot" and one.layout is None:
                data = of_slot[one.name]
                if one.name in self._left_slots:
                    memory_sharing.share(data)
                found.append(data)
                continue
            if one.kind == "argument":
                found.append(tensors[one.name])
                continue
            if one.kind in ("constant", "object"):
                found.append(one.name)
                continue
            if one.kind == "data":
                found.append(torch_private.copy_of(one.name))
                continue
            if one.kind in ("open", "again"):
                found.append(one.name(tensors) if one.kind == "open" else found[one.name])
                continue
            if one.kind == "leaf":
                data = leaves[one.name].detach()
                memory_sharing.share(data)
                value = _valued(data)
            elif one.name in values:
                value = values[one.name]
            else:
                value = values[one.name] = _valued(of_slot[one.name])
            assert one.meta is not None, "what makes a tensor has its metadata"
            tensor = _on(value, one.meta, one.layout)
            if one.grad == "leaf":
                tensor.requires_grad_()
            elif one.grad:
                tensor = torch_private.differentiated(tensor)
            found.append(tensor)
        if self._gives_list:
            return found
        return found[0] if self._gives_one else pytree.tree_unflatten(found, self.outline.structure)

    def _fail(
        self,
        error: BaseException,
        computed: dict[int, torch.Tensor],
        lasting: Tensors,
        tensors: Tensors,
    ) -> None:
        """Keep what was computed, as after a flush; a value that is gone keeps `error`."""
        failure = without_frames(error)
        self._leave(computed, lasting, tensors)
        for tensor in lasting:
            if isinstance(tensor, LazyTensor) and tensor._value.data is None:
                tensor._value.failure = failure


class _Told:
    """What tensors are, to be compared with: by Python, and by C++ once that is there."""

    def __init__(self, expected: Any, tell: Callable[[Any], Any], native: str, *more: Any) -> None:
        self._expected = expected
        self._tell = tell
        self._native = native
        self._more = more
        self._words: Any = None

    @classmethod
    def of(cls, tensors: Tensors, *, with_types: bool) -> _Told:
        tell = partial(described_in_python, with_types=with_types)
        return cls(tell(tensors), tell, "argument_words", with_types)

    def are(self, tensors: list[Any]) -> bool:
        """Whether these tensors are told to be the same."""
        tell = None if hits.native is None else getattr(hits.native, self._native)
        if tell is not None and self._words is not None:
            return bool(tell(tensors, *self._more) == self._words)
        if self._tell(tensors) != self._expected:
            return False
        if tell is not None:
            self._words = tell(tensors, *self._more)
        return True


def _concrete(tensors: list[Any]) -> list[Any]:
    """`take.concrete` of each."""
    native = hits.native
    return list(map(concrete, tensors)) if native is None else native.concrete(tensors)


def _count_writes(tensors: Tensors) -> None:
    count = torch_private.count_writes if hits.native is None else hits.native.count_writes
    count(tensors)


def _copied(tensor: torch.Tensor, _: Tensors) -> torch.Tensor:
    return torch_private.copy_of(tensor)


def _place(left: Left) -> tuple[str, int]:
    return (left.holding, left.key)


def _have_facets(tensors: Tensors, facets: list[tuple[int, tuple[Any, ...]]]) -> bool:
    """Whether tensor `i` is as `(i, values)` say."""
    if hits.native is not None:
        return bool(hits.native.have_facets(tensors, facets, OPEN))
    return all(all(map(is_same, values, facets_of(tensors[i]))) for i, values in facets)


def _renew(
    tensors: Tensors,
    data: Sequence[torch.Tensor | None],
    layouts: Sequence[tensor_types.Layout | None],
) -> list[int]:
    """Give lazy tensors new values, or empty ones; the numbers of those not lazy, or of other
    metadata or layouts. What they had before may belong to an alias too, and stays as it is."""
    others: Sequence[int] = range(len(tensors))
    if hits.native is not None:
        others = hits.native.renew(tensors, data, layouts)
    left: list[int] = []
    for i in others:
        tensor, value, layout = tensors[i], data[i], layouts[i]
        if layout is not None:
            fits = tensor_types.layout_of(tensor) is layout
        else:
            fits = type(tensor) is LazyTensor and (
                value is None or meta_of(tensor) == meta_of(value)
            )
        if fits:
            assert isinstance(tensor, LazyTensor), "only those have layouts"
            tensor._value = _valued(value)
        else:
            left.append(i)
    return left


def _viewing(fetch: Any, view: tuple[Any, ...]) -> Fetch:
    size, stride, moved = view

    def viewed(tensors: Tensors) -> torch.Tensor:
        base = concrete(fetch(tensors) if callable(fetch) else fetch)
        assert base is not None, "what is pending was flushed"
        with torch_private.no_dispatch(), torch_private.below_autograd():
            return base.as_strided(size, stride, base.storage_offset() + moved)

    return viewed


def _made(data: torch.Tensor, meta: Any, layout: tensor_types.Layout | None) -> torch.Tensor:
    return _on(_valued(data), meta, layout)


def _on(value: Value, meta: Any, layout: tensor_types.Layout | None) -> torch.Tensor:
    """A lazy tensor on a value, sharded if it has a layout."""
    return (
        tensor_types.new_tensor(value, meta)
        if layout is None
        else tensor_types.new_sharded(value, layout)
    )


def _valued(data: torch.Tensor | None) -> Value:
    value = Value()
    value.data = data
    return value
