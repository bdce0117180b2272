"""`make fuzz`: random programs until told to stop, a shrunk script for each failure.

    python tests/fuzz/run.py [--minutes 60] [--seed 0] [--out build/fuzz]

Every side runs op by op, except that one round in `COMPILED_EVERY` goes through Inductor's kernels.
One in `LOOPS_EVERY` replays each program as the body of a loop.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fuzzing.grammar import LOOPS, PRODUCTIONS, SMOOTH, new_tensor
from fuzzing.program import Program, programs
from fuzzing.sides import COMPILED, EXACT, Side, difference, difference_of_loop
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import FlakyFailure
from hypothesis.strategies import SearchStrategy

import lazy_tensor

ROUND = 200
COMPILED_EVERY, COMPILED_ROUND = 20, 8
LOOPS_EVERY = 4


class Count:
    """Programs run, calls replayed, and the last program that differed."""

    n_programs = 0
    n_replayed = 0
    failed: tuple[str, Program] | None = None


Differs = Callable[[Program], str | None]


def one_round(
    number: int, size: int, drawn: SearchStrategy[Program], differs: Differs, count: Count
) -> None:
    """Draw `size` programs from seed `number`; AssertionError for one that `differs`, made short
    first."""

    @seed(number)
    @settings(
        max_examples=size,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        print_blob=False,
    )
    @given(program=drawn)
    def agree(program: Program) -> None:
        count.n_programs += 1
        found = differs(program)
        if found is not None:
            count.failed = (found, program)
            raise AssertionError(found)

    agree()


def round_of_sides(number: int, sides: Sequence[Side], count: Count) -> None:
    def differs(program: Program) -> str | None:
        for side in sides:
            found = difference(program, side)
            if found is not None:
                return f"{side.name}: {found}"
        return None

    compiled = sides is COMPILED
    size = COMPILED_ROUND if compiled else ROUND
    drawn = programs(SMOOTH if compiled else PRODUCTIONS, new_tensor)
    one_round(number, size, drawn, differs, count)


def round_of_loops(number: int, count: Count) -> None:
    """A round in which programs are bodies of loops."""

    def differs(program: Program) -> str | None:
        found, n_replayed = difference_of_loop(program)
        count.n_replayed += n_replayed
        return None if found is None else f"loop: {found}"

    one_round(number, ROUND, programs(LOOPS, new_tensor, max_lines=12), differs, count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=0, help="of the first round; counts up")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--loops", action="store_true", help="replayed loops only")
    options = parser.parse_args()
    lazy_tensor.configure(cache_dir=tempfile.mkdtemp())
    count, n_failures, start, number = Count(), 0, time.monotonic(), options.seed
    try:
        while time.monotonic() - start < options.minutes * 60:
            sides = COMPILED if number % COMPILED_EVERY == COMPILED_EVERY - 1 else EXACT
            try:
                if options.loops or number % LOOPS_EVERY == 0:
                    round_of_loops(number, count)
                else:
                    round_of_sides(number, sides, count)
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
            print(f"{count.n_programs} programs, {count.n_replayed} calls replayed, "
                  f"{n_failures} failures, {minutes:.1f} minutes", flush=True)  # fmt: skip
    except KeyboardInterrupt:
        pass
    return min(n_failures, 1)


if __name__ == "__main__":
    sys.exit(main())
