"""Finds what a function can see besides its arguments: the Python objects that its code leads to.

In: a function. Out: an `ObjectGraph`, with each place that the function may read, by a path such as
`model.blocks[0].weight`, and what lies there now. `take` compares the pictures before and after a
call, to find where tensors came from and where they went. `captured_call` has a `Watch` on the
places, to see before a replay whether anything has changed.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import functools
import gc
import io
import itertools
import logging
import random
import sys
import sysconfig
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from lazy_tensor.capture.mentions import mentions_of
from lazy_tensor.capture.watched_object import (
    AUTOGRAD_FIELDS,
    MISSING,
    OF_ITSELF,
    Unreachable,
    WatchedObject,
    is_atom,
    is_number,
    keys_of,
    own_attributes,
    put_cell,
    put_item,
    read_array,
    read_attributes,
    read_autograd_fields,
    read_bytes,
    read_cell,
    read_context,
    read_elements,
    read_function,
    read_items,
    read_iterator,
    read_random,
    read_set,
    read_slots,
)

MOST_HELD = 200_000
"""Values that a picture may hold: each call looks at them all, which takes a few milliseconds."""

MOST_ARRAY_BYTES = 4096
"""Size of a NumPy array up to which its contents are compared at each call."""


_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "functorch", "lazy_tensor", "builtins"}
"""Python's own packages, torch and others, and ours. Their code isn't followed, and most of their
objects aren't entered either."""
INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
"""Where packages are installed. Their code isn't followed, as it leads to thousands of objects.
Their globals count as constant. What their objects hold, such as a model's configuration, is
watched."""


class _Part:
    """An object's attributes, of which only those count that the code mentions.

    They are entered again as names are found, so a part is kept until the picture is complete.
    `attributes` gives the names of all. Those in `always` count anyway. If the part `is_whole`, all
    count; with `takes_all_if_dynamic` it becomes whole once code computes names. If the part
    `notices_new`, attributes that come later count, too. So it has a holding even if none is there.
    """

    __slots__ = ("always", "attributes", "holder", "holding", "is_whole", "label", "notices_new",
                 "read", "takes_all_if_dynamic", "write")  # fmt: skip

    def __init__(
        self,
        label: str,
        holder: Any,
        attributes: Callable[[], Iterable[str]],
        read: Callable[[Any, tuple[Any, ...]], tuple[Any, ...] | None],
        write: Callable[[Any, Any, Any], None] | None = None,
    ) -> None:
        self.label = label
        self.holder = holder
        self.attributes = attributes
        self.read = read
        self.write = write
        self.notices_new = True
        self.always: frozenset[str] = frozenset()
        self.is_whole = self.takes_all_if_dynamic = False
        self.holding: WatchedObject | None = None


