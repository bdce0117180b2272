"""Bounded maps with true counts."""

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


def test_clear_all_empties_every_cache():
    cache: Cache[int, int] = Cache("test", 4)
    cache.put(1, 1)
    cache.get(1)
    clear_all()
    assert cache_info()["test"] == (0, 0, 4, 0)
