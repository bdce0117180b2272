"""A side measured in a process of its own."""

from __future__ import annotations

import pytest

from lazy_tensor.cli.probe import probe
from lazy_tensor.cli.training import Recipe

RECIPE = Recipe(size="tiny", batch=2, steps=2)


def test_probe_reports_every_step_and_a_peak():
    result = probe("eager", RECIPE, {})
    assert len(result.losses) == len(result.seconds) == 2
    assert result.peak_bytes > 0


def test_memory_of_the_parent_is_not_counted():
    ballast = bytearray(b"x") * (1 << 30)
    assert probe("eager", RECIPE, {}).peak_bytes < len(ballast) // 2


def test_failing_child_raises_with_its_last_words():
    with pytest.raises(RuntimeError, match=r"probe of side 'nobody'(.|\n)*KeyError: 'nobody'"):
        probe("nobody", RECIPE, {})
