"""The arguments of a call, read once.

In: what a function is called with. Out: `Arguments`, by whose `key` `replay` finds what it knows of
such calls. C++ reads numbers, plain tensors and builtin containers (`dispatch/native/arguments.h`).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from lazy_tensor.capture.numbers.number_arguments import Followed, followed_arguments
from lazy_tensor.capture.watched_object import own_attributes, slots_of
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.traced_number import NumberLog, is_plain, may_be_traced

NONE_FOLLOWED: Followed = {}
_NAME_OF = {float: "a float that is followed", int: "an int that is followed"}
"""What stands for such a number in a key."""


class Arguments:
    """The arguments of one call.

    `key` is equal for calls that may run the same plan. It holds the metadata of tensors, the
    values of numbers and strings, and the ids of other objects. `tensors` are all tensors, in the
    order found. `objects` are pairs of a label and an object that the call can look into: the roots
    of an `ObjectGraph`. `numbers` are those of arguments that are `followed`, of which the key has
    only the types. `used` are those of these arguments whose numbers turn out to be used otherwise.
    """

    __slots__ = (
        "_followed", "_ids", "_inside", "_places", "args", "key", "kwargs", "numbers", "objects",
        "tensors", "used", "words",
    )  # fmt: skip

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], followed: Followed = NONE_FOLLOWED
    ) -> None:
        self.args = args
        self.kwargs = kwargs
        self.numbers: list[float] = []
        self.used: set[int | str] = set()
        self._followed = followed
        self._places: list[int | str] = []  # of the numbers
        if followed:
            args, kwargs = self._with_types(args, kwargs)
        self.tensors: list[torch.Tensor] = []
        self.objects: list[tuple[str, Any]] = []
        self.words = b""
        """What describes the tensors when the call begins: `take` sets it."""
        self._ids: list[int] = []  # where the key has ids of objects
        self._inside: set[int] = set()  # ids of containers being read: one may contain itself
        parts: list[Any] = []
        hits.loaded.read_arguments(args, kwargs, parts, self.tensors, self._read_other)
        # for each tensor: its class, size, strides, dtype and device; whether it requires a
        # gradient, has a graph, has a storage offset, is an inference tensor or a conjugate or
        # negative view; the first place of the same object; and how it is sharded
        try:
            words = hits.loaded.argument_words(self.tensors, [])
        except RuntimeError:  # autograd raises for a view whose base was written
            words = object()  # equal to nothing
        self.key = (tuple(parts), words)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all tensors, one after the other."""
        return tuple([n for tensor in self.tensors if not tensor.is_nested for n in tensor.shape])

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for calls whose keys differ in sizes of tensors, and in which objects are given."""
        parts = list(self.key[0])
        for i in self._ids:
            parts[i] = "an object"
        sizeless = hits.loaded.argument_words([], self.tensors, True)
        return (*parts, *map(type, self.tensors), sizeless)

    def are_unchanged(self) -> bool:
        """Whether the arguments still hold the same objects; tensors may have other values."""
        # equal keys mean equally many tensors, so `map` leaves none out
        now = Arguments(self.args, self.kwargs, self._followed)
        is_same = map(operator.is_, self.tensors, now.tensors)
        return self.key[0] == now.key[0] and all(is_same)

    def _with_types(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with types in place of the numbers that are followed, which are noted."""
        for place, calls_ops in self._followed.items():
            given: Any = None
            if isinstance(place, str):
                given = kwargs.get(place)
            elif place < len(args):
                given = args[place]
            if type(given) in _NAME_OF and is_plain(given) and may_be_traced(given, calls_ops):
                self.numbers.append(given)
                self._places.append(place)
        if not self._places:
            return args, kwargs
        types = map(_NAME_OF.__getitem__, map(type, self.numbers))
        return self._with(dict(zip(self._places, types, strict=True)))

    def _with(self, others: dict[int | str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with others at some places."""
        args = tuple([others.get(i, given) for i, given in enumerate(self.args)])
        return args, {name: others.get(name, given) for name, given in self.kwargs.items()}

    def call(self, function: Callable[..., Any], log: NumberLog, n_found: int) -> Any:
        """Call a function. It gets traced numbers in place of those that are followed; `n_found`
        others are numbered before them in `log`."""
        args, kwargs = self._with({
            place: log.traced(f"r[{-1 - n_found - k}]", number, calls_ops=self._followed[place])
            for k, (place, number) in enumerate(zip(self._places, self.numbers, strict=True))
        })  # fmt: skip
        return function(*args, **kwargs)

    def note_used(self, places: Iterable[int]) -> bool:
        """Note that the numbers at these places among `numbers` are used in a way that no text
        follows. Whether there are any."""
        self.used.update(self._places[i] for i in places)
        return bool(self.used)

    def note_unfollowed(self, function: Callable[..., Any], of_users: frozenset[str]) -> bool:
        """Note those that aren't followed if `of_users` are names of the user's; whether there are
        any."""
        followed = followed_arguments(function, of_users)
        return self.note_used(i for i, one in enumerate(self._places) if one not in followed)

    def _read(self, label: str, value: Any, parts: list[Any]) -> None:
        hits.loaded.read_argument(label, value, parts, self.tensors, self._read_other)

    def _read_other(self, label: str, value: Any, parts: list[Any]) -> None:
        """Read a value that C++ passes back: of a subclass, a dataclass or any other class, or a
        tensor with attributes."""
        parts.append(type(value))
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            self._read_attributes(label, value, parts)
            return
        # the class is a root too: the function may call its methods, which can see more
        self.objects.append((label, type(value)))
        if isinstance(value, (list, tuple)):
            self._read_items(label, value, enumerate(value), parts)
        elif isinstance(value, Mapping):
            # keys with their types, because 1, 1.0 and True are equal
            parts.append(tuple([(type(name), name) for name in value]))
            self._read_items(label, value, value.items(), parts)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            self._read_items(label, value, (), parts)
        else:
            self._ids.append(len(parts))
            parts.append(id(value))
            self.objects.append((label, value))

    def _read_items(
        self, label: str, value: Any, items: Iterable[tuple[Any, Any]], parts: list[Any]
    ) -> None:
        """Read a container's items, then its attributes."""
        if id(value) in self._inside:
            parts.append("again")
            return
        self._inside.add(id(value))
        for name, item in items:
            self._read(f"{label}[{name!r}]", item, parts)
        parts.append("end")
        self._read_attributes(label, value, parts)
        self._inside.discard(id(value))

    def _read_attributes(self, label: str, value: Any, parts: list[Any]) -> None:
        slots = {
            name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)
        }
        attributes = slots | getattr(value, "__dict__", {})
        of_tensor = isinstance(value, torch.Tensor)
        for name in own_attributes(attributes) if of_tensor else attributes:
            item = attributes[name]
            parts.append(name)
            self._read(f"{label}.{name}", item, parts)
