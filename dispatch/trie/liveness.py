"""Who holds a value, by its reference count.

In: the list in which a trace keeps its values. Out: those that somebody else holds too, as a tensor
does. `torch_checks.assumptions` checks at import that counts tell so.
"""

from __future__ import annotations

import sys
from typing import TypeVar

T = TypeVar("T")


def _calibrate() -> int:
    values = [object()]
    return next(sys.getrefcount(value) for value in values)


_UNOWNED = _calibrate()


def live_values(values: list[T]) -> list[T]:
    """Those of `values` that somebody besides the list holds."""
    return [value for value in values if sys.getrefcount(value) > _UNOWNED]
