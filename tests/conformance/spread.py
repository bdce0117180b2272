"""Which of many items a run takes: the same ones each time, different ones for each name."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable
from typing import TypeVar

import numpy
import torch

T = TypeVar("T")


def number_of(name: str) -> int:
    """A number that is `name`'s in every process, which `hash` isn't."""
    return zlib.crc32(name.encode())


def spread(items: Iterable[T], most: int | None, name: str) -> list[tuple[int, T]]:
    """`(place, item)` of `most` items at most (None: all), spread evenly from where `name` says."""
    every = list(enumerate(items))
    if most is None or len(every) <= most:
        return every
    first = number_of(name)
    places = {(first + i * len(every) // most) % len(every) for i in range(most)}
    return [every[place] for place in sorted(places)]


def seed() -> None:
    """Make what PyTorch's databases draw the same in every process."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
