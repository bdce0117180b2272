"""Programs that tests run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys


def run_python(*arguments: object, **environment: str) -> str:
    """What Python prints, run with these arguments and variables; it must end with status 0."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env={**os.environ, **environment},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_on_processes(n: int, program: object, *arguments: object, **environment: str) -> str:
    """The same of a program on `n` processes, which torch's launcher starts."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}")
    return run_python(*launcher, program, *arguments, OMP_NUM_THREADS="1", **environment)
