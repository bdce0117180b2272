"""How soon a program has its first kernel, if the compiler has a core to itself and if it has none.

Each case runs in a process of its own with empty caches. Writes `results/first_kernel.md`.
"""

from __future__ import annotations

from pathlib import Path

from apart import apart
from first_kernel import FirstKernel, first_kernel
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page, seconds_text

CASES = {
    "one thread": (1, False),
    "two threads": (2, False),
    "two threads, beside another process of two": (2, True),
}
LIMIT_S = 60.0


def bench_first_kernel(benchmark: BenchmarkFixture, quick: bool, results_dir: Path) -> None:
    cases = list(CASES)[: 1 if quick else None]
    found: dict[str, FirstKernel] = {}

    def run() -> None:
        for case in cases:
            found[case] = apart(first_kernel, *CASES[case], 0.5 if quick else LIMIT_S)

    benchmark.pedantic(run, rounds=1, iterations=1)
    rows = [
        [case, *map(seconds_text, (f.eager_s, f.came_s, f.before_s, f.longest_s, f.after_s))]
        for case, f in found.items()
    ]
    columns = ["case", "eager's step", "first kernel", "median step before", "longest", "after"]
    notes = [
        "two cores; Gray-Scott on 1000 x 1000 cells, a block a step, empty caches",
        "first kernel: seconds after the first step",
    ]
    (results_dir / "first_kernel.md").write_text(page("The first kernel", columns, rows, notes))