class ObjectGraph:
    """All objects that a function can see, and what they hold at this moment.

    They are what `roots`, pairs of a label and an object, and the tensors `given` lead to.
    `holdings` are the objects that hold others, by a name. `instances` are those that have
    attributes. `generators` are random generators. `arguments` has the name of the holding of each
    tensor in `given` that `roots` don't lead to.

    Of an object of the user's classes only attributes whose names occur in the code are followed,
    as no function can see the others. Modules, optimizers and containers are followed as a whole.
    Without `follows_code`, functions and classes are constant, and all objects are followed as a
    whole. Unreachable, with the place, for what can't be watched: an iterator, a huge array.
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, Any]],
        given: Sequence[torch.Tensor] = (),
        *,
        follows_code: bool = True,
    ) -> None:
        self.follows_code = follows_code
        self.holdings: dict[str, WatchedObject] = {}
        self.generators: list[torch.Generator] = []
        self.arguments: dict[int, str] = {}
        self.instances: list[Any] = []
        self._names = set(_ALWAYS)  # that code mentions, and all parts were searched for
        self._found: set[str] = set()  # that code mentions, for the next round of `_explore`
        self._parts: list[_Part] = []
        self._n_alike: collections.Counter[str] = collections.Counter()  # holdings by label
        self._seen: dict[int, Any] = {}  # visited objects by `id`, kept alive for their ids
        self._classes: dict[tuple[int, bool], type] = {}  # visited, without or with an instance
        self._is_dynamic = False  # whether code computes names of attributes
        self._of_users: set[str] = set()  # names that the user's own code mentions
        self._n_held = 0  # values in holdings: see `MOST_HELD`
        self._queue: deque[tuple[str, Any]] = deque(roots)
        self._explore()
        # after the roots, so that an argument that they lead to is known by that place
        names_of: dict[int, str] = {}
        for i, tensor in enumerate(given):
            if not self.has(tensor):
                names_of[id(tensor)] = name = f"tensor {i} among the arguments"
                self._visit(name, tensor)
                self._explore()
            if id(tensor) in names_of:
                self.arguments[i] = names_of[id(tensor)]
        # one set for all: there can be thousands of names, and of holdings
        names = frozenset(self._names)
        for part in self._parts:
            if part.holding is not None and not part.is_whole:
                part.holding.among, part.holding.always = names, part.always
        self._parts.clear()

    def forget(self) -> None:
        """Let go of all objects."""
        self.holdings.clear()
        self._seen.clear()

    def has(self, value: Any) -> bool:
        """Whether an object is among what was found."""
        return id(value) in self._seen

    def may_mention(self, *names: str) -> bool:
        """Whether the user's own code may use an attribute of one of these names."""
        return self._is_dynamic or not self._of_users.isdisjoint(names)

    def numbers(self, without: Collection[tuple[str, int]]) -> int:
        """A digest of all numbers found, less those at the places in `without`."""
        return hash(tuple([
            (name, i, repr(value))
            for name, holding in self.holdings.items()
            for i, value in enumerate(holding.values)
            if is_number(value) and (name, i) not in without
        ]))  # fmt: skip

    def tensors(self) -> dict[tuple[str, int], torch.Tensor]:
        """The tensors found, by their places: a holding, and the number of the key in it."""
        return {
            (name, i): value
            for name, holding in self.holdings.items()
            for i, value in enumerate(holding.values)
            if isinstance(value, torch.Tensor)
        }

    def _explore(self) -> None:
        """Visit what is queued, and what it leads to.

        Code that is met on the way mentions new names, by which objects that were visited before
        lead further. So this goes on in rounds until a round finds no new name.
        """
        while True:
            was_dynamic = self._is_dynamic
            while self._queue:
                self._visit(*self._queue.popleft())
            new = self._found - self._names
            if not new and self._is_dynamic == was_dynamic:
                return
            self._names |= new
            self._found.clear()
            for cls in dict.fromkeys(self._classes.values()):
                self._follow_members(cls, new)
            for part in self._parts:
                if self._is_dynamic != was_dynamic or not new.isdisjoint(part.attributes()):
                    self._widen(part)

    def _hold(
        self,
        label: str,
        holder: Any,
        keys: Iterable[Any],
        read: Callable[[Any, tuple[Any, ...]], tuple[Any, ...] | None],
        write: Callable[[Any, Any, Any], None] | None = None,
    ) -> WatchedObject:
        holding = WatchedObject(label, holder, tuple(keys), read, write)
        # a function and its closure, or an object and its slots, have one label
        n_alike = self._n_alike[label]
        self._n_alike[label] += 1
        self.holdings[f"{label}'{n_alike}" if n_alike else label] = holding
        if read is read_autograd_fields:
            hooks = [(f"{label}'s hooks", value) for value in holding.values[2:4]]
            self._queue.extend(pair for pair in hooks if pair[1] is not None)
            self._count(label, len(holding.values))
        elif read in OF_ITSELF:
            self._count(label, len(holding.values))
        else:
            self._follow(holding, range(len(holding.values)))
        return holding

    def _follow(self, holding: WatchedObject, places: Iterable[int]) -> None:
        """Queue the values at these places of a holding."""
        places = list(places)
        self._count(holding.label, len(places))
        for i in places:
            value = holding.values[i]
            if not is_atom(value) and value is not MISSING:
                self._queue.append((holding.label_of(i), value))

    def _count(self, label: str, n_values: int) -> None:
        """Count values, up to `MOST_HELD`; Unreachable beyond."""
        self._n_held += n_values
        if self._n_held > MOST_HELD:
            raise Unreachable(f"{label} and what else it can see hold over {MOST_HELD} values")

    def _hold_part(self, part: _Part) -> None:
        """Hold the attributes in a part that the code mentions, and those of names found later."""
        self._parts.append(part)
        self._widen(part)

    def _widen(self, part: _Part) -> None:
        """Hold the attributes of a part that count by now and aren't held yet."""
        if part.takes_all_if_dynamic and self._is_dynamic:
            part.is_whole = True
        keys = tuple(
            name
            for name in part.attributes()
            if part.is_whole or name in self._names or name in part.always
        )
        holding = part.holding
        if holding is None:
            if keys or part.notices_new:
                holding = self._hold(part.label, part.holder, keys, part.read, part.write)
                holding.size = len(part.holder) if part.notices_new else -1
                part.holding = holding
        elif len(keys) != len(holding.keys):
            known = frozenset(holding.keys)
            values = holding.read(holding.holder, keys)
            assert values is not None, "attributes are read one by one"
            holding.keys, holding.values = keys, values
            self._follow(holding, (i for i, key in enumerate(keys) if key not in known))

    def _visit(self, label: str, value: Any) -> None:
        """Hold an object, and queue what it leads to, as its kind demands.

        The order of the cases matters: a subclass of a container is a container before it is an
        object of the user's class. What no case takes is constant.
        """
        if is_atom(value) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self._visit_tensor(label, value)
        elif not (self._visit_container(label, value) or self._visit_code(label, value)):
            self._visit_object(label, value)

    def _visit_tensor(self, label: str, value: torch.Tensor) -> None:
        self._hold(label, value, AUTOGRAD_FIELDS, read_autograd_fields, setattr)
        state = vars(value)
        if state:
            # what comes later is noticed above, by the tensor's names
            part = _Part(label, state, lambda: own_attributes(state), read_attributes, put_item)
            part.is_whole, part.notices_new = not self.follows_code, False
            self._hold_part(part)

    def _visit_container(self, label: str, value: Any) -> bool:
        """Hold what a container has inside; whether it is one."""
        if isinstance(value, dict):
            self._hold(label, value, keys_of(value), read_items, put_item)
        elif isinstance(value, (list, deque)):
            self._hold(label, value, range(len(value)), read_elements, put_item)
        elif isinstance(value, (tuple, frozenset)):
            self._hold(label, value, range(len(value)), read_elements)
        elif isinstance(value, set):
            self._hold(label, value, ("",), read_set)
        elif isinstance(value, (bytearray, array.array)):
            self._hold(label, value, ("",), read_bytes)
            return True
        elif isinstance(value, contextvars.ContextVar):
            self._hold(label, value, ("",), read_context)
            return True
        elif isinstance(value, weakref.ref):
            self._queue.append((label, value()))
            return True
        else:
            return False
        if not _is_of_library(type(value)):  # a class of the user's, which may have attributes
            self._visit_attributes(label, value)
        return True

    def _visit_code(self, label: str, value: Any) -> bool:
        """Follow functions, classes and modules to what they mention; whether it is one of them."""
        if isinstance(value, _CODE) and not self.follows_code:
            return True
        if isinstance(value, types.FunctionType):
            self._visit_function(label, value)
        elif isinstance(value, types.MethodType):
            self._queue.append((label, value.__func__))
            self._queue.append((_owner(label), value.__self__))
        elif isinstance(value, functools.partial):
            inside = (value.func, value.args, value.keywords)
            self._queue.extend((label, part) for part in inside)
        elif isinstance(value, (staticmethod, classmethod)):
            self._queue.append((label, value.__func__))
        elif isinstance(value, _CACHED):
            self._queue.append((label, value.__wrapped__))
        elif isinstance(value, property):
            self._queue.extend((label, f) for f in (value.fget, value.fset) if f is not None)
        elif isinstance(value, type):
            self._visit_classes(value, has_instance=False)
            # the code may call the class, to make an instance
            if not _is_constant(value):
                made_by = [vars(value).get(name) for name in _MAKERS]
                self._queue.extend((label, f) for f in made_by if f is not None)
        elif isinstance(value, types.ModuleType):
            if not _is_constant(value):
                self._hold_part(_Part(label, _dict_of(value), lambda: vars(value), read_attributes))
        else:
            return False
        return True

    def _visit_object(self, label: str, value: Any) -> None:
        """Hold what an object of another kind may change: its attributes, as a rule."""
        kind = type(value)
        if isinstance(value, torch.Generator):
            self.generators.append(value)
        elif kind.__module__ == "numpy" and hasattr(value, "tobytes"):
            if value.nbytes > MOST_ARRAY_BYTES or value.dtype == object:
                raise Unreachable(f"{label} is an array that may change; pass a tensor")
            self._hold(label, value, ("",), read_array)
        elif isinstance(value, random.Random) or _is_random_of_numpy(kind):
            self._hold(label, value, ("",), read_random)
        elif isinstance(value, _OPAQUE):
            return
        elif hasattr(kind, "__length_hint__") or kind is itertools.count:
            self._hold(label, value, ("",), read_iterator)
        elif hasattr(kind, "__next__") and _is_of_library(kind):
            raise Unreachable(f"{label} is an iterator; pass what it gives as an argument")
        elif hasattr(kind, "__replayed__"):
            self._queue.append((label, value.__replayed__))
        elif (
            _package(kind) not in _LIBRARIES - {"torch"}
            or isinstance(value, _NAMESPACES)
            or getattr(kind, "is_state_of_modules", False)
        ):
            self._visit_attributes(label, value)

    def _visit_attributes(self, label: str, value: Any) -> None:
        """Hold an object's slots and attributes, and visit its classes."""
        kind = type(value)
        self.instances.append(value)
        if self.follows_code:
            self._visit_classes(kind, has_instance=True)
        slots = slots_of(kind)
        if slots:
            part = _Part(label, value, lambda: slots, read_slots, setattr)
            part.is_whole, part.notices_new = not self.follows_code, False
            self._hold_part(part)
        state = getattr(value, "__dict__", None)
        if isinstance(state, dict):
            part = _Part(label, state, functools.partial(tuple, state), read_attributes, put_item)
            part.is_whole = not self.follows_code or _is_constant(kind)
            part.takes_all_if_dynamic = True
            self._hold_part(part)

    def _visit_classes(self, kind: type, *, has_instance: bool) -> None:
        """Visit a class and its bases. If it `has_instance`, Python may call special methods."""
        for cls in kind.__mro__[:-1]:
            visit = (id(cls), has_instance)
            if visit not in self._classes and _package(cls) not in ("builtins", "abc", "typing"):
                self._classes[visit] = cls
                self._visit_class(cls, has_instance)

    def _visit_class(self, cls: type, has_instance: bool) -> None:
        """Follow the members of a class that the code mentions, and its special methods."""
        if _is_constant(cls):
            # its code isn't followed, but the names in it may be of an instance's attributes
            for member in vars(cls).values():
                function = getattr(member, "__func__", member)
                if isinstance(function, types.FunctionType):
                    self._found.update(mentions_of(function.__code__).names)
            return
        special = frozenset(
            name
            for name, member in vars(cls).items()
            if has_instance
            and name.startswith("__")
            and name not in _MAKERS
            and isinstance(getattr(member, "__func__", member), types.FunctionType)
        )
        self._follow_members(cls, self._names | special)
        part = _Part(cls.__name__, _dict_of(cls), lambda: vars(cls), read_attributes)
        part.always = special
        self._hold_part(part)

    def _follow_members(self, cls: type, names: Collection[str]) -> None:
        """Queue the members of a user's class that have these names."""
        if _is_constant(cls):
            return
        # what makes instances is followed where a class may be called: see `_visit`
        for name, member in vars(cls).items():
            if name in names:
                function = getattr(member, "__func__", member)
                if not isinstance(function, types.FunctionType):
                    self._queue.append((f"{cls.__name__}.{name}", member))
                elif name not in _MAKERS:
                    self._queue.append((f"{cls.__name__}.{name}", function))

    def _visit_function(self, label: str, function: types.FunctionType) -> None:
        """Hold a function's closure, its code and defaults, and the globals that it mentions.

        Of a function of torch, or of an installed package, only the closure and attributes count.
        """
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._hold(name, cell, ("",), read_cell, put_cell)
        if vars(function):
            self._queue.append((label, vars(function)))
        if _is_constant(function):
            return
        self._hold(function.__name__, function, _FUNCTION, read_function)
        mentions = mentions_of(code)
        for name in mentions.imports:
            self._queue.append((name, sys.modules.get(name)))
        self._is_dynamic |= mentions.computes_names
        self._of_users |= mentions.names
        self._found.update(mentions.names)
        if mentions.globals:
            # names of builtins, too: a global may come later and hide one
            self._hold("", function.__globals__, mentions.globals, read_attributes, put_item)


