"""What a call did, without the tensors that it worked on: equal for calls that did the same.

In: what `take` has noted of a call. Out: its `Outline`, and in words how it differs from another.
`captured_call` makes a replay of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lazy_tensor.capture.numbers.op_numbers import explained_by
from lazy_tensor.capture.numbers.step_counts import Count, value_of
from lazy_tensor.capture.watched_object import Place, is_atom, is_same
from lazy_tensor.dispatch.run.tape import Draw
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.dispatch.trie.trace import Leaf, Node, State
from lazy_tensor.dispatch.wording import op_name
from lazy_tensor.kernels.segment import Ref, ScalarRef


@dataclass(frozen=True, slots=True)
class Source:
    """Where a leaf of the trace came from: `kind` says what `name` is.

    "argument" and "draw": its number. "place": its holding and the number of the key there.
    "constant": the contents of a small tensor that the call made. "object": the id of a `tensor`
    that `state` doesn't lead to. `view` is set if the leaf is another tensor on the memory of that
    one, as `Tensor.data` gives: size, stride, and offset from that tensor's. `is_copy`: others,
    such as an array, may write that memory, so the trace copied what lay there.
    """

    kind: str
    name: Any
    view: tuple[Any, ...] | None = None
    is_copy: bool = False
    tensor: torch.Tensor | None = field(default=None, compare=False)


MOST_SHOWN = 100
"""Characters of a message that show a changed value; it is left out of longer ones."""


class Constant:
    """What a replay returns as it is. An instance never changes, and equal ones are the same."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Left:
    """A place where the call put another tensor, and the tensor's slot in the trace (-1 - i for
    draw i). Of a tensor that was `moved_from` another place the slot is None.

    `was_empty`: None lay there before. Else the tensor that lies there gets the new value, unless
    somebody else holds it: then another tensor takes its place.
    """

    place: Place
    slot: int | None
    was_empty: bool
    moved_from: Place | None = None


@dataclass(frozen=True, slots=True)
class Flag:
    """A place where the call found one value and put another, neither of which can change: as
    `model.eval()` does. A replay finds and puts the same ones. `spoken` names it in messages."""

    place: Place
    spoken: str
    old: Any
    new: Any

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Flag)
            and self.place == other.place
            and is_same(self.old, other.old)
            and is_same(self.new, other.new)
        )

    def __str__(self) -> str:
        text = f"{self.spoken} from {self.old!r} to {self.new!r}"
        return text if len(text) < MOST_SHOWN else self.spoken


@dataclass(frozen=True, slots=True)
class Returned:
    """How to make one leaf of what the call returned: `kind` says what `name` is.

    "kept": the place of a number that is kept. "number argument": the place of a number among
    those that the call gets. "computed": text that tells how a number is computed, see
    `traced_number`. "slot": a new tensor of `meta` on that result of the plan. "leaf": a new tensor
    of `meta` on the memory of that leaf. "number", "list": what that result has, for what the call
    read and did nothing else with; "leaf number", "leaf list": the same of a leaf. "data": a new
    tensor of these values. "argument", "object": the one of this number that the call gets.
    "place": the object there. "again": the object returned as that earlier leaf. "constant": `name`
    itself, which is no tensor.
    `layout` is that of a sharded tensor. `grad` is "leaf" for a tensor that requires a gradient,
    "spent" for one whose graph a backward pass has freed, else "".
    """

    kind: str
    name: Any
    meta: tuple[Any, ...] | None = None
    grad: str = ""
    layout: tensor_types.Layout | None = None


@dataclass(frozen=True, slots=True)
class Outline:
    """What a call did, without the tensors it worked on: equal for calls that did the same.

    `checks` are operations on numbers, with the outcomes that decided what the call did. `stepped`
    are ids of schedulers. `kept` are numbers for the next call: see `CallNumbers`. `computed_from`
    says how a replay gets the numbers that it computes with behind its plan.
    """

    state: State
    scalars: tuple[complex, ...]
    counts: tuple[Count, ...]
    numbers: int  # digest of all numbers that the call can see, less those of `counts` and `kept`
    draws: tuple[Any, ...]
    reads: tuple[Any, ...]
    checks: tuple[tuple[str, bool | None], ...]
    stepped: tuple[int, ...]
    flags: tuple[Flag, ...]
    kept: tuple[tuple[Place, str, type], ...]
    sources: tuple[Source, ...]
    left: tuple[Left, ...]
    live: tuple[int, ...]
    returned: tuple[Returned, ...]
    computed_from: dict[int, Returned]
    structure: Any
    numbers_returned: dict[int, Any] = field(compare=False)
    """The numbers that the call read and only returned: keys for their values, by their places in
    `returned`."""
    given: dict[str, Any] = field(compare=False)
    """Numbers that ops may have got, by the texts that tell how Python computed them."""
    sizes_read: tuple[int, ...] = field(compare=False)
    """The sizes of tensors that the call has read, if these were noted."""
    leaf_words: bytes = field(compare=False)
    """What describes the leaves: their sizes, and how these lie in memory."""
    argument_sizes: tuple[int | None, ...] = field(compare=False)
    """The sizes of the tensors among the arguments; None for one that varies."""
    drawn: tuple[Draw, ...] = field(compare=False)
    """The draws of which `draws` has the keys."""

    def may_have(self, sizes: tuple[int, ...]) -> bool:
        """Whether the tensors among the arguments may have these sizes."""
        pairs = zip(self.argument_sizes, sizes, strict=False)
        return len(sizes) == len(self.argument_sizes) and all(a in (None, b) for a, b in pairs)

    def difference(self, before: Outline, *, by_value: bool = False) -> str | None:
        """The first difference from an earlier call, in words; None if there is none.

        A number may be part of a step in one trace and an input in the other. No plan runs both
        then, so the traces differ, unless they are compared `by_value`.
        """
        numbers = _paired_numbers(before, self, by_value=by_value)
        if isinstance(numbers, str):
            return numbers
        # a value read at the same line is named with its line, which `_WORDS` can't do
        for now, then in zip(self.reads, before.reads, strict=False):
            if now != then and now[0] == then[0]:
                return f"it reads {now[1]} at {now[0]} where the call before read {then[1]}"
        changed = [one for one in self.flags if one not in before.flags]
        if changed:
            return f"it changes {changed[0]}, which a replay would not"
        for name, words in _WORDS.items():
            if getattr(self, name) != getattr(before, name):
                return words
        # if other numbers changed too, an equal number of an optimizer explains nothing: it may be
        # equal by chance, or follow the other number for a while
        is_known = self.numbers == before.numbers
        explained = explained_by(self.given, before.given) if is_known else {}
        for node, now, then in numbers:
            if not is_same(now, then) and (repr(now), repr(then)) not in explained:
                return f"{named(node)} gets {now!r} where the call before gave it {then!r}"
        return None


