"""What the demo makes of a turn's times and values."""

from __future__ import annotations

import numpy as np
import pytest

from lazy_tensor.examples.race.turn import Turn, difference


def values(**of):
    return Turn(values={int(n[1:]): np.array(value, np.float32) for n, value in of.items()})


def test_settled_step_is_the_median_of_the_last_fifth():
    turn = Turn(ends_s=[5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 12.5, 12.75])
    assert turn.settled_s() == pytest.approx(0.375)
    assert Turn(ends_s=[2.0]).settled_s() == 2.0


def test_steps_are_counted_that_ended_by_a_time():
    turn = Turn(ends_s=[1.0, 2.0, 3.0])
    assert [turn.steps_by(s) for s in (0.5, 2.0, 9.0)] == [0, 2, 3]


def test_difference_is_the_largest_of_the_steps_that_all_did():
    first, second = values(_1=1.0, _2=2.0, _4=4.0), values(_1=1.5, _2=2.0)
    assert difference(first, second) == 0.5
    assert difference(first, Turn()) is None
