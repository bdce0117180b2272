"""Views: what they show of their base, and what the base is after a view has been written.

Called by `read`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, cast

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.loops.builder import broadcast, expanded_size, first_of, sliced
from lazy_tensor.kernels.loops.index import Index, Indices, restored, stride_of_view
from lazy_tensor.kernels.loops.values import Input, Joined, Permuted, Reshaped, Value, View
from lazy_tensor.kernels.segment import TensorSpec
from lazy_tensor.kernels.symbolic import example_of

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
    parts = given.get("split_sizes", given.get("split_size"))
    if not isinstance(parts, tuple):
        parts = [parts] * (len(specs) - 1)
        parts.append(size[dim] - sum(parts))
    return [
        Shown("slice", {"dim": dim, "start": end - n, "end": end}, size, spec)
        for n, end, spec in zip(parts, accumulate(parts), specs, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Shown:
    """A view, by an op of one result, of a base of sizes `base_size`."""

    name: str
    given: dict[str, Any]
    base_size: tuple[int, ...]
    # what `of` must give
    spec: TensorSpec | None = None

    @property
    def _dim(self) -> int:
        return int(self.given.get("dim", 0)) % len(self.base_size)

    @property
    def _first(self) -> int:
        """The index of the first element that it shows, in its dimension."""
        n = self.base_size[self._dim]
        if self.name == "select":
            return cast(int, self.given["index"] % n)
        return first_of(n, self.given.get("start"))

    def of(self, base: Value) -> Value:
        """What it shows of `base`. A view of an input is known by its strides."""
        size, dtype = self.size(), base.dtype
        if self.spec is not None and example_of(size) != self.spec.size:
            raise Declined(f"sizes of a view by {self.name}")
        if isinstance(base, Input) and self.name not in ("diagonal", "unfold"):
            start = base.start
            if self.name in ("select", "slice"):
                start += self._first * base.stride[self._dim]
            return Input(size, dtype, base.number, self._stride(base, size), start)
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

    def size(self) -> tuple[int, ...]:
        """The view's sizes."""
        name, given, size = self.name, self.given, self.base_size
        if name in ("view", "_reshape_alias", "_unsafe_view"):
            return _inferred(given["size"], prod(size))
        if name == "squeeze":
            dims = given.get("dim", range(len(size)))
            dims = dims if isinstance(dims, (tuple, range)) else (dims,)
            gone = {d % max(len(size), 1) for d in dims}
            return tuple(n for d, n in enumerate(size) if d not in gone or n != 1)
        if name == "unsqueeze":
            dim = given["dim"] % (len(size) + 1)
            return (*size[:dim], 1, *size[dim:])
        if name in _PERMUTED:
            return tuple(size[d] for d in self._order())
        if name == "expand":
            return expanded_size(size, given["size"])
        if name in ("alias", "detach"):
            return size
        return self._size_of_part()

    def _size_of_part(self) -> tuple[int, ...]:
        """The sizes of a view that shows a part of each dimension, or of some."""
        name, given, size = self.name, self.given, self.base_size
        if name == "diagonal":
            starts = self._starts_of_diagonal()
            length = min(size[dim] - start for dim, start in starts.items())
            return (*(n for d, n in enumerate(size) if d not in starts), length)
        if name == "unfold":
            if not size:
                return (given["size"],)
            dim = given["dimension"] % len(size)
            n_parts = (size[dim] - given["size"]) // given["step"] + 1
            return (*size[:dim], n_parts, *size[dim + 1 :], given["size"])
        dim, n = self._dim, size[self._dim]
        if name == "select":
            return (*size[:dim], *size[dim + 1 :])
        end, step = given.get("end"), given.get("step", 1)
        length = max((n if end is None else first_of(n, end)) - self._first, 0)
        return (*size[:dim], (length + step - 1) // step, *size[dim + 1 :])

    def _stride(self, base: Input, size: tuple[int, ...]) -> tuple[int, ...]:
        """The strides of the view, of these sizes, of an input."""
        name, stride = self.name, base.stride
        if name in _SAME_ORDER:
            found = stride_of_view(base.size, stride, size)
            if found is None:
                raise Declined("a view of other sizes")
            return found
        if name in _PERMUTED:
            return tuple(stride[d] for d in self._order())
        if name == "expand":
            new = len(size) - len(stride)
            ones = [one if n != 1 else 0 for one, n in zip(stride, base.size, strict=True)]
            return (*[0] * new, *ones)
        if name == "select":
            return (*stride[: self._dim], *stride[self._dim + 1 :])
        if name == "slice":
            step = self.given.get("step", 1)
            return tuple(one * step if d == self._dim else one for d, one in enumerate(stride))
        return stride

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
        starts = self._starts_of_diagonal()
        found = [*index[:-1]]
        for dim in sorted(starts):
            found.insert(dim, index[-1] + Index((), starts[dim]))
        return tuple(found)

    def _starts_of_diagonal(self) -> dict[int, int]:
        """Where the diagonal begins, in each of its two dimensions."""
        n_dims, offset = len(self.base_size), self.given.get("offset", 0)
        one, other = self.given.get("dim1", 0) % n_dims, self.given.get("dim2", 1) % n_dims
        return {one: max(-offset, 0), other: max(offset, 0)}


def _inferred(size: tuple[int, ...], n: int) -> tuple[int, ...]:
    """The sizes of `n` elements, one of which is given as -1 if it follows from the others."""
    known = prod(one for one in size if not _is_inferred(one))
    return tuple(n // known if _is_inferred(one) else one for one in size)


def _is_inferred(size: Any) -> bool:
    return isinstance(size, int) and size == -1
