"""Which numbers count as only returned, by the bytecode of what reads them."""

from __future__ import annotations

import contextlib
import functools
import math
import sys

import pytest
import torch

from lazy_tensor.dispatch.value_flow import is_only_returned


class Number:
    """Notes, where it is read, whether the number is only returned."""

    is_only_returned = False

    def item(self):
        self.is_only_returned = is_only_returned(sys._getframe(1), told.__code__)
        return 1.5

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
    program(number)
    return number.is_only_returned


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


RETURNED = [alone, in_a_tuple, in_a_dict_later, in_a_block, converted, in_comprehensions,
            behind_a_branch, by_another_function, by_other_names, in_a_loop, with_an_end,
            thrown_away, converted_later, with_options, by_a_method, decorated,
            caught_elsewhere]  # fmt: skip


def given_to_c(n):
    return math.isnan(n.item())


def compared(n):
    value = n.item()
    return value if value > 1 else 0


def added(n):
    return n.item() + 1


def formatted(n):
    return f"{n.item()}"


def formatted_by_percent(n):
    return "%f" % n.item()  # noqa: UP031


def passed_on(n):
    value = n.item()
    len([value, len("abc")])
    return value


def passed_by_name(n):
    return dict(value=n.item())


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


def asked(n):
    return 1 if n.item() else 2


def asked_in_a_comprehension(n):
    return [one for one in (n.item(),) if one]


def the_largest(n):
    return max(one.item() for one in (n, n))


def replaced(n):
    return n.item() or 0.0


def looped_by(n):
    value = n.item()
    while value:
        break
    return value


def rounded_by_the_caller(n):
    value = alone(n)
    return round(value, 2)


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


USED = [given_to_c, compared, added, formatted, formatted_by_percent, passed_on, passed_by_name,
        kept_by_a_list, kept_in_a_dict, kept_as_an_attribute, kept_by_a_function, hashed, asked,
        asked_in_a_comprehension, the_largest, replaced, looped_by, rounded_by_the_caller, spread,
        yielded, all_of, all_converted, largest_of, mapped, ordered, ordered_by_another, magnitude,
        of_a_method_called_float, decided_by_a_handler, decided_behind_what_is_suppressed,
        evaluated, of_a_wrapper, by_a_variable, by_a_local_name,
        by_a_function_called_item]  # fmt: skip


@pytest.mark.parametrize("program", RETURNED)
def test_is_only_returned(program):
    assert told(program)


@pytest.mark.parametrize("program", USED)
def test_may_decide_something(program):
    assert not told(program)


def test_a_function_that_was_not_called_from_there():
    number = Number()
    alone(number)
    assert not number.is_only_returned
