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
import ctypes
import functools
import gc
import importlib.util
import io
import itertools
import logging
import math
import operator
import random
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from lazy_tensor.capture import watched_object as kinds
from lazy_tensor.capture.watched_object import (
    Kind,
    Names,
    Obstacle,
    Place,
    WatchedObject,
    is_atom,
    is_number,
    own_attributes,
    slots_of,
)
from lazy_tensor.dispatch.mentions import ANY_NAME, codes_in, mentions_of
from lazy_tensor.dispatch.number_takers import OPERATOR_METHODS

MOST_HELD = 200_000
"""Values that a picture may hold: each call looks at them all, which takes a few milliseconds."""

MOST_ARRAY_BYTES = 4096
"""Size of a NumPy array up to which its contents are compared at each call."""


_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "functorch", "lazy_tensor", "builtins"}
"""Python's own packages, torch and others, and ours. Their code isn't followed, and most of their
objects aren't entered either."""
_NOT_ENTERED = _LIBRARIES - {"torch"}
INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
"""Where packages are installed. Their code isn't followed, as it leads to thousands of objects.
Their globals count as constant. What their objects hold, such as a model's configuration, is
watched."""
_ALWAYS = frozenset({"forward", "backward", "setup_context"})
"""Methods that torch calls, though no code mentions them."""
_OF_GROUPS = ("lr", "param_groups")
"""Names by which code sees what a scheduler sets."""
_MAKERS = ("__new__", "__init__", "__post_init__")
"""Methods that run only when an instance is made."""


def explore(
    roots: Iterable[tuple[str, Any]],
    given: Sequence[torch.Tensor],
    names: set[str],
    *,
    follows_code: bool = True,
) -> ObjectGraph:
    """All objects that `roots`, pairs of a label and an object, and the tensors `given` lead to.

    `names` are names that the code mentions, as far as they are known. New ones are added.
    """
    # a set of its own, which the holdings keep
    roots, known = list(roots), {*_ALWAYS, *names}
    while True:
        n_known = len(known)
        graph = ObjectGraph(roots, given, known, follows_code=follows_code)
        # code that is met on the way mentions new names, by which objects met before lead further
        if len(known) == n_known:
            names |= known
            return graph


