"""Which values somebody holds, by their reference counts.

In: the list in which a trace keeps its values. Out: those that somebody besides the list holds, as
the program's tensors do: a flush computes these alone. `torch_checks.assumptions` checks at import
that this Python's counts tell so. C++ does the same (`native/flush.h`).
"""

from __future__ import annotations

import sys
from typing import TypeVar

T = TypeVar("T")


def _calibrate() -> int:
    """The count that `live_values` sees of an object that the list alone holds. It depends on the
    Python version how many references a loop has."""
    values = [object()]
    return next(sys.getrefcount(value) for value in values)


_UNOWNED = _calibrate()


def live_values(values: list[T]) -> list[T]:
    """Those of `values` that somebody besides the list holds."""
    return [value for value in values if sys.getrefcount(value) > _UNOWNED]
