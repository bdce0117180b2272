"""What a subprocess does: reads names, a line each; tells what it does and finds, in JSON lines.

    python -m tests.sweep.worker < names

A line is `["at", name, pattern, kind, dtype, side]` before a program runs, so that whoever reads
knows what a crash is due to, `["found", how, name, pattern, kind, dtype, eager, lazy]` for a
difference, and `["counted", name, counts]` when a callable is through. `--left-out` takes triples
of a name, kind and side as JSON, whose programs are not run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable

import torch

import lazy_tensor
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.run.compile_service import compiler
from lazy_tensor.dispatch.tiering import policy
from lazy_tensor.dispatch.trie import trace
from tests.sweep.operands import DTYPES, KINDS
from tests.sweep.outcome import Outcome, Program, difference, outcome
from tests.sweep.patterns import patterns_of

N_PATTERNS = 5
"""Patterns that give something which a callable is swept with; and one that raises."""
N_TIMES = 2
"""How often each runs lazily: what is recorded in Python at first is a hit the next time."""

Say = Callable[..., None]


class Sweep:
    """The programs of one callable after another."""

    def __init__(
        self, say: Say, left_out: set[tuple[str, ...]], n_patterns: int = N_PATTERNS
    ) -> None:
        self.say, self.left_out, self.n_patterns = say, left_out, n_patterns

    def run(self, name: str) -> Counter[str]:
        """How many of its programs agree, and how many do what else."""
        return Counter(
            self._compared(Program(name, pattern, kind, dtype))
            for dtype in DTYPES
            for pattern in self._chosen(name, dtype)
            for kind in KINDS
        )

    def _outcome(self, program: Program, *, lazily: bool = False) -> Outcome | None:
        side = "lazily" if lazily else "eagerly"
        if (program.name, program.kind, side) in self.left_out:
            return None
        self.say("at", *program, side)
        return outcome(program, lazily=lazily)

    def _chosen(self, name: str, dtype: str) -> list[str]:
        """The first patterns that give something, and the first that raises."""
        giving: list[str] = []
        raising: list[str] = []
        for pattern in patterns_of(name):
            found = self._outcome(Program(name, pattern, "plain", dtype))
            if found is None:
                continue
            (giving if found.error is None else raising).append(pattern)
            if len(giving) == self.n_patterns:
                break
        return giving + raising[:1]

    def _compared(self, program: Program) -> str:
        expected = self._outcome(program)
        if expected is None:
            return "left out"
        again = self._outcome(program)
        if again is None or difference(again, expected, exact=program.is_exact) is not None:
            return "eager differs"
        is_late = False
        for _ in range(N_TIMES):
            got = self._outcome(program, lazily=True)
            if got is None:
                return "left out"
            told = difference(got, expected, exact=program.is_exact)
            if told is not None:
                how = "refused" if got.is_refused else "differs"
                self.say("found", how, *program, *told)
                return how
            is_late = is_late or (got.is_late and not expected.is_late)
        if expected.error is None:
            return "agree"
        return "later" if is_late else "same error"


def prepare() -> None:
    """Record everything, below Python where that can be, and run op by op."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    policy.FIRST_CALLS = 1 << 60
    trace.local.trace.policy.reset()
    if os.environ.get("LAZY_TENSOR_HITS") != "python":
        hits.start(compiler().disk)
        assert hits.EXTENSION.status == "in use", hits.EXTENSION.status
    lazy_tensor.configure(backend="aten", compile="off")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--left-out", default="[]")
    parser.add_argument("--patterns", type=int, default=N_PATTERNS)
    parser.add_argument("--compiler", action="store_true")
    options = parser.parse_args()
    names = sys.stdin.read().split()
    told = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what callables print is for nobody

    def say(*line: object) -> None:
        told.write(json.dumps(line) + "\n")
        told.flush()

    if options.compiler:  # as every optimizer does: fake tensors tell what ops give from then on
        importlib.import_module("torch._dynamo")
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
