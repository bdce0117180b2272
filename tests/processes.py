"""Programs that tests run in processes of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor


def run_python(*arguments: object, **environment: str) -> str:
    """What Python prints, run with these arguments and variables; it must end with status 0."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={"PYTHONFAULTHANDLER": "1", **os.environ, **environment},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stderr}status {done.returncode}, after {done.stdout!r}"
    return done.stdout


def run_on_processes(n: int, program: object, *arguments: object, **environment: str) -> str:
    """The same of a program on `n` processes, which find each other as torch's launcher has it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(n),
        "OMP_NUM_THREADS": "1", **environment,
    }  # fmt: skip
    ranks = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(n)]
    with ThreadPoolExecutor(n) as pool:
        shown = pool.map(lambda rank: run_python(program, *arguments, **rank), ranks)
        return "".join(shown)
