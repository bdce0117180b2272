"""Numbers that note what Python computes from them, while `replay` records a call.

In: a number that the call reads by `.item()`, gets as an argument, or finds where an earlier call
has kept it, if the bytecode only computes with it, compares it, gives it to ops, and returns or
keeps it (see `value_flow`); and the step counts and rates that torch's optimizers read, whatever
their code does. Out: the outcomes of comparisons, and text that says how each number was computed.
In a text `r[3]` is the fourth number that the call read, `r[-1]` the first that it found, `c[0]`
the first of an optimizer, and `r['0']` the first size of a tensor. A replay evaluates texts for its
own numbers.
Made by `tape`.
"""

from __future__ import annotations

import functools
import gc
import math
import operator
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CellType, FrameType
from typing import Any, NamedTuple

import torch

from lazy_tensor.dispatch.number_takers import FUNCTIONS
from lazy_tensor.dispatch.patches import PutWhileUsed
from lazy_tensor.dispatch.torch_private import values_of
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

    `calls_ops` tells of the number that a frame waits for whether the frame's code may give it to
    an op by a call; None if it can't be followed (see `value_flow`). `checks` are in the order in
    which the call made them. `fixed` are the reads whose numbers were used in a way that no text
    follows, so that replays need the same ones. `given` are the texts of numbers that ops may have
    got, with the numbers.
    """

    def __init__(self, calls_ops: Callable[[FrameType | None], bool | None]) -> None:
        self.given: dict[str, float] = {}
        self._calls_ops = calls_ops
        self.is_open = True
        self._thread = threading.get_ident()
        self._made: list[weakref.ref[TracedNumber]] = []
        self._sizes_made: list[TracedSize] = []  # Python has no weak references to ints
        self.sizes: list[int] = []
        """The sizes of tensors that the call has read, in order: `r['i']` in texts."""
        self.checks: list[Check] = []
        self._checked: set[str] = set()  # texts of checks: the same one has the same outcome
        self.fixed: set[int] = set()

    def traced(self, text: str, value: float, *, calls_ops: bool = True) -> TracedNumber:
        """A number to be handed out, which is `text` in texts. `calls_ops` says whether it may be
        given to an op by a call."""
        made = TracedNumber(value, text, self)
        self._made.append(weakref.ref(made))
        if calls_ops:
            self.given[text] = value
        return made

    def size(self, value: int) -> TracedSize:
        """The size of a tensor, to be handed out."""
        self.sizes.append(value)
        return self._sized(f"r['{len(self.sizes) - 1}']", value)

    def _sized(self, text: str, value: int) -> TracedSize:
        made = TracedSize(value)
        made.value, made.text, made.log = value, text, self
        self._sizes_made.append(made)
        self.given[text] = value
        return made

    def repair(self) -> bool:
        """Put plain numbers in place of those that outlive the call, wherever code has put them.
        Whether there were any."""
        made: list[TracedNumber | TracedSize | None] = [one() for one in self._made]
        sizes, self._sizes_made = self._sizes_made, []
        n_own = 3  # references to a size: the list's, the variable's, the function's
        made += [one for one in sizes if sys.getrefcount(one) > n_own]
        sizes.clear()
        alive = [number for number in made if number is not None]
        del made
        self._made.clear()
        for holder in gc.get_referrers(*alive) if alive else ():
            # in place of a tuple another one is put where it lies
            is_tuple = isinstance(holder, tuple)
            for at in gc.get_referrers(holder) if is_tuple else (holder,):
                with suppress(Exception):  # it can't be changed
                    _replace_in(at, holder if is_tuple else None)
        return bool(alive)

    def decides(self, text: str, outcome: bool | None) -> None:
        """Note an operation that decides what the call does."""
        if self.is_noting and text not in self._checked:
            self._checked.add(text)
            self.checks.append(Check(text, outcome, user_line()))

    @contextmanager
    def fixing(self, *numbers: Any) -> Iterator[None]:
        """An operation that raises may be caught: a replay needs the same numbers then."""
        try:
            yield
        except BaseException:
            self.fix(*numbers)
            raise

    def computed(self, text: str, result: Any) -> Any:
        """Note the result of a method that this is called by. If it is a number, and its way can be
        followed, return a traced one in its place."""
        if not self.is_noting:
            return result
        if type(result) is int and sizes_in(text) and len(text) <= MOST_CHARACTERS:
            return self._sized(text, result)
        # the frame that called the method, or a function in C that did
        calls_ops = True if counts_in(text) else self._calls_ops(sys._getframe(2))
        is_followed = may_be_traced(result, calls_ops)
        if type(result) is bool and not is_followed:
            self.decides(text, result)
            return result
        with suppress(OverflowError):  # an int beyond all floats
            if is_followed and type(result) in PLAIN_TYPES and len(text) <= MOST_CHARACTERS:
                return self.traced(text, result, calls_ops=bool(calls_ops))
        self._fix(text, result)
        return result

    def give(self, number: TracedNumber) -> float:
        """The number itself, for an op."""
        if self.is_open:
            self.given[number.text] = number.value
        return number.value

    @property
    def is_noting(self) -> bool:
        """Whether the call goes on, and this is its thread: numbers may outlive it, or be seen by
        another."""
        return self.is_open and threading.get_ident() == self._thread

    def fix(self, *numbers: Any) -> None:
        """Note that the traced ones among these numbers were read as they are."""
        for number in numbers:
            if type(number) in TRACED:
                self._fix(number.text, number.value)

    def _fix(self, text: str, value: float) -> None:
        if self.is_open:
            self.fixed |= reads_in(text)
        if counts_in(text) or sizes_in(text):
            self.decides(f"(repr({text}) == {repr(value)!r})", True)


class TracedNumber(float):
    """A number, `value`, that knows how it was computed, `text`.

    It is a float so that Python asks it before any other number that stands on its left, and so
    that ops take it. An int is never given to what would take the float, which may be rounded.
    """

    __slots__ = ("__weakref__", "log", "text", "value")
    value: float
    text: str
    log: NumberLog

    def __new__(cls, value: float, text: str, log: NumberLog) -> TracedNumber:
        made = float.__new__(cls, value)
        made.value, made.text, made.log = value, text, log
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """An op on a tensor and the number: called by torch for all that it may take as tensors."""
        named = {key: _given_to_op(one) for key, one in (kwargs or {}).items()}
        return function(*map(_given_to_op, args), **named)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """NumPy's functions use the number in a way that no text follows."""
        self.log.fix(*args)
        return getattr(ufunc, method)(*map(plain, args), **kwargs)

    def __round__(self, n_digits: Any = None) -> Any:
        with self.log.fixing(self):
            result = round(self.value, n_digits)
        text = f"round({self.text}, {n_digits!r})"
        if type(n_digits) not in (int, type(None)):
            self.log.fix(self)
            return result
        if n_digits is None or n_digits < 0:
            self.log.decides(text, None)  # NaN is no int
        return self.log.computed(text, result)

    def __bool__(self) -> bool:
        return _decided(self)


