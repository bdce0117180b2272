"""Objects that hold others, read again to see whether what they hold has changed.

In: an object, and the `Kind` that says how such objects hold values. Out: a `WatchedObject`, which
has read the values under their keys; and a `Watch` on many, which C++ compares as far as it can.
`object_graph` finds the objects, and `captured_call` watches them.
"""

from __future__ import annotations

import collections
import enum
import itertools
import operator
import re
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch

from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.traced_number import is_plain
from lazy_tensor.dispatch.trie.tensor_types import OWN_ATTRIBUTES

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
    INTEGER = "any int"
    BOOLEAN = "any bool"


MISSING, OPEN, NUMBER = Marker.MISSING, Marker.OPEN, Marker.NUMBER
ANY_OF = {float: NUMBER, int: Marker.INTEGER, bool: Marker.BOOLEAN}
"""The markers of numbers of these types."""


class Obstacle(Exception):
    """Why a call can't be replayed."""


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

    `a` may be a marker, which any tensor, or any number of a type, is the same as.
    """
    if a is b:
        return True
    if a is OPEN:
        return isinstance(b, torch.Tensor)
    if type(a) is Marker:
        return ANY_OF.get(type(b)) is a and is_plain(b)
    if type(a) is not type(b):
        return False
    if type(a) in (float, complex, range):
        return repr(a) == repr(b)  # 0.0 and -0.0 differ, nan is nan; equal ranges may differ
    if is_atom(a):
        return bool(a == b)
    if type(a) is tuple:
        return len(a) == len(b) and all(map(is_same, a, b))
    return type(a) is types.MethodType and a.__self__ is b.__self__ and a.__func__ is b.__func__


Names = Collection[str] | None
"""Names of attributes that count; None if all do."""
Contents = tuple[tuple[Any, ...], tuple[Any, ...]]
"""Keys, and the values under them."""
Newest = tuple[int, Any]
"""How many attributes there are, and the one that came last; -1 if others than those read don't
count."""
Place = tuple[str, int]
"""Where a value lies: the name of a holding in an `ObjectGraph`, and the number of a key there."""


class Kind(NamedTuple):
    """How the objects of one kind hold others.

    `read` gives all keys and values, of attributes those whose names count. `get` and `put` read
    and set one value. Without `get`, the values describe the holder itself: a tensor can't lie
    there. `form` is how a program writes a place: "[]" for an item, "." for an attribute. `native`
    is the number that C++ gives the kind (`Holder` in `dispatch/native/watch.h`), -1 if only Python
    can compare it. `attributes` is the dict to which an attribute may come that counts, if any.
    """

    read: Callable[[Any, Names], Contents]
    form: str = ""
    get: Callable[[Any, Any], Any] | None = None
    put: Callable[[Any, Any, Any], None] | None = None
    native: int = -1
    attributes: Callable[[Any], Any] = lambda _: None


class WatchedObject:
    """One object that holds others: its keys, and the values there when they were read.

    Of an object's attributes only those in `names` count.
    """

    __slots__ = ("holder", "keys", "kind", "label", "names", "newest", "values")

    def __init__(self, label: str, holder: Any, kind: Kind, names: Names = None) -> None:
        self.label = label
        self.holder = holder
        self.kind = kind
        self.names = names
        attributes = kind.attributes(holder)
        self.newest: Newest = (-1, None)
        if attributes is not None:
            self.newest = len(attributes), next(reversed(attributes), None)
        self.keys, self.values = kind.read(holder, names)

    def label_of(self, i: int) -> str:
        """Where its `i`-th value lies, as a program would write it."""
        key = self.keys[i]
        if self.kind.form == "[]":
            return f"{self.label}[{repr(key) if is_atom(key) else f'<{i}>'}]"
        if self.kind.form == ".":
            return f"{self.label}.{key}" if self.label else str(key)
        return self.label

    def spoken(self, i: int | None = None) -> str:
        """The label, or that of its `i`-th value, for messages: `model.weight` in place of
        `model._parameters['weight']`."""
        label = self.label if i is None else self.label_of(i)
        short: str = re.sub(r"\._(?:modules|parameters|buffers)\['(.*?)'\]", r".\1", label)
        return f"`{short}`"

    def change(self) -> str | None:
        """The first place whose value has changed; None if there is none."""
        now = WatchedObject(self.label, self.holder, self.kind, self.names)
        if len(now.keys) != len(self.keys) or not all(map(_is, now.keys, self.keys)):
            return self.spoken()
        pairs = list(zip(self.values, now.values, strict=True))
        for i, (one, other) in enumerate(pairs):
            if not is_same(one, other):
                return self.spoken(i)
        # keep the objects that lie there now, if they are equal: C++ compares by identity
        self.newest, self.keys = now.newest, now.keys
        self.values = tuple([one if type(one) is Marker else other for one, other in pairs])
        return None

    def expect(self, i: int, value: Any) -> None:
        """Expect `value` at its `i`-th place from now on: a marker, say."""
        self.values = (*self.values[:i], value, *self.values[i + 1 :])

    @property
    def is_of_tensor(self) -> bool:
        """Whether the holder is a tensor, and its first value the gradient."""
        return self.kind is TENSOR

    @property
    def is_native(self) -> bool:
        """Whether C++ can compare it: only builtin types, as a subclass may have its own ways to
        hold things. Each module has an empty set (for buffers that aren't saved)."""
        if self.kind.native >= 0 and not self.keys and isinstance(self.holder, (dict, set)):
            return True
        return self.kind.native >= 0 and (type(self.holder) in _BUILTIN or self.is_of_tensor)

    @property
    def for_native(self) -> tuple[int, Any, tuple[Any, ...], tuple[Any, ...], Newest]:
        """(kind, holder, keys, values, newest), as `first_change` in C++ compares them."""
        return (self.kind.native, self.holder, self.keys, self.values, self.newest)


DICTS = (dict, collections.defaultdict, collections.OrderedDict)
_BUILTIN = frozenset({*DICTS, list, types.CellType, types.FunctionType})


def _is(a: Any, b: Any) -> bool:
    return a is b or (is_atom(a) and is_same(a, b))


# What each kind of holder has inside


def _items(holder: Any, _: Names) -> Contents:
    # whatever its class overrides; an `OrderedDict` keeps its order to itself
    is_ordered = isinstance(holder, collections.OrderedDict)
    keys = (collections.OrderedDict if is_ordered else dict).__iter__(holder)
    found = tuple(keys)
    return found, tuple([dict.__getitem__(holder, key) for key in found])


def _elements(holder: Any, _: Names) -> Contents:
    found = tuple(holder)
    return tuple(range(len(found))), found


def _attributes(holder: Any, names: Names) -> Contents:
    # sorted, as their order says nothing
    keys = sorted([key for key in tuple(holder) if names is None or key in names], key=str)
    return tuple(keys), tuple([holder.get(key, MISSING) for key in keys])


def _attributes_of_tensor(holder: Any, names: Names) -> Contents:
    return _attributes({key: holder[key] for key in own_attributes(holder)}, names)


def _globals(holder: Any, names: Names) -> Contents:
    assert names is not None, "only those that the code mentions count"
    return tuple(names), tuple([holder.get(key, MISSING) for key in names])


def _slots(holder: Any, names: Names) -> Contents:
    counted = [name for name in slots_of(type(holder)) if names is None or name in names]
    return tuple(counted), tuple([getattr(holder, name, MISSING) for name in counted])


def slots_of(kind: type) -> tuple[str, ...]:
    """The attributes for which a class and its bases have slots."""
    found: dict[str, None] = {}
    for cls in kind.__mro__[:-1]:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            found[_mangled(cls, name)] = None
    # these two aren't the program's: attributes in a `__dict__` are read one by one
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _mangled(cls: type, name: str) -> str:
    """The attribute that a name in a class's body stands for: `__s` in class C is `_C__s`."""
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{cls.__name__.lstrip('_')}{name}" if is_private else name


def _autograd_fields(tensor: Any, _: Names) -> Contents:
    """Obstacle if autograd raises, as for one of several views whose base was written."""
    # only leaves are asked for a gradient: torch warns about others
    hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    try:
        is_leaf = tensor.is_leaf
    except RuntimeError as error:
        raise Obstacle(f"a view is there that autograd refuses: {error}") from None
    names = tuple(own_attributes(vars(tensor)))
    return AUTOGRAD_FIELDS, (tensor.grad if is_leaf else None, tensor.requires_grad, *hooks, names)


AUTOGRAD_FIELDS = (
    "grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "__dict__",
)  # fmt: skip
"""What a call may read of a tensor besides its value and its metadata. The gradient is first:
`captured_call` counts on that. Of `__dict__` only the names count here: C++ compares how many there
are, and asks for the names where that differs."""


def own_attributes(attributes: Iterable[str]) -> list[str]:
    """The attributes that the program has given a tensor, less those of lazy tensors themselves:
    what these say is compared as metadata."""
    return [name for name in attributes if name not in OWN_ATTRIBUTES]


def _function(holder: Any, _: Names) -> Contents:
    keys = ("__code__", "__defaults__", "__kwdefaults__")
    return keys, tuple([getattr(holder, key) for key in keys])


def _set_contents(cell: Any, _: Any, value: Any) -> None:
    cell.cell_contents = value


def _cell(holder: Any, _: Names) -> Contents:
    try:
        return ("",), (holder.cell_contents,)
    except ValueError:
        return ("",), (MISSING,)


def _array(holder: Any, _: Names) -> Contents:
    return ("shape", "dtype", ""), (str(holder.shape), str(holder.dtype), holder.tobytes())


def _random_state(holder: Any) -> str:
    """The state of one of Python's or numpy's random generators."""
    bits = getattr(holder, "bit_generator", None)
    if bits is not None:
        return repr(bits.state)
    ask = getattr(holder, "getstate", None) or holder.get_state
    return repr(ask())


def _progress(holder: Any) -> Any:
    """How far an iterator of Python's own has come."""
    return repr(holder) if type(holder) is itertools.count else operator.length_hint(holder)


def _of_itself(read: Callable[[Any], Any]) -> Kind:
    """A kind of object that is compared by one value."""
    return Kind(lambda holder, _: (("",), (read(holder),)))


ITEMS = Kind(_items, "[]", operator.getitem, operator.setitem, native=0)
ATTRIBUTES = Kind(
    _attributes, ".", operator.getitem, operator.setitem, native=1, attributes=lambda holder: holder
)
MEMBERS = ATTRIBUTES._replace(put=None)
"""Those of a class or a module."""
OF_TENSOR = Kind(_attributes_of_tensor, ".", operator.getitem, operator.setitem, native=1)
GLOBALS = Kind(_globals, ".", operator.getitem, operator.setitem, native=1)
SLOTS = Kind(_slots, ".", getattr, setattr)
ELEMENTS = Kind(_elements, "[]", operator.getitem, operator.setitem, native=2)
FIXED = ELEMENTS._replace(put=None)
SET = Kind(_elements, native=2)
CELL = Kind(_cell, "", lambda cell, _: cell.cell_contents, _set_contents, native=3)
TENSOR = Kind(_autograd_fields, ".", getattr, setattr, native=4, attributes=vars)
FUNCTION = Kind(_function, ".", getattr, native=5)
ARRAY = Kind(_array)
BYTES = _of_itself(bytes)
CONTEXT = _of_itself(lambda variable: variable.get(MISSING))
RANDOM = _of_itself(_random_state)
ITERATOR = _of_itself(_progress)


class Watch:
    """Holdings that must not change: `for_native` are those that C++ can compare, `others` those
    that it can't."""

    def __init__(self, holdings: Iterable[WatchedObject]) -> None:
        # tuples can't change; what they hold has holdings of its own
        watched = [one for one in holdings if not isinstance(one.holder, (tuple, frozenset))]
        self._native = [one for one in watched if one.is_native]
        self.for_native = [one.for_native for one in self._native]
        self.others = [one for one in watched if not one.is_native]

    def change(self) -> str | None:
        """The first place that changed; None if nothing did."""
        i: int = hits.loaded.first_change(self.for_native, 0)
        while i >= 0:
            # C++ compares by identity: an equal number in a new object is no change
            change = self._native[i].change()
            if change is not None:
                return change
            self.for_native[i] = self._native[i].for_native
            i = hits.loaded.first_change(self.for_native, i + 1)
        changes = (one.change() for one in self.others)
        return next((change for change in changes if change is not None), None)
