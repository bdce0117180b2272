"""A definition: the calls that build an nvFuser fusion, as data.

In: lines, one at a time, from `translate` and its rules. Out: lists that JSON can hold, and the
lines again. `library` makes the calls. This module needs no nvFuser, so that tests can interpret
definitions on a machine without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lazy_tensor.kernels.backend import Declined

KINDS = {
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Int",
    torch.int32: "Int32",
    torch.bool: "Bool",
}
"""nvFuser's names of the dtypes that definitions use, which it calls kinds here. It has no 8- and
16-bit integers."""
MAX_RANK = 8
"""The most dimensions of a tensor. lightning-thunder, nvFuser's largest user, uses no more."""
DTYPES = {kind: dtype for dtype, kind in KINDS.items()}


@dataclass(frozen=True, slots=True)
class V:
    """Value number `index` of a definition, counted over the results of its lines."""

    index: int


@dataclass(frozen=True, slots=True)
class Line:
    """One call. `op` is the name of an nvFuser op, or one of these:

    - "input": a tensor; `args` are shape, contiguity, stride order, and whether it is on the CPU
    - "scalar": a number given at each run
    - "constant": a number fixed in the definition; `args` is its value
    - "size": a size of an input at run time; `args` are a tensor and a dimension
    - "output": `args` are a value, and the input whose memory it is written to, or None

    `kinds` are the results' dtypes by nvFuser's names, or "" where nvFuser decides.
    """

    op: str
    args: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    kinds: tuple[str, ...]


MAX_PATHS = 10**5
"""The most paths from inputs to one value. nvFuser's lowering walks each of them, so with many more
it may never finish. Measured: it does not finish with 2^22."""


class TooManyPaths(Declined):
    """A definition that nvFuser might not finish compiling."""


@dataclass
class Definition:
    """The lines of a definition in order.

    The next three lists are indexed by the number of a value. `makers` has the line that makes it,
    `kinds` its dtype, and `paths` the number of paths from inputs to it.
    """

    lines: list[Line] = field(default_factory=list)
    makers: list[Line] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    paths: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (input, result) by number: the kernel copies the result to the input after the run."""
    # lines by their text, so that an equal call is not made twice
    _known: dict[str, list[V]] = field(default_factory=dict, repr=False)

    def add(
        self, op: str, *args: Any, kind: str = "", n: int = 1, fresh: bool = False, **options: Any
    ) -> Any:
        """Add a call, and return its value, or a tuple of `n` values if `n` isn't 1.

        If an equal call was added before, its value is returned, unless `fresh` asks for a new one.
        Raises TooManyPaths if more than `MAX_PATHS` lead to the value.
        """
        # sorted, so that the order in which options are given makes no difference
        given = tuple(sorted(options.items()))
        line = Line(op, args, given, (kind,) * n)
        key = repr(line)
        known = None if fresh else self._known.get(key)
        if known is None:
            n_paths = max(1, sum(self.paths[i] for i in operands(args)))
            if n_paths > MAX_PATHS:
                raise TooManyPaths(f"more than {MAX_PATHS} paths lead to one value")
            first = len(self.kinds)
            self.lines.append(line)
            self.makers += [line] * n
            self.kinds += line.kinds
            self.paths += [n_paths] * n
            known = [V(first + i) for i in range(n)]
            self._known[key] = known
        return known[0] if n == 1 else tuple(known)

    def ancestors(self, value: V) -> set[int]:
        """The numbers of all values that `value` depends on, and its own."""
        found, left = set(), [value.index]
        while left:
            i = left.pop()
            if i not in found:
                found.add(i)
                left += operands(self.makers[i].args)
        return found

    def output(self, value: V, alias: V | None = None) -> None:
        """Make `value` an output, or have it written to the memory of the input `alias`."""
        self.lines.append(Line("output", (value, alias), (), ()))

    def dumped(self) -> list[Any]:
        """The lines as lists and dicts that JSON can hold."""
        return [
            [line.op, _plain(line.args), _plain(dict(line.options)), line.kinds]
            for line in self.lines
        ]


def operands(args: Sequence[Any]) -> list[int]:
    """The numbers of the values among `args`, also of those inside lists."""
    found: list[int] = []
    for arg in args:
        if isinstance(arg, V):
            found.append(arg.index)
        elif isinstance(arg, (list, tuple)):
            found += operands(arg)
    return found


def loaded(lines: Sequence[Any]) -> list[Line]:
    """The lines from the output of `Definition.dumped`."""
    return [
        Line(
            op, tuple(map(_rich, args)), tuple((k, _rich(v)) for k, v in options.items()), tuple(k)
        )
        for op, args, options, k in lines
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, V):
        return {"v": value.index}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _rich(value: Any) -> Any:
    if isinstance(value, dict):
        return V(value["v"])
    if isinstance(value, list):
        return [_rich(item) for item in value]
    return value