# What to say if a field of two outlines differs. Fields are compared in this order.
_WORDS = {
    "counts": "its optimizers read other step counts or rates each call",
    "draws": "it draws other random numbers each call",
    "reads": "it reads values at other places each call",
    "checks": "what it does depends on numbers that are others in each call",
    "stepped": "it steps other schedulers each call",
    "kept": "it keeps other numbers for the next call each call",
    "flags": "it changes other values each call",
    "sources": "it reads other tensors each call",
    "left": "it leaves tensors in other places each call",
    "live": "other results outlive it each call",
    "returned": "it returns something else each call",
    "computed_from": "it computes what it returns from other numbers each call",
    "structure": "it returns something else each call",
}


def _paired_numbers(
    before: Outline, now: Outline, *, by_value: bool
) -> list[tuple[Node, Any, Any]] | str:
    """The numbers that are inputs of a trace, each with its step, and its value now and before.

    If the steps of the two traces differ, the first difference, with the user's line.
    """
    old, new = before.state.steps(), now.state.steps()
    numbers: list[tuple[Node, Any, Any]] = []
    for one, other in zip(old, new, strict=False):
        if isinstance(one, Leaf) or isinstance(other, Leaf):
            if one == other:
                continue
            specs = [s.spec if isinstance(s, Leaf) else None for s in (one, other)]
            return f"it reads a tensor {specs[1]} where the call before read {specs[0]}"
        if one is other:  # a step of the trace that both calls took: only its numbers may differ
            pairs = [(now.scalars[i], before.scalars[i]) for i in _scalars_in(one)]
            if all(type(value) is type(then) for value, then in pairs):
                numbers += [(one, *pair) for pair in pairs]
                continue
        if one.facts.op is not other.facts.op:
            called = op_name(one.facts.op)
            return f"it calls {named(other)} where the call before called {called}"
        flat, form = _flat(one)
        other_flat, other_form = _flat(other)
        is_equal = form == other_form and _bare(one) == _bare(other)
        for a, b in zip(flat, other_flat, strict=False):
            then, value = value_of(a, before.scalars), value_of(b, now.scalars)
            may_differ = type(a) is type(b) or by_value
            if ScalarRef in (type(a), type(b)) and type(then) is type(value) and may_differ:
                numbers.append((other, value, then))
                continue
            shown = _shown(value), _shown(then)
            if shown[0] != shown[1]:
                return f"{named(other)} gets {shown[0]} where the call before gave it {shown[1]}"
            is_equal &= is_same(a, b) if is_atom(a) else a == b
        if not is_equal:
            return f"{named(other)} gives something else than before"
    if len(old) != len(new):
        return f"it has {len(new)} steps where the call before had {len(old)}"
    return numbers


def _scalars_in(node: Node) -> list[int]:
    """The places of the numbers that are inputs of the trace and that a call gets, in order."""
    found: list[int] = []
    waiting = [*node.args, *(value for _, value in node.kwargs)]
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, (list, tuple)):
            waiting[:0] = one
        elif isinstance(one, ScalarRef):
            found.append(one.index)
    return found


def _flat(node: Node) -> tuple[list[Any], Any]:
    """The arguments of a recorded call, with those inside lists; and how they were nested."""
    return pytree.tree_flatten((node.args, node.kwargs))


def _bare(node: Node) -> Node:
    return replace(node, args=(), kwargs=())


def named(node: Node) -> str:
    return f"{op_name(node.facts.op)} at {node.where}"


def _shown(argument: Any) -> str:
    return f"tensor {argument.index}" if isinstance(argument, Ref) else repr(argument)
