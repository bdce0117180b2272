"""Numbers that optimizers compute from step counts and rates, computed anew at each replay.

In: the step counts and rates that torch's optimizers read while a call is recorded, and Python's
arithmetic on them. Out: `Formulas`, to compare with another call's, and a `Recount` that applies
them in later calls. Called by `take` and `captured_call`.

An optimizer reads a step count by `.item()`. Its value is computed aside, so that nothing is
flushed, and handed out as a `Count`: a float that notes each operation on it as a `Line`. A number
that an op got is matched with the line that gave the same value, in both of two calls.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from lazy_tensor.capture.numbers.op_numbers import may_be_made_from
from lazy_tensor.capture.object_graph import ObjectGraph
from lazy_tensor.capture.watched_object import Place, is_atom, is_same
from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.plan import foreach
from lazy_tensor.dispatch.record.inputs import slot_of
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.trie.trace import Leaf, Node, State, Trace, local
from lazy_tensor.kernels.segment import Ref, ScalarRef, TensorSpec


class Line(NamedTuple):
    """How one value is made from the values of other lines; `operands` are their numbers.

    "leaf": the trace's, `what` is its number. "scalar": a number that an op got, `what` counts
    these. "place": a number in an optimizer's group, `what` is its place in an `ObjectGraph`.
    "constant": `what` is its type and text. "op": an op's result, its last operands passed by
    `names`. "item": a tensor's value. "number": the result of Python's operator `what`. "branch":
    a comparison, with its `outcome`. "read": a number that was turned into something that no line
    follows.
    """

    kind: str
    what: Any
    operands: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    outcome: bool | None = None


NUMBERS = frozenset({"place", "item", "number"})
"""Kinds of lines whose values an op may have got as a number."""


@dataclass(frozen=True, slots=True)
class Formulas:
    """How a call computed numbers: equal for calls that did so in the same way.

    `values` are those of the lines in this call. `inputs` are the lines of numbers that are inputs
    of the trace, with their numbers there. Other calls may have such a number in the trace itself.
    """

    code: tuple[Line, ...]
    values: tuple[Any, ...] = field(compare=False)
    inputs: dict[int, int] = field(compare=False)

    def places(self) -> set[Place]:
        """The places of optimizers' groups that were read."""
        return {line.what for line in self.code if line.kind == "place"}

    def explained(self, before: Formulas) -> dict[tuple[str, str], list[int]]:
        """Lines of numbers, by their values in this call and in an earlier one, as text.

        A number of the trace that had the same two values is computed by one of these lines.
        """
        found: dict[tuple[str, str], list[int]] = defaultdict(list)
        for i, line in enumerate(self.code):
            if line.kind in NUMBERS:
                found[repr(self.values[i]), repr(before.values[i])].append(i)
        return found

    def read_another(self, before: Formulas) -> bool:
        """Whether a number differs that was turned into something that no line follows."""
        return any(
            line.kind == "read" and not is_same(mine, theirs)
            for line, mine, theirs in zip(self.code, self.values, before.values, strict=True)
        )


