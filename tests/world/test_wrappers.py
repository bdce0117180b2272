"""Data parallelism on two gloo processes: bit-equal, built in the mode or before it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("wrappers_program.py")


@pytest.mark.parametrize("wrapper", ["ddp", "ddp_views", "zero", "fsdp1", "fsdp2", "fsdp2_tied"])
def test_data_parallel_training_is_bit_equal(wrapper):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               str(PROGRAM), wrapper]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
