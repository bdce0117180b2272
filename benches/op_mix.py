"""The aten calls of a program, captured once, and made again on tensors of any class.

In: a function. Out: a `Program`, whose `drive` makes the same calls on other leaves.
`bench_record.py` times recording by it, without autograd's engine and modules around the ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True)
class Place:
    """Stands for an argument that is value `index` of the program: leaves first, then results."""

    index: int


@dataclass(slots=True)
class Entry:
    """One call. `args` and `kwargs` have `Place`s for tensors. `n_results` are the values that it
    adds, 0 for calls in place. `is_single`: it returns one tensor, not a list. `varying` are the
    arguments, by position or name, that are another number in each step."""

    op: Any
    args: list[Any]
    kwargs: dict[str, Any]
    n_results: int
    is_single: bool
    varying: list[int | str] = field(default_factory=list)


@dataclass(slots=True)
class Program:
    """Calls in order. `leaves` are the tensors that no call of them has made."""

    leaves: list[torch.Tensor]
    entries: list[Entry]

    def note_varying(self, later: Program) -> None:
        """Note which numbers differ in `later`, the same program captured at another step."""
        for entry, other in zip(self.entries, later.entries, strict=True):
            assert entry.op is other.op, "the two captures are of different programs"
            entry.varying = [i for i, a in enumerate(entry.args) if is_other(a, other.args[i])]
            entry.varying += [k for k, a in entry.kwargs.items() if is_other(a, other.kwargs[k])]

    def vary(self, factor: float) -> None:
        """Multiply each number that varies from step to step by `factor`."""
        for entry in self.entries:
            for label in entry.varying:
                if isinstance(label, int):
                    entry.args[label] *= factor
                else:
                    entry.kwargs[label] *= factor

    def drive(self, leaves: Sequence[torch.Tensor], call: Callable[..., Any] | None = None) -> None:
        """Make all calls on `leaves`. `call(entry, args, kwargs)` is called in place of each op."""
        values: list[Any] = list(leaves)
        for entry in self.entries:
            args = [_filled(a, values) for a in entry.args]
            kwargs = {name: _filled(a, values) for name, a in entry.kwargs.items()}
            result = entry.op(*args, **kwargs) if call is None else call(entry, args, kwargs)
            if entry.n_results:
                values.extend([result] if entry.is_single else result)


def is_other(number: Any, later: Any) -> bool:
    return isinstance(number, float) and number != later


def _filled(argument: Any, values: list[Any]) -> Any:
    if type(argument) is Place:
        return values[argument.index]
    if type(argument) is list:
        return [_filled(item, values) for item in argument]
    return argument


class _Capture(TorchDispatchMode):
    """A dispatch mode that notes each call and its results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, list[Any], bool]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_single = isinstance(result, torch.Tensor)
        is_several = isinstance(result, (tuple, list))
        results = [result] if is_single else list(result) if is_several else []
        self.calls.append((func, args, kwargs or {}, results, is_single))
        return result


def captured(function: Callable[[], object], keep: Callable[[Any, list[Any]], bool]) -> Program:
    """The calls that `function` makes. `keep(op, tensors)` says which of them the program has."""
    with _Capture() as capture:
        function()
    # First pass: find the leaves, which are numbered before all results. `id()` names a tensor, as
    # `capture` holds all of them.
    place: dict[int, int] = {}
    leaves: list[torch.Tensor] = []
    made: set[int] = set()
    for op, args, kwargs, results, _ in capture.calls:
        tensors = _tensors((args, list(kwargs.values())))
        if keep(op, tensors):
            for tensor in tensors:
                if id(tensor) not in made and id(tensor) not in place:
                    place[id(tensor)] = len(leaves)
                    leaves.append(tensor)
            # results of calls that are left out are not `made`: the program has them as leaves
            made.update(id(r) for r in results)
    # second pass: number the results, and put numbers in place of tensors
    entries: list[Entry] = []
    n_values = len(leaves)
    for op, args, kwargs, results, is_single in capture.calls:
        tensors = _tensors((args, list(kwargs.values())))
        if not keep(op, tensors):
            continue
        named = {name: _placed(a, place) for name, a in kwargs.items()}
        template = [_placed(a, place) for a in args]
        is_new = [r is not None and id(r) not in {id(t) for t in tensors} for r in results]
        entries.append(Entry(op, template, named, len(results) if any(is_new) else 0, is_single))
        if any(is_new):
            for result in results:
                place[id(result)] = n_values
                n_values += 1
    return Program(leaves, entries)


def _tensors(argument: Any) -> list[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        return [argument]
    if isinstance(argument, (list, tuple)):
        return [tensor for item in argument for tensor in _tensors(item)]
    return []


def _placed(argument: Any, place: dict[int, int]) -> Any:
    if isinstance(argument, torch.Tensor):
        return Place(place[id(argument)])
    if isinstance(argument, (list, tuple)):
        return [_placed(item, place) for item in argument]
    return argument
