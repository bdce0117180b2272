"""A segment: the canonical, position-free program that a backend turns into one kernel.

In: made by `plan.partition` from recorded nodes. Out: the key of the kernel cache, and all that
a backend may know. Values are numbered: inputs first, then each call's outputs in order, one number
for each entry of `Call.outputs`, undefined ones included.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch._ops import OpOverload


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a kernel may rely on of a tensor; `stride` counts elements, as in `Tensor.stride()`."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.size)}{list(self.stride)}@{self.device}"


def n_bytes(spec: TensorSpec) -> int:
    """The bytes of the tensor's elements."""
    return math.prod(spec.size) * spec.dtype.itemsize


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from a tensor's first to its last in memory, gaps included."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is the segment's value number `index`."""

    index: int

    def __repr__(self) -> str:
        return f"%{self.index}"


@cache
def ref(index: int) -> Ref:
    """`Ref(index)`, the same object each time: programs name few values in very many places."""
    return Ref(index)


@dataclass(frozen=True, slots=True)
class ScalarRef:
    """An argument that is the segment's run-time scalar number `index`."""

    index: int

    def __repr__(self) -> str:
        return f"${self.index}"


UNDECLARED_WRITES = {
    torch.ops.aten.native_batch_norm.default: ("running_mean", "running_var"),
}
"""Arguments that an op writes (if it is told to train) though its schema doesn't say so."""


def op_named(name: str) -> OpOverload:
    """The op that `str` shows as `name`, such as `"aten.add.Tensor"`; AttributeError if none is."""
    namespace, packet, overload = name.rsplit(".", 2)
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return found


@dataclass(frozen=True, slots=True)
class Call:
    """One aten op on values, run-time scalars and static arguments.

    `outputs` holds one spec for each tensor the op creates, None for an output that it leaves
    undefined. An op that returns an argument it wrote (`add_`) creates nothing: its `outputs` are
    empty and later calls go on naming the argument, so a segment is a program with writes, run in
    order, not SSA. `args` nest by tuples only.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[TensorSpec | None, ...]

    def text(self) -> str:
        """A line that says the whole call, equal for equal calls in every process."""
        return f"{self.op}{self.args!r}{self.kwargs!r}->{self.outputs!r}"

    def arguments(self) -> Iterator[tuple[str, Any]]:
        """`(name in the op's schema, value)` of every argument given, positional ones first."""
        for argument, value in zip(self.op._schema.arguments, self.args, strict=False):
            yield argument.name, value
        yield from self.kwargs

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled_call, (str(self.op), self.args, self.kwargs, self.outputs)


def creates(call: Call) -> list[bool]:
    """For each of the several things that the op returns, whether it is one of `call.outputs`."""
    returns = call.op._schema.returns
    if len(returns) == len(call.outputs):
        return [True] * len(returns)
    return [
        str(r.type) == "Tensor" and not (r.alias_info is not None and r.alias_info.is_write)
        for r in returns
    ]


def _unpickled_call(op: str, *rest: Any) -> Call:
    # an OpOverload itself can't be pickled
    return Call(op_named(op), *rest)


@dataclass(frozen=True, eq=False)
class Segment:
    """Calls that run as one kernel. Equal segments share their kernel, wherever they were recorded.

    Inputs that a call writes are written in place; the caller guarantees that no two inputs share
    memory if either is written. `scalars` are the Python types of the run-time scalars. `outputs`
    are the numbers of the values handed back, each created by a call and none a view of an input.
    `default_dtype` is the one in force when the calls were recorded.
    Two outputs of a kernel share memory exactly if they do when the calls run one by one.
    """

    inputs: tuple[TensorSpec, ...]
    scalars: tuple[type, ...]
    calls: tuple[Call, ...]
    outputs: tuple[int, ...]
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    _text: str = field(init=False, repr=False, default="")

    def __post_init__(self) -> None:
        # by text, as `0.0 == -0.0` and `1 == True` must not make two programs equal
        scalars = [kind.__name__ for kind in self.scalars]
        lines = [f"default {self.default_dtype}", f"inputs {self.inputs!r}", f"scalars {scalars!r}"]
        lines += [call.text() for call in self.calls]
        lines.append(f"outputs {self.outputs!r}")
        object.__setattr__(self, "_text", "\n".join(lines))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segment) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> tuple[Any, ...]:
        own = (self.inputs, self.scalars, self.calls, self.outputs, self.default_dtype)
        return Segment, own

    @cached_property
    def device(self) -> torch.device:
        """Where the segment runs: the device that all its tensors but 0-dim CPU ones share."""
        specs = [s for call in self.calls for s in call.outputs if s is not None]
        devices = (spec.device for spec in (*specs, *self.inputs))
        return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))

    @cached_property
    def inputs_of_calls(self) -> list[list[TensorSpec]]:
        """For each call the tensors it takes, in order."""
        specs: list[TensorSpec | None] = list(self.inputs)
        found: list[list[TensorSpec]] = []
        for call in self.calls:
            taken = [specs[ref.index] for ref in refs(value for _, value in call.arguments())]
            found.append([spec for spec in taken if spec is not None])
            specs += call.outputs
        return found

    @cached_property
    def written(self) -> tuple[int, ...]:
        """The inputs that a call names as an argument it writes, in order.

        A write through a view made inside the segment counts for the input that it is a view of.
        """
        roots = list(range(len(self.inputs)))
        written: set[int] = set()
        for call in self.calls:
            written.update(roots[r.index] for r in _refs_where(call, is_write=True))
            viewed = [roots[r.index] for r in _refs_where(call, is_write=False)]
            # an op that makes views makes them all of one tensor
            roots += [viewed[0] if viewed else -1] * len(call.outputs)
        return tuple(i for i in range(len(self.inputs)) if i in written)

    def text(self) -> str:
        """The program as text, one call a line: for people, and for `digest`."""
        return self._text

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `text()` in hexadecimal: the segment's name on disk."""
        return hashlib.sha256(self._text.encode()).hexdigest()


def counted(names: Iterable[str], most: int | None = None) -> str:
    """Names of ops for people, the most frequent first and at most so many: `mul 3×, add, ...`."""
    counts = Counter(names).most_common()
    shown = [f"{name} {n}×" if n > 1 else name for name, n in counts[:most]]
    return ", ".join(shown) + (", ..." if len(shown) < len(counts) else "")


def refs(values: Iterable[Any]) -> Iterator[Ref]:
    """The values among arguments, those in lists included."""
    for value in values:
        if isinstance(value, Ref):
            yield value
        elif isinstance(value, tuple):
            yield from refs(value)


def _refs_where(call: Call, *, is_write: bool) -> Iterator[Ref]:
    """The values that `call` takes through an argument marked `(a)`, or `(a!)` for a write."""
    marked = {
        a.name: bool(a.alias_info.is_write)
        for a in call.op._schema.arguments
        if a.alias_info is not None
    }
    marked |= dict.fromkeys(UNDECLARED_WRITES.get(call.op, ()), True)
    for name, value in call.arguments():
        if marked.get(name) is is_write:
            yield from refs((value,))
