"""Integers that stand for many: sizes as polynomials in symbols, with the conditions they meet.

`kernels.loops` writes a kernel for all sizes with them in place of numbers. Each behaves as the
number that it is in one example. A comparison whose outcome depends on the symbols becomes a
condition: the kernel is correct for all values of the symbols for which the conditions hold.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

LEAST = 2
"""The least value of a symbol. Most comparisons, such as with 1, need no condition therefore."""
Monomial = tuple[int, ...]
"""A product of symbols, by their numbers; one that occurs twice stands for a square."""


class Symbols:
    """The symbols of a kernel, their values in the example, and the conditions met so far."""

    def __init__(self, values: Sequence[int]) -> None:
        self.example = tuple(values)
        self.names = tuple(f"s{i}" for i in range(len(values)))
        self.sizes = tuple(SymbolicInt(self, {(i,): 1}) for i in range(len(values)))
        self._conditions: dict[str, None] = {}

    @property
    def conditions(self) -> tuple[str, ...]:
        """Expressions, in Python as in C, that are true where the kernel is correct."""
        return tuple(self._conditions)

    def decide(self, left: Any, test: str) -> bool:
        """Whether `left` compares so with 0; `test` is a sign, such as "<"."""
        if isinstance(left, int):
            return _TESTS[test](left)
        left = left.without_common()
        least, most = left.bounds()
        outcome = _TESTS[test](int(left.example))
        if not _is_settled(test, least, most):
            sign = test if outcome else _OPPOSITES[test]
            self._conditions[f"{left} {sign} 0"] = None
        return outcome


_TESTS: dict[str, Callable[[int], bool]] = {
    "<": lambda n: n < 0, "<=": lambda n: n <= 0, ">": lambda n: n > 0, ">=": lambda n: n >= 0,
    "==": lambda n: n == 0,
}  # fmt: skip
_OPPOSITES = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!="}


def _is_settled(test: str, least: float, most: float) -> bool:
    """Whether all integers from `least` to `most` give the test the same outcome."""
    match test:
        case "<" | ">=":
            return most < 0 or least >= 0
        case "<=" | ">":
            return most <= 0 or least > 0
    return most < 0 or least > 0


class SymbolicInt:
    """A polynomial in symbols: a coefficient for each of its products of symbols.

    It has the operators of an integer. Where its value itself is asked for (as by `range`), the
    symbols are bound to the example's values by a condition.
    """

    __slots__ = ("_symbols", "_terms", "example")

    def __init__(self, symbols: Symbols, terms: dict[Monomial, int]) -> None:
        self._symbols, self._terms = symbols, terms
        self.example = sum(
            factor * math.prod(symbols.example[i] for i in one) for one, factor in terms.items()
        )

    def _made(self, terms: dict[Monomial, int]) -> Any:
        """A polynomial; an integer if it is constant."""
        left = {one: factor for one, factor in terms.items() if factor}
        if left.keys() <= {()}:
            return left.get((), 0)
        return SymbolicInt(self._symbols, left)

    def bounds(self) -> tuple[float, float]:
        """The least and the greatest value, where each symbol is `LEAST` or more."""
        factors = [factor for one, factor in self._terms.items() if one]
        end = sum(factor * LEAST ** len(one) for one, factor in self._terms.items())
        least = end if all(factor > 0 for factor in factors) else -math.inf
        most = end if all(factor < 0 for factor in factors) else math.inf
        return least, most

    def without_common(self) -> SymbolicInt:
        """What is left without the symbols that are in all terms. It has the same sign."""
        common = functools.reduce(Counter.__and__, map(Counter, self._terms))
        if not common:
            return self
        return SymbolicInt(
            self._symbols,
            {
                tuple(sorted((Counter(one) - common).elements())): factor
                for one, factor in self._terms.items()
            },
        )

    def __add__(self, other: Any) -> Any:
        terms = _terms_of(other)
        if terms is None:
            return NotImplemented
        found = dict(self._terms)
        for one, factor in terms.items():
            found[one] = found.get(one, 0) + factor
        return self._made(found)

    __radd__ = __add__

    def __neg__(self) -> Any:
        return self * -1

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        terms = _terms_of(other)
        if terms is None:
            return NotImplemented
        found: dict[Monomial, int] = {}
        for one, factor in self._terms.items():
            for two, times in terms.items():
                both = tuple(sorted(one + two))
                found[both] = found.get(both, 0) + factor * times
        return self._made(found)

    __rmul__ = __mul__

    def __divmod__(self, n: Any) -> tuple[Any, Any]:
        """The quotient and the rest as polynomials. If there are none, the symbols are bound."""
        whole, rest = self._divided(n)
        if 0 <= rest < n:
            return whole, rest
        if -n <= rest < 0:
            return whole - 1, rest + n
        bound: tuple[int, int] = divmod(self.__index__(), n.__index__())
        return bound

    def _divided(self, n: Any) -> tuple[Any, Any]:
        """A quotient, and what is left: no multiple of `n`, or not known to be one."""
        terms = _terms_of(n)
        if terms is None or len(terms) != 1:
            return 0, self
        ((divisor, by),) = terms.items()
        whole: dict[Monomial, int] = {}
        rest: dict[Monomial, int] = {}
        for one, factor in self._terms.items():
            left = Counter(one)
            left.subtract(divisor)
            if min(left.values(), default=0) < 0:
                rest[one] = factor
                continue
            quotient, rest[one] = divmod(factor, by)
            whole[tuple(sorted(left.elements()))] = quotient
        return self._made(whole), self._made(rest)

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        if isinstance(other, int):
            if 0 <= other < self:
                return 0, other
            if -self <= other < 0:
                return -1, other + self
        found: tuple[Any, Any] = divmod(other, self.__index__())
        return found

    def __floordiv__(self, n: Any) -> Any:
        return divmod(self, n)[0]

    def __rfloordiv__(self, other: Any) -> Any:
        return self.__rdivmod__(other)[0]

    def __mod__(self, n: Any) -> Any:
        return divmod(self, n)[1]

    def __rmod__(self, other: Any) -> Any:
        return self.__rdivmod__(other)[1]

    def __rtruediv__(self, other: float) -> Ratio:
        return Ratio(float(other), self)

    def __abs__(self) -> Any:
        return self if self >= 0 else -self

    def __lt__(self, other: Any) -> bool:
        return self._symbols.decide(self - other, "<")

    def __le__(self, other: Any) -> bool:
        return self._symbols.decide(self - other, "<=")

    def __gt__(self, other: Any) -> bool:
        return self._symbols.decide(self - other, ">")

    def __ge__(self, other: Any) -> bool:
        return self._symbols.decide(self - other, ">=")

    def __eq__(self, other: object) -> bool:
        if _terms_of(other) is None:
            return NotImplemented
        return self._symbols.decide(self - other, "==")

    # as that of the integer, which it may equal
    def __hash__(self) -> int:
        return hash(self.example)

    def __bool__(self) -> bool:
        return self != 0

    def __index__(self) -> int:
        """The value in the example, to which it is bound from now on."""
        self._symbols.decide(self - self.example, "==")
        return self.example

    __int__ = __index__

    def __str__(self) -> str:
        """An expression in Python as in C."""
        found = ""
        for one, factor in sorted(self._terms.items(), reverse=True):
            parts = [self._symbols.names[i] for i in one]
            if abs(factor) != 1 or not parts:
                parts.insert(0, str(abs(factor)))
            sign = ("-" if factor < 0 else "") if not found else (" - ", " + ")[factor > 0]
            found += sign + " * ".join(parts)
        return f"({found})"

    __repr__ = __str__


@dataclass(frozen=True, slots=True)
class Ratio:
    """A number divided by a symbolic integer."""

    number: float
    by: SymbolicInt

    def __str__(self) -> str:
        return f"({self.number!r} / (double){self.by})"


def _terms_of(given: Any) -> dict[Monomial, int] | None:
    """The polynomial that an integer is; None for anything else."""
    if isinstance(given, SymbolicInt):
        return given._terms
    return {(): given} if isinstance(given, int) else None


def example_of(size: Sequence[Any]) -> tuple[int, ...]:
    """The sizes in the example, to which the symbols aren't bound."""
    return tuple(n if isinstance(n, int) else n.example for n in size)
