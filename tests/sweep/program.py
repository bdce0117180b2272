"""What a subprocess does: reads names, a line each; tells what it does and finds, in JSON lines.

    python -m tests.sweep.program < names

A line is `["at", name, pattern, kind, dtype, side]` before a program runs, so that whoever reads
knows what a crash is due to, `["found", how, name, pattern, kind, dtype, eager, lazy]` for a
difference, and `["counted", name, counts]` when a callable is through. `--left-out` takes triples
of a name, kind and side as JSON, whose programs are not run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections import Counter
from typing import Any

import torch

import lazy_tensor
from lazy_tensor.dispatch import budget, hits, trace
from lazy_tensor.dispatch.flush import compiler
from tests.sweep.callables import resolve
from tests.sweep.operands import DTYPES, KINDS
from tests.sweep.outcome import Outcome, difference, outcome
from tests.sweep.patterns import are_values_known, patterns_of

N_PATTERNS, N_ERRORS = 5, 1
"""Patterns that a callable is swept with: those that give something, and those that raise."""
N_TIMES = 2
"""How often each runs lazily: what is recorded in Python at first is a hit the next time."""

Say = Any


class Sweep:
    """The programs of one callable after another."""

    def __init__(
        self, say: Say, left_out: set[tuple[str, ...]], n_patterns: int = N_PATTERNS
    ) -> None:
        self.say, self.left_out, self.n_patterns = say, left_out, n_patterns

    def run(self, name: str) -> Counter[str]:
        counts: Counter[str] = Counter()
        for dtype in DTYPES:
            for pattern in self._chosen(name, dtype):
                for kind in KINDS:
                    found = self._compared(name, pattern, kind, dtype)
                    counts[found] += 1
        return counts

    def _outcome(self, *what: str, lazily: bool = False) -> Outcome | None:
        side = "lazily" if lazily else "eagerly"
        if (what[0], what[2], side) in self.left_out:
            return None
        self.say("at", *what, side)
        name, pattern, kind, dtype = what
        return outcome(resolve(name), pattern, kind, dtype, lazily=lazily)

    def _chosen(self, name: str, dtype: str) -> list[str]:
        """The patterns that give something, and one of each of the first errors."""
        giving: list[str] = []
        errors: dict[str, str] = {}
        for pattern in patterns_of(name):
            found = self._outcome(name, pattern, "plain", dtype)
            if found is None:
                continue
            if found.error is None:
                giving.append(pattern)
            elif len(errors) < N_ERRORS:
                errors.setdefault(type(found.error).__name__, pattern)
            if len(giving) == self.n_patterns:
                break
        return giving + list(errors.values())

    def _compared(self, *what: str) -> str:
        name, pattern, kind, _ = what
        expected = self._outcome(*what)
        if expected is None:
            return "left out"
        exact = are_values_known(name, pattern)
        again = self._outcome(*what)
        if again is None or difference(again, expected, exact=exact) is not None:
            return "eager differs"
        is_late = False
        for _ in range(N_TIMES):
            got = self._outcome(*what, lazily=True)
            if got is None:
                return "left out"
            told = difference(got, expected, exact=exact)
            if told is not None:
                how = "refused" if got.is_refused else "differs"
                self.say("found", how, *what, *told)
                return how
            is_late = is_late or (got.is_late and not expected.is_late)
        if expected.error is None:
            return "agree"
        return "later" if is_late else "same error"


def prepare() -> None:
    """Record everything, below Python where that can be, and run op by op."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    budget.START_S = 100.0
    trace.local.trace.budget.reset()
    if os.environ.get("LAZY_TENSOR_HITS") != "python":
        hits.start(compiler().disk)
        assert hits.EXTENSION.status == "in use", hits.EXTENSION.status
    lazy_tensor.configure(backend="aten", compile="off")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--left-out", default="[]")
    parser.add_argument("--patterns", type=int, default=N_PATTERNS)
    options = parser.parse_args()
    names = sys.stdin.read().split()
    told = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def say(*line: object) -> None:
        told.write(json.dumps(line) + "\n")
        told.flush()

    prepare()
    left_out = {tuple(what) for what in json.loads(options.left_out)}
    sweep = Sweep(say, left_out, options.patterns)
    for name in names:
        say("counted", name, sweep.run(name))
    say("done")
    return 0


if __name__ == "__main__":
    status = main()
    os._exit(status)  # what callables left behind, threads and queues, isn't waited for
