"""What became of each test of a suite, eagerly and in one way lazily, and what was expected.

In: the lines that `plugin/in_lazy_mode.py` writes. `expected.toml` has a table a suite, in which
`"test" = "reason"` names a test that may fail lazily, or with `*` at the end all that begin so.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

EXPECTED = Path(__file__).with_name("expected.toml")


class Outcome(NamedTuple):
    """What became of one test: `outcome` is pytest's word, `why` the end of the error."""

    outcome: str
    why: str = ""
    seconds: float = 0.0

    @property
    def error(self) -> str:
        """The last lines that tell what went wrong."""
        lines = self.why.strip().splitlines() or [self.outcome]
        return " / ".join(([line for line in lines if line.startswith("E ")] or lines)[-2:])[:300]


@dataclass
class Run:
    """A suite that was run in one way, at one commit of this project."""

    tests: dict[str, Outcome] = field(default_factory=dict)
    commit: str = ""
    torch: str = ""
    n_recorded: int = 0
    n_at_once: int = 0

    @property
    def passed(self) -> set[str]:
        return {name for name, one in self.tests.items() if one.outcome == "passed"}

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.tests.values())


def read_run(path: Path) -> Run:
    """What a file of the plugin's tells: a test that began and has no outcome ended its process."""
    run = Run()
    for line in map(json.loads, path.read_text().splitlines()):
        if "begun" in line:
            run.tests[line["begun"]] = Outcome("the process ended")
        elif "test" in line:
            run.tests[line["test"]] = Outcome(line["outcome"], line["why"], line["seconds"])
        elif "commit" in line:
            run.commit, run.torch = line["commit"], line["torch"]
        elif "recorded" in line:
            run.n_recorded += line["recorded"]
            run.n_at_once += line["at_once"]
    return run


@dataclass
class Comparison:
    """The tests that pass eagerly and ran lazily, and those among them that didn't pass."""

    suite: str
    way: str
    eager: Run
    lazy: Run

    @property
    def ran(self) -> set[str]:
        return self.eager.passed & set(self.lazy.tests)

    @property
    def failed(self) -> dict[str, Outcome]:
        return {name: self.lazy.tests[name] for name in sorted(self.ran - self.lazy.passed)}

    @property
    def expected(self) -> dict[str, Outcome]:
        return {n: one for n, one in self.failed.items() if reason(self.suite, n) is not None}

    @property
    def differs(self) -> dict[str, Outcome]:
        return {n: one for n, one in self.failed.items() if reason(self.suite, n) is None}

    def __str__(self) -> str:
        eager_s = sum(self.eager.tests[name].seconds for name in self.ran)
        share = self.lazy.n_recorded / max(self.lazy.n_recorded + self.lazy.n_at_once, 1)
        return (
            f"{self.suite} [{self.way}]: {len(self.eager.passed)} pass eagerly; of {len(self.ran)} "
            f"run lazily {len(self.ran) - len(self.failed)} pass, {len(self.expected)} fail as "
            f"expected, {len(self.differs)} differ; {self.lazy.n_recorded} ops recorded, "
            f"{share:.2f} of all; {self.lazy.seconds / max(eager_s, 1e-9):.1f}x eager's time"
        )


def compare(results: Path, suite: str, way: str) -> Comparison:
    """What the files of `results` tell."""
    eager, lazy = (read_run(results / f"{suite}.{one}.jsonl") for one in ("eager", way))
    return Comparison(suite, way, eager, lazy)


@cache
def expected() -> dict[str, dict[str, str]]:
    """By suite and test, the reason why it may fail."""
    entries: dict[str, Any] = tomllib.loads(EXPECTED.read_text(encoding="utf-8"))
    return entries


def reason(suite: str, test: str) -> str | None:
    """Why `test` may fail lazily; None if it may not."""
    for name, why in expected().get(suite, {}).items():
        if test == name or (name.endswith("*") and test.startswith(name[:-1])):
            return why
    return None
