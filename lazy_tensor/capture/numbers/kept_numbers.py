"""Numbers that a recorded call keeps for the next one, such as `self.n_steps`.

In: the picture of what a call can see before it is recorded. Out: `KeptNumbers`, which lends such
numbers as traced ones while the call is recorded, and then tells what the call left. Called by
`take`.

A plan doesn't run the function's Python. It can do without as long as all code that sees such a
number only computes with it, compares it, and keeps it or returns it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from lazy_tensor.capture import watched_object as kinds
from lazy_tensor.capture.object_graph import ObjectGraph, code_of
from lazy_tensor.capture.watched_object import MISSING, Place, WatchedObject
from lazy_tensor.dispatch import torch_private, value_flow
from lazy_tensor.dispatch.mentions import item_name, mentions_of
from lazy_tensor.dispatch.number_takers import known_in
from lazy_tensor.dispatch.run.tape import Tape
from lazy_tensor.dispatch.traced_number import PLAIN_TYPES, TRACED, is_plain, text_of

OWN_WAYS = ("__delattr__", "__getattr__", "__getattribute__", "__setattr__")
"""Methods by which a class may do anything where an attribute is read or set."""
OWN_ITEMS = ("__getitem__", "__setitem__")
"""Those by which it may do anything where an item is read or set."""
KEEPERS = (kinds.ATTRIBUTES, kinds.SLOTS, kinds.CELL, kinds.GLOBALS)
"""Kinds of places where numbers may be kept."""
NAMING = (*KEEPERS, kinds.MEMBERS, kinds.OF_TENSOR)
"""Kinds of places that have names in code."""


class KeptNumbers:
    """Numbers that a call finds, and may leave others in place of, for the next call.

    These are the numbers in `graph` that its code stores anew, rates in the groups of optimizers
    among them, and does nothing unseen with; the `tape` gets their names. Their `places` hold a
    `TracedNumber` while the call of `function` is recorded. `texts` say what each place holds at
    the end, see `traced_number`: "" if that is no number.
    """

    def __init__(
        self, graph: ObjectGraph, function: Callable[..., Any], tape: Tape, moved: frozenset[str]
    ) -> None:
        self.texts: dict[Place, str] = {}
        self._tape = tape
        found = [*_stored(graph, moved), *_rates_stored(graph)]
        tape.of_users = graph.names_of_users
        own = code_of(function) if found else None
        if own is not None and graph.may_call(own):
            own = None  # what it returns may be used
        stored = frozenset(name for name, _ in found)
        tape.kept, given_to_ops = _followed(graph, stored, own, tape.of_users)
        # an op reads a traced number as a float
        others = {name for name, place in found if type(graph.value_at(place)) is not float}
        while not others.isdisjoint(tape.kept & given_to_ops):
            tape.kept, given_to_ops = _followed(
                graph, tape.kept - (others & given_to_ops), own, tape.of_users
            )
        found = [(name, place) for name, place in found if name in tape.kept]
        self.places = [place for _, place in found]
        self._calls_ops = [name in given_to_ops for name, _ in found]

    @contextmanager
    def lent(self, graph: ObjectGraph) -> Iterator[None]:
        """Put traced numbers at the places, and take them back at the end."""
        lent = enumerate(zip(self.places, self._calls_ops, strict=True))
        log = self._tape.numbers
        try:
            for k, ((name, i), calls_ops) in lent:
                holding = graph.holdings[name]
                # no variable has the number, which would outlive the call
                put(
                    holding,
                    holding.keys[i],
                    log.traced(f"r[{-1 - k}]", holding.values[i], calls_ops=calls_ops),
                )
            yield
        finally:
            if self.places:
                own = {name for name, _ in self.places}
                self._take_back([
                    one for one in graph.holdings.items() if one[1].kind in KEEPERS or one[0] in own
                ])  # fmt: skip

    def _take_back(self, holdings: list[tuple[str, WatchedObject]]) -> None:
        """Note what the places hold, and put plain numbers in place of traced ones everywhere."""
        found = {
            name: dict(zip(*one.kind.read(one.holder, one.names), strict=True))
            for name, one in holdings
        }
        keys = {name: one.keys for name, one in holdings}
        for name, i in self.places:
            value = found[name].get(keys[name][i])
            is_number = type(value) in (*TRACED, *PLAIN_TYPES)
            self.texts[name, i] = text_of(value) if is_number else ""
        for name, holding in holdings:
            for key, value in found[name].items():
                if type(value) in TRACED:
                    put(holding, key, value.value)


class MovedNumbers:
    """The `names` of numbers that the program changes between calls."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._left: dict[Place, Any] = {}

    def found_by(self, graph: ObjectGraph) -> frozenset[str]:
        """The names, with those of the numbers that a call finds and the last one didn't leave."""
        if graph.follows_code:
            moved = {
                name
                for name, place in _numbers_in(graph)
                if place in self._left
                and not kinds.is_same(graph.value_at(place), self._left[place])
            }
            self._names |= moved
        return self._names

    def left_by(self, graph: ObjectGraph) -> None:
        """Note what a call leaves."""
        self._left = {place: graph.value_at(place) for _, place in _numbers_in(graph)}


