"""What a recorded call changes in Python besides tensors, and each replay then changes too.

In: the picture of what a call can see before it is recorded. Out: the schedulers of learning rates
that it stepped, and the numbers that it keeps for the next call, such as `self.n_steps`, with what
it made of them. Called by `take`.

A plan doesn't run the function's Python. It can do without as long as the code does only what is
known here: it steps a scheduler and looks at nothing that this has set; it computes with a number,
compares it, and keeps it or returns it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from lazy_tensor.capture import watched_object as kinds
from lazy_tensor.capture.object_graph import ObjectGraph
from lazy_tensor.capture.watched_object import MISSING, Place, WatchedObject, is_same
from lazy_tensor.dispatch import value_flow
from lazy_tensor.dispatch.mentions import mentions_of
from lazy_tensor.dispatch.run.tape import Tape
from lazy_tensor.dispatch.traced_number import PLAIN_TYPES, TracedNumber, text_of
from lazy_tensor.dispatch.trie.trace import Trace, local
from lazy_tensor.dispatch.user_frame import user_line

KEEPERS = (kinds.ATTRIBUTES, kinds.SLOTS, kinds.CELL, kinds.GLOBALS)


class KeptNumbers:
    """Numbers that a call finds, and may leave others in place of, for the next call.

    These are the numbers in `graph` that its code stores anew, under `names`, and does nothing else
    with. Their `places` hold a `TracedNumber` while the call of `function` is recorded. `texts` say
    what each place holds at the end, see `traced_number`: "" if that is no number.
    """

    def __init__(self, graph: ObjectGraph, function: Callable[..., Any], tape: Tape) -> None:
        self.texts: dict[Place, str] = {}
        self._tape = tape
        found = [*_stored(graph)] if not graph.may_mention() else []
        own = _code_of(function)
        if own is not None and graph.may_call(own):
            own = None  # what it returns may be used
        stored = frozenset(name for name, _ in found)
        self.names = _followed(graph, stored, own, traces_bools=False)
        tracing = _followed(graph, self.names, own, traces_bools=True)
        self.places = [place for name, place in found if name in self.names]
        self._traces_bools = [name in tracing for name, _ in found if name in self.names]

    @contextmanager
    def lent(self, graph: ObjectGraph) -> Iterator[None]:
        """Have the places hold numbers that note what is computed from them."""
        lent = zip(self.places, self._traces_bools, strict=True)
        for k, ((name, i), traces_bools) in enumerate(lent):
            holding = graph.holdings[name]
            number = self._tape.numbers.number(-1 - k, holding.values[i], traces_bools=traces_bools)
            put(holding, holding.keys[i], number)
        try:
            yield
        finally:
            if self.places:
                self._take_back([one for one in graph.holdings.items() if one[1].kind in KEEPERS])

    def _take_back(self, holdings: list[tuple[str, WatchedObject]]) -> None:
        """Note what the places hold, and put plain numbers in place of traced ones everywhere."""
        found = {
            name: dict(zip(*one.kind.read(one.holder, one.names), strict=True))
            for name, one in holdings
        }
        keys = {name: one.keys for name, one in holdings}
        for name, i in self.places:
            value = found[name].get(keys[name][i])
            is_number = type(value) in (TracedNumber, *PLAIN_TYPES)
            self.texts[name, i] = text_of(value) if is_number else ""
        for name, holding in holdings:
            for key, value in found[name].items():
                if type(value) is TracedNumber:
                    put(holding, key, value.value)


def _stored(graph: ObjectGraph) -> Iterator[tuple[str, Place]]:
    """The numbers that the user's code stores anew: their names and places."""
    stored = frozenset().union(*[mentions_of(code).stored for code in graph.codes])
    for name, holding in graph.holdings.items() if stored else ():
        if holding.kind not in KEEPERS or name in graph.arguments.values():
            continue
        for i, (key, value) in enumerate(zip(holding.keys, holding.values, strict=True)):
            # a closure's cell has no key: its holding is named after the variable
            its_name = holding.label if holding.kind is kinds.CELL else key
            is_number = type(value) in PLAIN_TYPES and its_name in stored
            if is_number and not graph.is_read_by_libraries(holding, its_name):
                yield its_name, (name, i)