class TracedSize(int):
    """The size of a tensor, or an int that Python computed from sizes: `value`, computed by `text`.

    It is an int, as sizes are given to what takes nothing else: slices, `range`, torch's functions.
    What these do with it, no text follows. A float on its left doesn't ask it either.
    """

    value: int
    text: str
    log: NumberLog

    def __bool__(self) -> bool:
        return _decided(self)


TRACED = (TracedNumber, TracedSize)


def _decided(number: TracedNumber | TracedSize) -> bool:
    """The number's truth value, which is noted."""
    number.log.decides(f"bool({number.text})", bool(number.value))
    return bool(number.value)


def is_plain(value: Any) -> bool:
    """Whether a value is a number that may be traced."""
    return type(value) in PLAIN_TYPES and (type(value) is not int or abs(value) <= LARGEST)


def may_be_traced(number: Any, calls_ops: bool | None) -> bool:
    """Whether a number may be handed out as a traced one where `calls_ops` says what code does with
    it (see `value_flow.calls_ops`). An op that is called with a traced number reads a float."""
    return calls_ops is not None and (type(number) is float or not calls_ops)


def plain(number: Any) -> Any:
    """The number itself of a traced one; anything else as it is."""
    return number.value if type(number) in TRACED else number


def _given_to_op(argument: Any) -> Any:
    """An argument of an op, with plain numbers in place of traced ones, which are noted."""
    if type(argument) in (list, tuple):
        return type(argument)(map(_given_to_op, argument))
    return argument.log.give(argument) if type(argument) is TracedNumber else argument