class Counts:
    """Follows what a recorded call reads from 0-dim CPU tensors, and what it computes from that.

    The values of such tensors are known though they are pending: ops on them are run aside, on
    copies. Made when the tape is on.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._tape = trace.tape
        self._seen: State | None = trace.state  # up to here steps were followed
        self._n_leaves = 0  # of the steps followed
        self._line_of: dict[int, int] = {}  # by slot; slots that are not followed are missing
        self._code: list[Line] = []
        self._values: list[Any] = []  # of each line
        self._number_of: dict[Line, int] = {}  # equal lines are one
        self._n_scalars = 0  # "scalar" lines
        self._inputs: dict[int, int] = {}  # see `Formulas`

    def formulas(self) -> Formulas:
        """The lines so far."""
        return Formulas(tuple(self._code), tuple(self._values), self._inputs)

    @property
    def is_going_on(self) -> bool:
        """Whether this thread still records the call: `Count`s may outlive it, or reach another."""
        return self._trace.tape is self._tape and local.trace is self._trace

    @contextmanager
    def counts_in_param_groups(self, picture: ObjectGraph) -> Iterator[None]:
        """Put `Count`s in place of floats in the groups of torch's own optimizers while they step.

        If the user's code may look into groups, none are put there: that code might use a rate in
        C, for a tensor say, which no line follows.
        """
        groups = {id(h.holder): name for name, h in picture.holdings.items()}
        lent: list[tuple[dict[str, Any], str, float, Count]] = []

        def lend(optimizer: Any, *_: Any) -> None:
            for group in optimizer.param_groups if self.is_going_on else ():
                name = groups.get(id(group))
                for i, key in enumerate(() if name is None else picture.holdings[name].keys):
                    number = group.get(key)
                    if type(number) is float:
                        group[key] = count = self._count(Line("place", (name, i)), number)
                        lent.append((group, key, number, count))

        def take_back(*_: Any) -> None:
            for group, key, number, count in lent:
                # a value that the step itself has set stays
                now = group.get(key)
                if now is count:
                    group[key] = number
                elif type(now) is Count:  # a scheduler that a hook has stepped computed it
                    group[key] = _plain(now)
            lent.clear()

        hooks: list[Any] = []
        if not picture.may_mention("param_groups", "lr"):
            for instance in filter(torch_private.is_own_optimizer, picture.instances):
                hooks.append(instance.register_step_pre_hook(lend))
                hooks.append(instance.register_step_post_hook(take_back))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            take_back()

    def read(self, tensor: torch.Tensor) -> Count | None:
        """The tensor's value as a `Count`; None if it isn't followed, or is no float."""
        slot = slot_of(self._trace, tensor) if self.is_going_on else None
        if slot is None:
            return None
        self._catch_up()
        line = self._line_of.get(slot.index)
        if line is None:
            return None
        value = torch_private.values_of(self._values[line])
        if type(value) is not float:
            return None
        return self._count(Line("item", None, (line,)), value)

    def computed(self, name: str, *arguments: Any) -> Any:
        """Apply Python's operator `name`, and note it. The result is a `Count` if it is a float."""
        result = getattr(operator, name)(*map(_plain, arguments))
        if not self.is_going_on or type(result) not in (float, bool):
            return result
        operands = tuple([
            argument.line
            if type(argument) is Count and argument.counts is self
            else self._constant(_plain(argument))
            for argument in arguments
        ])  # fmt: skip
        if type(result) is bool:
            self._noted(Line("branch", name, operands, outcome=result), result)
            return result
        return self._count(Line("number", name, operands), result)

    def read_as_it_is(self, line: int) -> None:
        """Note that a count was read in a way that no line follows: it must stay the same."""
        if self.is_going_on:
            self._noted(Line("read", None, (line,)), self._values[line])

    def _noted(self, line: Line, value: Any) -> int:
        """The number of a line, which is added if it is new."""
        number = self._number_of.get(line)
        if number is None:
            number = self._number_of[line] = len(self._code)
            self._code.append(line)
            self._values.append(value)
        return number

    def _count(self, line: Line, value: float) -> Count:
        made = Count(value)
        made.counts, made.line = self, self._noted(line, value)
        return made

    def _scalar(self, value: complex) -> int:
        self._n_scalars += 1
        return self._noted(Line("scalar", self._n_scalars), value)

    def _constant(self, value: Any) -> int:
        return self._noted(Line("constant", (type(value), repr(value))), value)

    def _catch_up(self) -> None:
        """Follow the steps that were recorded since the last time."""
        steps: list[Leaf | Node] = []
        state: State | None = self._trace.state
        while state is not self._seen:
            assert state is not None, "a trace only grows while its tape is on"
            if state.step is not None:
                steps.append(state.step)
            state = state.parent
        self._seen = self._trace.state
        drawn = {id(data) for _, data in self._tape.draws}
        for step in reversed(steps):
            if isinstance(step, Node):
                self._follow(step)
                continue
            data = self._trace.leaves[self._n_leaves]
            if step.shares is not None:
                # another tensor on the memory of that leaf: writes to one would change both
                self._line_of.pop(step.shares, None)
            elif _is_count(step.spec) and id(data) not in drawn:
                # a copy: the leaf is written when the call's ops run, and its value belongs to now
                line = Line("leaf", self._n_leaves)
                self._line_of[step.slot] = self._noted(line, torch_private.copy_of(data))
            self._n_leaves += 1

    def _follow(self, node: Node) -> None:
        """Run a recorded call aside if its inputs are followed; else stop following its outputs."""
        if self._line_of.keys().isdisjoint((*node.reads, *node.writes)):
            return
        for part in foreach.parts_of(node):
            given = [*part.args, *(value for _, value in part.kwargs)]
            if self._is_followed(part, given):
                self._run(part, given)
                continue
            # what it writes is unknown from here on. A base is given up with its first view, as a
            # write to the view would change it.
            for slot in part.writes if part.view_of is None else part.reads:
                self._line_of.pop(slot, None)

    def _is_followed(self, node: Node, given: list[Any]) -> bool:
        """Whether a call has one result, or writes its first argument alone, and all its inputs are
        followed counts or constants."""
        if node.view_of is not None or node.facts.is_random or not node.is_single:
            return False
        if node.facts.writes not in ((), (0,)):
            return False
        return all(map(_is_count, node.specs)) and all(
            argument.index in self._line_of
            if isinstance(argument, Ref)
            else isinstance(argument, ScalarRef) or is_atom(argument)
            for argument in given
        )

    def _run(self, node: Node, given: list[Any]) -> None:
        """Run a call on the values known, and note its result as a line."""
        operands: list[int] = []
        for argument in given:
            if isinstance(argument, Ref):
                operands.append(self._line_of[argument.index])
            elif isinstance(argument, ScalarRef):
                operands.append(self._scalar(self._trace.scalars[argument.index]))
                self._inputs[operands[-1]] = argument.index
            elif type(argument) in (int, float, complex):
                operands.append(self._scalar(argument))
            else:
                operands.append(self._constant(argument))
        names = tuple([name for name, _ in node.kwargs])
        line = Line("op", node.facts.op, tuple(operands), names)
        if line not in self._number_of:
            self._noted(line, _result_of(line, [self._values[i] for i in operands]))
        for slot in (*node.outs, *node.writes):
            if slot is not None:
                self._line_of[slot] = self._number_of[line]


