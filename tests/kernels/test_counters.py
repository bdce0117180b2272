"""Counts survive threads and reset to zero."""

from concurrent.futures import ThreadPoolExecutor

from lazy_tensor.kernels.counters import Counters


def test_counts_from_many_threads_add_up():
    counters = Counters()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: counters.add("compiled"), range(1000)))
    assert counters.snapshot()["compiled"] == 1000


def test_reset_zeroes_everything():
    counters = Counters()
    counters.add("compile_s", 1.5)
    counters.reset()
    assert set(counters.snapshot().values()) == {0}
