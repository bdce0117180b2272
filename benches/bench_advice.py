"""What `explain()` advises on programs with a known bottleneck, and what following it gains.

Default settings, one thread, empty caches, a process for each program. A run that isn't quick fails
if another change is advised first. Writes `results/advice.md`.
"""

from __future__ import annotations

from pathlib import Path

from advised import programs
from apart import apart
from followed import Followed, followed
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page

SETTLES_S = 30.0


def bench_advice(benchmark: BenchmarkFixture, quick: bool, results_dir: Path) -> None:
    titles = [title for title, _ in programs()][: 1 if quick else None]
    seconds = 0.5 if quick else SETTLES_S
    found: dict[str, Followed] = {}

    def run() -> None:
        found.update((title, apart(followed, title, seconds)) for title in titles)

    benchmark.pedantic(run, rounds=1, iterations=1)
    table = dict(programs())
    rows = [
        [
            title, one.advice[0].replace("|", "\\|") if one.advice else "nothing",
            table[title].change or "nothing", "" if one.gained is None else f"{one.gained:.2f}",
        ]
        for title, one in found.items()
    ]  # fmt: skip
    notes = [
        f"default settings, one thread, empty caches; each form runs for {seconds:.0f} s",
        "gained: a step's time after the change over that before, the median of turns",
    ]
    columns = ["program", "what would help most", "the change", "gained"]
    (results_dir / "advice.md").write_text(page("What the report advises", columns, rows, notes))
    if not quick:
        wrong = [title for title, one in found.items() if not is_right(table[title].says, one)]
        assert not wrong, f"other advice than what helps: {wrong}"


def is_right(says: str, one: Followed) -> bool:
    """Whether the change that helps is advised first, or nothing if `says` is empty."""
    return says in one.advice[0] if says and one.advice else not says and not one.advice