class ObjectGraph:
    """All objects that a function can see by `names`, and what they hold at this moment.

    `holdings` are the objects that hold others, by a name. `instances` are those that have
    attributes. `generators` are random generators. `schedulers` are those that the code may step
    but not look into: what they count is not held. `codes` are all of the user's code, each with
    the globals that it sees. `arguments` has the name of the holding of each tensor in `given` that
    `roots` don't lead to. Names that the code mentions are added to `names`.

    Of an object of the user's classes only attributes whose names occur in the code are followed,
    as no function can see the others. Modules, optimizers and containers are followed as a whole.
    Without `follows_code`, functions and classes are constant, and all objects are followed as a
    whole. Obstacle, with the place, for what can't be watched: an iterator, a huge array.
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, Any]],
        given: Sequence[torch.Tensor],
        names: set[str],
        *,
        follows_code: bool = True,
    ) -> None:
        self.follows_code = follows_code
        self.names = names
        self.holdings: dict[str, WatchedObject] = {}
        self.generators: list[torch.Generator] = []
        self.schedulers: list[LRScheduler] = []
        self.names_in_objects: set[str] = set()  # by which objects such as `attrgetter` look up
        self.codes: dict[types.CodeType, dict[str, Any]] = {}
        self.arguments: dict[int, str] = {}
        self.is_given_complex = False  # a complex number is among the arguments
        self.instances: list[Any] = []
        self._n_alike: collections.Counter[str] = collections.Counter()  # holdings by label
        self._seen: dict[int, Any] = {}  # visited objects by `id`, kept alive for their ids
        self._classes: set[type] = set()  # visited
        self._of_users: set[str] = set()  # names that the user's own code mentions
        self._n_held = 0  # values in holdings: see `MOST_HELD`
        self._n_followed = 0  # names whose members of classes were followed
        self._queue: deque[tuple[str, Any]] = deque(roots)
        self._keys: deque[tuple[str, Any]] = deque()  # of dicts, and members of sets
        self._unvisited: list[tuple[str, LRScheduler]] = []
        self._visit_queued()
        # after the roots, so that an argument that they lead to is known by that place
        names_of: dict[int, str] = {}
        for i, tensor in enumerate(given):
            if not self.has(tensor):
                names_of[id(tensor)] = name = f"tensor {i} among the arguments"
                self._visit(name, tensor)
                self._visit_queued()
            if id(tensor) in names_of:
                self.arguments[i] = names_of[id(tensor)]
        self._visit_schedulers()

    def forget(self) -> None:
        """Let go of all objects."""
        self.holdings.clear()
        self._seen.clear()

    def has(self, value: Any) -> bool:
        """Whether an object is among what was found."""
        return id(value) in self._seen

    def may_mention(self, *names: str) -> bool:
        """Whether the user's own code may use an attribute of one of these names."""
        return not self._of_users.isdisjoint((ANY_NAME, *names))

    def may_call(self, code: types.CodeType) -> bool:
        """Whether the user's own code may call a function that has this code: by a variable of its
        name, as a method of the object whose method calls it or of another one, or by a place that
        holds it."""
        name = code.co_name
        is_mentioned = any(
            name in (*one.co_freevars, *one.co_cellvars)
            or name in mentions_of(one).globals
            or name in mentions_of(one).of_self
            for one in self.codes
            if one.co_name not in _MAKERS  # `self.step = replay(self.step)` calls nothing
        )
        owners = [one for one in self.instances if code_of(getattr(type(one), name, None)) is code]
        return (
            is_mentioned
            or len(owners) > 1
            or any(
                code_of(value) is code
                for (label, _), value in self._values()
                if self.holdings[label].kind is not kinds.MEMBERS
            )
        )

    def defines(self, name: str) -> bool:
        """Whether a class of the user's has a member of that name."""
        return any(name in vars(cls) for cls in self._classes if not _is_constant(cls))

    @functools.cached_property
    def names_of_users(self) -> frozenset[str]:
        """The names of the user's functions, and of all attributes and items found.

        Those of operators are among them if the program has complex numbers: such a number computes
        with one on its right without asking it.
        """
        keys = [key for one in self.holdings.values() for key in one.keys if isinstance(key, str)]
        codes = (code.co_name for code in self.codes)
        return frozenset([*keys, *codes, *(OPERATOR_METHODS if self._has_complex() else ())])

    def _has_complex(self) -> bool:
        return (
            self.is_given_complex
            or any(isinstance(value, complex) for _, value in self._values())
            or any(isinstance(one, complex) for code in self.codes for one in code.co_consts)
            or not self._of_users.isdisjoint(("complex", "cmath"))
        )

    def is_read_by_libraries(self, holding: WatchedObject, name: str) -> bool:
        """Whether the code of a library's class may read an attribute that an object holds."""
        owners = (one for one in self.instances if holding.holder is getattr(one, "__dict__", one))
        return any(
            name in mentions_of(member.__code__).names
            for owner in owners
            for cls in filter(_is_constant, type(owner).__mro__[:-1])
            for member in map(_unwrapped, vars(cls).values())
            if isinstance(member, types.FunctionType)
        )

    def numbers(self, without: Collection[Place]) -> int:
        """A digest of all numbers found, less those at the places in `without`."""
        values = [pair for pair in self._values() if is_number(pair[1]) and pair[0] not in without]
        return hash(tuple([(place, repr(value)) for place, value in values]))

    def value_at(self, place: Place) -> Any:
        """What lay at a place."""
        name, i = place
        return self.holdings[name].values[i]

    def tensors(self) -> dict[Place, torch.Tensor]:
        """The tensors found, by their places; without parameters that have no size yet."""
        return {
            place: one
            for place, one in self._values()
            if isinstance(one, torch.Tensor) and not torch.nn.parameter.is_lazy(one)
        }

    def _values(self) -> Iterator[tuple[Place, Any]]:
        for name, holding in self.holdings.items():
            for i, value in enumerate(holding.values):
                yield (name, i), value

    def _hold(self, label: str, holder: Any, kind: Kind, names: Names = None) -> None:
        """Hold an object, and queue what it holds."""
        holding = WatchedObject(label, holder, kind, names)
        # a function and its closure, or an object and its slots, have one label
        n_alike = self._n_alike[label]
        self._n_alike[label] += 1
        self.holdings[f"{label}'{n_alike}" if n_alike else label] = holding
        self._n_held += len(holding.values)
        if self._n_held > MOST_HELD:
            raise Obstacle(f"{label} and what else it can see hold over {MOST_HELD} values")
        if kind in (kinds.ITEMS, kinds.SET):
            keys = holding.keys if kind is kinds.ITEMS else holding.values
            self._keys.extend(
                (f"list({label})[{i}]", key) for i, key in enumerate(keys) if not is_atom(key)
            )
        if kind is kinds.TENSOR:
            hooks = [one for one in holding.values[2:4] if one is not None]
            self._queue.extend((f"{label}'s hooks", one) for one in hooks)
        elif kind.get is not None:
            # what makes instances is followed where a class may be called: see `_visit_code`
            left_out = _MAKERS if kind is kinds.MEMBERS else ()
            self._queue.extend(
                (holding.label_of(i), value)
                for i, value in enumerate(holding.values)
                if not is_atom(value) and holding.keys[i] not in left_out
            )

    def _visit_queued(self) -> None:
        while self._queue or self._keys:
            # keys last: parameters are keys of an optimizer's state, but the model names them
            self._visit(*(self._queue or self._keys).popleft())
            # code that was met mentions members of classes that were visited before
            if not self._queue and len(self.names) > self._n_followed:
                self._n_followed = len(self.names)
                for cls in self._classes:
                    self._follow_members(cls, self.names)

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

    def _visit_schedulers(self) -> None:
        """Hold those that the code may look into, which is known when all code was met."""
        n_left = -1
        while n_left != len(self._unvisited):
            n_left = len(self._unvisited)
            for label, one in [*self._unvisited]:
                if self.may_mention(*_names_in(one)) or not _only_counts(one):
                    self._unvisited.remove((label, one))
                    self._visit_attributes(label, one)
                    self._visit_queued()
        self.schedulers = [one for _, one in self._unvisited]

    def _visit_tensor(self, label: str, value: torch.Tensor) -> None:
        self._hold(label, value, kinds.TENSOR)
        state = vars(value)
        if own_attributes(state):
            # what comes later is noticed above, by the tensor's names
            self._hold(label, state, kinds.OF_TENSOR, self.names if self.follows_code else None)

    def _visit_container(self, label: str, value: Any) -> bool:
        """Hold what a container has inside; whether it is one."""
        kind = next((one for cls, one in _CONTAINERS.items() if isinstance(value, cls)), None)
        if kind is None:
            return False
        self._hold(label, value, kind)
        if not _is_of_library(type(value)):  # a class of the user's, which may have attributes
            self._visit_attributes(label, value)
        return True

    def _visit_code(self, label: str, value: Any) -> bool:
        """Follow functions, classes and modules to what they mention; whether it is one of them."""
        if isinstance(value, _CODE) and not self.follows_code:
            return True
        parts = next((one for cls, one in _WRAPPERS.items() if isinstance(value, cls)), None)
        if parts is not None:
            for name in parts:
                # `model` for `model.forward`
                owner = label.rpartition(".")[0] if name == "__self__" else ""
                self._queue.append((owner or label, getattr(value, name)))
        elif isinstance(value, weakref.ref):
            self._queue.append((label, value()))
        elif isinstance(value, types.FunctionType):
            self._visit_function(label, value)
        elif isinstance(value, type):
            self._visit_classes(value)
            # the code may call the class, to make an instance
            for cls in value.__mro__:
                if not _is_constant(cls):
                    made_by = [vars(cls).get(name) for name in _MAKERS]
                    self._queue.extend((label, function) for function in made_by)
            if not _is_constant(type(value)):  # a metaclass of the user's
                self._visit_classes(type(value))
        elif isinstance(value, types.ModuleType):
            if not _is_constant(value):
                self._hold(label, vars(value), kinds.MEMBERS, self.names)
        else:
            return False
        return True

    def _visit_object(self, label: str, value: Any) -> None:
        """Hold what an object of another kind may change: its attributes, as a rule."""
        kind = type(value)
        if kind in _OF_BUILTINS and value in _LOOKING_UP:
            self._of_users.add(ANY_NAME)  # code may call it under another name than its own
        elif (behind := _behind(value)) is not None:
            self._queue.extend((label, one) for one in behind)
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif kind.__module__ == "numpy" and hasattr(value, "tobytes"):
            if value.nbytes > MOST_ARRAY_BYTES or value.dtype == object:
                raise Obstacle(f"{label} is an array that may change; pass a tensor")
            self._hold(label, value, kinds.ARRAY)
        elif isinstance(value, random.SystemRandom):
            raise Obstacle(f"{label} draws random numbers that can't be drawn again")
        elif isinstance(value, random.Random) or _is_random_of_numpy(kind):
            self._hold(label, value, kinds.RANDOM)
        elif isinstance(value, _OPAQUE) or _package(kind) in _OF_CODE:
            return
        elif isinstance(value, LRScheduler) and self.follows_code:
            self._queue.append((f"{label}.optimizer", value.optimizer))
            self._unvisited.append((label, value))
        elif isinstance(value, operator.attrgetter):
            paths = [path.split(".") for path in value.__reduce__()[1]]
            self.names.update(itertools.chain(*paths))
            self.names_in_objects.update(itertools.chain(*paths))
        elif kind is itertools.count or (hasattr(kind, "__length_hint__") and _is_of_library(kind)):
            self._hold(label, value, kinds.ITERATOR)
        elif hasattr(kind, "__next__") and _is_of_library(kind):
            raise Obstacle(f"{label} is an iterator; pass what it gives as an argument")
        elif (
            _package(kind) not in _NOT_ENTERED
            or _package(kind) in sys.stdlib_module_names
            or getattr(kind, "is_state_of_modules", False)
        ):
            self._visit_attributes(label, value)

    def _visit_attributes(self, label: str, value: Any) -> None:
        """Hold an object's slots and attributes, and visit its classes."""
        kind = type(value)
        names = self.names if self.follows_code else None
        self.instances.append(value)
        if self.follows_code:
            self._visit_classes(kind)
        if any(names is None or name in names for name in slots_of(kind)):
            self._hold(label, value, kinds.SLOTS, names)
        state = getattr(value, "__dict__", None)
        if isinstance(state, dict):
            is_users = kind in _OF_USERS or not _is_constant(kind)
            is_whole = ANY_NAME in self.names or not is_users
            self._hold(label, state, kinds.ATTRIBUTES, None if is_whole else names)

    def _visit_classes(self, kind: type) -> None:
        """Visit a class and its bases."""
        for cls in kind.__mro__[:-1]:
            if cls not in self._classes and _package(cls) not in ("builtins", "abc", "typing"):
                self._classes.add(cls)
                self._visit_class(cls)

    def _visit_class(self, cls: type) -> None:
        """Follow the members of a class that the code mentions, and those that Python calls."""
        members = {name: _unwrapped(member) for name, member in vars(cls).items()}
        functions = {k: one for k, one in members.items() if isinstance(one, types.FunctionType)}
        if _is_constant(cls):
            # its code isn't followed, but the names in it may be of an instance's attributes
            for function in functions.values():
                self.names |= mentions_of(function.__code__).names - {ANY_NAME}
            return
        called = {name for name in functions if name.startswith("__")}.difference(_MAKERS)
        names = self.names | called if called else self.names
        self._follow_members(cls, names)
        self._hold(cls.__name__, _dict_of(cls), kinds.MEMBERS, names)

    def _follow_members(self, cls: type, names: Collection[str]) -> None:
        """Queue the members of a user's class that have these names."""
        for name, member in () if _is_constant(cls) else vars(cls).items():
            # what makes instances is followed where a class may be called: see `_visit_code`
            if name in names and name not in _MAKERS:
                self._queue.append((f"{cls.__name__}.{name}", member))

    def _visit_function(self, label: str, function: types.FunctionType) -> None:
        """Hold a function's closure, its code and defaults, and the globals that it mentions.

        Of a function of torch, or of an installed package, only the closure and attributes count.
        """
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._hold(name, cell, kinds.CELL)
        if vars(function):
            self._queue.append((label, vars(function)))
        if _is_constant(function):
            return
        self._hold(function.__name__, function, kinds.FUNCTION)
        mentions = mentions_of(code)
        self.codes.update(dict.fromkeys(codes_in(code), function.__globals__))
        package = function.__globals__.get("__package__")
        self._queue.extend((name, _module(name, package)) for name in mentions.imports)
        self._of_users |= mentions.names
        self.names |= mentions.names
        if mentions.globals:
            # names of builtins, too: a global may come later and hide one
            self._hold("", function.__globals__, kinds.GLOBALS, mentions.globals)


