"""Real processes over gloo: what threads of one process can't show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes import run_on_processes

HERE = Path(__file__).parent
EXAMPLE = HERE.parent.parent / "examples" / "train_sharded.py"


def on_processes(n, program, *arguments):
    """What the program prints on so many processes, where nothing is compiled."""
    return run_on_processes(n, program, *arguments, LAZY_TENSOR_COMPILE="off")


def test_checkpoints_hold_the_tensors_for_any_number_of_processes(tmp_path):
    program = HERE / "checkpoint_program.py"
    shown = [on_processes(n, program, tmp_path / str(n)) for n in (2, 1)]
    numbers = [[float(x) for x in re.findall(r"\d+\.\d+", text)] for text in shown]
    assert len(numbers[0]) == 2
    for two, one in zip(*numbers, strict=True):
        assert abs(two - one) < 1e-5


def test_a_checkpoint_in_the_background_holds_what_was_there(tmp_path):
    shown = on_processes(2, HERE / "async_checkpoint_program.py", tmp_path)
    assert shown.count("done") == 2


@pytest.mark.slow
def test_the_example_goes_on_with_another_number_of_processes(tmp_path):
    def losses(n, *arguments):
        shown = on_processes(n, EXAMPLE, *arguments)
        return [float(x) for x in re.findall(r"step \d+: loss (\d+\.\d+)", shown)]

    common = ("--every", 3, "--checkpoint", tmp_path / "first")
    first = losses(4, "--tensor-parallel", 2, "--steps", 3, *common)
    rest = losses(1, "--steps", 5, *common)
    alone = losses(1, "--steps", 5, "--checkpoint", tmp_path / "second")
    assert len(first) == 3
    assert len(rest) == 2
    for found, expected in zip(first + rest, alone, strict=True):
        assert abs(found - expected) < 2e-3


def test_collectives_of_ddp_and_of_ours_keep_their_order():
    assert on_processes(2, HERE / "beside_ddp_program.py").count("done") == 2


@pytest.mark.parametrize("what", ["in_use", "lists", "after_one_block"])
def test_collectives_outside_of_blocks_are_those_of_eager(what):
    assert on_processes(2, HERE / "collectives_program.py", what).count("done") == 2


def test_collectives_are_under_way_while_a_rank_computes():
    shown = on_processes(2, HERE / "overlap_program.py")
    for kind, of in (("all_gather", 12), ("all_reduce", 6)):
        found = re.findall(rf"{kind}: (\d+) of {of} beside", shown)
        assert max(map(int, found)) >= 1, shown  # most, unless the machine is busy


@pytest.mark.parametrize("how", ["dies", pytest.param("elsewhere", marks=pytest.mark.slow)])
def test_a_missing_rank_is_named_with_the_op_and_the_line(how):
    shown = on_processes(2, HERE / "missing_rank_program.py", how)
    assert "_c10d_functional" in shown
    assert "missing_rank_program.py:26" in shown
    assert "by rank 1 within" in shown
    (seconds,) = re.findall(r"after (\d+) s", shown)
    assert int(seconds) < 15  # the group's 5 s, and once only
