"""Step counts and rates that torch's optimizers read, as a replay finds or computes them.

In: the 0-dim tensors and the numbers of groups that optimizers read while a call is recorded. Out:
the `Count`s of the call, and `CountValues`, which tells their values in later calls. Called by
`take` and `captured_call`.

An optimizer reads a step count by `.item()`. Its value is computed aside, so that nothing is
flushed, and handed out as a `TracedNumber`, in whose text `c[i]` is the count numbered `i`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from lazy_tensor.capture.object_graph import ObjectGraph
from lazy_tensor.capture.watched_object import Obstacle, Place, is_atom, is_same
from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.plan import foreach
from lazy_tensor.dispatch.record.inputs import slot_of
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.run.tape import Tape
from lazy_tensor.dispatch.traced_number import TracedNumber, computes, counts_in, plain, reads_in
from lazy_tensor.dispatch.trie.trace import Node, Trace
from lazy_tensor.kernels.segment import Ref, ScalarRef, TensorSpec

NUMBER = "a number"
"""Stands for a number that an op gets: the trace may have it, or it is an input there."""


@dataclass(frozen=True, slots=True)
class Count:
    """A number, or a 0-dim CPU tensor, that optimizers read: equal if calls find it the same way.

    "place": a number in an optimizer's group, `what` is its place. "set": one that the call itself
    has put there, `what` is the text that tells how it was computed. "leaves": leaves of the trace
    that had one value, `what` are their numbers. "op": what the op gives for `operands`: other
    counts by their numbers, constants by type and text, or NUMBER; the last ones go by `names`.
    `value` is what the call found, `given` are the op's arguments: a `Ref` to another count, a
    `ScalarRef` to a number of the trace, or any constant.
    """

    kind: str
    what: Any
    operands: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()
    value: Any = field(compare=False, default=None)
    given: tuple[Any, ...] = field(compare=False, default=())


class StepCounts:
    """Follows what a recorded call's optimizers read from 0-dim CPU tensors, and from groups.

    The values of such tensors are known though they are pending: ops on them are run aside, on
    copies. Made when the tape is on.
    """

    def __init__(self, trace: Trace, tape: Tape) -> None:
        self._trace, self._tape, self._log = trace, tape, tape.numbers
        self._seen = trace.state  # up to here steps were followed
        self._n_leaves = 0  # of the steps followed
        self._count_at: dict[int, int] = {}  # by slot; slots that are not followed are missing
        self._counts: list[Count] = []
        self._leaves: dict[int, list[int]] = {}  # of each count of leaves
        self._known: dict[Any, int] = {}  # counts that were found in one way are one

    def found(self) -> tuple[Count, ...]:
        """The counts so far."""
        return tuple([
            Count(one.kind, tuple(self._leaves[i]), value=one.value) if i in self._leaves else one
            for i, one in enumerate(self._counts)
        ])  # fmt: skip

    @contextmanager
    def lent_in_groups(self, graph: ObjectGraph) -> Iterator[None]:
        """Put traced numbers in place of floats in the groups of torch's own optimizers while they
        step.

        If the user's code may look into groups, only those are put there that it has set: that code
        might use a rate in C, for a tensor say, which no text follows.
        """
        groups = {id(h.holder): name for name, h in graph.holdings.items()}
        is_seen = graph.may_mention("param_groups", "lr")
        lent: list[tuple[dict[str, Any], str, float, TracedNumber]] = []

        def lend(optimizer: Any, *_: Any) -> None:
            for group in optimizer.param_groups if self._log.is_noting else ():
                name = groups.get(id(group))
                for i, key in enumerate(() if name is None else graph.holdings[name].keys):
                    number = group.get(key)
                    if type(number) is TracedNumber:
                        count = Count("set", number.text, value=number.value)
                    elif type(number) is float and not is_seen:
                        count = Count("place", (name, i), value=number)
                    else:
                        continue
                    text = f"c[{self._numbered(count)}]"
                    group[key] = traced = self._log.traced(text, count.value)
                    lent.append((group, key, number, traced))

        def take_back(*_: Any) -> None:
            for group, key, number, traced in lent:
                # leave a value that the step itself, or a scheduler in a hook, has put there
                now = group.get(key)
                if type(now) is TracedNumber:
                    group[key] = number if now is traced else plain(now)
            lent.clear()

        hooks: list[Any] = []
        for instance in filter(torch_private.is_own_optimizer, graph.instances):
            hooks.append(instance.register_step_pre_hook(lend))
            hooks.append(instance.register_step_post_hook(take_back))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            take_back()

    def read(self, tensor: torch.Tensor) -> TracedNumber | None:
        """The tensor's value as a traced number; None if it isn't followed, or is no float."""
        slot = slot_of(self._trace, tensor) if self._log.is_noting else None
        if slot is None:
            return None
        self._catch_up()
        count = self._count_at.get(slot.index)
        if count is None:
            return None
        value = torch_private.values_of(self._counts[count].value)
        if type(value) is not float:
            return None
        return self._log.traced(f"item(c[{count}])", value)

    def _numbered(self, count: Count, key: Any = None) -> int:
        """The number of a count, which is added if none has the `key`, or is equal."""
        number = self._known.setdefault(count if key is None else key, len(self._counts))
        if number == len(self._counts):
            self._counts.append(count)
        return number

    def _catch_up(self) -> None:
        """Follow the steps that were recorded since the last time."""
        steps = self._trace.state.steps(self._seen)  # a trace only grows while its tape is on
        self._seen = self._trace.state
        drawn = {id(data) for _, data in self._tape.draws}
        for step in steps:
            if isinstance(step, Node):
                self._follow(step)
                continue
            data = self._trace.leaves[self._n_leaves]
            if step.shares is not None:
                # another tensor on the memory of that leaf: writes to one would change both
                self._count_at.pop(step.shares, None)
            elif _may_be_count(step.spec) and id(data) not in drawn:
                # a copy: the leaf is written when the call's ops run, and its value belongs to now
                value = torch_private.copy_of(data)
                key = ("leaves", value.dtype, repr(torch_private.values_of(value)))
                count = self._numbered(Count("leaves", None, value=value), key)
                self._leaves.setdefault(count, []).append(self._n_leaves)
                self._count_at[step.slot] = count
            self._n_leaves += 1

    def _follow(self, node: Node) -> None:
        """Run a recorded call aside if its inputs are followed; else stop following its outputs."""
        if self._count_at.keys().isdisjoint((*node.reads, *node.writes)):
            return
        for part in foreach.parts_of(node):
            given = [*part.args, *(value for _, value in part.kwargs)]
            if self._is_followed(part, given):
                self._run(part, given)
                continue
            # what it writes is unknown from here on. A base is given up with its first view, as a
            # write to the view would change it.
            for slot in part.writes if part.view_of is None else part.reads:
                self._count_at.pop(slot, None)

    def _is_followed(self, node: Node, given: list[Any]) -> bool:
        """Whether a call has one result, or writes its first argument alone, and all its inputs are
        followed counts or constants."""
        if node.view_of is not None or node.facts.is_random or not node.is_single:
            return False
        if node.facts.writes not in ((), (0,)):
            return False
        return all(map(_may_be_count, node.specs)) and all(
            argument.index in self._count_at
            if isinstance(argument, Ref)
            else isinstance(argument, ScalarRef) or is_atom(argument)
            for argument in given
        )

    def _run(self, node: Node, given: list[Any]) -> None:
        """Run a call on the values known, and note its result as a count."""
        operands: list[Any] = []
        numbers: list[Any] = []  # that it gets: those of one value are one
        values: list[Any] = []
        for i, argument in enumerate(given):
            operand: Any = NUMBER
            value = argument
            if isinstance(argument, Ref):
                operand = self._count_at[argument.index]
                given[i], value = Ref(operand), self._counts[operand].value
            elif isinstance(argument, ScalarRef):
                value = self._trace.scalars[argument.index]
            elif type(argument) not in (int, float, complex):
                operand = (type(argument), repr(argument))
            numbers += [(type(value), repr(value))] if operand is NUMBER else []
            operands.append(operand)
            values.append(value)
        names = tuple([name for name, _ in node.kwargs])
        count = Count("op", node.facts.op, tuple(operands), names, given=tuple(given))
        key = (count, *numbers)
        if key not in self._known:
            self._numbered(replace(count, value=_result_of(count, values)), key)
        self._count_at.update(dict.fromkeys((*node.makes, *node.writes), self._known[key]))


def _may_be_count(spec: TensorSpec | None) -> bool:
    """Whether a tensor may be a step count: of no dimensions, on the CPU."""
    return spec is not None and not spec.size and spec.device.type == "cpu"


def _result_of(count: Count, given: list[Any]) -> Any:
    """What the op of a count gives for these arguments."""
    n_args = len(given) - len(count.names)
    # the first argument belongs to another count, which the write must not change
    if count.what._schema.is_mutable:
        given[0] = torch_private.copy_of(given[0])
    with torch_private.kernels_only():
        return count.what(*given[:n_args], **dict(zip(count.names, given[n_args:], strict=True)))


class CountValues:
    """The values of counts in later calls that do as two calls did.

    `counts` has the later call's counts, then the earlier call's. A replay evaluates `texts` for
    the values. `computed_by` gives the texts that compute a number of the trace: none if it never
    changes. RuntimeError if a count needs a number that isn't known yet when it is computed.
    """

    def __init__(
        self,
        counts: tuple[Sequence[Count], Sequence[Count]],
        texts: Iterable[str],
        computed_by: Callable[[int], list[str]],
        scalars: Sequence[complex],
    ) -> None:
        now, _ = counts
        unmoved = unmoved_in(counts)
        moving = [i for i, one in enumerate(now) if one.kind == "place" and i not in unmoved]
        wanted = {i for text in texts for i in counts_in(text)}
        self._values = [one.value if i in unmoved else None for i, one in enumerate(now)]
        self._moving = [(i, now[i].what) for i in moving]
        self._set: list[tuple[int, Callable[..., Any]]] = []
        self.texts: list[str] = []
        """How numbers are computed that the call puts into groups."""
        self._alike: list[tuple[int, list[int]]] = []
        self._ops: list[tuple[int, Count, list[Callable[..., Any]]]] = []
        for i, count in reversed([*enumerate(now)]):
            if i in wanted and count.kind == "leaves":
                self._alike.append((i, list(count.what)))
            elif i in wanted and count.kind == "set":
                if any(k >= 0 for k in reads_in(count.what)) or counts_in(count.what):
                    raise RuntimeError("a rate is computed from a number that the call reads")
                self._set.append((i, computes(count.what)))
                self.texts.append(count.what)
            elif i in wanted and count.kind == "op":
                arguments = [_text_of(one, computed_by) for one in count.given]
                for text in filter(None, arguments):
                    if reads_in(text) or any(k >= i for k in counts_in(text)):
                        raise RuntimeError(
                            "a number changes, and what it is computed from is unknown"
                        )
                    wanted |= counts_in(text)
                computes_them = [
                    computes(text) if text else partial(_constant, value_of(one, scalars))
                    for one, text in zip(count.given, arguments, strict=True)
                ]
                self._ops.insert(0, (i, count, computes_them))

    @property
    def places(self) -> list[Place]:
        """Where the numbers in groups lie that change."""
        return [place for _, place in self._moving]

    def __call__(
        self,
        leaves: list[torch.Tensor],
        numbers: dict[int, float],
        look_up: Callable[[Place], float],
    ) -> list[Any]:
        """The counts for these leaves, and for the `numbers` of texts; `look_up` tells what a place
        holds. Obstacle if counts that were equal are not."""
        values = self._values.copy()
        for i, compute in self._set:
            values[i] = compute(numbers)
        for i, place in self._moving:
            values[i] = look_up(place)
        for i, members in self._alike:
            # 0-dim tensors of one dtype on the CPU
            if not hits.loaded.are_equal(leaves, members):
                raise Obstacle("step counts that were equal are not")
            values[i] = leaves[members[0]]
        for i, count, arguments in self._ops:
            values[i] = _result_of(count, [compute({}, values) for compute in arguments])
        return values


def unmoved_in(counts: tuple[Sequence[Count], Sequence[Count]]) -> set[int]:
    """The counts that are numbers in groups, and were the same in two calls."""
    return {
        i
        for i, (now, before) in enumerate(zip(*counts, strict=True))
        if now.kind == "place" and is_same(now.value, before.value)
    }


def _text_of(argument: Any, computed_by: Callable[[int], list[str]]) -> str | None:
    """The text that computes an op's argument; None of a constant. The first of several will do:
    `OpNumbers` checks that they agree."""
    if isinstance(argument, Ref):
        return f"c[{argument.index}]"
    texts = computed_by(argument.index) if isinstance(argument, ScalarRef) else []
    return texts[0] if texts else None


def value_of(argument: Any, scalars: Sequence[complex]) -> Any:
    """The value of a number that is an input of the trace; any other argument as it is."""
    return scalars[argument.index] if isinstance(argument, ScalarRef) else argument


def _constant(value: Any, *_: Any) -> Any:
    return value