def without_traced(result: Any, seen: set[int] | None = None) -> Any:
    """What a call returned, with plain numbers in place of traced ones. Lists and dicts stay the
    same objects."""
    seen = set() if seen is None else seen
    if type(result) is torch.Size and any(type(one) is TracedSize for one in result):
        return torch.Size(map(plain, result))
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        parts = [without_traced(one, seen) for one in result]
        is_plain_already = all(a is b for a, b in zip(parts, result, strict=True))
        return result if is_plain_already else tuple.__new__(type(result), parts)
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


def _is_dict_of(found: dict[Any, Any], owner: type) -> bool:
    return any(one is found for one in gc.get_referents(owner))


def _replace_in(holder: Any, old: tuple[Any, ...] | None = None) -> None:
    """Put plain numbers where an object holds traced ones; or a tuple of them where it holds the
    tuple `old`."""

    def is_held(one: Any) -> bool:
        return type(one) in TRACED if old is None else one is old

    def changed(one: Any) -> Any:
        return one if not is_held(one) else plain(one) if old is None else _plain_tuple(one)

    if isinstance(holder, CellType):
        holder.cell_contents = changed(holder.cell_contents)
        return
    if isinstance(holder, set):
        held = [one for one in holder if is_held(one)]
        holder.difference_update(held)
        holder.update(map(changed, held))
        return
    if type(holder) is dict:
        if any(map(is_held, holder)):
            items = [(changed(key), changed(one)) for key, one in holder.items()]
            holder.clear()
            holder.update(items)
        # of a class: a write past `setattr` leaves the old number in Python's cache of attributes
        owners = [one for one in gc.get_referrers(holder) if isinstance(one, type)]
        holder = next((one for one in owners if _is_dict_of(holder, one)), holder)
    state = holder if isinstance(holder, (dict, list)) else vars(holder)
    for key, one in list(enumerate(state) if isinstance(state, list) else state.items()):
        if is_held(one) and isinstance(holder, type):
            setattr(holder, key, changed(one))
        elif is_held(one):
            state[key] = changed(one)


def _plain_tuple(old: tuple[Any, ...]) -> tuple[Any, ...]:
    """A tuple of the same class with plain numbers."""
    items = map(plain, old)
    # a named tuple may have a `__new__` of its own
    return tuple.__new__(type(old), items) if hasattr(old, "_fields") else type(old)(items)


def reads_in(text: str) -> set[int]:
    """Which numbers a text is about, besides those of optimizers."""
    return {int(i) for i in re.findall(r"\br\[(-?\d+)\]", text)}


def counts_in(text: str) -> set[int]:
    """Which numbers of optimizers a text is about."""
    return {int(i) for i in re.findall(r"\bc\[(\d+)\]", text)}


def sizes_in(text: str) -> bool:
    """Whether a text is about sizes of tensors."""
    return "r['" in text


def computes(text: str) -> Callable[..., Any]:
    """A function that evaluates a text for numbers by what they are called: a dict for `r`, with
    the sizes of tensors under their numbers as text, and what optimizers read for `c`."""
    names = {"abs": abs, "bool": bool, "float": float, "item": values_of, "math": math,
             "repr": repr, "round": round}  # fmt: skip
    # texts come from this file alone, and from `step_counts`
    function: Callable[..., Any] = eval(f"lambda r, c=(): {text}", {"__builtins__": names})
    return function


def text_of(number: Any) -> str:
    """How a number was computed; a plain one is written as it is."""
    if type(number) in TRACED:
        text: str = number.text
        return text
    # the texts of inf and nan are no numbers of Python's
    is_special = type(number) is float and not math.isfinite(number)
    return f"float('{number!r}')" if is_special else f"({number!r})"


def _unary(name: str, form: str) -> Callable[..., Any]:
    operation = getattr(operator, name)

    def method(self: TracedNumber) -> Any:
        result = operation(self.value)
        return self.log.computed(form % self.text, result)

    return method


