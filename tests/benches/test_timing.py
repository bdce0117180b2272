"""The benchmarks' clock, with functions that only count."""

from __future__ import annotations

import timing


def test_warmup_rounds_are_run_but_not_reported():
    calls = []
    timings = timing.interleaved({"a": lambda: calls.append("a")}, rounds=3, warmup=2)
    assert len(calls) == 5
    assert len(timings.seconds["a"]) == 3


def test_order_alternates_between_rounds():
    calls = []
    functions = {name: (lambda name=name: calls.append(name)) for name in ("a", "b")}
    timing.interleaved(functions, rounds=2, warmup=0)
    assert calls == ["a", "b", "b", "a"]


def test_device_is_synchronized_before_each_clock_reading():
    calls = []
    timing.interleaved(
        {"a": lambda: calls.append("a")}, 1, 0, synchronize=lambda: calls.append("sync")
    )
    assert calls == ["sync", "a", "sync"]


def test_ratio_is_the_median_of_the_rounds_ratios():
    timings = timing.Timings({"a": [2.0, 9.0, 4.0], "b": [1.0, 3.0, 4.0]})
    assert timings.ratio("a", "b") == 2.0
