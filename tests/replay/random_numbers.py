"""Python expressions on numbers, drawn at random, for programs that compute with what they read."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random


def expression(draw: Random, known: Sequence[str], depth: int, signs: Sequence[str]) -> str:
    """An expression of the numbers `known`, with at most `depth` operations inside one another."""

    def part() -> str:
        return expression(draw, known, depth - 1, signs)

    kind = draw.randrange(5) if depth else 0
    if kind == 0:
        return draw.choice(known)
    if kind == 1:
        return draw.choice(["(-{})", "abs({})", "round({}, 2)", "round({})"]).format(part())
    if kind == 2:
        return f"{draw.choice(['max', 'min'])}({part()}, {part()})"
    return f"({part()} {draw.choice(signs)} {part()})"
