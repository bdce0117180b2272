"""Which numbers count as only returned, and which as computed with, by the bytecode that reads."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from typing import Any

import pytest
import torch

from lazy_tensor.dispatch.traced_number import NumberLog, math_of_numbers
from lazy_tensor.dispatch.value_flow import calls_ops, is_only_returned


class Number:
    """Notes, where it is read, whether the number is only returned, or only computed with."""

    is_only_returned = False
    may_be_followed = False

    def __init__(self):
        self.log = NumberLog(lambda frame: calls_ops(frame, told.__code__))

    def item(self):
        frame = sys._getframe(1)
        self.is_only_returned = is_only_returned(frame, told.__code__)
        self.may_be_followed = calls_ops(frame, told.__code__, is_read=True) is not None
        return self.log.traced("r[0]", 1.0, calls_ops=False) if self.may_be_followed else 1

    @property
    def is_followed(self):
        """Whether the number may be another one, as all that is done with it is noted."""
        return self.may_be_followed and 0 not in self.log.fixed

    def __float__(self):
        self.is_only_returned = is_only_returned(sys._getframe(1), told.__code__)
        return 1.5

    float = __float__

    def __bool__(self):
        self.is_only_returned = is_only_returned(sys._getframe(1), told.__code__)
        return True

    def __gt__(self, other):
        return self

    __lt__ = __gt__

    def __int__(self):
        self.is_only_returned = is_only_returned(sys._getframe(1), told.__code__)
        return 1


def told(program):
    number = Number()
    with math_of_numbers():
        program(number)
    return number


def alone(n):
    return n.item()


def in_a_tuple(n):
    return n.item(), 3


def in_a_dict_later(n):
    value = n.item()
    others = [1, 2]
    others.append(3)
    return {"value": value, "others": others}


def in_a_block(n):
    with contextlib.nullcontext():
        return n.item()


def converted(n):
    return float(n)


def in_comprehensions(n):
    return [{key: one.item() for key, one in {"n": n}.items()} for n in (n, n)]


def behind_a_branch(n):
    value = n.item()
    if len("abc") > 2:
        return value
    return None


def by_another_function(n):
    return alone(n)


def by_other_names(n):
    x = 3
    v, w = n.item(), n.item()
    y = x + 1
    w, v = v, w
    return v, [w, y]


def in_a_loop(n):
    for _ in range(2):
        value = n.item()
    return value


def with_an_end(n):
    try:
        return n.item()
    finally:
        len("abc")


def thrown_away(n):
    n.item()


def converted_later(n):
    return int(max([n], key=id)), float(n)


def with_options(n):
    return alone(n=n)


def by_a_method(n):
    class Owner:
        def number(self, n):
            return n.item()

    return Owner().number(n)


@torch.no_grad()
def decorated(n):
    return n.item()


def caught_elsewhere(n):
    value = n.item()
    try:
        len(3)  # type: ignore[arg-type]
    except TypeError:
        len("abc")
    return value


def passed_by_name(n):
    return dict(value=n.item())


def passed_on(n):
    value = n.item()
    len([value, len("abc")])
    return value


RETURNED = [alone, passed_by_name, in_a_tuple, in_a_dict_later, in_a_block, converted,
            in_comprehensions,
            behind_a_branch, by_another_function, by_other_names, in_a_loop, with_an_end,
            thrown_away, converted_later, with_options, by_a_method, decorated,
            caught_elsewhere, passed_on]  # fmt: skip


def given_to_c(n):
    return math.isnan(n.item())


def compared(n):
    value = n.item()
    return value if value > 1 else 0


def added(n):
    return n.item() + 1


def beside_a_tensor(n):
    return n.item() * torch.ones(2)


def subtracted_from_a_number(n):
    return 1 - n.item() / len("abc")


def summed(n):
    total = 0.0
    for _ in range(2):
        total += n.item() * len("abc")
    return {"total": total, "mean": total / 2}


def rounded(n):
    return abs(round(n.item(), 2)), -n.item()


def of_two(n):
    return abs(n.item()) - n.item(), n.item() / n.item()


def the_larger(n):
    return min(max(n.item(), 0.5), 2)


def asked_by_not(n):
    return 1 if not n.item() else 2


def asked(n):
    return 1 if n.item() else 2


def looped_by(n):
    value = n.item()
    while value:
        break
    return value


def rounded_by_the_caller(n):
    value = alone(n)
    return round(value, 2)


def replaced(n):
    return n.item() or 0.0


def on_the_right_of_a_tensor(n):
    return torch.ones(2) * n.item()


def on_the_right_of_what_may_be_one(n):
    values = torch.ones(2)
    return values.sum() - n.item()


def on_the_right_of_a_variable_that_changes(n):
    total: Any = 1.0
    value = n.item()
    for _ in range(2):
        total, before = torch.ones(2), total * value
    return before


def the_larger_by_another(n):
    return max(n.item(), 1, key=lambda one: -one)


def as_a_number_of_digits(n):
    return round(1.5, n.item())


def shifted(n):
    return 1 << n.item()


def compared_on_the_right(n):
    return n > n.item()


def of_a_max_of_its_own(n):
    def max(a, b):
        return a

    return max(n.item(), 1)


def by_a_longer_way(n):
    return round(*(n.item(), 1))


def formatted(n):
    return f"{n.item()}"


def formatted_by_percent(n):
    return "%f" % n.item()  # noqa: UP031


def kept_by_a_list(n):
    values = []
    values.append(n.item())
    return values


def kept_in_a_dict(n):
    values = {}
    values["n"] = n.item()
    return values


def kept_as_an_attribute(n):
    n.value = n.item()


def kept_by_a_function(n):
    value = n.item()
    return lambda: value


def hashed(n):
    return {n.item(): 1}


def asked_in_a_comprehension(n):
    return [one for one in (n.item(),) if one]


def the_largest(n):
    return max(one.item() for one in (n, n))


def spread(n):
    values = {"n": n.item()}
    return {**values}


def yielded(n):
    def numbers():
        yield n.item()

    return next(numbers())


def all_of(n):
    return all(one.item() for one in [n])


def all_converted(n):
    return all([n])


def largest_of(n):
    return max(n, 1)


def mapped(n):
    return list(map(float, [n]))


def ordered(n):
    return sorted([n], key=float)


def ordered_by_another(n):
    return sorted([n], key=alone)


def magnitude(n):
    return math.fabs(n)


def of_a_method_called_float(n):
    return n.float()


def decided_by_a_handler(n):
    value = n.item()
    try:
        len(3)  # type: ignore[arg-type]
    except TypeError:
        return value if value > 1 else 0
    return value


def decided_behind_what_is_suppressed(n):
    value = n.item()
    with contextlib.suppress(TypeError):
        return len(3), value  # type: ignore[arg-type]
    return value + 1


def evaluated(n):
    value = n.item()
    return value, eval("value > 1")


def by_a_variable(n, float=math.fabs):
    return float(n)


def by_a_local_name(n):
    item = functools.partial(math.fabs, n)
    return item()


item = max


def by_a_function_called_item(n):
    return item(n, 1)


def of_a_wrapper(n):
    return wrapping(alone)(n)


def wrapping(function):
    @functools.wraps(function)
    def wrapper(n):
        return function(n)

    return wrapper


COMPUTED = [given_to_c, on_the_right_of_a_tensor, on_the_right_of_what_may_be_one,
            on_the_right_of_a_variable_that_changes, decided_behind_what_is_suppressed,
            replaced, of_two, asked, looped_by, rounded_by_the_caller, compared, added,
            beside_a_tensor, subtracted_from_a_number, summed, rounded, the_larger,
            asked_by_not]  # fmt: skip

USED = [the_larger_by_another, as_a_number_of_digits,
        shifted, of_a_max_of_its_own, by_a_longer_way, formatted,
        formatted_by_percent, kept_by_a_list, kept_in_a_dict, kept_as_an_attribute,
        kept_by_a_function, hashed, asked_in_a_comprehension, the_largest, spread,
        yielded, all_of, all_converted, largest_of, mapped, ordered, ordered_by_another, magnitude,
        of_a_method_called_float, decided_by_a_handler,
        evaluated, of_a_wrapper, by_a_variable, by_a_local_name,
        by_a_function_called_item]  # fmt: skip


@pytest.mark.parametrize("program", RETURNED)
def test_is_only_returned(program):
    assert told(program).is_only_returned


@pytest.mark.parametrize("program", COMPUTED)
def test_is_only_computed_with(program):
    assert not told(program).is_only_returned
    assert told(program).is_followed


def test_what_a_comparison_gives_may_be_traced():
    def counted(n):
        return 1 + (n.item() > 1)

    def given_to_a_function(n):
        return len([n.item() > 1])

    def given_to_another_function(n):
        return sum([n.item() > 1])

    assert not told(counted).log.checks
    assert not told(given_to_a_function).log.checks
    assert told(given_to_another_function).is_followed
    assert len(told(given_to_another_function).log.checks) == 1


@pytest.mark.parametrize("program", USED)
def test_may_decide_something(program):
    assert not told(program).is_only_returned
    assert not told(program).is_followed


def test_a_function_that_was_not_called_from_there():
    number = Number()
    alone(number)
    assert not number.is_only_returned
