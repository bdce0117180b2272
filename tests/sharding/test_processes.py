"""Real processes over gloo: what threads of one process can't show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "checkpoint_program.py"


def on_processes(n, *arguments):
    """What the program prints, run by torch's launcher on so many processes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LAZY_TENSOR_COMPILE": "off"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc-per-node={n}", str(PROGRAM), *arguments]  # fmt: skip
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_checkpoints_hold_the_tensors_for_any_number_of_processes(tmp_path):
    shown = [on_processes(n, str(tmp_path / str(n))) for n in (2, 1)]
    numbers = [[float(x) for x in re.findall(r"\d+\.\d+", text)] for text in shown]
    assert len(numbers[0]) == 2
    for two, one in zip(*numbers, strict=True):
        assert abs(two - one) < 1e-5