_OF_BUILTINS = (types.BuiltinFunctionType, types.WrapperDescriptorType)
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)
"""Classes of methods in C that are bound to an object. Functions in C are bound to a module."""
_EMPTY: dict[str, Any] = {}
_VIEWS_OF_DICTS = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))
_LOOKING_UP = frozenset({getattr, setattr, vars, eval, exec, object.__getattribute__})
"""Functions by which code may get at any attribute."""


def _behind(value: Any) -> list[Any] | None:
    """What a value leads to that holds nothing itself; None for any other value."""
    kind = type(value)
    if kind in _BOUND and not isinstance(value.__self__, (type, types.ModuleType)):
        return [value.__self__]  # the list of `log = history.append`
    if kind is types.MappingProxyType or kind in _VIEWS_OF_DICTS:
        return gc.get_referents(value)
    if kind is memoryview:
        return [value.obj]
    return [value.__replayed__] if hasattr(kind, "__replayed__") else None


def code_of(function: Any) -> types.CodeType | None:
    """The code of the user's that a call of a function runs; None for anything else."""
    while isinstance(function, (functools.partial, types.MethodType, staticmethod, classmethod)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return function.__code__ if isinstance(function, types.FunctionType) else None


def _only_counts(scheduler: Any) -> bool:
    """Whether a scheduler depends on nothing but numbers of its own, and on its optimizer."""
    if not type(scheduler).__module__.startswith("torch.optim."):
        return False
    values = list(vars(scheduler).values())
    values += itertools.chain(*[one for one in values if type(one) in (list, tuple)])
    return all(
        _only_counts(one) if isinstance(one, LRScheduler) else not callable(one) or _is_closed(one)
        for one in values
    )


def _is_closed(function: Any) -> bool:
    """Whether what a function gives depends on nothing but its arguments."""
    if isinstance(function, functools.partial):
        given = (*function.args, *function.keywords.values())
        return _is_closed(function.func) and all(map(is_atom, given))
    if isinstance(function, types.MethodType) and isinstance(function.__self__, LRScheduler):
        return True
    if not isinstance(function, types.FunctionType):
        return isinstance(function, (type, weakref.ref, types.BuiltinFunctionType))
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    mentions = mentions_of(function.__code__)
    values = [function.__globals__.get(name, math) for name in mentions.globals]
    return (
        all(map(is_atom, (*cells, *(function.__defaults__ or ()))))
        and not mentions.stored
        and ANY_NAME not in mentions.names
        and all(isinstance(one, types.ModuleType) for one in values)
    )


def _names_in(scheduler: LRScheduler) -> set[str]:
    """Names of attributes by which code may see what a scheduler has counted, or change it."""
    names = {name for name in (*dir(type(scheduler)), *vars(scheduler)) if name[:2] != "__"}
    return (names - {"optimizer", "step"}).union(_OF_GROUPS)


_OF_C = (ctypes.Structure, ctypes.Union, ctypes.Array, ctypes.c_int.__base__)
"""Classes of ctypes' values; the last is that of single numbers."""
_CONTAINERS: dict[Any, Kind] = {
    dict: kinds.ITEMS,
    (list, deque): kinds.ELEMENTS,
    (tuple, frozenset): kinds.FIXED,
    set: kinds.SET,
    (bytearray, array.array, *_OF_C): kinds.BYTES,
    contextvars.ContextVar: kinds.CONTEXT,
}
_WRAPPERS: dict[Any, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    (staticmethod, classmethod): ("__func__",),
    type(functools.cache(lambda: None)): ("__wrapped__",),
    property: ("fget", "fset"),
}
"""What is followed to the functions in it, by the attributes that have them."""
_CODE = (
    types.FunctionType, types.MethodType, type, types.ModuleType, property, staticmethod,
    classmethod,
)  # fmt: skip
"""Classes of what is constant if code isn't followed."""


def _unwrapped(member: Any) -> Any:
    """The function of a static method or a class method; anything else as it is."""
    return member.__func__ if isinstance(member, (staticmethod, classmethod)) else member


def _dict_of(cls: type) -> Any:
    """The dict behind a class, whose `vars()` is a proxy, which C++ can't read."""
    state = vars(cls)
    return next((one for one in gc.get_referents(state) if type(one) is dict), state)


def _module(name: str, package: str | None) -> types.ModuleType | None:
    """The module that code of a package imports by this name; None if it isn't loaded yet."""
    try:
        return sys.modules.get(importlib.util.resolve_name(name, package))
    except (ImportError, ValueError):  # a relative name that leads nowhere
        return None


def _is_random_of_numpy(kind: type) -> bool:
    return _package(kind) == "numpy" and (
        hasattr(kind, "bit_generator") or hasattr(kind, "get_state")
    )


_OF_USERS = (argparse.Namespace, types.SimpleNamespace)
"""Classes of Python's whose attributes are the user's: those count that the code names."""
_OPAQUE = (io.IOBase, logging.Logger, logging.Handler)
"""Classes of what programs write to: its state changes nothing that they compute."""
_OF_CODE = frozenset({"abc", "importlib", "inspect", "pathlib", "typing"})
"""Packages whose objects describe code or name files: none changes but for what it caches."""

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
