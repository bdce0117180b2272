"""A definition: the calls that build an nvFuser fusion, as data.

In: lines, one at a time, from `translate` and its rules. Out: bytes that can be kept on disk;
`library` makes the calls. Needs no nvFuser, so that a formula can be checked where there is none.
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
"""nvFuser's names of the dtypes that definitions use: it has no 8- and 16-bit integers."""
MAX_RANK = 8
"""Dimensions that lightning-thunder, its largest user, gives nvFuser at most."""
DTYPES = {kind: dtype for dtype, kind in KINDS.items()}


@dataclass(frozen=True, slots=True)
class V:
    """Value number `index` of a definition, counted over the results of its lines."""

    index: int


@dataclass(frozen=True, slots=True)
class Line:
    """One call. `op` is the name of an nvFuser op, or one of these:

    - "input": a tensor; `args` are shape, contiguity, stride order, whether it lies on the CPU
    - "scalar": a number given at each run
    - "constant": `args` are its value
    - "size": `args` are a tensor and a dimension
    - "output": `args` are a value and the input whose memory it is written to, or None

    `kinds` are the results' dtypes, by nvFuser's names, "" where the op decides by itself.
    """

    op: str
    args: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    kinds: tuple[str, ...]


MAX_PATHS = 10**5
"""Paths from inputs to a value, over all its operands, beyond which nvFuser may never finish: its
lowering walks each of them (measured: 2^22 do not end)."""


class TooManyPaths(Declined):
    """A definition that nvFuser might not finish compiling."""


@dataclass
class Definition:
    """Lines in order; of value `i` its dtype, the line that makes it, the paths that lead to it."""

    lines: list[Line] = field(default_factory=list)
    makers: list[Line] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    paths: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Inputs that are to be written from results afterwards, both by number."""
    _known: dict[str, list[V]] = field(default_factory=dict, repr=False)

    def add(
        self, op: str, *args: Any, kind: str = "", n: int = 1, fresh: bool = False, **options: Any
    ) -> Any:
        """The value (for `n` other than 1: the values) of one more call, or of an equal one before
        unless it is to be `fresh`.

        TooManyPaths if its operands are reached by too many.
        """
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
        """The values that `value` is made of, itself included."""
        found, left = set(), [value.index]
        while left:
            i = left.pop()
            if i not in found:
                found.add(i)
                left += operands(self.makers[i].args)
        return found

    def output(self, value: V, alias: V | None = None) -> None:
        """Return `value`, or write it to the memory of the input `alias`."""
        self.lines.append(Line("output", (value, alias), (), ()))

    def dumped(self) -> list[Any]:
        """The lines as what JSON can hold."""
        return [
            [line.op, _plain(line.args), _plain(dict(line.options)), line.kinds]
            for line in self.lines
        ]


def operands(args: Sequence[Any]) -> list[int]:
    """The numbers of the values among `args`, those in lists included."""
    found: list[int] = []
    for arg in args:
        if isinstance(arg, V):
            found.append(arg.index)
        elif isinstance(arg, (list, tuple)):
            found += operands(arg)
    return found


def loaded(lines: Sequence[Any]) -> list[Line]:
    """The lines that `Definition.dumped` made."""
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
