"""Bounded LRU maps that count their hits and misses, registered by name.

In: a name and a size. Out: a `Cache`, an LRU of `cachetools` with a lock and counts. All layers use
it. `cache_info()` and `clear_all()` serve the public functions of the same purpose.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable
from functools import _CacheInfo as CacheInfo
from typing import Generic, TypeVar

from cachetools import Cache as Map, LRUCache

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

# caches with a name, for `cache_info`; a new cache of a name replaces the one before
_registry: dict[str, Cache] = {}  # type: ignore[type-arg]
# all caches, whose locks a forked child renews
_caches: weakref.WeakSet[Cache] = weakref.WeakSet()  # type: ignore[type-arg]


class _EvictingLRU(LRUCache):  # type: ignore[type-arg]
    """An LRU that calls `on_evict(key, value)` for each entry that it evicts."""

    on_evict: Callable[[object, object], None] | None = None

    # cachetools evicts by `popitem`
    def popitem(self) -> tuple[object, object]:
        key, value = super().popitem()
        if self.on_evict is not None:
            self.on_evict(key, value)
        return key, value


class Cache(Generic[K, V]):
    """A named LRU map from `K` to `V`, safe under threads, counted in `cache_info()`.

    `maxsize` bounds the sum of `weigh(value)`, by default the number of entries. A cache with an
    empty name is left out of `cache_info()` and `clear_all()`: there are many of its kind.

    `on_evict(key, value)` is called for entries that leave because the map is full. It runs with
    the cache's lock held, so it must not call back into this cache.
    """

    def __init__(
        self,
        name: str,
        maxsize: int,
        on_evict: Callable[[K, V], None] | None = None,
        weigh: Callable[[V], float] | None = None,
    ) -> None:
        self.name = name
        self.hits = 0
        self.misses = 0
        self._on_evict = on_evict
        self._weigh = weigh
        self._lock = threading.RLock()
        self._map = self._new_map(maxsize)
        _caches.add(self)
        if name:
            _registry[name] = self

    def _new_map(self, maxsize: int) -> _EvictingLRU:
        entries = _EvictingLRU(maxsize, self._weigh)
        entries.on_evict = self._on_evict  # type: ignore[assignment]
        return entries

    def get(self, key: K) -> V | None:
        """The value under `key`, which becomes the most recent entry; None if there is none.

        Counts a hit or a miss.
        """
        with self._lock:
            try:
                value: V = self._map[key]
            except KeyError:
                self.misses += 1
                return None
            self.hits += 1
            return value

    def put(self, key: K, value: V) -> None:
        with self._lock:
            self._map[key] = value

    def values(self) -> list[V]:
        with self._lock:
            # not `self._map.values()`, which counts as a use of each
            return [Map.__getitem__(self._map, key) for key in self._map]

    def resize(self, maxsize: int) -> None:
        """Change the bound; if entries must go, the most recent stay."""
        with self._lock:
            if maxsize == self._map.maxsize:
                return
            old, self._map = self._map, self._new_map(maxsize)
            old.on_evict = None
            while old:
                key, value = old.popitem()  # the least recent first
                self._map[key] = value

    def clear(self) -> None:
        with self._lock:
            self._map = self._new_map(int(self._map.maxsize))
            self.hits = self.misses = 0

    def info(self) -> CacheInfo:
        with self._lock:
            return CacheInfo(self.hits, self.misses, int(self._map.maxsize), len(self._map))


def _renew_locks() -> None:
    """Give each cache a new lock in a forked child.

    Another thread of the parent may hold a lock at the fork. That thread does not exist in the
    child, so nobody would release it there.
    """
    for cache in _caches:
        cache._lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)


def cache_info() -> dict[str, CacheInfo]:
    """`{name: CacheInfo(hits, misses, maxsize, currsize)}` for every cache in the process."""
    return {name: cache.info() for name, cache in sorted(_registry.items())}


def clear_all() -> None:
    """Empty every named cache, zero its counts, and call all functions of `on_clear`."""
    for cache in list(_registry.values()):
        cache.clear()
    for forget in _others:
        forget()


_others: list[Callable[[], object]] = []


def on_clear(forget: Callable[[], object]) -> None:
    """Have `clear_all` call `forget()`, for state that a module keeps outside a `Cache`."""
    _others.append(forget)
