"""Reads a segment as values: what its outputs and written inputs hold in the end.

In: a segment. Out: `Values`; Declined for ops, dtypes and arguments without a rule. Called by
`write`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.loops.rules import (
    FACTORIES,
    FOR_BOOLS,
    FOR_INTEGERS,
    MASKS,
    RULES,
    TESTS,
    TEXTS,
    UNARY_FUNCTIONS,
    Arguments,
    names,
)
from lazy_tensor.kernels.loops.values import (
    C_TYPES,
    Builder,
    Computed,
    Index,
    Indices,
    Input,
    Value,
    View,
    broadcast,
    expanded,
)
from lazy_tensor.kernels.segment import Call, Ref, ScalarRef, Segment, TensorSpec, base_name


@dataclass(frozen=True, slots=True)
class Values:
    """What a segment computes: the value of each output, and of each written input by number."""

    outputs: tuple[Value, ...]
    written: dict[int, Value]


def values_of(segment: Segment) -> Values:
    """The values of `segment`; raises Declined if an op of it has no rule."""
    return _Reader(segment).values()


class _Reader:
    """Reads the calls of a segment one by one.

    A write gives its target a new value. A write to memory that a view shows is declined.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._values: list[Value | None] = [
            Input(one.size, one.dtype, i, one.stride, 0) for i, one in enumerate(segment.inputs)
        ]
        for one in segment.inputs:
            self._known(one.dtype)
        # of each value the number of the one whose memory it shows
        self._roots = list(range(len(segment.inputs)))
        self._written: set[int] = set()
        # the dtype in which the call at hand computes
        self._builder = Builder(torch.float32)

    def values(self) -> Values:
        for call in self._segment.calls:
            self._read(call)
        roots = [self._roots[i] for i in self._segment.outputs]
        if len(set(roots)) < len(roots):
            raise Declined("outputs share memory")
        outputs = [self._values[i] for i in self._segment.outputs]
        written = {i: self._values[i] for i in sorted(self._written)}
        return Values(tuple(filter(None, outputs)), {i: v for i, v in written.items() if v})

    def _known(self, dtype: torch.dtype) -> None:
        if dtype not in C_TYPES:
            raise Declined(f"dtype {dtype}")

    def _read(self, call: Call) -> None:
        name, given = base_name(call.op), dict(call.arguments())
        if name in _VIEWS:
            source = given["self"].index
            (spec,) = self._specs(call)
            base = self._values[source]
            assert base is not None
            self._add(_view(name, base, given, spec), self._roots[source])
            return
        if call.outputs and name != "native_layer_norm":
            self._specs(call)
        self._builder.dtype = self._dtype_of(call, name, given)
        arguments = {one: self._argument(one, value) for one, value in given.items()}
        made = self._made(call, name, arguments)
        if call.outputs:
            for value in made:
                self._add(value, len(self._values))
            return
        # an op that writes its argument; `self` in all of them
        self._write(given["self"].index, made[0])

    def _specs(self, call: Call) -> list[TensorSpec]:
        specs = [one for one in call.outputs if one is not None]
        if len(specs) != 1 or len(call.outputs) != 1:
            raise Declined(f"{call.op}: several results")
        self._known(specs[0].dtype)
        return specs

    def _add(self, value: Value, root: int) -> None:
        self._values.append(value)
        self._roots.append(root)

    def _write(self, number: int, value: Value) -> None:
        root = self._roots[number]
        if root != number or self._roots.count(root) > 1:
            raise Declined("a write that a view shows")
        target = self._values[number]
        assert target is not None
        self._values[number] = self._builder.cast(expanded(value, target.size), target.dtype)
        if number < len(self._segment.inputs):
            self._written.add(number)

    def _dtype_of(self, call: Call, name: str, given: Arguments) -> torch.dtype:
        """The dtype in which eager computes; Declined if that is hard to tell."""
        taken = {n: self._values[v.index] for n, v in given.items() if isinstance(v, Ref)}
        values = [v for n, v in taken.items() if v is not None and n not in MASKS]
        if name in TESTS:
            shaped = [v.dtype for v in values if v.size] or [v.dtype for v in values]
            dtype = reduce(torch.promote_types, shaped)
            self._known(dtype)
            if any(v.dtype.is_floating_point for v in values) != dtype.is_floating_point:
                raise Declined(f"{call.op}: a float beside integers")
        elif call.outputs:
            (dtype,) = {one.dtype for one in call.outputs if one is not None}
        else:
            target = taken["self"]
            assert target is not None
            dtype = target.dtype
            if name != "copy" and any(v.size and v.dtype is not dtype for v in values):
                raise Declined(f"{call.op}: it writes another dtype")
        if not dtype.is_floating_point:
            if name not in (FOR_BOOLS if dtype is torch.bool else FOR_INTEGERS):
                raise Declined(f"{call.op}: of {dtype}")
            if name not in TESTS and any(v.dtype.is_floating_point for v in values):
                raise Declined(f"{call.op}: from floats to {dtype}")
        return dtype

    def _argument(self, name: str, given: Any) -> Any:
        """An argument as a value of the dtype in which the call computes; others as they are."""
        if isinstance(given, Ref):
            value = self._values[given.index]
            assert value is not None
            return value if name in MASKS else self._builder.cast(value, self._builder.dtype)
        if isinstance(given, ScalarRef):
            if (
                self._segment.scalars[given.index] is float
                and not self._builder.dtype.is_floating_point
            ):
                raise Declined("a float beside integers")
            return Computed(
                (), self._builder.dtype, f"({C_TYPES[self._builder.dtype]})number{given.index}"
            )
        return given

    def _made(self, call: Call, name: str, given: Arguments) -> list[Value]:
        """The values that the call makes, or the one that it writes."""
        rule = RULES.get(name)
        if name in TESTS:
            made = [self._builder.test(TESTS[name], *given.values())]
        elif name in TEXTS:
            made = [self._builder.of(TEXTS[name], *given.values())]
        elif name in UNARY_FUNCTIONS:
            made = [self._builder.of(f"{name}({{0}})", *given.values())]
        elif name in FACTORIES:
            made = [self._builder.of("{0}", FACTORIES[name])]
        elif rule is not None:
            found = rule(self._builder, given)
            made = found if isinstance(found, list) else [found]
        else:
            raise Declined(f"{call.op}: no rule")
        sizes = [one.size for one in call.outputs if one is not None]
        if not sizes:
            return made
        return [expanded(one, size) for one, size in zip(made, sizes, strict=True)]


