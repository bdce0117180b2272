"""A page for `benches/results`: what a sweep found."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator

import torch

from tests.pages import section, table
from tests.sweep.callables import SKIPPED
from tests.sweep.found import Found, Result, exceptions, listed

COLUMNS = (
    "agree", "same error", "later", "eager differs", "refused", "listed", "differs", "crashes",
)  # fmt: skip
HEAD = """# Every public callable of torch, on pending tensors

- device: CPU, torch {torch}
- commit: {commit}
- command: `python tests/sweep/run.py --results PATH` (a quarter of an hour, two processes)
- hits: {hits}

Each callable is given a few simple arguments, of floats and of integers, in seven kinds: a lazy
tensor, a plain one with a pending write, a view from before that write, a plain one beside those;
and in no mode a lazy tensor, a plain one beside lazy ones, a wrapped parameter. Each program runs
eagerly, and twice lazily: the second time by hits. What it gives, its operands, and both again
after a write of either must be eager's, bit for bit; of an error, the type.

*Later*: the error is raised at the flush, not at the line. *Eager differs*: from itself, when the
program runs again. *Refused*: an error that says that lazy tensors are the reason. *Listed*:
differs as [`exceptions.toml`](../../tests/sweep/exceptions.toml) says. *Without programs*: takes
none of the arguments that were tried, but raises as eagerly.

"""


def page(result: Result, commit: str) -> str:
    """What was found, in Markdown."""
    head = ("of", "callables", "without programs", "programs", *COLUMNS)
    areas = sorted({name.rpartition(".")[0] for name in result.counts})
    late = sorted(name for name, counted in result.counts.items() if counted["later"])
    parts = (
        HEAD.format(torch=torch.__version__.partition("+")[0], commit=commit, hits=_hits()),
        table(head, (_row(area, result) for area in (*areas, "all"))),
        section("What differs", map(str, one_of_each(result.unlisted()))),
        section("What is raised later", (f"`{name}`" for name in late)),
        section("What is listed", (f"`{key}`: {why}" for key, why in exceptions().items())),
        section("What is left out", (f"`{name}`: {why}" for name, why in SKIPPED.items())),
    )
    return "".join(parts)


def _hits() -> str:
    return "in Python" if os.environ.get("LAZY_TENSOR_HITS") == "python" else "below Python"


def _row(area: str, result: Result) -> tuple[str, ...]:
    def is_in(name: str) -> bool:
        return area in ("all", name.rpartition(".")[0])

    counts = {name: counted for name, counted in result.counts.items() if is_in(name)}
    total: Counter[str] = sum(counts.values(), Counter())
    unlisted = Counter(one.what for one in result.unlisted() if is_in(one.name))
    total["listed"] = sum(is_in(one.name) and listed(one) is not None for one in result.found)
    for what in ("refused", "differs", "crashes"):
        total[what] = unlisted[what]
    empty = sum(not counted for counted in counts.values())
    n_programs = sum(total[column] for column in COLUMNS)
    return (area, str(len(counts)), str(empty), str(n_programs), *(str(total[c]) for c in COLUMNS))


def one_of_each(found: Iterable[Found]) -> Iterator[Found]:
    """The first of each callable, way to differ and dtype."""
    seen = set()
    for one in found:
        key = one.name, one.what, one.dtype
        if key not in seen:
            seen.add(key)
            yield one
