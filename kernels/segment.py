"""A segment: the program that a backend turns into one kernel, independent of where it occurs.

`dispatch.plan` makes segments from recorded nodes. A segment is the key of the kernel cache, and
all that a backend may know. Its values are numbered: the inputs first, then the outputs of each
call in order. Every entry of `Call.outputs` has a number, also that of an undefined output.
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
    """The properties of a tensor that a kernel may rely on. `stride` counts elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.size)}{list(self.stride)}@{self.device}"


def n_bytes(spec: TensorSpec) -> int:
    """The bytes of the tensor's elements, without gaps and with repeated elements."""
    return math.prod(spec.size) * spec.dtype.itemsize


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from a tensor's first to its last in memory, gaps included."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands among a call's arguments for the segment's value number `index`."""

    index: int

    def __repr__(self) -> str:
        return f"%{self.index}"


@cache
def ref(index: int) -> Ref:
    """`Ref(index)`, the same object each time.

    Recorded calls hold very many references to few numbers. One object for each number leaves the
    garbage collector less to visit.
    """
    return Ref(index)


@dataclass(frozen=True, slots=True)
class ScalarRef:
    """Stands among a call's arguments for the segment's run-time scalar number `index`."""

    index: int

    def __repr__(self) -> str:
        return f"${self.index}"


UNDECLARED_WRITES = {torch.ops.aten.native_batch_norm.default: ("running_mean", "running_var")}
"""Arguments that an op writes (in training) though its schema doesn't mark them as written."""


def op_named(name: str) -> OpOverload:
    """The op whose `str` is `name`, such as `"aten.add.Tensor"`; AttributeError if none is."""
    namespace, packet, overload = name.rsplit(".", 2)
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return found


def base_name(op: OpOverload) -> str:
    """The op's name without namespace, overload and the `_` of an in-place op."""
    name: str = op._schema.name.partition("::")[2]
    # `__and__` and its like keep their underscores
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


@dataclass(frozen=True, slots=True)
class Call:
    """One aten op on values, run-time scalars and static arguments. `args` nest by tuples only.

    `outputs` holds one spec for each tensor that the op creates, None for an undefined output. An
    op that returns an argument it wrote (`add_`) creates nothing: its `outputs` are empty, and
    later calls refer to the argument. So a segment is a program with writes, run in order, and not
    in SSA form.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[TensorSpec | None, ...]

    def text(self) -> str:
        """One line with everything about the call, the same for equal calls in every process."""
        return f"{self.op}{self.args!r}{self.kwargs!r}->{self.outputs!r}"

    def arguments(self) -> Iterator[tuple[str, Any]]:
        """`(name in the op's schema, value)` of every argument given, positional ones first."""
        for argument, value in zip(self.op._schema.arguments, self.args, strict=False):
            yield argument.name, value
        yield from self.kwargs

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled_call, (str(self.op), self.args, self.kwargs, self.outputs)


def creates(call: Call) -> list[bool]:
    """For each of the op's returns, whether it is a new tensor, one of `call.outputs`.

    The others are arguments that the op wrote and returns again, or no tensors.
    """
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

    `scalars` are the Python types of the run-time scalars. `outputs` are the numbers of the values
    returned: each is created by a call, no output is a view, and no two share memory.
    `default_dtype` is torch's default dtype when the calls were recorded.

    A kernel writes the inputs that a call writes, in place. The caller guarantees that no two
    inputs share memory if either is written.
    """

    inputs: tuple[TensorSpec, ...]
    scalars: tuple[type, ...]
    calls: tuple[Call, ...]
    outputs: tuple[int, ...]
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    # the whole program as text: equality, hash and name on disk all go by it
    _text: str = field(init=False, repr=False, default="")

    def __post_init__(self) -> None:
        # Text and not tuples, since `0.0 == -0.0` and `1 == True` in Python. Such programs must not
        # share a kernel. A NaN is not equal to itself, but its text is.
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
    def specs(self) -> list[TensorSpec | None]:
        """The spec of each value by its number; None for an undefined output."""
        return [*self.inputs, *(spec for call in self.calls for spec in call.outputs)]

    @cached_property
    def device(self) -> torch.device:
        """The device on which the segment runs: all its tensors but 0-dim CPU ones are there."""
        devices = (spec.device for spec in self.specs if spec is not None)
        return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))

    @cached_property
    def inputs_of_calls(self) -> list[list[TensorSpec]]:
        """For each call the specs of its tensor arguments, in order."""
        taken = [[*refs(value for _, value in call.arguments())] for call in self.calls]
        specs = [[self.specs[ref.index] for ref in one] for one in taken]
        return [[spec for spec in one if spec is not None] for one in specs]

    @cached_property
    def written(self) -> tuple[int, ...]:
        """The numbers of the inputs that a call writes, in order.

        A write through a view counts for the input that the view shows.
        """
        # of each value the input whose memory it shows, or -1 if a call created the memory
        roots = list(range(len(self.inputs)))
        written: set[int] = set()
        for call in self.calls:
            written.update(roots[r.index] for r in _refs_where(call, is_write=True))
            viewed = [roots[r.index] for r in _refs_where(call, is_write=False)]
            # an op that returns views returns views of one tensor only
            roots += [viewed[0] if viewed else -1] * len(call.outputs)
        return tuple(i for i in range(len(self.inputs)) if i in written)

    def text(self) -> str:
        """The program as text, one call a line."""
        return self._text

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `text()` in hexadecimal: the segment's name on disk."""
        return hashlib.sha256(self._text.encode()).hexdigest()


