"""Numbers that note what Python computes from them, while `replay` records a call.

In: a number that the call reads by `.item()`, or finds where an earlier call has kept it, if the
bytecode only computes with it, compares it, and returns or keeps the outcome (see `value_flow`).
Out: the outcomes of comparisons, and text that says how each number was computed. In a text `r[3]`
is the fourth number that the call read, `r[-1]` the first that it found. A replay evaluates texts
for its own numbers.
Made by `tape`.
"""

from __future__ import annotations

import gc
import math
import operator
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CellType
from typing import Any, NamedTuple

from lazy_tensor.dispatch.user_frame import user_line

PLAIN_TYPES = (bool, float, int)
LARGEST = 2**63
"""The largest int that is followed, as torch has none beyond. With larger ones it would depend on
values whether a result is beyond all floats."""
MOST_CHARACTERS = 1000
"""Length of a text up to which it is computed anew: loops may make long ones."""


class Check(NamedTuple):
    """An operation whose outcome decides what a call does: a truth value, or one that may raise.

    `outcome` is None for the latter, which has to give a number. `where` is the user's line.
    """

    text: str
    outcome: bool | None
    where: str


class NumberLog:
    """What one call does with its numbers.

    `checks` are in the order in which the call made them. `fixed` are the reads whose numbers were
    used in a way that no text follows, so that replays need the same ones.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._thread = threading.get_ident()
        self._made: list[weakref.ref[TracedNumber]] = []
        self.checks: list[Check] = []
        self.fixed: set[int] = set()

    def number(self, i: int, value: float, *, traces_bools: bool) -> TracedNumber:
        """The number `i` in texts, to be handed out."""
        return self._traced(value, f"r[{i}]", traces_bools=traces_bools)

    def _traced(self, value: float, text: str, *, traces_bools: bool) -> TracedNumber:
        made = TracedNumber(value, text, self, traces_bools)
        self._made.append(weakref.ref(made))
        return made

    def repair(self) -> bool:
        """Put plain numbers in place of those that outlive the call, wherever code has put them.
        Whether there were any."""
        made = [one() for one in self._made]
        alive = tuple([number for number in made if number is not None])
        del made
        self._made.clear()
        for holder in gc.get_referrers(*alive) if alive else ():  # a tuple isn't changed
            with suppress(Exception):  # it can't be changed
                _replace_in(holder)
        return bool(alive)

    def decides(self, text: str, outcome: bool | None) -> None:
        """Note an operation that decides what the call does."""
        if self._is_noting:
            self.checks.append(Check(text, outcome, user_line()))

    @contextmanager
    def fixing(self, *numbers: Any) -> Iterator[None]:
        """An operation that raises may be caught: a replay needs the same numbers then."""
        try:
            yield
        except BaseException:
            for number in numbers:
                self.fix(text_of(number))
            raise

    def computed(self, text: str, result: Any, *, traces_bools: bool) -> Any:
        """Note a result. If it is a number, return a traced one in its place."""
        if not self._is_noting:
            return result
        if type(result) is bool and not traces_bools:
            self.decides(text, result)
            return result
        with suppress(OverflowError):  # an int beyond all floats
            if type(result) in PLAIN_TYPES and len(text) <= MOST_CHARACTERS:
                return self._traced(result, text, traces_bools=traces_bools)
        self.fix(text)
        return result

    @property
    def _is_noting(self) -> bool:
        """Whether the call goes on, and this is its thread: numbers may outlive it, or be seen by
        another."""
        return self.is_open and threading.get_ident() == self._thread

    def fix(self, text: str) -> None:
        """Note that the numbers in this text were read as they are."""
        if self.is_open:
            self.fixed |= reads_in(text)


class TracedNumber(float):
    """A number, `value`, that knows how it was computed, `text`. Its comparisons give such numbers,
    too, if it `traces_bools`; else they give bools, and have to come out the same.

    It is a float so that Python asks it before any other number that stands on its left. No other
    code sees the float, which is rounded if `value` is a large int.
    """

    __slots__ = ("__weakref__", "log", "text", "traces_bools", "value")
    value: float
    text: str
    log: NumberLog
    traces_bools: bool

    def __new__(cls, value: float, text: str, log: NumberLog, traces_bools: bool) -> TracedNumber:
        made = float.__new__(cls, value)
        made.value, made.text, made.log, made.traces_bools = value, text, log, traces_bools
        return made

    def __round__(self, n_digits: Any = None) -> Any:
        with self.log.fixing(self):
            result = round(self.value, n_digits)
        text = f"round({self.text}, {n_digits!r})"
        if type(n_digits) not in (int, type(None)):
            self.log.fix(self.text)
            return result
        if n_digits is None or n_digits < 0:
            self.log.decides(text, None)  # NaN is no int
        return self.log.computed(text, result, traces_bools=self.traces_bools)

    def __bool__(self) -> bool:
        self.log.decides(f"bool({self.text})", bool(self.value))
        return bool(self.value)


def is_plain(value: Any) -> bool:
    """Whether a value is a number that may be traced."""
    return type(value) in PLAIN_TYPES and (type(value) is not int or abs(value) <= LARGEST)


def plain(number: Any) -> Any:
    """The number itself of a traced one; anything else as it is."""
    return number.value if type(number) is TracedNumber else number


def without_traced(result: Any, seen: set[int] | None = None) -> Any:
    """What a call returned, with plain numbers in place of traced ones. Lists and dicts stay the
    same objects."""
    seen = set() if seen is None else seen
    if type(result) not in (tuple, list, dict) or id(result) in seen:
        return plain(result)
    seen.add(id(result))
    items = result.items() if type(result) is dict else enumerate(result)
    changed = {key: given for key, one in items if (given := without_traced(one, seen)) is not one}
    if changed and type(result) is tuple:
        return tuple([changed.get(i, one) for i, one in enumerate(result)])
    for key, given in changed.items():
        result[key] = given
    return result


def _replace_in(holder: Any) -> None:
    """Put plain numbers where an object holds traced ones."""
    if isinstance(holder, CellType):
        holder.cell_contents = plain(holder.cell_contents)
        return
    state = holder if isinstance(holder, (dict, list)) else vars(holder)
    for key, one in list(enumerate(state) if isinstance(state, list) else state.items()):
        if type(one) is TracedNumber and isinstance(holder, type):
            setattr(holder, key, one.value)
        elif type(one) is TracedNumber:
            state[key] = one.value


def reads_in(text: str) -> set[int]:
    """Which numbers a text is about."""
    return {int(i) for i in re.findall(r"\br\[(-?\d+)\]", text)}


def computes(text: str) -> Callable[[dict[int, float]], Any]:
    """A function that evaluates a text for the numbers of these reads."""
    names = {"abs": abs, "bool": bool, "float": float, "round": round}
    # texts come from this file alone
    function: Callable[[dict[int, float]], Any] = eval(f"lambda r: {text}", {"__builtins__": names})
    return function


def text_of(number: Any) -> str:
    """How a number was computed; a plain one is written as it is."""
    if type(number) is TracedNumber:
        return number.text
    # the texts of inf and nan are no numbers of Python's
    is_special = type(number) is float and not math.isfinite(number)
    return f"float('{number!r}')" if is_special else f"({number!r})"


def _unary(name: str, form: str) -> Callable[..., Any]:
    operation = getattr(operator, name)

    def method(self: TracedNumber) -> Any:
        result = operation(self.value)
        return self.log.computed(form % self.text, result, traces_bools=self.traces_bools)

    return method


def _binary(name: str, form: str, *, is_swapped: bool = False) -> Callable[..., Any]:
    operation = getattr(operator, name)

    def method(self: TracedNumber, other: Any) -> Any:
        left, right = (other, self) if is_swapped else (self, other)
        with self.log.fixing(left, right):
            result = operation(plain(left), plain(right))
        if not (type(other) is TracedNumber or is_plain(other)):
            self.log.fix(self.text)
            return result
        traces_bools = all(one.traces_bools for one in (left, right) if type(one) is TracedNumber)
        text = form % (text_of(left), text_of(right))
        if "**" in form:
            self.log.decides(text, None)
        elif form in DIVISIONS and type(right) is TracedNumber:
            self.log.decides(f"(1 / {right.text})", None)  # by zero it raises
        return self.log.computed(text, result, traces_bools=traces_bools)

    return method


def _other(name: str) -> Callable[..., Any]:
    """A method that uses the number in a way that no text follows."""

    def method(self: TracedNumber, *args: Any) -> Any:
        self.log.fix(self.text)
        return getattr(self.value, name)(*args)

    return method


DIVISIONS = ("(%s / %s)", "(%s // %s)", "(%s %% %s)")
for _name, _form in {
    "add": "(%s + %s)", "sub": "(%s - %s)", "mul": "(%s * %s)", "pow": "(%s ** %s)",
    **dict(zip(("truediv", "floordiv", "mod"), DIVISIONS, strict=True)),
}.items():  # fmt: skip
    setattr(TracedNumber, f"__{_name}__", _binary(_name, _form))
    setattr(TracedNumber, f"__r{_name}__", _binary(_name, _form, is_swapped=True))
for _name, _form in {
    "lt": "(%s < %s)", "le": "(%s <= %s)", "gt": "(%s > %s)", "ge": "(%s >= %s)",
    "eq": "(%s == %s)", "ne": "(%s != %s)",
}.items():  # fmt: skip
    setattr(TracedNumber, f"__{_name}__", _binary(_name, _form))
for _name, _form in {"neg": "(-%s)", "abs": "abs(%s)"}.items():
    setattr(TracedNumber, f"__{_name}__", _unary(_name, _form))
for _name in ("__float__", "__format__", "__hash__", "__int__", "__reduce_ex__", "__repr__",
              "__str__"):  # fmt: skip
    setattr(TracedNumber, _name, _other(_name))
