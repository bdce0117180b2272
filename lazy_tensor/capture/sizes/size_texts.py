"""How the sizes in a call follow from a few of them, which stand for the rest: the symbols.

In: the words that describe the leaves of several calls (see `hits.leaf_words`), which differ in
sizes. Out: `SizeTexts`. It tells how to compute a size that was seen in these calls, as a text of
the symbols (see `traced_number`), and what the symbols are in a further call. Called by `any_size`.

A size is explained by what it was in each of the calls, by the simplest formula that gives it. Each
size of a leaf is compared with its formula in each further call. Formulas for what ops get are used
only if all that is known of them agrees, and checked as all that a replay does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from lazy_tensor.capture.watched_object import Obstacle
from lazy_tensor.dispatch.traced_number import computes
from lazy_tensor.dispatch.traced_sizes import LEAST
from lazy_tensor.kernels.generic import Size, size_of

Column = tuple[int, ...]
"""What a size was in each of the calls."""

DIVISORS = (2, 4, 8, 16, 32)
"""What a size may be divided by, without a rest, as by a stride or a pooling."""
TOO_SMALL = "sizes of 0 and 1 need plans of their own"
MOST_SYMBOLS = 6
"""Symbols up to which formulas are looked for: there are too many beyond."""


class SizeTexts:
    """The symbols, and texts for sizes in which they are `r['s0']`, `r['s1']`, and so on.

    `words` describe the leaves of each of the calls. `conditions` are texts that have to be true
    for those that were given to mean anything. Obstacle if no symbols explain the words.
    """

    def __init__(self, words: Sequence[bytes]) -> None:
        rows = [memoryview(one).cast("Q") for one in words]
        if len({len(row) for row in rows}) != 1:
            raise Obstacle("it reads tensors with other numbers of dimensions")
        self.symbols: list[Column] = []
        self.conditions: dict[str, None] = {}
        self._texts: dict[Column, str | None] = {}
        columns = {i: one for i, one in enumerate(zip(*rows, strict=True)) if len({*one}) > 1}
        found: dict[int, str] = {}
        self.places: list[int] = []
        """Where the words have the symbols."""
        for i, column in columns.items():
            text = self.text_of(column)
            if text is None:
                if min(column) < LEAST or len(self.symbols) == MOST_SYMBOLS:
                    raise Obstacle(TOO_SMALL)
                text = _symbol(len(self.symbols))
                self.places.append(i)
                self.symbols.append(column)
                self._texts.clear()
            found[i] = text
        if not self.symbols:
            raise Obstacle("it reads the same sizes each time")
        # where the words vary, and all of them with zeros there
        self._varying = list(found)
        self._texts_there = computes(f"({''.join(f'{text}, ' for text in found.values())})")
        template = bytearray(words[-1])
        self._blank(template)
        self._template = bytes(template)

    def _blank(self, words: bytearray) -> list[int]:
        """Put zeros in place of the words that vary. Return these."""
        view = memoryview(words).cast("Q")
        found = [view[i] for i in self._varying]
        for i in self._varying:
            view[i] = 0
        return found

    def read(self, words: bytes) -> dict[Any, int]:
        """The symbols in a call whose leaves these words describe, by their names in texts.
        Obstacle if it isn't like the calls that are known."""
        if len(words) != len(self._template):
            raise Obstacle("tensors share memory with others than they did")
        all_of_them = memoryview(words).cast("Q")
        values = {f"s{k}": all_of_them[i] for k, i in enumerate(self.places)}
        changed = bytearray(words)
        found = self._blank(changed)
        fits = changed == self._template
        if fits and min(values.values()) < LEAST:
            raise Obstacle(TOO_SMALL)
        if not fits or tuple(found) != self._texts_there(values):
            raise Obstacle("sizes are to each other as in no call before")
        return values

    def text_of(self, column: Column) -> str | None:
        """A text that gives the size; None if there is none."""
        if column not in self._texts:
            self._texts[column] = self._explained(column)
        return self._texts[column]

    def _explained(self, column: Column) -> str | None:
        size = size_of(column, self.symbols)
        are_points = all(len({*self.symbols[i]}) > 2 for i in size.symbols) if size else False
        if size is not None and (are_points or not size.offset):
            return _text(size)
        found = next(self._formulas(column), None)
        if found is not None:
            return found
        for divisor in DIVISORS:
            whole = tuple(divisor * one for one in column)
            text = next(self._formulas(whole), None)
            if text is not None:
                self.conditions[f"({text} % {divisor} == 0)"] = None
                return f"({text} // {divisor})"
        return None

    def _formulas(self, column: Column) -> Iterator[str]:
        """Sums of two symbols and a number; a product of up to two symbols, times a number, plus
        another."""
        # a line through two points says nothing
        numbered = [i for i, one in enumerate(self.symbols) if len({*one}) > 2]
        for i, j in itertools.combinations_with_replacement(numbered, 2):
            pairs = list(zip(column, self.symbols[i], self.symbols[j], strict=True))
            for sign in (1, -1):
                rests = {one - a - sign * b for one, a, b in pairs}
                if len(rests) == 1 and (i != j or sign == 1):
                    yield f"({_symbol(i)} {'+-'[sign < 0]} {_symbol(j)} + {rests.pop()})"
        for n in (1, 2):
            for chosen in itertools.combinations_with_replacement(numbered, n):
                products = [
                    math.prod(one) for one in zip(*(self.symbols[i] for i in chosen), strict=True)
                ]
                line = _line(products, column)
                if line is not None:
                    yield _text(Size(line[0], chosen, line[1]))


def _line(xs: Sequence[int], ys: Sequence[int]) -> tuple[int, int] | None:
    """The whole numbers a and b of a line a * x + b through all points; None if there is none."""
    others = [(x, y) for x, y in zip(xs, ys, strict=True) if x != xs[0]]
    if not others:
        return None
    slope, rest = divmod(others[0][1] - ys[0], others[0][0] - xs[0])
    offset = ys[0] - slope * xs[0]
    is_line = all(slope * x + offset == y for x, y in zip(xs, ys, strict=True))
    return (slope, offset) if is_line and slope and not rest else None


def _symbol(i: int) -> str:
    return f"r['s{i}']"


def _text(size: Size) -> str:
    factors = [_symbol(i) for i in size.symbols]
    if size.factor != 1 or not factors:
        factors.insert(0, f"({size.factor})")
    text = " * ".join(factors)
    text = f"{text} + {size.offset}" if size.offset else text
    return text if text.startswith("r[") and len(factors) == 1 and not size.offset else f"({text})"
