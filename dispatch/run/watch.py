"""Whether a value was written since something was derived from it, which may serve again if not.

In: a value, pending or computed, and what was derived from it. Out: whether a call, recorded or run
at once, has written its memory since. Flushes in between, which may differ between ranks, change no
answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch

from lazy_tensor.dispatch.torch_private import storage_id
from lazy_tensor.dispatch.trie.trace import Node, State, Trace, Value
from lazy_tensor.kernels.cache import Cache


class Watch:
    """What a value's `watch` is. `kept` was derived from the value, under the name `key`; it is
    dropped once the value is written. `repeats` is for the owner of `kept`."""

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
        """Note that `kept` was derived from `value` just now, after so many writes."""
        self.key, self.kept, self._is_valid, self._state = key, kept, True, trace.state
        self._n_writes = n_writes
        self._stamp(value)

    def is_current(self, trace: Trace, value: Value, n_writes: int | None = None) -> bool:
        """Whether nothing has written `value` since.

        `n_writes` are those that autograd has counted, of a caller that has the tensor: it counts
        also what runs at once, which no trace and no memory's own version tells of.
        """
        if self._is_valid and (
            n_writes not in (None, self._n_writes)
            or (self._version is not None and self._version != _version_of(value))
            or _is_written_since(trace, self._state, value)
        ):
            self.stop()
        return self._is_valid

    def stop(self) -> None:
        """What was derived is out of date."""
        self.kept, self._is_valid = None, False

    def go_on(self, value: Value) -> None:
        """Start from an empty trace, all that was recorded being done."""
        self._state = None
        self._stamp(value)

    def _stamp(self, value: Value) -> None:
        self._version = _version_of(value)
        if self._version is not None:
            _by_storage[self._version[0]] = self


_by_storage: WeakValueDictionary[int, Watch] = WeakValueDictionary()


def _version_of(value: Value) -> tuple[int, int] | None:
    data = value.data
    return None if data is None else (storage_id(data), data._version)


def _is_written_since(trace: Trace, since: State | None, value: Value) -> bool:
    if value.slot is not None and value.slot.trace is trace:
        root = trace.root_of(value.slot.index)
    elif value.data is not None and storage_id(value.data) in trace.storages:
        root = trace.storages[storage_id(value.data)]  # a view of it is there
    else:
        return False
    places, writes = _writes(trace)
    return writes.get(root, -1) > places.get(id(since), -1)


def before_flush(trace: Trace) -> list[Value]:
    """Drop what the trace's writes make out of date. Values that are watched still, for
    `after_flush`."""
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
            watch.stop()  # by a view: the value itself isn't in this trace
    return left


def _writes(trace: Trace) -> tuple[dict[int, int], dict[int, int]]:
    """The place of each state on the trace's path, by `id`, and of the last write to each memory,
    by the slot that owns it."""
    known = _known.get(id(trace.state))
    if known is not None and known[0] is trace.state:
        return known[1:]
    path: list[State] = []
    state: State | None = trace.state
    while state is not None:
        path.append(state)
        state = state.parent
    places, writes = {}, {}
    for place, state in enumerate(reversed(path)):
        places[id(state)] = place
        if isinstance(state.step, Node):
            writes.update(dict.fromkeys(map(trace.root_of, state.step.writes), place))
    _known.put(id(trace.state), (trace.state, places, writes))
    return places, writes


_known: Cache[int, tuple[State, dict[int, int], dict[int, int]]] = Cache("writes", 16)


def note_writes(tensors: Iterable[torch.Tensor | None]) -> None:
    """Drop what was derived from the memory of tensors that were written by what no trace holds."""
    if not _by_storage:
        return
    for tensor in tensors:
        value = getattr(tensor, "_value", None)
        data = tensor if value is None else value.data
        if value is not None and value.watch is not None:
            value.watch.stop()
        if data is not None and (watch := _by_storage.get(storage_id(data))) is not None:
            watch.stop()  # a view of it was written, or another tensor on the same memory


def after_flush(values: list[Value], *, failed: bool) -> None:
    """Go on watching values whose trace was run, unless it has failed."""
    for value in values:
        if failed:
            value.watch.stop()
        else:
            value.watch.go_on(value)
