"""Data parallelism on two gloo processes: bit-equal, built in the mode or before it."""

from pathlib import Path

import pytest

from tests.processes import run_on_processes

PROGRAM = Path(__file__).with_name("wrappers_program.py")


@pytest.mark.parametrize("wrapper", ["ddp", "ddp_views", "zero", "fsdp1", "fsdp2", "fsdp2_tied"])
def test_data_parallel_training_is_bit_equal(wrapper):
    assert run_on_processes(2, PROGRAM, wrapper).count("done") == 2
