"""What calls that differ in sizes have in common, so that one plan runs them all.

In: the outlines of some calls, recorded with sizes noted (see `traced_sizes`). Out: `AnySize`, with
outlines that are equal for these calls: sizes that ops got are numbers of the trace, and texts are
about the symbols of `SizeTexts`. Or the obstacle to that. Called by `replay`, for `captured_call`.

What a call did because of a size is a condition: a comparison, whatever Python did with a size that
no text follows, and each size that came out the same though it was computed from one that changed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lazy_tensor.capture.numbers.op_numbers import explained_by
from lazy_tensor.capture.numbers.step_counts import value_of
from lazy_tensor.capture.outline import Outline, named
from lazy_tensor.capture.sizes.size_texts import Column, SizeTexts
from lazy_tensor.capture.sizes.sized_draw import SizedDraw, kind_of, sizes_of
from lazy_tensor.capture.watched_object import Obstacle, is_atom, is_same
from lazy_tensor.dispatch.run.aside import Aside
from lazy_tensor.dispatch.run.tape import Draw
from lazy_tensor.dispatch.traced_number import Check, sizes_in
from lazy_tensor.dispatch.traced_sizes import LEAST
from lazy_tensor.dispatch.trie.trace import Leaf, Node, State
from lazy_tensor.kernels.cache import Cache
from lazy_tensor.kernels.generic import dense_strides
from lazy_tensor.kernels.segment import ScalarRef, TensorSpec

if TYPE_CHECKING:
    from lazy_tensor.capture.take import Take

ANY_SIZE: Any = ("of the size that the data has",)
"""The metadata of a returned tensor whose sizes vary."""
N_CALLS = 3
"""Calls that are compared: two points fit a line, the third confirms it."""
BEYOND = (1.0, 1.5, 2.0)
"""How many times as large as in all recorded calls a size may grow, by the times that a recorded
call of a larger size has done the same. Between two sizes a program rarely does anything else than
at both. Beyond, code may decide by a size without anybody noticing it."""
SETTLED_AFTER = 16
"""Replays of one size before it gets a plan of its own, which costs two recorded calls, and kernels
for what varies."""
MOST_SIZES = 256
"""Sizes whose replays are counted."""
SLOWLY = 8
"""A size may grow by this part of itself, or by one, from a call to the next: as caches do."""


class SizedState(State):
    """A state beside the trie, whose steps get sizes as numbers."""

    def __init__(self, steps: Sequence[Node | Leaf]) -> None:
        super().__init__(None, (), None)
        self._all = list(steps)
        self.n_ops = sum(isinstance(one, Node) for one in steps)

    any_size = True

    def steps(self, since: State | None = None) -> list[Node | Leaf]:
        """All steps from the root to here."""
        assert since is None, "it is in no trie"
        return self._all


class AnySize:
    """Calls whose sizes are to each other as in some calls: `found` are the outlines of these, the
    latest last. Obstacle if they differ in more than sizes.

    `outlines` are those for all sizes, the latest first. `texts` say how each number of the trace
    that changes is computed.
    """

    def __init__(self, found: Sequence[Outline]) -> None:
        self._sizes = sizes = SizeTexts([one.leaf_words for one in found])
        if len({len(one.sizes_read) for one in found}) != 1:
            raise Obstacle("it reads other sizes for each size")
        self._read: list[str | None] = [None] * len(found[0].sizes_read)
        self._by_python: dict[Column, str] = {}  # texts of what Python computed from sizes
        self._follow([one.given for one in found])
        self._scalars: list[list[complex]] = [[] for _ in found]
        self._found_in = found
        self._seen = [(min(column), max(column)) for column in sizes.symbols]
        self.symbols = sizes.read(found[-1].leaf_words)
        """The symbols of the call that ran last."""
        self._n_replays: Cache[Any, int] = Cache("", MOST_SIZES)
        self._n_beyond = 0  # recorded calls that confirmed a size beyond those seen before
        self._computed: dict[str, Column] = {}  # by texts, the numbers that ops got
        self._unknown: list[tuple[Node, Column]] = []
        self._specs: dict[int, tuple[TensorSpec, ...]] = {}  # by slot, in each of the calls
        self._slices: list[Node] = []
        self._steps = self._merged_steps([one.state.steps() for one in found])
        self._state = SizedState(self._steps)
        given = [self._given(one, i) for i, one in enumerate(found)]
        explained = explained_by(given[-1], *reversed(given[:-1]))
        self.texts: dict[int, list[str]] = {}
        for i, column in enumerate(zip(*reversed(self._scalars), strict=True)):
            if len({*map(repr, column)}) > 1:
                self.texts[i] = explained.get(tuple(map(repr, column)), [])
        for node, column in self._unknown:
            if tuple(map(repr, reversed(column))) not in explained:
                then, now = column[-2:]
                raise Obstacle(f"{named(node)} gets {now!r} where the call before gave it {then!r}")
        self._draws = self._sized_draws([one.drawn for one in found])
        self._conditions = self._all_conditions(given)
        metas = list(zip(*[one.returned for one in found], strict=False))
        self.outlines = [self._outline(one, i, given[i], metas) for i, one in enumerate(found)]
        self.outlines.reverse()
        for one in self.outlines[1:]:
            difference = self.outlines[0].difference(one)
            if difference is not None:
                raise Obstacle(difference)

    def read(self, words: bytes) -> dict[Any, int]:
        """The symbols in a call whose leaves these words describe; Obstacle if it may differ."""
        symbols = self._sizes.read(words)
        beyond = BEYOND[min(self._n_beyond, len(BEYOND) - 1)]
        for name, (least, most) in zip(symbols, self._seen, strict=True):
            n, before = symbols[name], self.symbols[name]
            grows = n - before <= max(1, before // SLOWLY) and n <= most * beyond
            if n < least or (n > most and not grows):
                raise Obstacle("a size is beyond those of recorded calls")
        self.symbols = symbols
        return symbols

    def confirm(self, outline: Outline) -> bool:
        """Whether a recorded call is of these. If it is, its sizes are among those seen."""
        try:
            symbols = self._sizes.read(outline.leaf_words)
        except Obstacle:
            return False
        if self.difference(outline) is not None:
            return False
        self._n_beyond += any(
            n > most for n, (_, most) in zip(symbols.values(), self._seen, strict=True)
        )
        self.symbols = symbols
        self._seen = [
            (min(least, n), max(most, n))
            for n, (least, most) in zip(symbols.values(), self._seen, strict=True)
        ]
        return True

    def settles(self) -> bool:
        """Note a replay with the symbols found last. Whether these have come so often that they
        should have a plan of their own."""
        key = tuple(self.symbols.values())
        n = (self._n_replays.get(key) or 0) + 1
        self._n_replays.put(key, n)
        return n in (SETTLED_AFTER, SETTLED_AFTER + 1)

    @property
    def varying(self) -> frozenset[int]:
        """The slots of tensors whose sizes, or strides, vary."""
        return frozenset(slot for slot, specs in self._specs.items() if len({*specs}) > 1)

    def difference(self, outline: Outline) -> str | None:
        """How a call of some size differs from these, in words; None if it doesn't."""
        try:
            found = AnySize([*self._found_in, outline])
        except Obstacle as obstacle:
            return str(obstacle)
        pairs = zip(self.texts.items(), found.texts.items(), strict=False)
        are_alike = all(
            i == j and not {*texts}.isdisjoint(others) for (i, texts), (j, others) in pairs
        )
        if are_alike and len(self.texts) == len(found.texts):
            return None
        return "sizes are computed in another way"

    @property
    def conditions(self) -> list[str]:
        """What has to be true of the symbols, as texts."""
        return [one.text for one in self._conditions if one.outcome is not None]

    def of(self, take: Take) -> Take:
        """The take of the latest of the calls, for all sizes."""
        sized = copy.copy(take)
        sized.outline, sized.any_size = self.outlines[0], self
        sized.draws = self._draws
        numbers = sized.numbers = copy.copy(take.numbers)
        numbers.checks = [*self._checks(take.numbers.checks), *self._conditions]
        numbers.kept = {
            i: (place, self._swapped(text), kind) for i, (place, text, kind) in numbers.kept.items()
        }
        asides = {id(read): self._aside(read.aside) for read in numbers.reads}
        anew = {id(one): replace(one, aside=asides[id(one)]) for one in take.numbers.reads}
        numbers.reads = [anew[id(one)] for one in take.numbers.reads]
        numbers.deciding = [anew[id(one)] for one in take.numbers.deciding]
        numbers.returned = {i: anew[id(one)] for i, one in take.numbers.returned.items()}
        return sized

    def _aside(self, aside: Aside) -> Aside:
        n_steps = len(aside.state.steps())
        return Aside(SizedState(self._steps[:n_steps]), *aside.slots)

    # Steps, with numbers in place of sizes

    def _merged_steps(self, calls: list[Any]) -> list[Node | Leaf]:
        if len({*map(len, calls)}) != 1:
            raise Obstacle(f"it has {len(calls[-1])} steps, and {len(calls[-2])} for another size")
        return [self._merged(steps) for steps in zip(*calls, strict=True)]

    def _merged(self, steps: tuple[Any, ...]) -> Node | Leaf:
        now: Node | Leaf = steps[-1]
        if any(type(one) is not type(now) or _key(one) != _key(now) for one in steps):
            what = named(now) if isinstance(now, Node) else f"a tensor {now.spec}"
            raise Obstacle(f"it has {what} where the call before had something else")
        if isinstance(now, Leaf):
            self._specs[now.slot] = tuple([one.spec for one in steps])
            return now
        if now.facts.communicates:
            raise Obstacle("it communicates")
        for slot, specs in zip(
            now.outs, zip(*[one.specs for one in steps], strict=True), strict=True
        ):
            if slot is not None:
                self._specs[slot] = specs
        self._slices += [now] if now.facts.op is SLICE else []
        args = self._argument(tuple([one.args for one in steps]), now)
        kwargs = self._argument(tuple([one.kwargs for one in steps]), now)
        return replace(now, args=args, kwargs=kwargs)

    def _argument(self, values: tuple[Any, ...], node: Node) -> Any:
        """An argument that the calls gave to an op, with numbers of the trace for sizes."""
        now = values[-1]
        if type(now) is tuple:
            if any(type(one) is not tuple or len(one) != len(now) for one in values):
                raise Obstacle(f"{named(node)} gets lists of other lengths")
            return tuple([self._argument(items, node) for items in zip(*values, strict=True)])
        found = [
            value_of(value, one.scalars) for value, one in zip(values, self._found_in, strict=True)
        ]
        is_number = ScalarRef in map(type, values)
        last = found[-1]
        if not is_number and all(
            is_same(one, last) if is_atom(last) else one == last for one in found
        ):
            return now
        if {*map(type, found)} not in ({int}, {float}) and not is_number:
            raise Obstacle(
                f"{named(node)} gets {now!r} where the call before gave it {values[-2]!r}"
            )
        return self._number(tuple(found), node)

    def _number(self, column: Column, node: Node) -> ScalarRef:
        """A number of the trace for one that an op got."""
        for scalars, number in zip(self._scalars, column, strict=True):
            scalars.append(number)
        if len({*map(repr, column)}) > 1:
            self._unknown.append((node, column))
            text = self._text_of(column)
            if text is not None:
                self._computed[text] = column
        return ScalarRef(len(self._scalars[0]) - 1)

    def _text_of(self, column: tuple[Any, ...]) -> str | None:
        """A text of the symbols for a number: a size, or one divided by a size."""
        if {*map(type, column)} == {int}:
            return self._size_text(column)
        if {*map(type, column)} != {float} or not all(column):
            return None
        inverse = tuple([round(1 / one) for one in column])
        for form, whole in (("float({})", tuple(map(round, column))), ("(1 / {})", inverse)):
            values = whole if form.startswith("float") else [1 / one if one else 0 for one in whole]
            if all(one == value for one, value in zip(column, values, strict=True)):
                text = self._size_text(whole)
                return None if text is None else form.format(text)
        return None

    def _sized_draws(self, of_calls: list[tuple[Draw, ...]]) -> tuple[Draw, ...]:
        """The draws, for all sizes."""
        if len({tuple(map(kind_of, draws)) for draws in of_calls}) != 1:
            raise Obstacle("it draws other random numbers for each size")
        made = []
        for alike in zip(*of_calls, strict=True):
            columns = zip(*map(sizes_of, alike), strict=True)
            texts = [self._size_text(column) for column in columns]
            if None in texts:
                raise Obstacle(f"what {alike[-1].op} draws has a size that follows from no other")
            made.append(SizedDraw(alike[-1], [text or "" for text in texts], lambda: self.symbols))
        return tuple(made)

    # Texts, about symbols in place of the sizes that were read

    def _follow(self, given: list[dict[str, Any]]) -> None:
        """Note what the sizes are that the calls have read, and what Python computed from them."""
        for text in given[-1]:
            if not sizes_in(text) or any(text not in one for one in given):
                continue
            column = tuple([one[text] for one in given])
            read = _READ.fullmatch(text)
            if read is not None:
                self._read[int(read[1])] = self._size_text(column)
            elif {*map(type, column)} == {int} and self._is_known(text):
                self._by_python.setdefault(column, self._swapped(text))

    def _is_known(self, text: str) -> bool:
        """Whether all sizes that a text is about follow from symbols."""
        return all(self._read[int(k)] is not None for k in _READ.findall(text))

    def _size_text(self, column: Column) -> str | None:
        """A text of the symbols for a size."""
        return self._sizes.text_of(column) or self._by_python.get(column)

    def _swapped(self, text: str) -> str:
        """A text about symbols. Obstacle if a size that it is about follows from no symbols."""
        return _READ.sub(self._text_read, text)

    def _text_read(self, found: re.Match[str]) -> str:
        text = self._read[int(found[1])]
        if text is None:
            raise Obstacle("it computes with a size that follows from no other")
        return text

    def _checks(self, checks: Iterable[Check]) -> list[Check]:
        """Checks of the symbols, without those that hold for all."""
        found = {}
        for check in checks:
            text = self._swapped(check.text)
            if "r[" in text or "c[" in text:
                found[text] = check._replace(text=text)
        return list(found.values())

    def _given(self, outline: Outline, i: int) -> dict[str, Any]:
        """The numbers that ops may have got, by texts about symbols."""
        given = {}
        for text, value in outline.given.items():
            if self._is_known(text):
                swapped = self._swapped(text)
                if swapped == text or sizes_in(swapped):
                    given[swapped] = value
        return given | {text: column[i] for text, column in self._computed.items()}

    def _all_conditions(self, given: list[dict[str, Any]]) -> list[Check]:
        """What must be true of the symbols besides what the call has compared."""
        texts: dict[str, None] = {}
        for text, value in given[-1].items():
            if sizes_in(text) and all(text in one and is_same(one[text], value) for one in given):
                texts[f"repr({text}) == {repr(value)!r}"] = None
        for specs in self._specs.values():
            for column in zip(*[spec.size for spec in specs], strict=True):
                if len({*column}) > 1:
                    if min(column) < LEAST:
                        raise Obstacle("sizes of 0 and 1 need plans of their own")
                    texts[f"{self._sure_text(column)} >= {LEAST}"] = None
        texts |= self._parts_of_slices() | self._gaps() | self._sizes.conditions
        return [Check(f"({' and '.join(texts)})", True, "")] if texts else []

    def _sure_text(self, column: Column) -> str:
        """A text for a size; Obstacle if there is none."""
        text = self._size_text(column)
        if text is None:
            raise Obstacle(f"a size of {column[-1]} follows from no other")
        return text

    def _parts_of_slices(self) -> dict[str, None]:
        """Conditions by which a part of a tensor isn't all of it: Python's `x[:n]` makes no slice
        then."""
        found: dict[str, None] = {}
        for node in self._slices:
            of_base, of_part = self._specs[node.reads[0]], self._specs[node.makes[0]]
            for sizes in zip(*[one.size for one in (*of_base, *of_part)], strict=True):
                base, part = sizes[: len(of_base)], sizes[len(of_base) :]
                if base != part and all(a > b for a, b in zip(base, part, strict=True)):
                    found[f"{self._sure_text(base)} > {self._sure_text(part)}"] = None
        return found

    def _gaps(self) -> dict[str, None]:
        """Conditions by which what has gaps in memory keeps them: without, `contiguous()` makes no
        copy."""
        found: dict[str, None] = {}
        for step in self._steps:
            if not isinstance(step, Leaf) or len({*self._specs[step.slot]}) == 1:
                continue
            specs = self._specs[step.slot]
            have_gaps = {
                spec.stride != dense_strides(range(len(spec.size)), spec.size) for spec in specs
            }
            if len(have_gaps) > 1:
                raise Obstacle("a tensor has gaps in memory at some sizes alone")
            if have_gaps.pop():
                dense = zip(
                    *[dense_strides(range(len(spec.size)), spec.size) for spec in specs],
                    strict=True,
                )
                strides = zip(*[spec.stride for spec in specs], strict=True)
                pairs = zip(dense, strides, strict=True)
                texts = [
                    f"{self._sure_text(a)} != {self._sure_text(b)}" for a, b in pairs if a != b
                ]
                found[f"({' or '.join(texts)})"] = None
        return found

    # Outlines

    def _outline(
        self, outline: Outline, i: int, given: dict[str, Any], metas: list[Any]
    ) -> Outline:
        returned = []
        for one, alike in zip(outline.returned, metas, strict=True):
            if one.layout is not None:
                raise Obstacle("it returns a sharded tensor")
            varies = any(other.meta != one.meta for other in alike)
            meta = ANY_SIZE if varies else one.meta
            name = self._swapped(one.name) if one.kind == "computed" else one.name
            returned.append(replace(one, meta=meta, name=name))
        checks = self._checks([Check(*check, "") for check in outline.checks])
        return replace(
            outline,
            state=self._state,
            scalars=tuple(self._scalars[i]),
            given=given,
            checks=tuple([(one.text, one.outcome) for one in checks]),
            kept=tuple([(place, self._swapped(text), kind) for place, text, kind in outline.kept]),
            returned=tuple(returned),
            draws=tuple(map(kind_of, outline.drawn)),
            sizes_read=(),
        )  # fmt: skip


SLICE = torch.ops.aten.slice.Tensor


_READ = re.compile(r"r\['(\d+)'\]")


def fingerprint(outline: Outline) -> int:
    """Equal for calls that may differ in sizes alone."""
    outcomes = tuple([outcome for _, outcome in outline.checks])
    return hash((tuple(map(_key, outline.state.steps())), outcomes, outline.reads))


def _key(step: Node | Leaf) -> tuple[Any, ...]:
    """What a step must have in common with those of other calls."""
    if isinstance(step, Leaf):
        return (step.slot, step.shares, *_kind(step.spec))
    node = step
    return (
        node.facts.op, node.outs, node.is_single, node.writes, node.view_of, node.in_backward,
        node.after, *map(_kind, node.specs),
    )  # fmt: skip


def _kind(spec: TensorSpec | None) -> tuple[Any, ...]:
    return () if spec is None else (spec.dtype, spec.device, len(spec.size))
