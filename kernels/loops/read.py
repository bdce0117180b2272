"""Reads a segment as values: those of its outputs, and those of its written inputs at the end.

In: a segment. Out: `Values`; Declined for ops and arguments without a rule. Called by `write`.

No tensor of a segment is empty, and each has a dtype of `fusible.DTYPES`:
`dispatch.plan.partition` puts no other calls into segments.
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
    """What a segment computes: its outputs' values, and those of written inputs by their numbers.

    `bad` is a bool, true if an index from data is out of range; None without such indices.
    """

    outputs: tuple[Value, ...]
    written: dict[int, Value]
    bad: Value | None


def values_of(segment: Segment) -> Values:
    """The values of `segment`; raises Declined if an op of it has no rule."""
    return _Reader(segment).values()


class _Reader:
    """Reads the calls of a segment one by one.

    A write gives a new value to its target and, if that is a view, to the bases.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._values: list[Value | None] = [
            Input(spec.size, spec.dtype, i, spec.stride, 0) for i, spec in enumerate(segment.inputs)
        ]
        # view -> the number of its base, and the view's op
        self._views: dict[int, tuple[int, Shown]] = {}
        # view -> its value, and the value of the base from which that was made
        self._view_values: dict[int, tuple[Value, Value]] = {}
        self._written: set[int] = set()
        # its dtypes are those of the call that is being read
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
        name, arguments = base_name(call.op), dict(call.arguments())
        if name in VIEWS:
            base = arguments["self"].index
            specs = [spec for spec in call.outputs if spec is not None]
            for view in views_of(name, arguments, self._value(base).size, specs):
                self._views[len(self._values)] = base, view
                self._values.append(None)
            return
        b = self._builder
        b.stored_dtype = self._dtype_of(call, name, arguments)
        b.dtype = b.stored_dtype if name in TESTS else _computed_in(b.stored_dtype)
        operands = {key: self._argument(name, key, value) for key, value in arguments.items()}
        values = self._results_of_call(call, name, operands)
        results, writes = values[: len(call.outputs)], values[len(call.outputs) :]
        if len(results) < len(call.outputs):
            raise Declined(f"{call.op}: several results")
        for value, spec in zip(results, call.outputs, strict=True):
            self._values.append(self._result(call, value, arguments, spec) if spec else None)
        # an op without outputs writes `self`
        targets = UNDECLARED_WRITES.get(call.op, ()) if call.outputs else ("self",)
        for target, value in zip(targets, writes, strict=True):
            if value is not None:
                self._write(arguments[target].index, value)

    def _result(
        self, call: Call, value: Value | None, arguments: Arguments, spec: TensorSpec
    ) -> Value | None:
        """A result in its dtype, and in the size of its rule, the argument `size`, or `self`."""
        if value is None:
            return None
        # a 16-bit result is computed in float32
        if spec.dtype in HALVES:
            value = self._builder.cast(value, spec.dtype)
        if example_of(value.size) == spec.size:
            return value
        size = arguments.get("size")
        if size is not None:
            size = expanded_size(value.size, size)
        elif base_name(call.op).endswith("_like"):
            size = self._value(arguments["self"].index).size
        if size is None or example_of(size) != spec.size:
            raise Declined(f"{call.op}: sizes of its result")
        return expanded(value, size)

    def _value(self, number: int) -> Value:
        """The current value of this number."""
        if number in self._views:
            base_number, view = self._views[number]
            base = self._value(base_number)
            if number not in self._view_values or self._view_values[number][1] is not base:
                self._view_values[number] = view.of(base), base
            return self._view_values[number][0]
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

    def _dtype_of(self, call: Call, name: str, arguments: Arguments) -> torch.dtype:
        """The dtype of the results, or of a test's operands; Declined if these rules can't tell."""
        tensors = {n: self._value(v.index) for n, v in arguments.items() if isinstance(v, Ref)}
        uncast = _uncast_arguments(name)
        values = [v for n, v in tensors.items() if n not in uncast]
        values += [self._value(ref.index) for ref in arguments.get("tensors", ())]
        if name in TESTS or name in ("all", "any"):
            dtype = self._compared_in(values, arguments.get("other"))
            if dtype not in C_TYPES:
                raise Declined(f"{call.op}: compared as {dtype}")
            if any(v.dtype.is_floating_point for v in values) != dtype.is_floating_point:
                raise Declined(f"{call.op}: a float beside integers")
        elif name in GIVES_PLACES:
            dtype = tensors["self"].dtype
        elif call.outputs:
            dtype, *others = {spec.dtype for spec in call.outputs if spec is not None}
            if len({*map(_computed_in, (dtype, *others))}) > 1:
                raise Declined(f"{call.op}: results of several dtypes")
        else:
            dtype = tensors["self"].dtype
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
        """The dtype in which eager compares; for a bool and 2 int64, so `True == 2` is false."""
        operands: list[Any] = [
            torch.empty([1] * len(v.size), dtype=v.dtype, device="meta") for v in values
        ]
        if isinstance(other, ScalarRef):
            other = self._segment.scalars[other.index](1)
        if not isinstance(other, Ref) and other is not None:
            operands.append(other)
        return torch.result_type(operands[0], operands[-1])

    def _argument(self, name: str, argument: str, value: Any) -> Any:
        """An argument as a value of the dtype in which the call computes; others as they are."""
        b = self._builder
        if isinstance(value, tuple):
            return tuple(self._argument(name, argument, item) for item in value)
        if isinstance(value, Ref):
            tensor = self._value(value.index)
            if argument in _uncast_arguments(name):
                return tensor
            is_unrounded = name in TAKES_UNROUNDED and argument == "other" and not tensor.size
            # for 16-bit results eager first rounds tensors of other dtypes
            if b.stored_dtype in HALVES and not (is_unrounded or name in NORMS):
                tensor = b.cast(tensor, b.stored_dtype)
            return b.cast(tensor, b.dtype)
        if isinstance(value, ScalarRef):
            dtype = b.dtype
            if self._segment.scalars[value.index] is float and not dtype.is_floating_point:
                raise Declined("a float beside integers")
            if dtype in C_TYPES_OF_NUMBERS:
                return Number((), dtype, f"({C_TYPES[dtype]})number{value.index}")
            if dtype in HALVES:
                number = Number((), torch.float32, f"(float)number{value.index}")
                return b.cast(number, dtype)
            raise Declined(f"a run-time number among {dtype}")
        return value

    def _results_of_call(self, call: Call, name: str, args: Arguments) -> list[Value | None]:
        """The values of the call's outputs, then those that it writes to its arguments."""
        b, rule = self._builder, RULES.get(name)
        if rule is not None:
            results = rule(b, args)
            return results if isinstance(results, list) else [results]
        if name in FACTORIES:
            return [b.of("{0}", FACTORIES[name])]
        text = TESTS.get(name) or TEXTS.get(name)
        if name in UNARY_FUNCTIONS:
            text = f"{name}({{0}})"
        if text is None:
            raise Declined(f"{call.op}: no rule")
        if len(args) != (2 if "{1}" in text else 1):
            raise Declined(f"{call.op}: other arguments than its rule knows")
        return [b.test(text, *args.values()) if name in TESTS else b.of(text, *args.values())]


C_TYPES_OF_NUMBERS = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)
"""The dtypes to which C casts a run-time number without a rounding function."""


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which eager computes results of `dtype`."""
    return torch.float32 if dtype in HALVES else dtype


MASKS = frozenset(("condition", "mask"))
"""Arguments that stay bool."""
INDICES = {
    "embedding": names("indices"), "gather": names("index"), "index_select": names("index"),
    "nll_loss_forward": names("target"), "nll_loss_backward": names("target"),
    "zeros_like": names("self"), "ones_like": names("self"), "full_like": names("self"),
    "new_zeros": names("self"), "new_ones": names("self"), "new_full": names("self"),
}  # fmt: skip
"""Arguments that aren't cast: integers, and tensors of which only the size matters."""


def _uncast_arguments(name: str) -> frozenset[str]:
    """The arguments of an op that aren't cast to the dtype in which it computes."""
    return MASKS | INDICES.get(name, frozenset())
