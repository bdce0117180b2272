"""Reads a segment as values: what its outputs and written inputs hold in the end.

In: a segment. Out: `Values`; Declined for ops and arguments without a rule. Called by `write`. That
no tensor is empty and each has a dtype of `fusible.DTYPES` is certain: `dispatch.plan.partition`
puts no other calls into segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.fusible import NORMS
from lazy_tensor.kernels.loops.builder import Builder, expanded, expanded_size
from lazy_tensor.kernels.loops.reductions import Arguments
from lazy_tensor.kernels.loops.rules import (
    FACTORIES,
    FOR_BOOLS,
    FOR_INTEGERS,
    GIVES_PLACES,
    RULES,
    TAKES_UNROUNDED,
    TESTS,
    TEXTS,
    UNARY_FUNCTIONS,
    names,
)
from lazy_tensor.kernels.loops.values import C_TYPES, HALVES, Input, Number, Value
from lazy_tensor.kernels.loops.views import VIEWS, Shown, views_of
from lazy_tensor.kernels.segment import (
    UNDECLARED_WRITES,
    Call,
    Ref,
    ScalarRef,
    Segment,
    TensorSpec,
    base_name,
)
from lazy_tensor.kernels.symbolic import example_of


@dataclass(frozen=True, slots=True)
class Values:
    """What a segment computes: the value of each output, and of each written input by number.

    `bad` says whether an index from data is out of range; None without such indices.
    """

    outputs: tuple[Value, ...]
    written: dict[int, Value]
    bad: Value | None


def values_of(segment: Segment) -> Values:
    """The values of `segment`; raises Declined if an op of it has no rule."""
    return _Reader(segment).values()


class _Reader:
    """Reads the calls of a segment one by one.

    A write gives its target a new value, and what its target is a view of.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._values: list[Value | None] = [
            Input(one.size, one.dtype, i, one.stride, 0) for i, one in enumerate(segment.inputs)
        ]
        # of each view the number of its base, and how it shows that
        self._views: dict[int, tuple[int, Shown]] = {}
        # of each view its value, and that of its base which it shows
        self._shown: dict[int, tuple[Value, Value]] = {}
        self._written: set[int] = set()
        # the dtype in which the call at hand computes
        self._builder = Builder(torch.float32)

    def values(self) -> Values:
        for call in self._segment.calls:
            self._read(call)
        bad = self._builder.bad
        text = " | ".join(f"{{{i}}}" for i in range(len(bad)))
        return Values(
            tuple(map(self._value, self._segment.outputs)),
            {i: self._value(i) for i in sorted(self._written)},
            self._builder.test(text, *bad) if bad else None,
        )

    def _read(self, call: Call) -> None:
        name, given = base_name(call.op), dict(call.arguments())
        if name in VIEWS:
            base = given["self"].index
            specs = [one for one in call.outputs if one is not None]
            for view in views_of(name, given, self._value(base).size, specs):
                self._views[len(self._values)] = base, view
                self._values.append(None)
            return
        b = self._builder
        b.holds = self._dtype_of(call, name, given)
        b.dtype = b.holds if name in TESTS else _computed_in(b.holds)
        arguments = {one: self._argument(name, one, value) for one, value in given.items()}
        made = self._made(call, name, arguments)
        results, writes = made[: len(call.outputs)], made[len(call.outputs) :]
        if len(results) < len(call.outputs):
            raise Declined(f"{call.op}: several results")
        for value, spec in zip(results, call.outputs, strict=True):
            self._values.append(self._result(call, value, given, spec) if spec else None)
        # an op without results of its own writes `self`
        targets = UNDECLARED_WRITES.get(call.op, ()) if call.outputs else ("self",)
        for target, value in zip(targets, writes, strict=True):
            if value is not None:
                self._write(given[target].index, value)

    def _result(
        self, call: Call, value: Value | None, given: Arguments, spec: TensorSpec
    ) -> Value | None:
        """A result in its dtype and sizes: its rule's, those asked for, or those of `self`."""
        if value is None:
            return None
        # halves are computed in float32
        if spec.dtype in HALVES:
            value = self._builder.cast(value, spec.dtype)
        if example_of(value.size) == spec.size:
            return value
        size = given.get("size")
        if size is not None:
            size = expanded_size(value.size, size)
        elif base_name(call.op).endswith("_like"):
            size = self._value(given["self"].index).size
        if size is None or example_of(size) != spec.size:
            raise Declined(f"{call.op}: sizes of its result")
        return expanded(value, size)

    def _value(self, number: int) -> Value:
        """What the value of this number holds now."""
        if number in self._views:
            base_number, view = self._views[number]
            base = self._value(base_number)
            if number not in self._shown or self._shown[number][1] is not base:
                self._shown[number] = view.of(base), base
            return self._shown[number][0]
        value = self._values[number]
        if value is None:
            raise Declined("an undefined value")
        return value

    def _write(self, number: int, value: Value) -> None:
        target = self._value(number)
        value = self._builder.cast(expanded(value, target.size), target.dtype)
        while number in self._views:
            number, view = self._views[number]
            value = view.written(self._value(number), value)
        self._values[number] = value
        if number < len(self._segment.inputs):
            self._written.add(number)

    def _dtype_of(self, call: Call, name: str, given: Arguments) -> torch.dtype:
        """The dtype of the results, or in which tests compare; Declined if that is hard to tell."""
        taken = {n: self._value(v.index) for n, v in given.items() if isinstance(v, Ref)}
        kept = _kept(name)
        values = [v for n, v in taken.items() if n not in kept]
        values += [self._value(one.index) for one in given.get("tensors", ())]
        if name in TESTS or name in ("all", "any"):
            dtype = self._compared_in(values, given.get("other"))
            if dtype not in C_TYPES:
                raise Declined(f"{call.op}: compared as {dtype}")
            if any(v.dtype.is_floating_point for v in values) != dtype.is_floating_point:
                raise Declined(f"{call.op}: a float beside integers")
        elif name in GIVES_PLACES:
            dtype = taken["self"].dtype
        elif call.outputs:
            dtype, *others = {one.dtype for one in call.outputs if one is not None}
            if len({*map(_computed_in, (dtype, *others))}) > 1:
                raise Declined(f"{call.op}: results of several dtypes")
        else:
            dtype = taken["self"].dtype
            if name != "copy" and any(v.size and v.dtype is not dtype for v in values):
                raise Declined(f"{call.op}: it writes another dtype")
        if not dtype.is_floating_point:
            if name not in (FOR_BOOLS if dtype is torch.bool else FOR_INTEGERS):
                raise Declined(f"{call.op}: of {dtype}")
            is_cast = name in TESTS or name in ("_to_copy", "copy")
            if not is_cast and any(v.dtype.is_floating_point for v in values):
                raise Declined(f"{call.op}: from floats to {dtype}")
        return dtype

    def _compared_in(self, values: Sequence[Value], other: Any) -> torch.dtype:
        """The dtype in which eager compares values, or one with a number: `True == 2` is false."""
        operands: list[Any] = [
            torch.empty([1] * len(one.size), dtype=one.dtype, device="meta") for one in values
        ]
        if isinstance(other, ScalarRef):
            other = self._segment.scalars[other.index](1)
        if not isinstance(other, Ref) and other is not None:
            operands.append(other)
        return torch.result_type(operands[0], operands[-1])

    def _argument(self, name: str, argument: str, given: Any) -> Any:
        """An argument as a value of the dtype in which the call computes; others as they are."""
        b = self._builder
        if isinstance(given, tuple):
            return tuple(self._argument(name, argument, one) for one in given)
        if isinstance(given, Ref):
            value = self._value(given.index)
            if argument in _kept(name):
                return value
            is_taken = name in TAKES_UNROUNDED and argument == "other" and not value.size
            # where the results are halves, eager rounds a tensor of another dtype first
            if b.holds in HALVES and not (is_taken or name in NORMS):
                value = b.cast(value, b.holds)
            return b.cast(value, b.dtype)
        if isinstance(given, ScalarRef):
            dtype = b.dtype
            if self._segment.scalars[given.index] is float and not dtype.is_floating_point:
                raise Declined("a float beside integers")
            if dtype in C_TYPES_OF_NUMBERS:
                return Number((), dtype, f"({C_TYPES[dtype]})number{given.index}")
            if dtype in HALVES:
                number = Number((), torch.float32, f"(float)number{given.index}")
                return b.cast(number, dtype)
            raise Declined(f"a run-time number among {dtype}")
        return given

    def _made(self, call: Call, name: str, given: Arguments) -> list[Value | None]:
        """The values that the call makes, then those that it writes to its arguments."""
        b, rule = self._builder, RULES.get(name)
        if rule is not None:
            found = rule(b, given)
            return found if isinstance(found, list) else [found]
        if name in FACTORIES:
            return [b.of("{0}", FACTORIES[name])]
        text = TESTS.get(name) or TEXTS.get(name)
        if name in UNARY_FUNCTIONS:
            text = f"{name}({{0}})"
        if text is None:
            raise Declined(f"{call.op}: no rule")
        if len(given) != (2 if "{1}" in text else 1):
            raise Declined(f"{call.op}: other arguments than its rule knows")
        return [b.test(text, *given.values()) if name in TESTS else b.of(text, *given.values())]


C_TYPES_OF_NUMBERS = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)
"""The dtypes that a run-time number can have as it is."""


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which eager computes results of a dtype."""
    return torch.float32 if dtype in HALVES else dtype


MASKS = frozenset(("condition", "mask"))
"""Arguments that stay bool."""
INDICES = {
    "embedding": names("indices"), "gather": names("index"), "index_select": names("index"),
    "nll_loss_forward": names("target"), "nll_loss_backward": names("target"),
    "zeros_like": names("self"), "ones_like": names("self"), "full_like": names("self"),
    "new_zeros": names("self"), "new_ones": names("self"), "new_full": names("self"),
}  # fmt: skip
"""Arguments that stay as they are: integers, and tensors of which only the sizes count."""


def _kept(name: str) -> frozenset[str]:
    """The arguments of an op that aren't cast to the dtype in which it computes."""
    return MASKS | INDICES.get(name, frozenset())
