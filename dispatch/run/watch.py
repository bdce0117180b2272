"""Tells whether a value was written since something was derived from it.

In: a value, pending or computed, and what was derived from it, such as a gathered parameter. Out:
whether any call, recorded or run at once, has written its memory since. If none has, `sharding`
uses the derived tensor again.

The answer must be the same on all ranks, because a collective depends on it. Ranks flush at
different points, so a flush in between must not change the answer: see `before_flush`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch

from lazy_tensor.dispatch.tiering.policy import Policy
from lazy_tensor.dispatch.torch_private import storage_id
from lazy_tensor.dispatch.trie.trace import Node, State, Trace, Value
from lazy_tensor.kernels.cache import Cache


class Watch:
    """The `watch` of a value.

    `kept` was derived from the value, under the name `key`; it is dropped once the value is
    written. `repeats` is a flag of the owner of `kept`: whether keeping it has paid before.

    Two things tell of writes. While the value is in a trace, the writes recorded behind `_state`
    do. When it is computed, `_version` does: its memory's identity and count of writes.
    """

    __slots__ = (
        "__weakref__", "_is_valid", "_n_writes", "_state", "_version", "kept", "key", "repeats",
    )  # fmt: skip

    def __init__(self) -> None:
        self.key: Any = None
        self.kept: Any = None
        self.repeats = False
        self._is_valid = False
        self._n_writes = 0
        self._state: State | None = None  # in the value's trace, None before its first
        self._version: tuple[int, int] | None = None

    def start(self, trace: Trace, value: Value, n_writes: int, key: Any, kept: Any) -> None:
        """Note that `kept` was derived from `value` just now, which autograd saw written `n_writes`
        times."""
        self.key, self.kept, self._is_valid, self._state = key, kept, True, trace.state
        self._n_writes = n_writes
        self._stamp(value)

    def is_current(self, trace: Trace, value: Value, n_writes: int | None = None) -> bool:
        """Whether nothing has written `value` since `start`.

        A caller that has the tensor passes autograd's count of its writes as `n_writes`. That also
        counts ops that run at once, which neither the trace nor the version of the data shows.
        """
        if self._is_valid and (
            n_writes not in (None, self._n_writes)
            or (self._version is not None and self._version != _version_of(value))
            or _is_written_since(trace, self._state, value)
        ):
            self.stop()
        return self._is_valid

    def stop(self) -> None:
        """Drop what was derived: it is out of date."""
        self.kept, self._is_valid = None, False

    def go_on(self, value: Value) -> None:
        """Go on behind a flush: the trace is empty, and the value may have its data now."""
        self._state = None
        self._stamp(value)

    def _stamp(self, value: Value) -> None:
        self._version = _version_of(value)
        if self._version is not None:
            if not _by_storage:
                Policy.see_all_tensors()  # those that ops pass by, too
            _by_storage[self._version[0]] = self


_by_storage: WeakValueDictionary[int, Watch] = WeakValueDictionary()
"""The watch on each storage, by `storage_id`: a write may come through another tensor on it."""


def _version_of(value: Value) -> tuple[int, int] | None:
    data = value.data
    return None if data is None else (storage_id(data), data._version)


def _is_written_since(trace: Trace, since: State | None, value: Value) -> bool:
    if value.slot is not None and value.slot.trace is trace:
        root = trace.root_of(value.slot.index)
    elif value.data is not None and storage_id(value.data) in trace.storages:
        # the value itself is no leaf of the trace, but another tensor on its storage is
        root = trace.storages[storage_id(value.data)]
    else:
        return False
    places, writes = _writes(trace)
    # a state that isn't on the path is from before the last flush: any write is later
    return writes.get(root, -1) > places.get(id(since), -1)


def is_on() -> bool:
    """Whether any value is watched."""
    return bool(_by_storage)


def before_flush(trace: Trace) -> list[Value]:
    """Drop what the trace's writes make out of date, while the trace still tells of them.

    Returns the values that are watched on, for `after_flush`.
    """
    if not _by_storage:
        return []
    _, writes = _writes(trace)
    left: list[Value] = []
    seen: set[Watch] = set()
    for value in (*trace.leaf_values, *trace.values):
        watch = value.watch
        if watch is not None and value.slot is not None:
            seen.add(watch)
            if watch.is_current(trace, value):
                left.append(value)
    for storage, slot in trace.storages.items():
        watch = _by_storage.get(storage)
        if watch is not None and watch not in seen and slot in writes:
            watch.stop()  # written through another tensor: the value itself isn't in this trace
    return left


def _writes(trace: Trace) -> tuple[dict[int, int], dict[int, int]]:
    """The place of each state on the trace's path, by `id`; and the place of the last write to each
    memory, by the slot that owns it.

    Kept for the state where the trace stands: many values are asked about there.
    """
    known = _known.get(id(trace.state))
    if known is not None and known[0] is trace.state:
        return known[1:]
    places, writes = {}, {}
    for place, state in enumerate(trace.state.path()):
        places[id(state)] = place
        if isinstance(state.step, Node):
            writes.update(dict.fromkeys(map(trace.root_of, state.step.writes), place))
    _known.put(id(trace.state), (trace.state, places, writes))
    return places, writes


# by `id` of the state, which is in the entry, too: an id may come again once its state is gone
_known: Cache[int, tuple[State, dict[int, int], dict[int, int]]] = Cache("writes", 16)


def note_writes(tensors: Iterable[torch.Tensor | None]) -> None:
    """Drop what was derived from the memory of `tensors`, which a call outside any trace wrote."""
    if not _by_storage:
        return
    for tensor in tensors:
        value = getattr(tensor, "_value", None)  # of a lazy tensor
        data = tensor if value is None else value.data
        if value is not None and value.watch is not None:
            value.watch.stop()
        if data is not None and (watch := _by_storage.get(storage_id(data))) is not None:
            watch.stop()  # of a view, or of another tensor on the same memory


def after_flush(values: list[Value], *, failed: bool) -> None:
    """Go on watching the values that `before_flush` returned, unless the flush has failed."""
    for value in values:
        if failed:
            value.watch.stop()
        else:
            value.watch.go_on(value)
