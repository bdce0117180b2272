"""Numbers for objects that ops take as arguments: schemas of ops allow ints, not any objects.

In: placements, or a plan of `fully_shard`. Out: the int that the recorded op takes in its place.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Numbered(Generic[T]):
    """A table of objects and their numbers; equal objects have the same number.

    Objects are never dropped, because states of the trie hold their numbers.
    """

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