def _numbers_in(graph: ObjectGraph) -> Iterator[tuple[str, Place]]:
    """The numbers that may be kept for the next call, by name and place."""
    for name, holding in graph.holdings.items():
        for i, (key, value) in enumerate(zip(holding.keys, holding.values, strict=True)):
            if _may_keep(graph, name, value):
                yield _name_of(holding, key), (name, i)


def _may_keep(graph: ObjectGraph, name: str, value: Any) -> bool:
    """Whether a value in the holding of that name is a number that may be kept there."""
    is_keeper = graph.holdings[name].kind in KEEPERS and name not in graph.arguments.values()
    return is_keeper and is_plain(value)


def _name_of(holding: WatchedObject, key: Any) -> Any:
    """The name in code of what a holding has under a key."""
    # a closure's cell has no key: its holding is named after the variable
    return holding.label if holding.kind is kinds.CELL else key


def _stored(graph: ObjectGraph, moved: frozenset[str]) -> list[tuple[str, Place]]:
    """The numbers that the user's code stores anew, or that are `moved`: their names and places.

    Code is followed by names. So a name is left out if anything else that has it isn't such a
    number: a tensor, a property, an attribute that the code of a library reads.
    """
    if graph.may_mention() or any(map(graph.defines, OWN_WAYS)):
        return []
    stored = moved.union(*[mentions_of(code).stored for code in graph.codes])
    found: list[tuple[str, Place]] = []
    others = set(graph.names_in_objects)
    for name, holding in graph.holdings.items() if stored else ():
        for i, (key, value) in enumerate(zip(holding.keys, holding.values, strict=True)):
            its_name = _name_of(holding, key)
            if its_name not in stored or value is MISSING or holding.kind not in NAMING:
                continue
            may_keep = _may_keep(graph, name, value)
            if may_keep and not graph.is_read_by_libraries(holding, its_name):
                found.append((its_name, (name, i)))
            else:
                others.add(its_name)
    return [(name, place) for name, place in found if name not in others]


def _rates_stored(graph: ObjectGraph) -> list[tuple[str, Place]]:
    """The same of the rates that the user's code sets in the groups of torch's own optimizers."""
    stored = frozenset[str]().union(*[mentions_of(code).rates_stored for code in graph.codes])
    if not stored or graph.may_mention() or any(map(graph.defines, OWN_ITEMS)):
        return []
    if any(isinstance(one, LRScheduler) for one in graph.instances) or graph.schedulers:
        return []  # their code reads the rates, and isn't followed
    optimizers = filter(torch_private.is_own_optimizer, graph.instances)
    groups = {id(group) for one in optimizers for group in one.param_groups}
    return [
        (item_name(key), (name, i))
        for name, holding in graph.holdings.items()
        if id(holding.holder) in groups
        for i, (key, value) in enumerate(zip(holding.keys, holding.values, strict=True))
        if item_name(key) in stored and type(value) is float
    ]


def _followed(
    graph: ObjectGraph, names: frozenset[str], own: types.CodeType | None, of_users: frozenset[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """The names whose numbers are only computed with, compared, given to ops and kept by all code
    that the call can see; and those of them that ops get by a call. Code of its `own` may return
    them, too."""
    n_names = -1
    given_to_ops: set[str] = set()
    while names and len(names) != n_names:
        n_names = len(names)
        for code, seen in graph.codes.items():
            rules = known_in(code, seen), names, of_users
            names, given = value_flow.may_be_kept(code, rules, may_return=code is own)
            given_to_ops |= given
    return names, frozenset(given_to_ops)


def put(holding: WatchedObject, key: Any, value: Any) -> None:
    """Put a value where a holding has one."""
    assert holding.kind.put is not None, "there is a way to put what was read"
    holding.kind.put(holding.holder, key, value)