def _followed(
    graph: ObjectGraph, names: frozenset[str], own: types.CodeType | None, *, traces_bools: bool
) -> frozenset[str]:
    """Those of these names with which all code that the call can see does only what is known here.
    Code of its `own` may return them."""
    n_names = -1
    while names and len(names) != n_names:
        n_names = len(names)
        for code, seen in graph.codes.items():
            rules = value_flow.NOTED.difference(seen), names, traces_bools
            names = value_flow.may_be_kept(code, rules, may_return=code is own)
    return names


def put(holding: WatchedObject, key: Any, value: Any) -> None:
    """Put a value where a holding has one."""
    assert holding.kind.put is not None, "there is a way to put what was read"
    holding.kind.put(holding.holder, key, value)


def _code_of(function: Any) -> types.CodeType | None:
    """The code that a call of a function runs, if nothing else sees what it returns."""
    while isinstance(function, (functools.partial, types.MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return getattr(function, "__code__", None)


class SchedulerSteps:
    """The schedulers that one call steps, in order: `stepped`.

    A step that a replay couldn't do when its plan has run is an obstacle: the tape stops.
    """

    def __init__(self, trace: Trace, tape: Tape) -> None:
        self.stepped: list[LRScheduler] = []
        self._trace = trace
        self._tape = tape
        self._is_inside = False
        # before the first step and after the last, by the dicts' ids and the keys
        self._before: dict[tuple[int, str], Any] = {}
        self._after: dict[tuple[int, str], Any] = {}

    def explains(self, group: Any, key: Any, old: Any, new: Any) -> bool:
        """Whether all that changed `old` to `new` in an optimizer's group were the steps."""
        place = (id(group), key)
        return (
            place in self._before
            and is_same(self._before[place], old)
            and is_same(self._after[place], new)
        )

    @contextmanager
    def followed(self, schedulers: list[LRScheduler]) -> Iterator[None]:
        """Note the steps of these schedulers, and whether their optimizers step afterwards."""
        own = [vars(scheduler).get("step", MISSING) for scheduler in schedulers]
        hooks = [
            scheduler.optimizer.register_step_pre_hook(self._before_optimizer)
            for scheduler in schedulers
        ]
        for scheduler in schedulers:
            vars(scheduler)["step"] = self._noting(scheduler, scheduler.step)
        try:
            yield
        finally:
            for scheduler, step in zip(schedulers, own, strict=True):
                del vars(scheduler)["step"]
                if step is not MISSING:
                    vars(scheduler)["step"] = step
            for hook in hooks:
                hook.remove()

    @property
    def _is_going_on(self) -> bool:
        """Whether this thread still records the call."""
        return self._trace.tape is self._tape and local.trace is self._trace

    def _before_optimizer(self, *_: Any) -> None:
        if self.stepped and self._is_going_on:
            self._tape.stop(f"an optimizer steps at {user_line()}, behind its scheduler")

    def _noting(self, scheduler: LRScheduler, step: Callable[..., None]) -> Callable[..., None]:
        def noting(*args: Any, **kwargs: Any) -> None:
            # a scheduler may step others
            is_noted = self._is_going_on and not self._is_inside
            if is_noted and (args or kwargs):
                self._tape.stop(f"it gives a scheduler's step an argument at {user_line()}")
            if not is_noted or args or kwargs:
                step(*args, **kwargs)
                return
            state, groups = self._trace.state, scheduler.optimizer.param_groups
            before = [dict(group) for group in groups]
            self._is_inside = True
            try:
                step()
            finally:
                self._is_inside = False
            if self._trace.state is not state:
                self._tape.stop(f"a scheduler computes with tensors at {user_line()}")
            self.stepped.append(scheduler)
            for group, values in zip(groups, before, strict=True):
                for key, old in values.items():
                    if not is_same(old, group.get(key, MISSING)):
                        self._before.setdefault((id(group), key), old)
                        self._after[id(group), key] = group.get(key, MISSING)

        return noting
