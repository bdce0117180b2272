"""Pictures of results: every side of every group is in them."""

import matplotlib.image
import plots
import pytest

TABLE = {"1": {"eager": 1.0, "lazy": 0.5}, "16": {"eager": 9.0, "lazy": 4.0, "thunder": 8.0}}


@pytest.mark.parametrize("kind", ["bars", "lines"])
def test_pictures_are_drawn(kind, tmp_path):
    path = tmp_path / "plot.png"
    panels = {"time, ms": TABLE, "first step, s": TABLE}
    if kind == "bars":
        plots.bars(path, "A title", panels)
    else:
        plots.lines(path, "A title", "layers", panels)
    height, width, _ = matplotlib.image.imread(path).shape
    assert width > height > 100


def test_a_picture_of_steps_over_time_is_drawn(tmp_path):
    path = tmp_path / "plot.png"
    panels = {"a": {"eager": [0.1] * 1000, "wrap": [0.2, 0.1]}, "b": {"eager": [0.1]}}
    plots.over_time(path, "A title", panels)
    height, width, _ = matplotlib.image.imread(path).shape
    assert width > height > 100