def _binary(name: str, form: str, *, is_swapped: bool = False) -> Callable[..., Any]:
    operation = getattr(operator, name)

    def method(self: TracedNumber, other: Any, *modulus: Any) -> Any:
        if modulus:  # of `pow`
            self.log.fix(self, other, *modulus)
            return pow(plain(self), plain(other), *map(plain, modulus))
        left, right = (other, self) if is_swapped else (self, other)
        with self.log.fixing(left, right):
            result = operation(plain(left), plain(right))
        if isinstance(result, torch.Tensor):
            self.log.give(self)
            return result
        if not (type(other) in TRACED or is_plain(other)):
            self.log.fix(self)
            return result
        text = form % (text_of(left), text_of(right))
        if "**" in form:
            self.log.decides(text, None)
        elif form in DIVISIONS and type(right) in TRACED:
            self.log.decides(f"(1 / {right.text})", None)  # by zero it raises
        return self.log.computed(text, result)

    return method


_NEVER_RAISING = frozenset({"atan", "copysign", "fabs", "isfinite", "isinf", "isnan", "tanh"})


def _asking(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `math` that asks the traced numbers among its arguments."""

    @functools.wraps(function)
    def ask(*args: Any, **kwargs: Any) -> Any:
        traced = [one for one in args if type(one) in TRACED]
        if not traced:
            return function(*args, **kwargs)
        log = traced[0].log
        with log.fixing(*traced):
            result = function(*map(plain, args), **kwargs)
        if kwargs or not all(type(one) in TRACED or is_plain(one) for one in args):
            log.fix(*traced)
            return result
        text = f"math.{name}({', '.join(map(text_of, args))})"
        if name not in _NEVER_RAISING:
            log.decides(text, None)
        return log.computed(text, result)

    return ask


def math_of_numbers() -> PutWhileUsed:
    """Context manager: the functions of Python's `math` ask traced numbers. Else they would read
    these unnoticed."""
    return _ASKING


_ASKING = PutWhileUsed(
    [(math, name, _asking(name, getattr(math, name))) for name in FUNCTIONS["math"]]
)


def _other(name: str) -> Callable[..., Any]:
    """A method that uses the number in a way that no text follows."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.log.fix(self)
        return getattr(self.value, name)(*map(plain, args), **kwargs)

    return method


def _part(name: str) -> property:
    """An attribute that gives the number as it is."""

    def get(self: TracedSize) -> int:
        self.log.fix(self)
        found: int = getattr(self.value, name)
        return found

    return property(get)


DIVISIONS = ("(%s / %s)", "(%s // %s)", "(%s %% %s)")
for _kind in TRACED:
    for _name, _form in {
        "add": "(%s + %s)", "sub": "(%s - %s)", "mul": "(%s * %s)", "pow": "(%s ** %s)",
        **dict(zip(("truediv", "floordiv", "mod"), DIVISIONS, strict=True)),
    }.items():  # fmt: skip
        setattr(_kind, f"__{_name}__", _binary(_name, _form))
        setattr(_kind, f"__r{_name}__", _binary(_name, _form, is_swapped=True))
    for _name, _form in {
        "lt": "(%s < %s)", "le": "(%s <= %s)", "gt": "(%s > %s)", "ge": "(%s >= %s)",
        "eq": "(%s == %s)", "ne": "(%s != %s)",
    }.items():  # fmt: skip
        setattr(_kind, f"__{_name}__", _binary(_name, _form))
    for _name, _form in {"neg": "(-%s)", "pos": "(+%s)", "abs": "abs(%s)"}.items():
        setattr(_kind, f"__{_name}__", _unary(_name, _form))
    for _name in ("__ceil__", "__divmod__", "__float__", "__floor__", "__format__", "__hash__",
                  "__int__", "__rdivmod__", "__reduce_ex__", "__repr__", "__str__", "__trunc__",
                  "as_integer_ratio", "is_integer"):  # fmt: skip
        setattr(_kind, _name, _other(_name))
TracedNumber.hex = _other("hex")  # type: ignore[method-assign]
for _name in ("and", "lshift", "or", "rshift", "xor"):
    setattr(TracedSize, f"__{_name}__", _other(f"__{_name}__"))
    setattr(TracedSize, f"__r{_name}__", _other(f"__r{_name}__"))
for _name in ("__invert__", "__round__", "bit_count", "bit_length", "conjugate", "to_bytes"):
    setattr(TracedSize, _name, _other(_name))
for _name in ("denominator", "imag", "numerator", "real"):
    setattr(TracedSize, _name, _part(_name))
