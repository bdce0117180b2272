"""The image of losses and step times."""

from __future__ import annotations

import pytest

from lazy_tensor.cli import plot
from lazy_tensor.cli.errors import CommandError
from lazy_tensor.cli.race import History


def test_image_is_written(tmp_path):
    history = History(losses=[5.0, 4.0, 3.0], seconds=[2.0, 0.1, 0.1])
    plot.save({"eager": history, "lazy": history}, tmp_path / "out.png", "title")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "message"),
    [("out.txt", "must end in one of"), ("nowhere/out.png", "can't be written")],
)
def test_bad_path_is_a_command_error(tmp_path, name, message):
    with pytest.raises(CommandError, match=message):
        plot.check_path(tmp_path / name)


def test_checking_a_path_leaves_nothing_behind(tmp_path):
    plot.check_path(tmp_path / "out.png")
    assert list(tmp_path.iterdir()) == []
