"""Keys of calls: what in a call decides to which state it leads, as cheap hashable tuples.

In: an op and its arguments. Out: the exact key, in which a tensor stands by its slot and anything
else by value and type; and the generic key, in which numbers in arithmetic are replaced by their
types. Called by `record` for each call that C++ doesn't know, and by `sharding`. C++ makes keys of
its own (`native/keys.h`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch.ops.schema import facts_of
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.dispatch.trie.trace import Slot, Trace

Tensor, Parameter = torch.Tensor, torch.nn.Parameter
PlainSlots = Mapping[int, Slot]


class _Absent:
    """Stands in a key for a tensor without a slot: no state has such a key."""


ABSENT = _Absent()
# Python's 1 == True, and both have one hash. But x + 1 and x + True differ in dtype.
TRUE, FALSE = object(), object()
NONE = object()  # an argument None: a None in a key counts as a tensor without a slot
NUMBERS = frozenset({float, int, complex})
MOST = 2**63
"""Whole numbers from -MOST up to MOST may be inputs of kernels, which have 64 bits for each."""
MAY_VARY = NUMBERS | {list, tuple}
"""Types of arguments in which the generic key may replace numbers."""


def key_part(plain_slots: PlainSlots, argument: Any) -> Any:
    """An argument's part of the key: a slot, or the static value with its type."""
    kind = type(argument)
    if kind is int:
        return argument
    if kind is tensor_types.tensor_class:
        return argument._value.slot or ABSENT
    if kind is Tensor or kind is Parameter:
        return plain_slots.get(id(argument), ABSENT)
    if kind is list or kind is tuple:
        return tuple([key_part(plain_slots, item) for item in argument])
    if kind is float:
        # 0.0 == -0.0, but 1 / x differs
        return (float, argument) if argument else (float, str(argument))
    if kind is bool:
        return TRUE if argument else FALSE
    if kind is complex:
        return (complex, str(argument))  # either part may be -0.0
    if kind is tensor_types.sharded_class:
        slot = argument._value.slot
        return ABSENT if slot is None else (slot, argument._layout)
    return NONE if argument is None else argument


def exact_key(
    plain_slots: PlainSlots, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """The key of a call: the op's builtin, its arguments by position, then those by name."""
    key = [op._op, *(key_part(plain_slots, argument) for argument in args)]
    for name, argument in kwargs.items():
        key += (name, key_part(plain_slots, argument))
    return tuple(key)


def lacks_slots(trace: Trace, key: tuple[Any, ...]) -> bool:
    """Whether a tensor of the call, whose key this is, has no slot in `trace`."""
    for part in key:
        kind = type(part)
        if kind is Slot:
            if part.trace is not trace:
                return True
        elif part is ABSENT or part is None or (kind is tuple and lacks_slots(trace, part)):
            return True
    return False


def generic_key(
    plain_slots: PlainSlots,
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    exact: tuple[Any, ...] | None = None,
) -> tuple[tuple[Any, ...], list[complex]]:
    """The key with numbers in arithmetic replaced by their types; and these numbers, in order.

    The caller may pass the `exact` key, which a call without such numbers gets back. A number that
    sets a shape stays in the key (see `OpFacts.number_args`).
    """
    if exact is not None and not kwargs and MAY_VARY.isdisjoint(map(type, args)):
        return exact, []
    numeric = facts_of(op).number_args
    numbers: list[complex] = []

    key: list[Any] = [op._op]
    for position, argument in enumerate(args):
        key.append(_part(plain_slots, argument, numbers if position in numeric else None))
    for name, argument in kwargs.items():
        key += (name, _part(plain_slots, argument, numbers if name in numeric else None))
    return tuple(key), numbers


def _part(plain_slots: PlainSlots, argument: Any, numbers: list[complex] | None) -> Any:
    """An argument's part of a generic key; `numbers` gets the numbers in it that may vary."""
    kind = type(argument)
    if numbers is None or kind not in MAY_VARY:
        return key_part(plain_slots, argument)
    if kind in NUMBERS:
        numbers.append(argument)
        return kind
    return tuple([_part(plain_slots, item, numbers) for item in argument])


def fit_kernels(numbers: list[complex]) -> bool:
    """Whether all whole numbers among these fit into 64 bits."""
    return all(type(n) is not int or -MOST <= n < MOST for n in numbers)
