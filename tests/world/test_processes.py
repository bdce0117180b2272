"""Tensors that go to other processes, whatever starts them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("loaders_program.py")


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_workers_get_what_was_written(method):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), method], env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["done"]