def counted(names: Iterable[str], most: int | None = None) -> str:
    """Op names for people, at most `most`, the most frequent first: `mul 3×, add, ...`."""
    counts = Counter(names).most_common()
    shown = [f"{name} {n}×" if n > 1 else name for name, n in counts[:most]]
    return ", ".join(shown) + (", ..." if len(shown) < len(counts) else "")


def substituted(argument: Any, values: Any, scalars: Sequence[Any] = ()) -> Any:
    """An argument with each `Ref` and `ScalarRef` replaced by its value, and tuples by lists."""
    if isinstance(argument, Ref):
        return values[argument.index]
    if isinstance(argument, ScalarRef):
        return scalars[argument.index]
    if type(argument) is tuple:
        return [substituted(item, values, scalars) for item in argument]
    return argument


def last_uses(named: Sequence[Iterable[int]], kept: Iterable[int]) -> list[list[int]]:
    """For each step, those of the slots it names that no later step names, and that aren't kept.

    They are freed behind it, so that memory goes back as early as in eager.
    """
    alive = set(kept)
    dying: list[list[int]] = []
    for slots in reversed(named):
        dead = [slot for slot in dict.fromkeys(slots) if slot not in alive]
        alive.update(dead)
        dying.append(dead)
    return dying[::-1]


def refs(values: Iterable[Any]) -> Iterator[Ref]:
    """The `Ref`s among arguments, also those inside tuples."""
    for value in values:
        if isinstance(value, Ref):
            yield value
        elif isinstance(value, tuple):
            yield from refs(value)


def _refs_where(call: Call, *, is_write: bool) -> Iterator[Ref]:
    """The `Ref`s in arguments that the schema marks `(a!)` if `is_write`, else `(a)`.

    `(a!)` means that the op writes the argument, `(a)` that it returns a view of it.
    """
    marked = {
        a.name: bool(a.alias_info.is_write)
        for a in call.op._schema.arguments
        if a.alias_info is not None
    }
    marked |= dict.fromkeys(UNDECLARED_WRITES.get(call.op, ()), True)
    for name, value in call.arguments():
        if marked.get(name) is is_write:
            yield from refs((value,))
