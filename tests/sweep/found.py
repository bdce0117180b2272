"""What a sweep found, and which of it is known.

An entry of `exceptions.toml` is `"callable kind dtype" = "reason"`: shell patterns, or several with
`|` between.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple

EXCEPTIONS = Path(__file__).with_name("exceptions.toml")


class Found(NamedTuple):
    """A program whose outcome is not eager's."""

    what: str
    name: str
    pattern: str
    kind: str
    dtype: str
    eager: str
    lazy: str

    def __str__(self) -> str:
        program = f"`{self.name}`: `{self.pattern}`, {self.kind} {self.dtype}"
        return f"{program}: {self.what}: eager {self.eager}; lazily {self.lazy}"


@dataclass
class Result:
    """What is known of the callables that were swept."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    found: list[Found] = field(default_factory=list)

    def add(self, other: Result) -> None:
        self.counts.update(other.counts)
        self.found += other.found

    def unlisted(self) -> list[Found]:
        """What no entry of `exceptions.toml` is about."""
        return [one for one in self.found if listed(one) is None]

    def stale(self) -> list[str]:
        """The entries about callables that were swept, but about nothing that was found."""
        used = {listed(one) for one in self.found}
        return [
            key
            for key in exceptions()
            if key not in used and any(_is_named(name, key.split()[0]) for name in self.counts)
        ]


@cache
def exceptions() -> dict[str, str]:
    """The reason of each known difference, by `"callable kind dtype"`."""
    entries: dict[str, str] = tomllib.loads(EXCEPTIONS.read_text(encoding="utf-8"))["sweep"]
    return entries


def listed(found: Found) -> str | None:
    """The first entry that a difference falls under."""
    words = (found.name, found.kind, found.dtype)
    return next(
        (
            key
            for key in exceptions()
            if all(_is_named(word, part) for word, part in zip(words, key.split(), strict=True))
        ),
        None,
    )


def _is_named(word: str, patterns: str) -> bool:
    return any(fnmatchcase(word, one) for one in patterns.split("|"))
