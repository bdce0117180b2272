"""Data parallelism on two gloo processes: bit-equal, built in the mode or before it."""

from pathlib import Path

from tests.processes import run_on_processes

PROGRAM = Path(__file__).with_name("wrappers_program.py")


def test_data_parallel_training_is_bit_equal():
    shown = run_on_processes(2, PROGRAM)
    ways = "ddp ddp_views ddp_hooked ddp_in_threads zero fsdp1 fsdp2 fsdp2_tied ddp_replayed"
    for wrapper in ways.split():
        assert shown.count(f"{wrapper} is done") == 2
