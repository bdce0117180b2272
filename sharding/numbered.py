"""Objects that stand in calls of ops as numbers, for schemas know no others."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Numbered(Generic[T]):
    """Objects and their numbers; equal ones have the same. They are kept for good."""

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}
        self._objects: list[T] = []

    def __getitem__(self, number: int) -> T:
        return self._objects[number]

    def number(self, item: T) -> int:
        """The number that stands for `item`."""
        number = self._numbers.get(item)
        if number is None:
            self._objects.append(item)
            number = self._numbers[item] = len(self._objects) - 1
        return number