def _is_count(spec: TensorSpec | None) -> bool:
    """Whether a tensor may be a step count: of no dimensions, on the CPU."""
    return spec is not None and not spec.size and spec.device.type == "cpu"


def _result_of(line: Line, given: list[Any]) -> Any:
    """The value of a line, from the values of its operands."""
    if line.kind == "read":
        return given[0]
    if line.kind == "item":
        return torch_private.values_of(given[0])
    if line.kind != "op":
        return getattr(operator, line.what)(*given)
    op: OpOverload = line.what
    n_args = len(given) - len(line.names)
    # the first operand's value belongs to another line, which the write must not change
    if op._schema.is_mutable:
        given[0] = torch_private.copy_of(given[0])
    with torch_private.kernels_only():
        return op(*given[:n_args], **dict(zip(line.names, given[n_args:], strict=True)))


def _plain(number: Any) -> Any:
    """The plain float of a `Count`, without a note that it was read."""
    return float.__float__(number) if type(number) is Count else number


class Count(float):
    """A float that knows the line that it was computed by.

    C code that takes floats reads its value unnoticed, and so does the arithmetic of other classes.
    What they make of it is a plain number.
    """

    __slots__ = ("counts", "line")
    counts: Counts
    line: int

    def __bool__(self) -> bool:
        return bool(self.counts.computed("truth", self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.counts.read_as_it_is(self.line)
        return (float, (_plain(self),))


def _operator(name: str, *, is_swapped: bool = False) -> Callable[..., Any]:
    """A method of `Count` that applies an operator and notes it."""

    def method(self: Count, *other: Any) -> Any:
        if not all(type(number) in (int, float, bool, Count) for number in other):
            return NotImplemented
        return self.counts.computed(name, *((*other, self) if is_swapped else (self, *other)))

    return method


def _reading(name: str) -> Callable[..., Any]:
    """A method of `Count` that does as `float` does, and notes that the value was read."""

    def method(self: Count, *args: Any) -> Any:
        self.counts.read_as_it_is(self.line)
        return getattr(float, name)(self, *args)

    return method


# These are followed, so that replays may compute them with other values. All methods in the last
# list give what no line follows, so that replays need the same value.
for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(Count, f"__{_name}__", _operator(_name))
    setattr(Count, f"__r{_name}__", _operator(_name, is_swapped=True))
for _name in ("neg", "pos", "abs", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Count, f"__{_name}__", _operator(_name))
for _name in ("__float__", "__int__", "__round__", "__trunc__", "__floor__", "__ceil__",
              "__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__divmod__", "__rdivmod__",
              "__hash__", "__format__", "__repr__", "__str__", "is_integer", "as_integer_ratio",
              "hex"):  # fmt: skip
    setattr(Count, _name, _reading(_name))


class Recount:
    """Computes a trace's numbers from its leaves and from optimizers' groups, as two calls did.

    `formulas` and `scalars` are those of the two calls, the later one first. `constants` are the
    small tensors that the call makes. Counts that were equal are computed once, and must stay
    equal. Numbers that were the same in both calls must stay the same. RuntimeError if a number
    changes and it is unknown from what it is computed, or whether a constant was made from it.
    """

    def __init__(
        self,
        formulas: tuple[Formulas, Formulas],
        scalars: tuple[Sequence[complex], Sequence[complex]],
        constants: Iterable[torch.Tensor],
    ) -> None:
        now, before = formulas
        # lines that must have equal values share a number below, the place of their value here
        self._values: list[Any] = []  # None for what each call computes
        self._alike: dict[int, list[int]] = {}  # by place: the leaves that had one value
        self._computed: dict[int, Line] = {}  # by place, in the order to compute them in
        self._fixed: dict[int, Any] = {}  # by place: computed values that must stay
        self._moving: list[int] = []  # the places of numbers in groups that changed
        self._scalars = list(scalars[0])
        self.places: list[Place] = []
        """Where the numbers in groups lie that changed between the two calls."""
        explained = now.explained(before)
        # for each number of the trace that changed: the lines that gave the same two values
        explaining = {
            i: explained[repr(one), repr(other)]
            for i, (one, other) in enumerate(zip(*scalars, strict=True))
            if not is_same(one, other) and (repr(one), repr(other)) in explained
        }
        distinct: dict[Any, int] = {}
        places: list[int] = []  # of each line of the formulas
        for i, (line, value) in enumerate(zip(now.code, now.values, strict=True)):
            # an op on a count reads a number of the trace that an earlier line computes
            if now.inputs.get(i) in explaining:
                first = explaining[now.inputs[i]][0]
                if first >= i:
                    raise RuntimeError("a number changes, and what it is computed from is unknown")
                places.append(places[first])
                continue
            line = line._replace(operands=tuple([places[k] for k in line.operands]))
            # with operands as places, lines that compute the same from equal counts are equal
            key: Any = line
            if line.kind == "leaf":
                key = (value.dtype, repr(torch_private.values_of(value)))
            elif line.kind == "scalar":
                key = (type(value), repr(value))
            is_moving = line.kind == "place" and not is_same(value, before.values[i])
            is_given = line.kind in ("constant", "scalar", "place") and not is_moving
            place = distinct.setdefault(key, len(self._values))
            places.append(place)
            if place == len(self._values):
                self._values.append(value if is_given else None)
            if is_moving:
                self._moving.append(place)
                self.places.append(line.what)
            elif line.kind == "leaf":
                self._alike.setdefault(place, []).append(line.what)
            elif not is_given:
                self._computed[place] = line
                if line.kind != "op" and is_same(value, before.values[i]):
                    self._fixed[place] = value
        # several lines may have given a number. Which one computes it is unknown as long as they
        # agree, so they have to.
        self._changing = {i: places[lines[0]] for i, lines in explaining.items()}
        alike = {frozenset([places[line] for line in lines]) for lines in explaining.values()}
        self._agreeing = [sorted(one) for one in alike if len(one) > 1]
        # a tensor made from a number that changes would keep the value of the captured call
        changing = [
            value
            for line, value, then in zip(now.code, now.values, before.values, strict=True)
            if line.kind in NUMBERS and not is_same(value, then)
        ]
        if any(may_be_made_from(changing, constant) for constant in constants):
            raise RuntimeError("a tensor may be made from a number that changes")

    @property
    def is_needed(self) -> bool:
        """Whether numbers may differ from call to call."""
        return bool(self._alike or self._moving)

    def __call__(
        self, leaves: list[torch.Tensor], numbers: Iterable[float]
    ) -> list[complex] | None:
        """The trace's numbers for these leaves and for the `numbers` at `places`; None if the call
        might do something else with them."""
        values = self._values.copy()
        for place, number in zip(self._moving, numbers, strict=True):
            values[place] = number
        for place, members in self._alike.items():
            # 0-dim tensors of one dtype on the CPU
            if not hits.loaded.are_equal(leaves, members):
                return None
            values[place] = leaves[members[0]]
        try:
            for place, line in self._computed.items():
                values[place] = _result_of(line, [values[k] for k in line.operands])
        except ArithmeticError:
            return None  # the call is recorded: the function's Python raises it where eager does
        if not all(is_same(values[place], value) for place, value in self._fixed.items()):
            return None
        for first, *others in self._agreeing:
            if not all(is_same(values[first], values[other]) for other in others):
                return None
        scalars = self._scalars.copy()
        for i, place in self._changing.items():
            scalars[i] = values[place]
        return scalars
