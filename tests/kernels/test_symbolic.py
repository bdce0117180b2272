"""Symbolic integers compute and compare as their examples, and say for which others they do."""

import math
import operator
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from lazy_tensor.kernels.symbolic import Ratio, SymbolicInt, Symbols, example_of

OPS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a // b,
    lambda a, b: a % b, lambda a, b: max(a, b), lambda a, b: min(a, b),
    lambda a, b: a if a == b else b, lambda a, b: a if a < b else b, lambda a, b: abs(a) - b,
]  # fmt: skip


def program(random: Random, sizes: Any) -> list[Any]:
    """What random integer operations give, the same ones for each run of one seed."""
    values = [*sizes, 1, 3]
    for _ in range(12):
        one, other = random.choice(values), random.choice(values)
        op = random.choice(OPS)
        # decided alike for symbols and for numbers, as a program would
        if other == 0:
            other = 1
        values.append(op(one, other))
    return values


def at(value: Any, symbols: Symbols, sizes: tuple[int, ...]) -> Any:
    return eval(str(value), dict(zip(symbols.names, sizes, strict=True)))


@pytest.mark.parametrize("seed", range(200))
def test_where_the_conditions_hold_all_is_as_with_numbers(seed):
    symbols = Symbols((6, 4, 10))
    found = program(Random(seed), symbols.sizes)
    assert [*example_of(found)] == program(Random(seed), symbols.example)
    draw, n_right = Random(seed), 0
    tried = [tuple(draw.randint(2, 40) for _ in range(3)) for _ in range(50)]
    for sizes in (symbols.example, *tried):
        if all(at(one, symbols, sizes) for one in symbols.conditions):
            n_right += 1
            assert [at(one, symbols, sizes) for one in found] == program(Random(seed), sizes)
    assert n_right


def test_what_holds_for_all_sizes_is_no_condition():
    symbols = Symbols((6, 4))
    n, m = symbols.sizes
    assert n != 1
    assert n * m > n
    assert n * m + 1 > 0
    assert n == n * 1
    assert (n * m) // m == n
    assert (n * m) % n == 0
    assert n - n == 0
    assert math.prod((n, m, 2)) == 2 * m * n
    assert 1 % n == 1
    assert -1 % n == n - 1
    assert not symbols.conditions


def test_what_depends_on_sizes_is_a_condition():
    symbols = Symbols((6, 4))
    n, m = symbols.sizes
    assert n > m
    assert not n * m > 100
    assert n != m
    assert symbols.conditions == ("(-s1 + s0) > 0", "(s0 * s1 - 100) <= 0", "(-s1 + s0) != 0")


def test_a_value_that_is_asked_for_binds_the_symbols():
    symbols = Symbols((3, 4))
    n, m = symbols.sizes
    assert len(range(n)) == 3
    assert symbols.conditions == ("(s0 - 3) == 0",)
    assert {m: "found"}[m] == "found"
    assert len(symbols.conditions) == 1


def test_ratios_are_expressions():
    n = Symbols((4,)).sizes[0]
    ratio = 2 / n
    assert isinstance(ratio, Ratio)
    assert str(ratio) == "(2.0 / (double)(s0))"


def test_other_types_are_refused():
    n = Symbols((4,)).sizes[0]
    assert n != "4"
    assert n is not None
    with pytest.raises(TypeError):
        n + 0.5
    with pytest.raises(TypeError):
        operator.lt(n, "4")


def test_constants_are_integers():
    n = Symbols((4,)).sizes[0]
    assert type(n - n + 3) is int
    assert isinstance(n + 3, SymbolicInt)
