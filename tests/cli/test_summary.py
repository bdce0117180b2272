"""Statistics, comparison and the closing table, from made-up histories."""

from __future__ import annotations

import math

import pytest

from lazy_tensor.cli import summary
from lazy_tensor.cli.probe import Probe
from lazy_tensor.cli.race import History, relative_difference
from lazy_tensor.cli.timings import Spread, spread

EAGER = History(losses=[5.0, 4.0], seconds=[2.0, 0.1])
LAZY = History(losses=[5.0, 4.0], seconds=[3.0, 0.05])
OTHER = History(losses=[5.0, 4.4], seconds=[3.0, 0.05])


def test_spread_is_median_and_outer_deciles():
    assert spread([float(n) for n in range(11)]) == Spread(5.0, 1.0, 9.0)


def test_spread_of_one_timing_is_that_timing():
    assert spread([2.0]) == Spread(2.0, 2.0, 2.0)


def test_warm_times_are_those_of_the_last_half():
    assert EAGER.warm().median_s == 0.1


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(1.0, 1.0, 0.0), (4.0, 5.0, 0.2), (math.nan, math.nan, 0.0), (1.0, math.nan, math.inf)],
)
def test_relative_difference(a, b, expected):
    assert relative_difference(a, b) == pytest.approx(expected)


def test_rows_compare_every_side_to_the_first():
    probes = {"eager": Probe([], [], 100 << 20), "lazy": Probe([], [], 80 << 20)}
    rows = dict((row[0], row[1:]) for row in summary.rows(
        {"eager": EAGER, "lazy": LAZY, "other": OTHER}, probes, tokens_per_step=100
    ))  # fmt: skip
    assert rows["losses against eager"] == ("", "bit-equal", "within 9.1e-02")
    assert rows["first step"] == ("2.00 s", "3.00 s  1.50×", "3.00 s  1.50×")
    assert rows["median warm step"] == ("100.0 ms", "50.0 ms  0.50×", "50.0 ms  0.50×")
    assert rows["tokens/s, warm"] == ("1,000", "2,000", "2,000")
    assert rows["peak memory"] == ("100 MiB", "80 MiB  0.80×", "–")


def test_rows_have_one_cell_a_side_without_probes():
    rows = summary.rows({"eager": EAGER, "lazy": LAZY}, {}, tokens_per_step=100)
    assert {len(row) for row in rows} == {3}


def test_losses_that_became_nan_on_one_side_are_called_so():
    broken = History(losses=[5.0, math.nan], seconds=[1.0, 1.0])
    assert summary.equality(EAGER, broken) == "not finite"
