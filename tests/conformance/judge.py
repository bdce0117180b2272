"""Runs programs every way, counts what agrees, and fails with what doesn't.

In: cases and their programs. Out: counts for the summary; an AssertionError that names each program
that differs and isn't listed, or is listed and doesn't differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.conformance.compare import difference
from tests.conformance.exceptions import Case, listed
from tests.conformance.summary import COLUMNS, KEY
from tests.conformance.ways import WAYS, Outcome, Program, eager

N_RUNS = 2
"""Once recorded for the first time, once found in the trie."""


class Judge:
    """Collects one test's verdicts. `report` at the end, whatever happened before."""

    def __init__(self, record_property: Callable[[str, Any], None]) -> None:
        self._record_property = record_property
        self._counts: dict[tuple[str, ...], dict[str, int]] = defaultdict(
            lambda: dict.fromkeys(COLUMNS, 0)
        )
        self._problems: list[str] = []

    def check(self, case: Case, program: Program) -> None:
        """Run `program` in each way of recording, twice, and compare with eager."""
        expected = eager(program)
        for way in WAYS:
            self._judge(replace(case, way=way), *_compared(way, program, expected))

    def check_together(
        self, given: list[tuple[Case, Program]], make_one: Callable[[list[Program]], Program]
    ) -> None:
        """Check the one program that `make_one` makes of all.

        Each is checked alone where it is listed, where eager raises, or if the whole differs.
        """
        alone = [(c, p) for c, p in given if eager(p).error or any(_entries(c))]
        joined = [pair for pair in given if pair not in alone]
        whole = make_one([program for _, program in joined])
        expected = eager(whole)
        for way in WAYS:
            runs, found = _compared(way, whole, expected)
            for case, program in joined:
                one = replace(case, way=way)
                if found is None:
                    self._judge(one, runs, None)
                else:
                    self._judge(one, *_compared(way, program, eager(program)))
            if found is not None and not self._problems:
                self._problems.append(f"{[str(c) for c, _ in joined]}: only together, {found}")
        for case, program in alone:
            self.check(case, program)

    def _judge(self, case: Case, runs: list[Outcome], found: str | None) -> None:
        entry = listed(case)
        counts = self._counts[case.row]
        counts["programs"] += 1
        counts["recorded"] += any(got.n_recorded for got in runs)
        counts["fused"] += any(got.n_fused for got in runs)
        if found is not None and entry is not None:
            counts["listed"] += 1
        elif found is None and entry is None:
            counts["same error" if runs[0].error else "agree"] += 1
        else:
            counts["differ"] += 1
            why = found or f"agrees with eager, but {entry} says that it doesn't"
            self._problems.append(f"{case}: {why}")

    def report(self) -> None:
        """Hand the counts to the summary; AssertionError if a program differs."""
        self._record_property(KEY, [[*row, counts] for row, counts in self._counts.items()])
        assert not self._problems, "\n".join(
            [f"{len(self._problems)} differ from eager:", *self._problems]
        )


def _entries(case: Case) -> list[Any]:
    return [entry for entry in (listed(replace(case, way=way)) for way in WAYS) if entry]


def _compared(way: str, program: Program, expected: Outcome) -> tuple[list[Outcome], str | None]:
    """The runs, and how one of them differs from what eager can repeat."""
    runs = [WAYS[way](program) for _ in range(N_RUNS)]
    found = next(filter(None, (difference(got, expected, program) for got in runs)), None)
    # eager may not agree with itself: sums of several threads
    if found is not None and difference(eager(program), expected, program) is not None:
        found = None
    return runs, found
