"""Objects that hold others, read again to see whether what they hold has changed.

In: an object, with the keys under which it holds values. Out: a `WatchedObject`, which has read
the values by the reader for its kind; and a `Watch` on many, which C++ compares as far as it can.
`object_graph` finds the objects, and `captured_call` watches them.
"""

from __future__ import annotations

import collections
import enum
import itertools
import operator
import re
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from lazy_tensor.dispatch.run import hits

ATOMS: tuple[type, ...] = (
    int, float, complex, bool, str, bytes, type(None), type(...), range, slice,
    enum.Enum, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
"""Types whose instances never change, and can't be told apart if they are equal (`is_same` has the
exceptions)."""


class Marker(enum.Enum):
    """What a holding may have at a place instead of an object."""

    MISSING = "no such attribute"
    OPEN = "any tensor"
    NUMBER = "any float"


MISSING, OPEN, NUMBER = Marker.MISSING, Marker.OPEN, Marker.NUMBER


class Unreachable(Exception):
    """Says what the function can see that can't be watched."""


def is_atom(value: Any) -> bool:
    """Whether `value` is of a type in `ATOMS`."""
    return isinstance(value, ATOMS)


def is_number(value: Any) -> bool:
    """Whether a value is a number, or a tuple of numbers."""
    if type(value) is tuple:
        return all(map(is_number, value))
    return type(value) in (int, float, complex)


def is_same(a: Any, b: Any) -> bool:
    """Whether two values can't be told apart: the same object, or equal ones that can't change.

    `a` may be OPEN or NUMBER, which any tensor, or any float, is the same as.
    """
    if a is b:
        return True
    if a is OPEN:
        return isinstance(b, torch.Tensor)
    if a is NUMBER:
        return type(b) is float
    if type(a) is not type(b):
        return False
    if type(a) in (float, complex, range):
        return repr(a) == repr(b)  # 0.0 and -0.0 differ, nan is nan; equal ranges may differ
    if is_atom(a):
        return bool(a == b)
    if type(a) is tuple:
        return len(a) == len(b) and all(map(is_same, a, b))
    return type(a) is types.MethodType and a.__self__ is b.__self__ and a.__func__ is b.__func__


class Place(NamedTuple):
    """How C++ finds a tensor when a call begins: `kind` says what the other fields mean.

    "object": `holder` itself. "argument": the argument `number`. "open": the tensor at open place
    `number`. "item": dict `holder` under `key`. "element": list `holder` at `number`. "cell": what
    the cell `holder` contains. "gradient": that of `holder`, or of argument `number` if that is not
    negative. "ask": what `holder` returns, called with the tensors among the arguments.
    """

    kind: str
    holder: Any = None
    key: Any = None
    number: int = -1


class WatchedObject:
    """One object that holds others: its keys, and the values there when they were read.

    `read` reads the values, and `write` sets one, if that is possible. Of an object's attributes
    only those count whose names are `among` the names in the code, or in `always`. If `among` is
    None, all count. `size` is how many attributes it had, -1 if later ones don't matter.
    """

    __slots__ = ("always", "among", "holder", "keys", "label", "read", "size", "values", "write")

    def __init__(
        self,
        label: str,
        holder: Any,
        keys: tuple[Any, ...],
        read: Callable[[Any, tuple[Any, ...]], tuple[Any, ...] | None],
        write: Callable[[Any, Any, Any], None] | None,
    ) -> None:
        self.among: frozenset[str] | None = None
        self.always: frozenset[str] = frozenset()
        self.size = len(vars(holder)) if read is read_autograd_fields else -1
        self.label = label
        self.holder = holder
        self.keys = keys
        self.read = read
        self.write = write
        values = read(holder, keys)
        assert values is not None, "its keys were taken from it"
        self.values = values

    def label_of(self, i: int) -> str:
        """Where its `i`-th value lies, as a program would write it."""
        if self.read is read_cell or self.read in OF_ITSELF:
            return self.label
        key = self.keys[i]
        if self.read is read_items or self.read is read_elements:
            return f"{self.label}[{repr(key) if is_atom(key) else f'<{i}>'}]"
        return f"{self.label}.{key}" if self.label else str(key)

    def spoken(self, i: int | None = None) -> str:
        """The label, or that of its `i`-th value, for messages: `model.weight` in place of
        `model._parameters['weight']`."""
        label = self.label if i is None else self.label_of(i)
        short: str = re.sub(r"\._(?:modules|parameters|buffers)\['(.*?)'\]", r".\1", label)
        return f"`{short}`"

    def change(self) -> str | None:
        """The first place whose value has changed; None if there is none."""
        # a new attribute is a change only if the code mentions its name
        attributes = vars(self.holder) if self.is_of_tensor else self.holder
        if self.size >= 0 and len(attributes) != self.size:
            among, always = self.among, self.always
            counted = {k for k in attributes if among is None or k in among or k in always}
            # a tensor's names are among its values
            if counted != set(self.keys) and not self.is_of_tensor:
                return self.spoken()
            self.size = len(attributes)
        now = self.read(self.holder, self.keys)
        if now is None or len(now) != len(self.values):
            return self.spoken()
        for i, (one, other) in enumerate(zip(self.values, now, strict=True)):
            if one is not other and not is_same(one, other):
                return self.spoken(i)
        # keep the objects that lie there now, if they are equal: C++ compares by identity
        self.values = tuple(
            one if type(one) is Marker else other
            for one, other in zip(self.values, now, strict=True)
        )
        return None

    def get(self, i: int) -> Any:
        """What lies at its `i`-th place now. KeyError or the like if nothing does."""
        key = self.keys[i]
        if self.read is read_cell:
            return self.holder.cell_contents
        return (
            getattr(self.holder, key)
            if self.read in (read_slots, read_autograd_fields)
            else self.holder[key]
        )

    def way_to(self, i: int) -> Place | None:
        """How C++ finds what lies at its `i`-th place; None if only Python can."""
        if self.read is read_cell:
            return Place("cell", self.holder)
        if type(self.holder) is list:
            return Place("element", self.holder, number=self.keys[i])
        if type(self.holder) in _DICTS:
            return Place("item", self.holder, self.keys[i])
        return None

    def expect(self, i: int, value: Any) -> None:
        """Expect `value` at its `i`-th place from now on: a marker, say."""
        self.values = (*self.values[:i], value, *self.values[i + 1 :])

    @property
    def is_of_tensor(self) -> bool:
        """Whether the holder is a tensor, and its first value the gradient."""
        return self.read is read_autograd_fields


_DICTS = (dict, collections.defaultdict, collections.OrderedDict)


# A function for each kind of holder. It reads the values under the keys that the holder had, and
# gives None if it has other keys now.
def read_items(holder: Any, keys: tuple[Any, ...]) -> tuple[Any, ...] | None:
    now = keys_of(holder)
    if len(now) != len(keys) or not all(map(_is, now, keys)):
        return None
    return tuple([dict.__getitem__(holder, key) for key in now])


def keys_of(holder: Any) -> tuple[Any, ...]:
    """A dict's keys, whatever its class overrides; an `OrderedDict` keeps its order to itself."""
    is_ordered = isinstance(holder, collections.OrderedDict)
    return tuple(collections.OrderedDict.__iter__(holder) if is_ordered else dict.__iter__(holder))


def _is(a: Any, b: Any) -> bool:
    return a is b or (is_atom(a) and is_same(a, b))


def read_attributes(holder: Any, keys: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([holder.get(key, MISSING) for key in keys])


def read_slots(holder: Any, keys: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([getattr(holder, key, MISSING) for key in keys])


def autograd_fields_of(tensor: Any) -> tuple[Any, ...]:
    """The values of `AUTOGRAD_FIELDS` of a tensor.

    Unreachable if autograd raises, as for one of several views whose base was written.
    """
    # only leaves are asked for a gradient: torch warns about others
    hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    try:
        is_leaf = tensor.is_leaf
    except RuntimeError as error:
        raise Unreachable(f"a view is there that autograd refuses: {error}") from None
    names = tuple(own_attributes(vars(tensor)))
    return (tensor.grad if is_leaf else None, tensor.requires_grad, *hooks, names)


def read_autograd_fields(holder: Any, _: tuple[Any, ...]) -> tuple[Any, ...]:
    return autograd_fields_of(holder)


def read_function(holder: Any, _: tuple[Any, ...]) -> tuple[Any, ...]:
    return (holder.__code__, holder.__defaults__, holder.__kwdefaults__)


def read_elements(holder: Any, _: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(holder)


def read_set(holder: Any, _: tuple[Any, ...]) -> tuple[Any, ...]:
    return (len(holder), *holder)


def read_cell(holder: Any, _: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        return (holder.cell_contents,)
    except ValueError:
        return (MISSING,)


def read_array(holder: Any, _: tuple[Any, ...]) -> tuple[Any, ...]:
    return (holder.shape, str(holder.dtype), holder.tobytes())


def read_bytes(holder: Any, _: tuple[Any, ...]) -> tuple[Any, ...]:
    return (bytes(holder),)


def read_context(holder: Any, _: tuple[Any, ...]) -> tuple[Any, ...]:
    return (holder.get(MISSING),)


def read_random(holder: Any, _: tuple[Any, ...]) -> tuple[Any, ...]:
    """The state of Python's or numpy's random generators."""
    bits = getattr(holder, "bit_generator", None)
    if bits is not None:
        return (repr(bits.state),)
    ask = getattr(holder, "getstate", None) or holder.get_state
    return (repr(ask()),)


def read_iterator(holder: Any, _: tuple[Any, ...]) -> tuple[Any, ...]:
    """How far an iterator of Python's own has come."""
    return (repr(holder),) if type(holder) is itertools.count else (operator.length_hint(holder),)


OF_ITSELF = frozenset({read_array, read_set, read_random, read_iterator, read_bytes, read_context})
"""Readers whose values describe the holder itself, and are no places that a tensor may lie at."""
_NATIVE: dict[Any, int] = {
    read_items: 0, read_attributes: 1, read_elements: 2, read_cell: 3, read_autograd_fields: 4,
    read_function: 5,
}  # fmt: skip
_ORDERED, _NO_ELEMENTS = 6, 7  # `read_items` of an `OrderedDict`; `read_set` of an empty set
"""The kinds of holders that C++ reads: `Holder` in `dispatch/native/watch.h`."""


class Watch:
    """Holdings that must not change. `for_native` are those that C++ can compare; `has_others` says
    whether there are others."""

    def __init__(self, holdings: Iterable[WatchedObject]) -> None:
        self._holdings: list[WatchedObject] = []  # first those in `for_native`, in their order
        others: list[WatchedObject] = []
        for holding in holdings:
            if isinstance(holding.holder, (tuple, frozenset)):
                continue  # it can't change; what it holds has holdings of its own
            # C++ reads builtin types only: a subclass may have its own ways to hold things
            is_native = _is_empty_set(holding) or (
                holding.read in _NATIVE
                and (
                    type(holding.holder) is list
                    if holding.read is read_elements
                    else holding.read in (read_cell, read_autograd_fields, read_function)
                    or type(holding.holder) in _DICTS
                    or (isinstance(holding.holder, dict) and not holding.keys)
                )
            )
            (self._holdings if is_native else others).append(holding)
        self.for_native = [_for_native(holding) for holding in self._holdings]
        self.has_others = bool(others)
        self._holdings += others

    def change(self) -> str | None:
        """The first place that changed; None if nothing did."""
        n_read = 0
        while True:
            i: int = hits.loaded.first_change(self.for_native, n_read)
            if i < 0:
                n_read = len(self.for_native)
                break
            # C++ compares by identity: an equal number in a new object is no change
            change = self._holdings[i].change()
            if change is not None:
                return change
            self.for_native[i] = _for_native(self._holdings[i])
            n_read = i + 1
        for holding in self._holdings[n_read:]:
            change = holding.change()
            if change is not None:
                return change
        return None


def _is_empty_set(holding: WatchedObject) -> bool:
    """Whether it holds an empty set, as each module has one (for buffers that aren't saved)."""
    return holding.read is read_set and type(holding.holder) is set and holding.values == (0,)


def _for_native(holding: WatchedObject) -> tuple[int, Any, tuple[Any, ...], tuple[Any, ...], int]:
    """(kind, holder, keys, values, size), as `first_change` in C++ compares them."""
    is_ordered = holding.read is read_items and type(holding.holder) is collections.OrderedDict
    if is_ordered:
        kind = _ORDERED
    else:
        kind = _NO_ELEMENTS if holding.read is read_set else _NATIVE[holding.read]
    return (kind, holding.holder, holding.keys, holding.values, holding.size)


def put_item(holder: Any, key: Any, value: Any) -> None:
    holder[key] = value


def put_cell(holder: Any, _: Any, value: Any) -> None:
    holder.cell_contents = value


AUTOGRAD_FIELDS = (
    "grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "__dict__",
)  # fmt: skip
"""What a call may read of a tensor besides its value and its metadata. The gradient is first:
`captured_call` counts on that. Of `__dict__` only the names count here: C++ compares how many there
are, and asks for the names where that differs."""


_OF_LAZY = frozenset({"_value", "_is_param", "_layout"})
"""Attributes of lazy tensors themselves: what they say is compared as metadata."""


def own_attributes(attributes: Iterable[str]) -> list[str]:
    """The attributes that the program has given a tensor."""
    return [name for name in attributes if name not in _OF_LAZY]
