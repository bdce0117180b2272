"""The default's time over that of the better one of eager and `record="always"`.

`python benches/choice.py [--seconds S] [NAMES]` prints a line for each program and way. Each side
is a process of its own with empty caches. The sides take turns, so that a machine that slows down
slows all of them. The programs are in `choice_programs.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from choice_programs import PROGRAMS, RECORDS, ways_of

TURN_S = 0.5
"""Seconds of a turn."""
SETTLED = 0.4
"""The share of turns that count as settled: the last ones."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """`auto` and `always`: times of a settled step, by default and by `record="always"`, over
    eager's. `regret`: the default's time over the better one of the two others. `from_start`: the
    same for all steps from the first one on."""

    name: str
    way: str
    eager_s: float
    auto: float
    always: float
    regret: float
    from_start: float

    def __str__(self) -> str:
        return (
            f"{self.name:18} {self.way:5} eager {self.eager_s * 1e6:9.1f} us; default "
            f"{self.auto:.2f}, always {self.always:.2f}; regret {self.regret:.2f}, from the start "
            f"{self.from_start:.2f}"
        )


class _Player:
    """A process that runs a program's steps on command."""

    def __init__(self, name: str, way: str, record: str, within: ExitStack) -> None:
        # compilers may write there for a moment after the process has ended
        caches = within.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        self._process = within.enter_context(
            subprocess.Popen(
                [sys.executable, Path(__file__).with_name("choice_programs.py"), name, way, record],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={
                    **os.environ, "OMP_NUM_THREADS": "1", "LAZY_TENSOR_CACHE_DIR": caches,
                    "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
                },
            )
        )  # fmt: skip
        within.callback(self._process.terminate)
        self.turns: list[tuple[int, float]] = []

    def play(self, seconds: float) -> None:
        """Have the process do steps for so long, and note how many they were."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(seconds, file=self._process.stdin, flush=True)
        n_steps, passed_s = json.loads(self._process.stdout.readline())
        self.turns.append((n_steps, passed_s))

    def settled_s(self) -> list[float]:
        """Seconds of a step in each of the last turns."""
        last = self.turns[-max(round(SETTLED * len(self.turns)), 1) :]
        return [passed_s / n_steps for n_steps, passed_s in last]

    def step_s(self) -> float:
        """Seconds of a step over all turns."""
        n_steps, passed_s = map(sum, zip(*self.turns, strict=True))
        return passed_s / n_steps


def chosen(name: str, way: str, seconds: float) -> Chosen:
    """The times of a program, for which each side runs `seconds` in all."""
    with ExitStack() as within:
        players = {record: _Player(name, way, record, within) for record in RECORDS}
        for _ in range(max(round(seconds / TURN_S), 2)):
            for player in players.values():
                player.play(min(TURN_S, seconds))
        settled = [players[record].settled_s() for record in RECORDS]
        eager_s, auto_s, always_s = (players[record].step_s() for record in RECORDS)
    # ratios are of turns that were played one after another, when the machine was as fast
    turns = list(zip(*settled, strict=True))
    return Chosen(
        name, way, statistics.median(settled[0]),
        statistics.median(auto / eager for eager, auto, _ in turns),
        statistics.median(always / eager for eager, _, always in turns),
        statistics.median(auto / min(eager, always) for eager, auto, always in turns),
        auto_s / min(eager_s, always_s),
    )  # fmt: skip


def all_chosen(names: Sequence[str], seconds: float) -> Iterator[Chosen]:
    for name in names:
        for way in ways_of(name):
            yield chosen(name, way, seconds)


def mean_of(ratios: Sequence[float]) -> float:
    """The geometric mean, as for ratios."""
    return math.exp(statistics.mean(map(math.log, ratios)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("names", nargs="*", default=list(PROGRAMS))
    asked = parser.parse_args()
    for one in all_chosen(asked.names, asked.seconds):
        print(one, flush=True)
