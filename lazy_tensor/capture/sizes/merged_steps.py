"""The steps that calls of several sizes have in common, with numbers in place of what differs.

In: the outlines of these calls. Out: `MergedSteps`, or the obstacle: the calls differ in more than
sizes and numbers. Called by `any_size`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from lazy_tensor.capture.numbers.step_counts import value_of
from lazy_tensor.capture.outline import Outline, named
from lazy_tensor.capture.sizes.size_texts import Column
from lazy_tensor.capture.watched_object import Obstacle, is_atom, is_same
from lazy_tensor.dispatch.trie.trace import Leaf, Node, State
from lazy_tensor.kernels.segment import Ref, ScalarRef, TensorSpec

SLICE = torch.ops.aten.slice.Tensor


class SizedState(State):
    """A state beside the trie, whose steps get sizes as numbers."""

    def __init__(self, steps: Sequence[Node | Leaf], varying: frozenset[int]) -> None:
        super().__init__(None, (), None)
        self.varying = varying
        self._all = list(steps)
        self.n_ops = sum(isinstance(one, Node) for one in steps)

    def steps(self, since: State | None = None) -> list[Node | Leaf]:
        """All steps from the root to here."""
        assert since is None, "it is in no trie"
        return self._all


class MergedSteps:
    """The steps of calls, with a number of the trace for each that differs, or may. If it
    `is_known` what may differ, the first outline has numbers there, and another is compared with
    it.

    `columns` are these numbers: what each was in each of the calls; `nodes` has the call that gets
    it. `specs` describe each slot in each of the calls. `slices` are calls of `slice`.
    """

    def __init__(self, found: Sequence[Outline], *, is_known: bool = False) -> None:
        self._is_known = is_known
        self.columns: list[tuple[Any, ...]] = []
        self.nodes: list[Node] = []
        self.specs: dict[int, tuple[TensorSpec, ...]] = {}
        self.slices: list[Node] = []
        self._scalars = [one.scalars for one in found]
        calls = [one.state.steps() for one in found]
        if len({*map(len, calls)}) != 1:
            raise Obstacle(f"it has {len(calls[-1])} steps, and {len(calls[-2])} for another size")
        self.steps = [self._merged(steps) for steps in zip(*calls, strict=True)]

    @property
    def varying(self) -> frozenset[int]:
        """The slots of tensors whose sizes, or strides, vary."""
        return frozenset(slot for slot, specs in self.specs.items() if len({*specs}) > 1)

    def sizes(self) -> Iterable[Column]:
        """The sizes that vary: what each was in each of the calls."""
        for specs in self.specs.values():
            for column in zip(*[spec.size for spec in specs], strict=True):
                if len({*column}) > 1:
                    yield column

    def _merged(self, steps: tuple[Any, ...]) -> Node | Leaf:
        now: Node | Leaf = steps[-1]
        if any(type(one) is not type(now) or key_of(one) != key_of(now) for one in steps[:-1]):
            what = named(now) if isinstance(now, Node) else f"a tensor {now.spec}"
            raise Obstacle(f"it has {what} where the call before had something else")
        if isinstance(now, Leaf):
            self.specs[now.slot] = tuple([one.spec for one in steps])
            return now
        if now.facts.communicates:
            raise Obstacle("it communicates")
        of_outs = zip(*[one.specs for one in steps], strict=True)
        self.specs.update(
            (slot, specs) for slot, specs in zip(now.outs, of_outs, strict=True) if slot is not None
        )
        if now.facts.op is SLICE:
            self.slices.append(now)
        args = self._argument(tuple([one.args for one in steps]), now)
        kwargs = self._argument(tuple([one.kwargs for one in steps]), now)
        return replace(now, args=args, kwargs=kwargs)

    def _argument(self, values: tuple[Any, ...], node: Node) -> Any:
        """An argument that the calls gave to an op, with numbers of the trace for sizes."""
        now = values[-1]
        if type(now) is tuple:
            if any(type(one) is not tuple or len(one) != len(now) for one in values):
                raise Obstacle(f"{named(node)} gets lists of other lengths")
            return tuple([self._argument(items, node) for items in zip(*values, strict=True)])
        are_numbers = [type(one) is ScalarRef for one in values]
        # the trace of a later call may have numbers where the calls that are known had constants
        is_number = are_numbers[0] if self._is_known else any(are_numbers)
        found = values
        if any(are_numbers):
            found = tuple([value_of(*pair) for pair in zip(values, self._scalars, strict=True)])
        if not is_number and _are_same(found):
            return found[-1]
        if not is_number and {*map(type, found)} not in ({int}, {float}):
            raise Obstacle(
                f"{named(node)} gets {now!r} where the call before gave it {values[0]!r}"
            )
        self.columns.append(found)
        self.nodes.append(node)
        return ScalarRef(len(self.columns) - 1)


def _are_same(values: tuple[Any, ...]) -> bool:
    now = values[-1]
    if type(now) is Ref:
        return all(type(one) is Ref and one.index == now.index for one in values)
    if is_atom(now):
        return all(is_same(one, now) for one in values)
    return all(one == now for one in values)


def fingerprint(outline: Outline) -> int:
    """Equal for calls that may differ in sizes alone."""
    outcomes = tuple([outcome for _, outcome in outline.checks])
    return hash((tuple(map(key_of, outline.state.steps())), outcomes, outline.reads))


def key_of(step: Node | Leaf) -> tuple[Any, ...]:
    """What a step has in common with those of other calls that differ in sizes alone."""
    if isinstance(step, Leaf):
        return (step.slot, step.shares, *_kind(step.spec))
    return (
        step.facts.op, step.outs, step.is_single, step.writes, step.view_of, step.in_backward,
        step.after, *map(_kind, step.specs),
    )  # fmt: skip


def _kind(spec: TensorSpec | None) -> tuple[Any, ...]:
    return () if spec is None else (spec.dtype, spec.device, len(spec.size))
