"""A page for `benches/results`: what became of other projects' tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.pages import section, table
from tests.thirdparty import outcomes
from tests.thirdparty.outcomes import Comparison

HEAD = """# Other projects' tests, inside `lazy_mode`

- device: CPU, torch {torch}
- commit: {commit}
- command: `python tests/thirdparty/run.py --sources DIR --way WAY --page PATH`, for each way

The body of each test runs inside `lazy_mode`. *Pass eagerly* are those of a sample that pass
without. Ways: *default*, as users have it, op by op; *record*, all that can be recorded is, from
the first op on; *kernels*, the same with Inductor's kernels, built in the background from a
segment's first run on. A run takes a few minutes: where *run* is less than *pass eagerly* its time
was up, and what ran is of all files. *Expected* fail for a reason that stands below.

"""
COLUMNS = (
    "suite", "commit", "way", "pass eagerly", "run", "pass", "expected", "differ", "ops recorded",
)  # fmt: skip


def page(suites: dict[str, dict[str, Any]], comparisons: Sequence[Comparison]) -> str:
    """What `comparisons` say, in Markdown."""
    head = HEAD.format(
        torch=", ".join(sorted({one.lazy.torch.partition("+")[0] for one in comparisons})),
        commit=", ".join(sorted({one.lazy.commit for one in comparisons})),
    )
    rows = (_row(suites[c.suite], c) for c in comparisons)
    differs = (f"`{c.suite}`, {c.way}: `{test}`: {outcome.error}" for c in comparisons
               for test, outcome in c.differs.items())  # fmt: skip
    reasons = (f"`{suite}`: `{test}`: {why}" for suite, tests in outcomes.expected().items()
               for test, why in tests.items())  # fmt: skip
    parts = (
        head, table(COLUMNS, rows), section("What differs", differs), section("Expected", reasons),
    )  # fmt: skip
    return "".join(parts)


def _row(suite: dict[str, Any], one: Comparison) -> tuple[str, ...]:
    name = f"[{one.suite}](https://github.com/{suite['repository']})"
    counts = (
        len(one.eager.passed), len(one.ran), len(one.ran) - len(one.failed), len(one.expected),
        len(one.differs), one.lazy.n_recorded,
    )  # fmt: skip
    return (name, suite["commit"][:12], one.way, *map(str, counts))
