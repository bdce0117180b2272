"""The calls that a program made lately, and whether those of now were made in this order before.

In: each call that is not a hit, as a number, and where values are read or a block ends: a *break*.
Out: whether the present is known. `native/past.h` does the same below Python, where calls run
unrecorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lazy_tensor.dispatch.request import FIXED
from lazy_tensor.dispatch.schema import OpFacts, facts_of

N_KEPT = 1 << 16
"""Calls that are kept: as many as an epoch over twenty lengths of a large model takes."""
CONTEXT = 8
"""Calls in a row by which a place in the past is found again: each of the first behind a break, and
a quarter of the others, as their hash has it."""
MOST_APART = 16
"""Calls after which the next is such a place whatever its hash: a loop of few calls may have no
other."""
WAYS = 4
"""Places whose contexts share a slot: one that takes the slot of a stretch's first call makes the
stretch unknown."""
LOOP_FROM = 4096
"""Known calls without a break after which they are a loop of its own: layers that are alike, and
the optimizer's steps for them, are over by then."""
LOOP_AT_LEAST = 256
"""Calls between two flushes of such a loop."""
MASK = (1 << 64) - 2
FACTOR = 0x9E3779B97F4A7C15


class Past:
    """A ring of calls, and the place in it from which on the present goes the same way.

    `note` follows that place as long as it can, and else looks for the latest place that the last
    calls led to before. Only calls behind the same break are looked for: a program that goes one
    way or another at a break is found by the first call of either.
    """

    __slots__ = ("_begun", "_calls", "_context", "_matched", "_n", "_next", "_period", "_placed",
                 "_places", "_stretch")  # fmt: skip

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._calls = [0] * N_KEPT
        self._places: dict[int, int] = {}  # by a part of the context and a way, the call behind it
        self._n = self._begun = 0  # calls so far, and at the last break
        self._placed = 0  # calls up to the last place
        self._next: int | None = None  # the place that comes next if the program goes on as before
        self._matched = 0  # calls in a row that were as before
        self._context = 0
        self._period = 0  # calls of a loop without a break
        self._stretch = 0  # all calls since the last break in one number

    def note(self, call: int) -> bool:
        """Add a call; whether a loop that has no break has just come round."""
        call = call & MASK | (self._n == self._begun)
        if self._next is not None and self._kept(self._next) == call:
            self._next += 1
            self._matched += 1
        else:
            self._next, self._matched = None, 0
        out = self._calls[(self._n - CONTEXT) % N_KEPT] if self._n - self._begun >= CONTEXT else 0
        self._context = ((self._context + call) * FACTOR - out * FACTOR_OUT) & (MASK | 1)
        self._stretch = (self._stretch + call) * FACTOR & (MASK | 1)
        self._calls[self._n % N_KEPT] = call
        self._n += 1
        if (
            self._n - self._begun <= CONTEXT
            or self._context >> 62 == 0
            or self._n - self._placed >= MOST_APART
        ):
            slot = self._slot_of(self._context >> 32 & (N_KEPT // 2 - WAYS))
            place = self._places.get(slot, 0)
            if self._next is None and self._leads_here(place):
                self._next = place
                self._matched = self._n_alike(place, self._n - self._begun)
            self._places[slot] = self._placed = self._n
        return self._is_round()

    def _kept(self, place: int) -> int | None:
        return self._calls[place % N_KEPT] if place > self._n - N_KEPT else None

    def _n_alike(self, place: int, most: int) -> int:
        """How many calls before `place` are those before now, `most` at most."""
        n = 0
        while n < most and self._kept(place - 1 - n) == self._kept(self._n - 1 - n):
            n += 1
        return n

    def _leads_here(self, place: int) -> bool:
        needed = min(self._n - self._begun, CONTEXT)
        return place != 0 and self._n_alike(place, needed) == needed

    def _slot_of(self, first: int) -> int:
        """Of places whose contexts share a slot, that of the one that led here before, else of the
        oldest."""
        ways = range(first, first + WAYS)
        for slot in ways:
            if self._leads_here(self._places.get(slot, 0)):
                return slot
        return min(ways, key=lambda slot: self._places.get(slot, 0))

    def _is_round(self) -> bool:
        n_before = self._n - self._begun
        if self._next is None or self._matched < LOOP_FROM or n_before < self._matched:
            return False
        distance = self._n - self._next
        if self._matched < distance:
            return False
        self._period = -(-LOOP_AT_LEAST // distance) * distance
        return True

    def is_known(self) -> bool:
        """Whether the last call came where it came before."""
        return self._next is not None

    def has_begun(self) -> bool:
        """Whether there were calls since the last break."""
        return self._n > self._begun

    def all_known(self) -> bool:
        """Whether all calls since the last break, if any, came in this order before."""
        return 0 < self._n - self._begun <= self._matched

    def stretch(self) -> int:
        """What all calls since the last break are, in this order."""
        return self._stretch

    def ends_loop(self) -> bool:
        """Whether a loop without a break ends a turn, or several, with the last call."""
        return bool(self._period) and (self._n - self._begun) % self._period == 0

    def at_break(self) -> bool:
        """Begin anew behind a break; whether all calls since the last one, if any, are known."""
        known = self.all_known()
        self._begun = self._n
        self._context = self._period = self._stretch = 0
        return known


FACTOR_OUT = pow(FACTOR, CONTEXT + 1, 1 << 64)


def number_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """What calls that one state of the trie may stand for have in common, wherever they come; 0 if
    the call is about 0-dim tensors of the CPU alone, which may run at once."""
    parts: list[Any] = [op]
    facts = facts_of(op)
    args = without_index(op, args)
    sizes = [_put(parts, facts, i, argument) for i, argument in enumerate(args)]
    sizes += [_put(parts, facts, name, argument) for name, argument in kwargs.items()]
    return 0 if max(sizes, default=-1) == 0 else hash(tuple(parts)) & MASK or 2


def without_index(op: Any, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments of `select` and `slice` as they are with any index: `X[i]`, `X[a:b]`."""
    if op is SELECT and len(args) > 2:
        return args[:2]
    if op is SLICE and len(args) > 3 and args[2] is not None and args[3] is not None:
        return (*args[:2], args[3] - args[2], *args[4:])
    return args


SELECT, SLICE = torch.ops.aten.select.int, torch.ops.aten.slice.Tensor


def _put(parts: list[Any], facts: OpFacts, label: int | str, argument: Any) -> int:
    """Add what counts of an argument; the most dimensions that a tensor in it has, -1 for none."""
    kind = type(argument)
    if isinstance(argument, torch.Tensor):
        if argument.is_nested:
            return 1  # it has no sizes
        parts += (tuple(argument.shape), argument.dtype)
        return argument.dim() if argument.is_cpu else 1
    if kind is list or kind is tuple:
        return max([_put(parts, facts, label, item) for item in argument], default=-1)
    is_run_time = kind not in FIXED and (kind is not int or label in facts.number_args)
    parts.append(kind if is_run_time else argument)
    return -1
