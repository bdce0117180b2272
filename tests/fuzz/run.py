"""`make fuzz`: random programs until told to stop, a shrunk script for each failure.

    python tests/fuzz/run.py [--minutes 60] [--seed 0] [--out build/fuzz]

Every side runs op by op, except that one round in `COMPILED_EVERY` goes through Inductor's kernels.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fuzzing.grammar import PRODUCTIONS, SMOOTH, new_tensor
from fuzzing.program import Program, programs
from fuzzing.sides import COMPILED, EXACT, Side, difference
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import FlakyFailure

import lazy_tensor

ROUND = 200
COMPILED_EVERY, COMPILED_ROUND = 20, 8


class Count:
    """Programs run, and the last one that differed."""

    n_programs = 0
    failed: tuple[str, Program] | None = None


def one_round(number: int, sides: Sequence[Side], count: Count) -> None:
    """Draw programs from seed `number`; AssertionError for one that differs, made short first."""
    compiled = sides is COMPILED

    @seed(number)
    @settings(
        max_examples=COMPILED_ROUND if compiled else ROUND,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        print_blob=False,
    )
    @given(program=programs(SMOOTH if compiled else PRODUCTIONS, new_tensor))
    def agree(program: Program) -> None:
        count.n_programs += 1
        for side in sides:
            found = difference(program, side)
            if found is not None:
                count.failed = (f"{side.name}: {found}", program)
                raise AssertionError(found)

    agree()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=0, help="of the first round; counts up")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"))
    options = parser.parse_args()
    lazy_tensor.configure(cache_dir=tempfile.mkdtemp())
    count, n_failures, start, number = Count(), 0, time.monotonic(), options.seed
    try:
        while time.monotonic() - start < options.minutes * 60:
            sides = COMPILED if number % COMPILED_EVERY == COMPILED_EVERY - 1 else EXACT
            try:
                one_round(number, sides, count)
            except (AssertionError, FlakyFailure):
                n_failures += 1
                assert count.failed is not None
                what, program = count.failed
                script = f"# seed {program.seed}, {what}\n{program}\n"
                options.out.mkdir(parents=True, exist_ok=True)
                (options.out / f"round_{number}.py").write_text(script)
                print(script, flush=True)
            number += 1
            minutes = (time.monotonic() - start) / 60
            print(f"{count.n_programs} programs, {n_failures} failures, {minutes:.1f} minutes",
                  flush=True)  # fmt: skip
    except KeyboardInterrupt:
        pass
    return min(n_failures, 1)


if __name__ == "__main__":
    sys.exit(main())
