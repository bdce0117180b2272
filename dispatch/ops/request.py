"""One call that no state knew: its arguments, and the tensors among them, found once.

In: the op and its arguments as torch gave them. Out: the tensors, and the arguments with tensors
and numbers replaced: so come the key of the schema cache and the arguments of a node. Made by
`recorder`; its modules and `sharding` pass it on.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch.ops.schema import OpFacts, facts_of
from lazy_tensor.dispatch.torch_private import is_mode_entered
from lazy_tensor.kernels.segment import ScalarRef


def is_observed(owner: Any) -> bool:
    """Whether somebody else's dispatch mode wants to see the ops that a sharded call is made of.

    One that counts collectives, say. `owner` is the class or the mode that was given the call.
    """
    return isinstance(owner, type) and is_mode_entered()


class Request:
    """A call that no state knew.

    `owner` is the class or the mode whose `__torch_dispatch__` was given the call. `in_mode`: the
    owner is a mode, not the class of lazy tensors. `facts` are the op's, but a higher-order op has
    none. `tensors` are all among the arguments, in order, repeats included. `key` is the exact key,
    if `recorder` has made it. `is_called`: it is a call of the program's on sharded tensors, and
    not one with other arguments by which a part of it is computed. `learns` is the key for the
    schema cache, if the call runs once to tell its outputs' metadata. `began_s` is when recording
    began, by `perf_counter`. (The thread's own time takes a system call: 10 us beside busy ones.)
    """

    __slots__ = (
        "args", "began_s", "facts", "in_mode", "is_called", "key", "kwargs", "learns", "op",
        "owner", "tensors",
    )  # fmt: skip

    facts: OpFacts

    def __init__(
        self, owner: Any, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.began_s = perf_counter()
        self.owner = owner
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.in_mode = not isinstance(owner, type)
        self.is_called = False
        self.key: tuple[Any, ...] | None = None
        self.learns: tuple[Any, ...] | None = None
        if isinstance(op, OpOverload):
            self.facts = facts_of(op)
        self.tensors: list[torch.Tensor] = []
        for argument in args:
            if type(argument) not in FIXED:
                _collect(argument, self.tensors)
        for argument in kwargs.values():
            _collect(argument, self.tensors)

    def argument(self, name: str, default: Any = None) -> Any:
        """The argument called `name` in the schema, wherever it was passed."""
        return self.facts.named(self.args, self.kwargs.items()).get(name, default)

    def written(self) -> list[torch.Tensor]:
        """The tensors that the op writes."""
        found: list[torch.Tensor] = []
        for label in self.facts.writes:
            _collect(self.labelled(label), found)
        return found

    def labelled(self, label: int | str) -> Any:
        """The argument that `OpFacts.writes` names; None if it wasn't given."""
        if isinstance(label, str):
            return self.kwargs.get(label)
        if label < len(self.args):
            return self.args[label]
        # a positional argument may have been passed by its name
        return self.kwargs.get(self.op._schema.arguments[label].name)

    def mapped(
        self, on_tensor: Callable[[torch.Tensor], Any], on_number: Callable[[Any], Any] | None
    ) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        """The arguments with tensors replaced, and with `on_number` numbers in arithmetic too.

        Lists become tuples, so that the result is hashable.
        """
        numeric = self.facts.number_args if on_number else NOTHING
        args: list[Any] = []
        for i, argument in enumerate(self.args):
            if type(argument) in FIXED:
                args.append(argument)
            else:
                args.append(_mapped(argument, on_tensor, on_number if i in numeric else None))
        kwargs = [
            (name, _mapped(argument, on_tensor, on_number if name in numeric else None))
            for name, argument in self.kwargs.items()
        ]
        return tuple(args), tuple(kwargs)


NOTHING: frozenset[int | str] = frozenset()
FIXED = frozenset({bool, str, type(None), torch.dtype, torch.device, torch.memory_format})
"""Types of arguments that stay as they are: no tensors, no numbers in arithmetic, no lists."""


def _collect(argument: Any, found: list[torch.Tensor]) -> None:
    if isinstance(argument, torch.Tensor):
        found.append(argument)
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            _collect(item, found)


def _mapped(
    argument: Any, on_tensor: Callable[[torch.Tensor], Any], on_number: Callable[[Any], Any] | None
) -> Any:
    kind = type(argument)
    if kind is int or kind is float or kind is complex:
        return argument if on_number is None else on_number(argument)
    if isinstance(argument, torch.Tensor):
        return on_tensor(argument)
    if isinstance(argument, (list, tuple)):
        return tuple([_mapped(item, on_tensor, on_number) for item in argument])
    return argument


def scalar_refs(first: int) -> Callable[[Any], ScalarRef]:
    """A function that replaces each number by the next `ScalarRef`, from `first` on."""
    count = first

    def next_ref(_: Any) -> ScalarRef:
        nonlocal count
        count += 1
        return ScalarRef(count - 1)

    return next_ref


def record_again(request: Request, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Record another op in place of the call, as if the call's owner had been given it."""
    if request.in_mode:
        return type(request.owner).__torch_dispatch__(request.owner, op, (), args, kwargs)
    return request.owner.__torch_dispatch__(op, (), args, kwargs)
