"""What calls that differ in sizes have in common, so that one plan runs them all.

In: the outlines of some calls, recorded with sizes noted (see `traced_sizes`). Out: `AnySize`, with
outlines that are equal for these calls: sizes that ops got are numbers of the trace, and texts are
about the symbols of `SizeTexts`. Or the obstacle to that. Called by `kin`, for `captured_call`.

What a call did because of a size is a condition: a comparison, whatever Python did with a size that
no text follows, and each number that came out the same though it was computed from sizes that
changed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lazy_tensor.capture.numbers.op_numbers import explained_by
from lazy_tensor.capture.numbers.step_counts import value_of
from lazy_tensor.capture.outline import Outline, named
from lazy_tensor.capture.sizes.merged_steps import MergedSteps, SizedState
from lazy_tensor.capture.sizes.size_conditions import conditions_of
from lazy_tensor.capture.sizes.size_texts import Column, SizeTexts
from lazy_tensor.capture.sizes.sized_draw import SizedDraw, kind_of, sizes_of
from lazy_tensor.capture.watched_object import Obstacle, is_same
from lazy_tensor.dispatch.run.aside import Aside
from lazy_tensor.dispatch.run.tape import Draw
from lazy_tensor.dispatch.traced_number import Check, computes, sizes_in
from lazy_tensor.dispatch.trie.trace import Leaf
from lazy_tensor.kernels.cache import Cache
from lazy_tensor.kernels.segment import Ref, ScalarRef

if TYPE_CHECKING:
    from lazy_tensor.capture.take import Take

ANY_SIZE: Any = ("of the size that the data has",)
"""The metadata of a returned tensor whose sizes vary."""
N_CALLS = 3
"""Calls that are compared: two points fit a line, the third confirms it."""
BEYOND = (1.0, 1.5, 2.0)
"""How many times as large as in all recorded calls a size may be that grows slowly, as caches do,
by the times that a recorded call of a larger size has done the same. Between two sizes a program
rarely does anything else than at both. Beyond, code may decide by a size unnoticed."""
SLOWLY = 8
"""A size grows slowly if it grows by this part of itself, or by one, from a call to the next."""
SETTLED_AFTER = 16
"""Replays of one size before it gets a plan of its own, which costs two recorded calls, and kernels
for what varies."""
MOST_SIZES = 256
"""Sizes whose replays are counted."""


class AnySize:
    """Calls whose sizes are to each other as in some calls: `found` are the outlines of these, the
    latest last. Obstacle if they differ in more than sizes.

    `outlines` are those for all sizes, the latest first.
    """

    def __init__(self, found: Sequence[Outline]) -> None:
        self._sizes = sizes = SizeTexts([one.leaf_words for one in found])
        self.symbols = sizes.read(found[0].leaf_words)
        """The symbols of the call that ran last."""
        self._n_grown = dict.fromkeys(self.symbols, 0)  # calls in a row at which each grew slowly
        for one in found[1:]:
            self._note(sizes.read(one.leaf_words))
        self._seen = [(min(column), max(column)) for column in sizes.symbols]
        self._n_beyond = 0  # recorded calls that confirmed a size beyond those seen before
        self._n_replays: Cache[Any, int] = Cache("", MOST_SIZES)
        if len({len(one.sizes_read) for one in found}) != 1:
            raise Obstacle("it reads other sizes for each size")
        self._read: list[str | None] = [None] * len(found[0].sizes_read)
        self._by_python: dict[Column, str] = {}  # texts of what Python computed from sizes
        self._agreeing: dict[str, None] = {}  # conditions: two texts for one size
        self._follow([one.given for one in found])
        self._steps = MergedSteps(found)
        self._state = SizedState(self._steps.steps, self._steps.varying)
        changing = [column for column in self._steps.columns if len({*map(repr, column)}) > 1]
        columns = {self._text_of(column): column for column in changing}
        self._computed = {text: column for text, column in columns.items() if text is not None}
        given = [self._given(one, i) for i, one in enumerate(found)]
        self._explained = self._explain(given)
        self._draws = self._sized_draws([one.drawn for one in found])
        self._conditions = self._all_conditions(given)
        self._compared: list[Check] = []  # what Python did with sizes
        sizes_given = zip(*[one.argument_sizes for one in found], strict=True)
        self._argument_sizes = tuple([n[0] if len({*n}) == 1 else None for n in sizes_given])
        metas = zip(*[[one.meta for one in outline.returned] for outline in found], strict=False)
        self._are_fixed = [all(one == alike[0] for one in alike) for alike in metas]
        self._given_counts = self._given_to_counts(found)
        numbers = (
            zip(*self._steps.columns, strict=True) if self._steps.columns else [()] * len(found)
        )
        self.outlines = [self._outline(*one) for one in zip(found, numbers, given, strict=True)]
        self.outlines.reverse()
        for one in self.outlines[1:]:
            difference = self.outlines[0].difference(one)
            if difference is not None:
                raise Obstacle(difference)

    @property
    def varying(self) -> frozenset[int]:
        """The slots of tensors whose sizes, or strides, vary."""
        return self._steps.varying

    def told(self) -> str:
        """Which sizes vary, between which bounds, and what Python found when it compared them."""
        names = self._names()
        told = [f"{n} from {a} to {b}" for n, (a, b) in zip(names, self._seen, strict=True)]
        for check in self._compared:
            text = re.sub(r"\((-?\d+)\)", r"\1", check.text)
            for k, name in enumerate(names):
                text = text.replace(f"r['s{k}']", name)
            told.append(f"{text} is {check.outcome} at {check.where}")
        return "; ".join(told)

    def _names(self) -> list[str]:
        """What the symbols are: sizes of arguments, or of tensors elsewhere."""
        found: dict[int, str] = {}
        at = 0
        leaves = [one for one in self._steps.steps if isinstance(one, Leaf)]
        for leaf, source in zip(leaves, self.outlines[0].sources, strict=True):
            name = str(source.name[0]) if source.kind == "place" else source.kind
            if source.kind == "argument":
                name = f"argument {source.name + 1}"
            n_dims = len(leaf.spec.size)
            found |= {at + 1 + i: f"{name}.shape[{i}]" for i in range(n_dims)}
            at += 1 if source.kind == "draw" else 3 + 2 * n_dims  # see `hits.leaf_words`
        return [found.get(i, "a stride") for i in self._sizes.places]

    def read(self, words: bytes) -> dict[Any, int]:
        """The symbols in a call whose leaves these words describe; Obstacle if it may differ."""
        symbols = self._sizes.read(words)
        self._note(symbols)
        beyond = BEYOND[min(self._n_beyond, len(BEYOND) - 1)]
        for (name, n), (least, most) in zip(symbols.items(), self._seen, strict=True):
            may_grow = n <= most * beyond and self._n_grown[name] >= N_CALLS
            if n < least or (n > most and not may_grow):
                raise Obstacle("a size is beyond those of recorded calls")
        return symbols

    def _note(self, symbols: dict[Any, int]) -> None:
        """Note what a call's symbols are, and whether they grow slowly."""
        for name, n in symbols.items():
            before = self.symbols[name]
            if n != before:
                is_slow = before < n <= before + max(1, before // SLOWLY)
                self._n_grown[name] = self._n_grown[name] + 1 if is_slow else 0
        self.symbols = symbols

    def settles(self) -> bool:
        """Note a replay with the symbols found last. Whether these have come so often that they
        should have a plan of their own."""
        key = tuple(self.symbols.values())
        n = (self._n_replays.get(key) or 0) + 1
        self._n_replays.put(key, n)
        return n in (SETTLED_AFTER, SETTLED_AFTER + 1)

    def confirm(self, outline: Outline) -> bool:
        """Whether a recorded call is of these. If it is, its sizes are among those seen."""
        if self.difference(outline) is not None:
            return False
        symbols = self._sizes.read(outline.leaf_words)
        pairs = list(zip(symbols.values(), self._seen, strict=True))
        self._n_beyond += any(n > most for n, (_, most) in pairs)
        self._seen = [(min(least, n), max(most, n)) for n, (least, most) in pairs]
        return True

    def difference(self, outline: Outline) -> str | None:
        """How a call of some size differs from these, in words; None if it doesn't."""
        try:
            symbols = self._sizes.read(outline.leaf_words)
            values = {text: compute(symbols) for text, compute in self._to_compute.items()}
            given = self._given(outline) | values
            steps = MergedSteps([self.outlines[0], outline], is_known=True)
            numbers = [now for _, now in steps.columns]
            return (
                self._wrong_number(steps, given)
                or self._wrong_size(outline.sizes_read, symbols)
                or self.outlines[0].difference(self._outline(outline, numbers, given))
            )
        except (Obstacle, ArithmeticError, ValueError) as reason:
            return str(reason)

    def _wrong_number(self, steps: MergedSteps, given: dict[str, Any]) -> str | None:
        """The first number that an op got and that is another one than the texts say."""
        explained = explained_by(given)
        for i, (node, (then, now)) in enumerate(zip(steps.nodes, steps.columns, strict=True)):
            is_known = i < len(self._explained) and self._steps.nodes[i].outs == node.outs
            texts = self._explained[i] if is_known else []
            if not is_known or (texts and {*texts}.isdisjoint(explained.get((repr(now),), ()))):
                return f"{named(node)} gets {now!r} where a call before gave it {then!r}"
        return None

    def _wrong_size(self, read: Sequence[int], symbols: dict[Any, int]) -> str | None:
        """The first size that Python reads and that is another one than its text says."""
        for text, size in zip(self._read, read, strict=True):
            if text is not None and computes(text)(symbols) != size:
                return f"it reads a size of {size} where {text} was"
        return None

    def of(self, take: Take) -> Take:
        """The take of the latest of the calls, for all sizes."""
        sized = copy.copy(take)
        sized.outline, sized.any_size = self.outlines[0], self
        sized.draws = self._draws
        numbers = sized.numbers = copy.copy(take.numbers)
        checks = self._checks(take.numbers.checks)
        self._compared = [one for one in checks if sizes_in(one.text) and one.outcome is not None]
        numbers.checks = [*checks, *self._conditions]
        numbers.kept = {
            i: (place, self._swapped(text), kind) for i, (place, text, kind) in numbers.kept.items()
        }
        anew = {id(read): replace(read, aside=self._aside(read.aside)) for read in numbers.reads}
        numbers.reads = [anew[id(one)] for one in take.numbers.reads]
        numbers.deciding = [anew[id(one)] for one in take.numbers.deciding]
        numbers.returned = {i: anew[id(one)] for i, one in take.numbers.returned.items()}
        return sized

    def _aside(self, aside: Aside) -> Aside:
        n_steps = len(aside.state.steps())
        return Aside(SizedState(self._steps.steps[:n_steps], self._steps.varying), *aside.slots)

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

    def _swapped(self, text: str) -> str:
        """A text about symbols. Obstacle if a size that it is about follows from no symbols."""
        return _READ.sub(self._text_read, text)

    def _text_read(self, found: re.Match[str]) -> str:
        text = self._read[int(found[1])]
        if text is None:
            raise Obstacle("it computes with a size that follows from no other")
        return text

    def _size_text(self, column: Column) -> str | None:
        """A text of the symbols for a size; None if there is none."""
        text, by_python = self._sizes.text_of(column), self._by_python.get(column)
        if None not in (text, by_python) and text != by_python and len({*column}) > 1:
            self._agreeing[f"{text} == {by_python}"] = None
        return text or by_python

    def _sure_text(self, column: Column) -> str:
        """The same; Obstacle if there is none."""
        text = self._size_text(column)
        if text is None:
            raise Obstacle(f"a size of {column[-1]} follows from no other")
        return text

    def _text_of(self, column: tuple[Any, ...]) -> str | None:
        """A text of the symbols for a number: a size, or one divided by a size."""
        kinds = {*map(type, column)}
        if kinds == {int}:
            return self._size_text(column)
        if kinds == {float}:
            with suppress(ArithmeticError, ValueError):  # nan, inf or zero
                for form, compute in _OF_SIZES.items():
                    whole = tuple([round(compute(one)) for one in column])
                    text = self._size_text(whole)
                    if text is not None and list(column) == [compute(n) for n in whole]:
                        return form % text
        return None

    def _given(self, outline: Outline, i: int | None = None) -> dict[str, Any]:
        """The numbers that ops may have got, by texts about symbols; with those that follow from
        sizes in the `i`-th call."""
        given = {}
        for text, value in outline.given.items():
            if self._is_known(text):
                swapped = self._swapped(text)
                if swapped == text or sizes_in(swapped):
                    given[swapped] = value
        return given | ({} if i is None else {text: c[i] for text, c in self._computed.items()})

    def _explain(self, given: list[dict[str, Any]]) -> list[list[str]]:
        """For each number of the trace the texts that compute it; none if it is the same in all
        calls. Obstacle if one changes and no text tells how."""
        explained, found = explained_by(*given), []
        for node, column in zip(self._steps.nodes, self._steps.columns, strict=True):
            values = tuple(map(repr, column))
            if len({*values}) > 1 and values not in explained:
                then, now = column[-2:]
                raise Obstacle(f"{named(node)} gets {now!r} where the call before gave it {then!r}")
            found.append(explained[values] if len({*values}) > 1 else [])
        self._to_compute = {text: computes(text) for text in self._computed}
        return found

    def _checks(self, checks: Iterable[Check]) -> list[Check]:
        """Checks of the symbols, without those that hold for all."""
        found = {}
        for check in checks:
            text = self._swapped(check.text)
            if "r[" in text or "c[" in text:
                found[text] = check._replace(text=text)
        return list(found.values())

    def _all_conditions(self, given: list[dict[str, Any]]) -> list[Check]:
        """What must be true of the symbols besides what the call has compared, as one check."""
        texts = [
            f"repr({text}) == {repr(value)!r}"
            for text, value in given[-1].items()
            if sizes_in(text) and all(text in one and is_same(one[text], value) for one in given)
        ]
        texts += conditions_of(self._steps, self._sizes.symbols, self._sure_text)
        texts += [*self._sizes.conditions, *self._agreeing]
        return [Check(f"({' and '.join(dict.fromkeys(texts))})", True, "")] if texts else []

    # Draws, step counts and outlines, for all sizes

    def _given_to_counts(self, found: Sequence[Outline]) -> list[tuple[Any, ...]]:
        """What the ops get that compute step counts, with numbers of these steps."""
        if len({len(one.counts) for one in found}) != 1:
            raise Obstacle("its optimizers read other step counts or rates each call")
        given = []
        for alike in zip(*[one.counts for one in found], strict=True):
            pairs = zip(alike, found, strict=True)
            values = [[value_of(one, call.scalars) for one in count.given] for count, call in pairs]
            given.append(tuple(map(self._number_of, zip(*values, strict=True))))
        return given

    def _number_of(self, column: tuple[Any, ...]) -> Any:
        """A number of these steps, by what it was in each call; itself if it never changed."""
        if all(
            one == column[0] if isinstance(one, Ref) else is_same(one, column[0]) for one in column
        ):
            return column[0]
        for i, numbers in enumerate(self._steps.columns):
            if all(map(is_same, numbers, column)):
                return ScalarRef(i)
        raise Obstacle("a step count is computed from a number that no other op gets")

    def _sized_draws(self, of_calls: list[tuple[Draw, ...]]) -> tuple[Draw, ...]:
        if len({tuple(map(kind_of, draws)) for draws in of_calls}) != 1:
            raise Obstacle("it draws other random numbers for each size")
        made = []
        for alike in zip(*of_calls, strict=True):
            texts = [self._sure_text(sizes) for sizes in zip(*map(sizes_of, alike), strict=True)]
            made.append(SizedDraw(alike[-1], texts, lambda: self.symbols))
        return tuple(made)

    def _outline(
        self, outline: Outline, numbers: Sequence[complex], given: dict[str, Any]
    ) -> Outline:
        """The outline of a call, with these numbers of the trace, and those `given` to ops."""
        if any(one.layout is not None for one in outline.returned):
            raise Obstacle("it returns a sharded tensor")
        returned = [
            replace(
                one,
                meta=one.meta if is_fixed else ANY_SIZE,
                name=self._swapped(one.name) if one.kind == "computed" else one.name,
            )
            for one, is_fixed in zip(outline.returned, self._are_fixed, strict=False)
        ]
        checks = self._checks([Check(*check, "") for check in outline.checks])
        counts = zip(outline.counts, self._given_counts, strict=False)
        return replace(
            outline,
            state=self._state,
            counts=tuple([replace(count, given=given) for count, given in counts]),
            scalars=tuple(numbers),
            given=given,
            checks=tuple([(one.text, one.outcome) for one in checks]),
            kept=tuple([(place, self._swapped(text), kind) for place, text, kind in outline.kept]),
            returned=(*returned, *outline.returned[len(returned) :]),
            draws=tuple(map(kind_of, outline.drawn)),
            argument_sizes=self._argument_sizes,
            sizes_read=(),
        )


_READ = re.compile(r"r\['(\d+)'\]")
_OF_SIZES: dict[str, Callable[[float], float]] = {"float(%s)": float, "(1 / %s)": lambda n: 1 / n}
"""Floats that ops compute from sizes, as a mean's gradient does, and the size from the float."""