_CODE = (
    types.FunctionType, types.MethodType, type, types.ModuleType, property, staticmethod,
    classmethod,
)  # fmt: skip
"""Classes of what is constant if code isn't followed."""
_FUNCTION = ("__code__", "__defaults__", "__kwdefaults__")
_ALWAYS = frozenset({"forward", "backward", "setup_context"})
"""Methods that torch calls, though no code mentions them."""
_MAKERS = ("__new__", "__init__", "__post_init__")
"""Methods that run only when an instance is made."""


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


def _dict_of(value: Any) -> Any:
    """The dict behind a module or a class. A class's `vars()` is a proxy, which C++ can't read."""
    state = vars(value)
    if isinstance(state, types.MappingProxyType):
        state = next((d for d in gc.get_referents(state) if type(d) is dict), state)
    return state


def _owner(label: str) -> str:
    """`model` for `model.forward`."""
    return label.rpartition(".")[0] or label


_CACHED = type(functools.cache(lambda: None))


def _is_random_of_numpy(kind: type) -> bool:
    return _package(kind) == "numpy" and (
        hasattr(kind, "bit_generator") or hasattr(kind, "get_state")
    )


_OPAQUE = (io.IOBase, logging.Logger, logging.Handler)
"""Classes of what programs write to: its state changes nothing that they compute."""
_NAMESPACES = (
    types.SimpleNamespace, argparse.Namespace, threading.local, threading.Event,
    collections.UserDict, collections.UserList, collections.ChainMap,
)  # fmt: skip

_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that was made at run time, by a class statement say


def _package(value: Any) -> str:
    """The package that a function, a class or a module belongs to."""
    if isinstance(value, types.FunctionType):  # `functools.wraps` changes its `__module__`
        name: Any = value.__globals__.get("__name__")
    else:
        name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    if name and name.startswith("lazy_tensor.examples"):
        return str(name)  # our examples count as programs, not as our library
    if name in (None, "builtins"):  # what `exec` makes may have no module either
        is_users = isinstance(value, types.FunctionType) or getattr(value, "__flags__", 0) & _HEAP
        return "" if is_users else "builtins"
    return str(name).partition(".")[0]


def _is_of_library(value: Any) -> bool:
    return _package(value) in _LIBRARIES


def _is_constant(value: Any) -> bool:
    """Whether a function, a class or a module is of a package whose code isn't followed."""
    package = _package(value)
    return package in _LIBRARIES or _is_installed(package)


@functools.cache
def _is_installed(package: str) -> bool:
    if package == "__main__":
        return False  # the program, though an installed package such as pytest may run it
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is not None and file.startswith(INSTALLED)
