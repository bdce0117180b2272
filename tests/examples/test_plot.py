"""The demo's image."""

from __future__ import annotations

import numpy as np
import pytest

from lazy_tensor.cli.errors import CommandError
from lazy_tensor.examples.race import plot
from lazy_tensor.examples.race.turn import Turn

PATTERN = np.zeros((8, 8), dtype=np.float32)


@pytest.mark.parametrize("scenes", [["gray_scott"], ["gpt"], ["gray_scott", "monte_carlo", "gpt"]])
def test_image_is_written(tmp_path, scenes):
    turn = Turn(ends_s=[2.0, 2.1, 2.2], last=PATTERN)
    plot.save({scene: {"eager": turn, "lazy": turn} for scene in scenes}, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_image_of_a_run_cut_short(tmp_path):
    turns = {"eager": Turn(ends_s=[2.0]), "lazy": Turn()}
    plot.save({"gray_scott": turns, "gpt": {"eager": Turn()}}, tmp_path / "out.png")
    assert (tmp_path / "out.png").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [("out.txt", "must end in one of"), ("nowhere/out.png", "can't be written")],
)
def test_bad_path_is_a_command_error(tmp_path, name, message):
    with pytest.raises(CommandError, match=message):
        plot.check_path(tmp_path / name)


def test_checking_a_path_leaves_nothing_behind(tmp_path):
    plot.check_path(tmp_path / "out.png")
    assert not list(tmp_path.iterdir())
