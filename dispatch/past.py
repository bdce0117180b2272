"""Which sequences of calls a program has made before, each from its last sync point on.

In: each call that is not a hit, as a number; where values are read or a block ends: a *sync point*.
Out: whether the calls since the last one came in this order before. `native/past.h` does the same
below Python, where calls run unrecorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lazy_tensor.dispatch.request import FIXED
from lazy_tensor.dispatch.schema import OpFacts, facts_of

N_KEPT = 1 << 17
"""Sequences that are kept, one for each call: an epoch over twenty lengths of a large model has as
many as 65,000."""
FIRST = 8
"""The first calls of a loop's turn, by which it is seen to come again."""
LOOPS_FROM = 4096
"""Calls without a sync point after which a program is a loop: layers that are alike, and the
optimizer's steps for them, are over by then."""
TURN_AT_LEAST = 256
"""Calls of a loop's turn: each ends in a flush."""
ALL_BITS = (1 << 64) - 1
FACTOR = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio, as in Knuth's multiplicative hashing."""


class Past:
    """The hash of the calls since the last sync point, and the set of all such hashes so far.

    A loop may have no sync points. Then a turn of it ends where its first calls come again.
    """

    __slots__ = ("_ends_turn", "_first", "_hash", "_is_known", "_least", "_n", "_recent",
                 "_recent_hash", "_seen")  # fmt: skip

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._seen: dict[int, None] = {}  # the latest last
        self._is_known = False
        self.at_sync_point()

    def at_sync_point(self) -> bool:
        """Begin anew; whether all calls since the last sync point, if any, are known."""
        known = self._is_known
        self._n = self._hash = self._first = self._recent_hash = 0
        self._least = LOOPS_FROM
        self._recent: deque[int] = deque(maxlen=FIRST)
        self._is_known = self._ends_turn = False
        return known

    def note(self, call: int) -> bool:
        """Add a call; whether a loop's turn that was known has come round."""
        was_known = self._is_known
        out = self._recent[0] if self._n >= FIRST else 0
        self._recent.append(call)
        self._recent_hash = ((self._recent_hash + call) * FACTOR - out * FACTOR_OUT) & ALL_BITS
        self._hash = (self._hash + call) * FACTOR & ALL_BITS
        self._n += 1
        if self._n == FIRST:
            self._first = self._recent_hash
        self._ends_turn = self._n >= self._least and self._recent_hash == self._first
        if self._ends_turn:
            self._n, self._hash, self._least = FIRST, self._first, TURN_AT_LEAST
        self._is_known = self._hash in self._seen
        self._seen.pop(self._hash, None)
        self._seen[self._hash] = None
        if len(self._seen) > N_KEPT:
            del self._seen[next(iter(self._seen))]
        return self._ends_turn and was_known

    def is_known(self) -> bool:
        """Whether all calls up to the last one came in this order before."""
        return self._is_known

    def has_begun(self) -> bool:
        """Whether there were calls since the last sync point."""
        return self._n > 0

    def region(self) -> int:
        """The hash of all calls since the last sync point, in this order."""
        return self._hash

    def ends_turn(self) -> bool:
        """Whether the last call was the last of a loop's `FIRST` that came again."""
        return self._ends_turn


FACTOR_OUT = pow(FACTOR, FIRST + 1, 1 << 64)


def number_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """What calls that one state of the trie may stand for have in common, wherever they come; 0 if
    the call is about 0-dim tensors of the CPU alone, which may run at once."""
    parts: list[Any] = [op]
    facts = facts_of(op)
    args = without_index(op, args)
    sizes = [_put(parts, facts, i, argument) for i, argument in enumerate(args)]
    sizes += [_put(parts, facts, name, argument) for name, argument in kwargs.items()]
    return 0 if max(sizes, default=-1) == 0 else hash(tuple(parts)) & ALL_BITS or 1


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
