"""Views: what they show of their base, and what the base is after a view has been written.

Called by `read`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.loops.builder import broadcast, first_of, sliced
from lazy_tensor.kernels.loops.index import Index, Indices, restored
from lazy_tensor.kernels.loops.values import Input, Joined, Permuted, Reshaped, Value, View
from lazy_tensor.kernels.segment import TensorSpec

_SAME_ORDER = frozenset(("squeeze", "unsqueeze", "view", "_reshape_alias", "_unsafe_view"))
_PERMUTED = frozenset(("permute", "t", "transpose"))
_SPLIT = frozenset(("split", "split_with_sizes", "unbind"))
_OTHERS = frozenset(("alias", "detach", "diagonal", "expand", "select", "slice", "unfold"))
VIEWS = _SAME_ORDER | _PERMUTED | _SPLIT | _OTHERS


def views_of(
    name: str, given: dict[str, Any], size: tuple[int, ...], specs: Sequence[TensorSpec]
) -> list[Shown]:
    """The views that an op makes of a base of sizes `size`."""
    if name not in _SPLIT:
        return [Shown(name, given, size, spec) for spec in specs]
    dim = given.get("dim", 0) % len(size)
    if name == "unbind":
        return [
            Shown("select", {"dim": dim, "index": i}, size, spec) for i, spec in enumerate(specs)
        ]
    ends = accumulate(one.size[dim] for one in specs)
    return [
        Shown("slice", {"dim": dim, "start": end - spec.size[dim]}, size, spec)
        for spec, end in zip(specs, ends, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Shown:
    """A view, by an op of one result, of a base of sizes `base_size`."""

    name: str
    given: dict[str, Any]
    base_size: tuple[int, ...]
    spec: TensorSpec

    @property
    def _dim(self) -> int:
        return int(self.given.get("dim", 0)) % len(self.base_size)

    @property
    def _first(self) -> int:
        """The index of the first element that it shows, in its dimension."""
        n = self.base_size[self._dim]
        if self.name == "select":
            return int(self.given["index"]) % n
        return first_of(n, self.given.get("start"))

    def of(self, base: Value) -> Value:
        """What it shows of `base`. A view of an input is known by its strides."""
        size, dtype = self.spec.size, base.dtype
        if isinstance(base, Input) and self.name not in ("diagonal", "unfold"):
            start = base.start
            if self.name in ("select", "slice"):
                start += self._first * base.stride[self._dim]
            return Input(size, dtype, base.number, self.spec.stride, start)
        if self.name in _SAME_ORDER:
            return Reshaped(size, dtype, base)
        if self.name in _PERMUTED:
            return Permuted(size, dtype, base, self._order())
        return View(size, dtype, base, self._place)

    def written(self, base: Value, new: Value) -> Value:
        """The base after `new` has been written to the view."""
        if self.name in ("alias", "detach"):
            return new
        if self.name in _SAME_ORDER:
            return Reshaped(base.size, base.dtype, new)
        if self.name in _PERMUTED:
            order = self._order()
            back = restored(range(len(order)), order)
            return Permuted(base.size, base.dtype, new, back)
        if self.name not in ("select", "slice") or self.given.get("step", 1) != 1:
            raise Declined(f"a write to a view by {self.name}")
        dim, n = self._dim, base.size[self._dim]
        if self.name == "select":
            new = Reshaped((*new.size[:dim], 1, *new.size[dim:]), new.dtype, new)
        first, behind = self._first, self._first + new.size[dim]
        parts = [sliced(base, dim, 0, first), new, sliced(base, dim, behind, n)]
        return Joined(base.size, base.dtype, tuple(one for one in parts if one.size[dim]), dim)

    def _order(self) -> tuple[int, ...]:
        """The dimensions of the base in the order in which the view has them."""
        n_dims = len(self.base_size)
        if self.name == "permute":
            return tuple(d % n_dims for d in self.given["dims"])
        order = [*range(n_dims)]
        if n_dims > 1:
            one, other = (self.given.get(name, d) for name, d in (("dim0", 0), ("dim1", 1)))
            one, other = one % n_dims, other % n_dims
            order[one], order[other] = other, one
        return tuple(order)

    def _place(self, index: Indices) -> Indices:
        """Where an element of the view stands in its base."""
        name, given = self.name, self.given
        if name in ("alias", "detach"):
            return index
        if name == "expand":
            return broadcast(self.base_size)(index)
        if name == "diagonal":
            return self._of_diagonal(index)
        if name == "unfold":
            dim = given["dimension"] % max(len(self.base_size), 1)
            place = index[dim].times(given["step"]) + index[-1]
            return (*index[:dim], place, *index[dim + 1 : -1])
        dim, first = self._dim, Index((), self._first)
        if name == "select":
            return (*index[:dim], first, *index[dim:])
        place = index[dim].times(given.get("step", 1)) + first
        return (*index[:dim], place, *index[dim + 1 :])

    def _of_diagonal(self, index: Indices) -> Indices:
        n_dims, offset = len(self.base_size), self.given.get("offset", 0)
        one, other = self.given.get("dim1", 0) % n_dims, self.given.get("dim2", 1) % n_dims
        starts = {one: max(-offset, 0), other: max(offset, 0)}
        found = [*index[:-1]]
        for dim in sorted(starts):
            found.insert(dim, index[-1] + Index((), starts[dim]))
        return tuple(found)
