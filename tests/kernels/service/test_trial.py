"""The choice between a kernel and replay, made on real calls."""

import pytest

from lazy_tensor.kernels.service import trial
from lazy_tensor.kernels.service.trial import N_ROUNDS, Trial


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(trial, "perf_counter", clock)
    return clock


def taking(clock, seconds, calls, name):
    durations = iter(seconds)

    def run(tensors, scalars):
        calls.append(name)
        clock.now += next(durations)
        return ()

    return run


def decided(clock, kernel_s, aten_s):
    calls: list[str] = []
    verdicts: list[tuple[float, ...]] = []
    kernel = taking(clock, kernel_s, calls, "kernel")
    aten = taking(clock, aten_s, calls, "aten")
    run = Trial(kernel, aten, lambda *times: verdicts.append(times))
    while not verdicts:
        run([], [])
    return calls, verdicts


def test_candidates_run_in_turn_once_a_call(clock):
    calls, _ = decided(clock, [1] * 6, [2] * 6)
    assert calls == ["kernel", "aten"] * (N_ROUNDS + 1)


def test_medians_decide_and_the_first_call_of_each_does_not_count(clock):
    _, verdicts = decided(clock, [100, 1, 1, 1, 1, 9], [200, 3, 3, 3, 3, 0])
    assert verdicts == [(1, 3)]
