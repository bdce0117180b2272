"""`python -m lazy_tensor bench`: runs the benchmarks of a checkout by pytest.

In: names, as `record` for `benches/bench_record.py`. Out: pytest's exit status; the benchmarks
write `benches/results`. Peers that aren't installed are left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from lazy_tensor.cli.errors import CommandError

BENCHES = Path(__file__).resolve().parents[2] / "benches"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--quick", action="store_true", help="run each once, for what it counts; time nothing")
    add("names", nargs="*", metavar="NAME", help="benchmarks to run (default: all): record, depth")


def run(args: argparse.Namespace) -> int:
    if not BENCHES.is_dir():
        raise CommandError("the benchmarks are part of a checkout, not of an installed package")
    files = [BENCHES / f"bench_{name}.py" for name in args.names] or [BENCHES]
    for file in files:
        if not file.exists():
            known = sorted(path.stem.removeprefix("bench_") for path in BENCHES.glob("bench_*.py"))
            raise CommandError(f"there is no {file.name}; there are {', '.join(known)}")
    options = ["--quick"] if args.quick else []
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, files)],
        cwd=BENCHES.parent,
        check=False,
    ).returncode