def _view(name: str, base: Value, given: Arguments, spec: TensorSpec) -> Value:
    """The view that an op makes of `base`. One of an input is known by its strides."""
    if not isinstance(base, Input):
        return View(spec.size, base.dtype, base, _place(name, base.size, given, spec.size))
    start = base.start
    if name in ("select", "slice"):
        dim = given.get("dim", 0) % len(base.size)
        start += _first(name, base.size[dim], given) * base.stride[dim]
    return Input(spec.size, base.dtype, base.number, spec.stride, start)


def _first(name: str, n: int, given: Arguments) -> int:
    """The index, in a dimension of `n` elements, of the first one that the view shows."""
    if name == "select":
        return int(given["index"]) % n
    first = given.get("start") or 0
    return min(max(first + n if first < 0 else first, 0), n)


def _place(
    name: str, size: tuple[int, ...], given: Arguments, made: tuple[int, ...]
) -> Callable[[Indices], Indices]:
    """Where an element of a view of sizes `made` stands in its base of sizes `size`."""
    n_dims = len(size)
    if name in ("alias", "detach"):
        return lambda index: index
    if name == "expand":
        return broadcast(size)
    if name in ("select", "slice"):
        dim = given.get("dim", 0) % n_dims
        first = Index((), _first(name, size[dim], given))
        if name == "select":
            return lambda index: (*index[:dim], first, *index[dim:])
        step = given.get("step", 1)
        return lambda index: (
            *index[:dim],
            index[dim].times(step) + first,
            *index[dim + 1 :],
        )
    if name in ("t", "transpose", "permute"):
        order = list(range(n_dims))
        if name == "permute":
            order = [d % n_dims for d in given["dims"]]
        elif n_dims > 1:
            one, other = (given.get("dim0", 0) % n_dims, given.get("dim1", 1) % n_dims)
            order[one], order[other] = order[other], order[one]
        return lambda index: tuple(index[order.index(d)] for d in range(n_dims))
    if [n for n in size if n != 1] != [n for n in made if n != 1]:
        raise Declined("a view of other sizes")

    # the same dimensions but for those of one element
    def place(index: Indices) -> Indices:
        left = [i for i, n in zip(index, made, strict=True) if n != 1]
        return tuple(left.pop(0) if n != 1 else Index() for n in size)

    return place


_VIEWS = names(
    """alias detach expand permute select slice squeeze t transpose unsqueeze view _reshape_alias
    _unsafe_view"""
)
