"""Other projects' test suites, each test inside `lazy_mode`, against the same tests run eagerly.

    python tests/thirdparty/run.py [SUITE...] --sources DIR [--way default|record|kernels]
        [--seconds 60] [--results DIR] [--page PATH]

`suites.toml` names repositories, commits, and the packages that their tests import, which
`--install` puts into this environment (`make thirdparty` has one for them). The repositories are
cloned by hand:

    git clone https://github.com/REPOSITORY DIR/SUITE && git -C DIR/SUITE checkout COMMIT

A suite is run eagerly, for `--seconds`; then what passed is run lazily, for three times as long.
Results stay in `--results`: a suite that has eager ones there isn't run eagerly again, and `--page`
tells of all that lie there. Exit status 1 if a test fails lazily that `expected.toml` doesn't name.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from tests.pages import commit  # noqa: E402
from tests.thirdparty.outcomes import Comparison, compare, read_run  # noqa: E402
from tests.thirdparty.page import page  # noqa: E402
from tests.thirdparty.plugin.in_lazy_mode import WAYS  # noqa: E402

HERE = Path(__file__).resolve().parent
LAZY_WAYS = [way for way in WAYS if way != "eager"]
N_PROCESSES = 6
"""For a run: where a test took one down, the next goes on behind it."""
PATIENCE_S = 600.0
"""Beyond a run's own time: for its imports, and the tests that it is at."""
TIMES_LONGER = 3
"""What a lazy run may take of an eager one's time, a test and all of them."""

Suite = dict[str, Any]


def read_suites(path: Path) -> dict[str, Suite]:
    """By name, with the file's `[defaults]`."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: tables["defaults"] | suite for name, suite in tables["suite"].items()}


def install(path: Path) -> None:
    """Give this interpreter what the suites import; torch and this package stay as they are."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    packages = tomllib.loads(path.read_text(encoding="utf-8"))["packages"]
    subprocess.run([*pip, *packages["install"], f"torch=={torch.__version__}"], check=True)
    subprocess.run([*pip, "--no-deps", *packages["without_dependencies"]], check=True)


def run(suite: Suite, source: Path, way: str, results: Path, name: str, seconds: float) -> None:
    """Write what becomes of each test; one that takes the process down is left out after that."""
    outcomes = results / f"{name}.{way}.jsonl"
    outcomes.write_text(json.dumps({"commit": commit(), "torch": torch.__version__}) + "\n")
    options = [f"--lazy-way={way}", f"--lazy-outcomes={outcomes}"]
    options.append(f"--lazy-sample={suite['sample']}")
    timeout_s = suite["timeout_s"]
    if way != "eager":
        wanted = results / f"{name}.wanted.json"
        wanted.write_text(json.dumps(sorted(read_run(results / f"{name}.eager.jsonl").passed)))
        options.append(f"--lazy-tests={wanted}")
        timeout_s, seconds = timeout_s * TIMES_LONGER, seconds * TIMES_LONGER
    options += [f"--lazy-seconds={seconds}", f"--timeout={timeout_s}"]
    command = _pytest(suite, *options)
    for attempt in range(N_PROCESSES):
        with (results / f"{name}.{way}.{attempt}.log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=source / suite["folder"], env=_environment(suite, source),
                stdout=log, stderr=log,
            )  # fmt: skip
            try:
                status = process.wait(seconds + PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()  # in C++, or in an exit, where pytest's own timeout doesn't reach it
                status = process.wait()
        if status == pytest.ExitCode.USAGE_ERROR:
            raise RuntimeError(f"pytest ran nothing of {name}:\n{Path(log.name).read_text()}")
        if 0 <= status <= max(pytest.ExitCode):
            return


def _pytest(suite: Suite, *options: str) -> list[str]:
    return [
        sys.executable, "-m", "pytest", "-p", "in_lazy_mode", "-p", "no:cacheprovider",
        "-p", "no:xdist", "-q", "--no-header", "--tb=short", "-W", "ignore",
        "--continue-on-collection-errors", "-o", "addopts=", *options, *suite["args"],
    ]  # fmt: skip


def _environment(suite: Suite, source: Path) -> dict[str, str]:
    paths = [str(HERE / "plugin"), *(str(source / path) for path in suite["paths"])]
    return {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths), **suite["env"],
    }  # fmt: skip


def measured(results: Path, suites: dict[str, Suite]) -> list[Comparison]:
    """All that `results` has."""
    return [
        compare(results, name, way)
        for name in suites
        for way in LAZY_WAYS
        if (results / f"{name}.{way}.jsonl").exists()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="SUITE", help="all, if none is given")
    parser.add_argument("--suites", type=Path, default=HERE / "suites.toml")
    parser.add_argument("--install", action="store_true", help="what they import, and run nothing")
    parser.add_argument("--sources", type=Path, help="where the repositories are")
    parser.add_argument("--way", choices=LAZY_WAYS, default="record")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "thirdparty")
    parser.add_argument("--page", type=Path, help="where to write the page")
    options = parser.parse_args()
    if options.install:
        install(options.suites)
        return 0
    if options.sources is None:
        parser.error("--sources is needed: the folder with a clone of each suite's repository")
    suites = read_suites(options.suites)
    results = options.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    n_differ = 0
    for name in options.names or suites:
        source = options.sources.resolve() / name
        if not source.exists():
            parser.error(f"{source} is needed, a clone of {suites[name]['repository']}")
        if not (results / f"{name}.eager.jsonl").exists():
            run(suites[name], source, "eager", results, name, options.seconds)
        run(suites[name], source, options.way, results, name, options.seconds)
        n_differ += _print(compare(results, name, options.way))
    if options.page is not None:
        options.page.write_text(page(suites, measured(results, suites)), encoding="utf-8")
    return min(n_differ, 1)


def _print(comparison: Comparison) -> int:
    """How many tests differ, of which each gets a line."""
    print(comparison)
    for name, outcome in comparison.failed.items():
        how = "expected" if name in comparison.expected else "differs"
        print(f"  {how} {name}: {outcome.error}")
    sys.stdout.flush()
    return len(comparison.differs)


if __name__ == "__main__":
    sys.exit(main())
