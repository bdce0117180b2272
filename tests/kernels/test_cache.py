"""Bounded maps with true counts."""

import os
import signal
import threading

import pytest

from lazy_tensor.kernels.cache import Cache, cache_info, clear_all


def test_hits_and_misses_are_counted_under_the_caches_name():
    cache: Cache[str, int] = Cache("test", 4)
    assert cache.get("a") is None
    cache.put("a", 1)
    assert cache.get("a") == 1
    assert cache_info()["test"] == (1, 1, 4, 1)


def test_full_cache_drops_the_least_recent_and_says_so():
    dropped = []
    cache: Cache[str, int] = Cache("test", 2, lambda key, value: dropped.append((key, value)))
    cache.put("a", 1)
    cache.put("b", 2)
    cache.get("a")
    cache.put("c", 3)
    assert dropped == [("b", 2)]
    assert cache.values() == [1, 3]


def test_shrinking_keeps_the_most_recent():
    cache: Cache[int, int] = Cache("test", 4)
    for i in range(4):
        cache.put(i, i)
    cache.resize(2)
    assert cache.values() == [2, 3]
    assert cache.info().maxsize == 2


def test_shrinking_keeps_what_was_used_last():
    cache: Cache[int, int] = Cache("test", 4)
    for i in range(4):
        cache.put(i, i)
    cache.get(0)
    cache.resize(2)
    assert sorted(cache.values()) == [0, 3]


def test_a_look_at_all_values_is_no_use_of_them():
    cache: Cache[int, int] = Cache("test", 2)
    cache.put(0, 0)
    cache.put(1, 1)
    cache.get(0)
    cache.values()
    cache.put(2, 2)
    assert sorted(cache.values()) == [0, 2]


def test_clearing_evicts_nothing():
    evicted = []
    cache: Cache[int, int] = Cache("test", 2, lambda key, value: evicted.append(key))
    cache.put(0, 0)
    cache.clear()
    cache.resize(1)
    assert not evicted


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system can't fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_can_use_a_cache_whose_lock_was_held():
    cache: Cache[int, int] = Cache("", 2)
    held, go_on = threading.Event(), threading.Event()

    def hold():
        with cache._lock:
            held.set()
            go_on.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        cache.put(1, 1)
        os._exit(0)
    go_on.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_clear_all_empties_every_cache():
    cache: Cache[int, int] = Cache("test", 4)
    cache.put(1, 1)
    cache.get(1)
    clear_all()
    assert cache_info()["test"] == (0, 0, 4, 0)
