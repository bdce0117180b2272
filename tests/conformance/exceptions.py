"""The programs that are known to differ from eager: `exceptions.toml`, read and matched.

An entry is `"name dtype variant way samples" = "reason"`. The first four are shell patterns, or
several with `|` between; blanks inside them stand as `_`; `samples` is `*` or numbers and ranges
(`0,4-7`). Each program that an entry matches must differ: one that says too much fails the test.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("exceptions.toml")


@dataclass(frozen=True, slots=True)
class Case:
    """What names a program: `sample` is its number in the database's list."""

    database: str
    name: str
    dtype: str
    variant: str
    way: str
    sample: int
    backend: str = "aten"

    @property
    def row(self) -> tuple[str, ...]:
        """The line of the summary that counts it: all ways, all kinds of `out=` together."""
        kind = "out=" if self.variant.startswith("out") else self.variant.partition(",")[0]
        return self.database, self.dtype, kind, self.backend

    def __str__(self) -> str:
        words = (self.name, self.dtype, self.variant, self.way)
        return " ".join((*(w.replace(" ", "_") for w in words), str(self.sample)))


@dataclass(frozen=True, slots=True)
class Entry:
    patterns: tuple[str, ...]
    samples: frozenset[int] | None
    reason: str

    def matches(self, case: Case) -> bool:
        if self.samples is not None and case.sample not in self.samples:
            return False
        words = (case.name, case.dtype, case.variant, case.way)
        return all(
            any(fnmatchcase(word.replace(" ", "_"), one) for one in pattern.split("|"))
            for word, pattern in zip(words, self.patterns, strict=True)
        )


def listed(case: Case) -> Entry | None:
    """The entry for `case`, if there is one."""
    return next((entry for entry in entries(case.database) if entry.matches(case)), None)


@cache
def entries(database: str) -> tuple[Entry, ...]:
    tables = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return tuple(_entry(key, reason) for key, reason in tables.get(database, {}).items())


def _entry(key: str, reason: str) -> Entry:
    *patterns, samples = key.split()
    if len(patterns) != 4 or not reason:
        raise ValueError(
            f"{FILE.name}: {key!r} = {reason!r}; an entry is "
            '"name dtype variant way samples" = "reason"'
        )
    return Entry(tuple(patterns), None if samples == "*" else _numbers(samples), reason)


def _numbers(text: str) -> frozenset[int]:
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
