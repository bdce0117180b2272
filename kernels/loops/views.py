"""Views: the value of a view by that of its base, and the base after a write to a view.

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
    name: str, arguments: dict[str, Any], size: tuple[int, ...], specs: Sequence[TensorSpec]
) -> list[Shown]:
    """The views that an op returns, of a base of size `size`."""
    if name not in _SPLIT:
        return [Shown(name, arguments, size, spec) for spec in specs]
    dim = arguments.get("dim", 0) % len(size)
    if name == "unbind":
        return [
            Shown("select", {"dim": dim, "index": i}, size, spec) for i, spec in enumerate(specs)
        ]
    parts = arguments.get("split_sizes", arguments.get("split_size"))
    if not isinstance(parts, tuple):
        parts = [parts] * (len(specs) - 1)
        parts.append(size[dim] - sum(parts))
    return [
        Shown("slice", {"dim": dim, "start": end - n, "end": end}, size, spec)
        for n, end, spec in zip(parts, accumulate(parts), specs, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Shown:
    """A view of a base of size `base_size`, by an op with one result and its arguments."""

    name: str
    arguments: dict[str, Any]
    base_size: tuple[int, ...]
    # the recorded metadata, with which `of` compares
    spec: TensorSpec | None = None

    @property
    def _dim(self) -> int:
        return int(self.arguments.get("dim", 0)) % len(self.base_size)

    @property
    def _first(self) -> int:
        """The index in the base of the view's first element, along the op's dimension."""
        n = self.base_size[self._dim]
        if self.name == "select":
            return cast(int, self.arguments["index"] % n)
        return first_of(n, self.arguments.get("start"))

    def of(self, base: Value) -> Value:
        """The view's value by that of its base. A view of an input is one with other strides."""
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
            return Permuted(base.size, base.dtype, new, restored(range(len(order)), order))
        if self.name not in ("select", "slice") or self.arguments.get("step", 1) != 1:
            raise Declined(f"a write to a view by {self.name}")
        dim, n = self._dim, base.size[self._dim]
        if self.name == "select":
            new = Reshaped((*new.size[:dim], 1, *new.size[dim:]), new.dtype, new)
        first, end = self._first, self._first + new.size[dim]
        parts = [sliced(base, dim, 0, first), new, sliced(base, dim, end, n)]
        return Joined(base.size, base.dtype, tuple(part for part in parts if part.size[dim]), dim)

    def size(self) -> tuple[int, ...]:
        """The view's size."""
        name, arguments, size = self.name, self.arguments, self.base_size
        if name in ("view", "_reshape_alias", "_unsafe_view"):
            return _inferred(arguments["size"], prod(size))
        if name == "squeeze":
            dims = arguments.get("dim", range(len(size)))
            dims = dims if isinstance(dims, (tuple, range)) else (dims,)
            dims = {d % max(len(size), 1) for d in dims}
            return tuple(n for d, n in enumerate(size) if d not in dims or n != 1)
        if name == "unsqueeze":
            dim = arguments["dim"] % (len(size) + 1)
            return (*size[:dim], 1, *size[dim:])
        if name in _PERMUTED:
            return tuple(size[d] for d in self._order())
        if name == "expand":
            return expanded_size(size, arguments["size"])
        if name in ("alias", "detach"):
            return size
        return self._size_of_part()

    def _size_of_part(self) -> tuple[int, ...]:
        """The size of a view of a part of the base."""
        name, arguments, size = self.name, self.arguments, self.base_size
        if name == "diagonal":
            starts = self._starts_of_diagonal()
            length = min(size[dim] - start for dim, start in starts.items())
            return (*(n for d, n in enumerate(size) if d not in starts), length)
        if name == "unfold":
            if not size:
                return (arguments["size"],)
            dim = arguments["dimension"] % len(size)
            n_parts = (size[dim] - arguments["size"]) // arguments["step"] + 1
            return (*size[:dim], n_parts, *size[dim + 1 :], arguments["size"])
        dim, n = self._dim, size[self._dim]
        if name == "select":
            return (*size[:dim], *size[dim + 1 :])
        end, step = arguments.get("end"), arguments.get("step", 1)
        length = max((n if end is None else first_of(n, end)) - self._first, 0)
        return (*size[:dim], (length + step - 1) // step, *size[dim + 1 :])

    def _stride(self, base: Input, size: tuple[int, ...]) -> tuple[int, ...]:
        """The strides of the view, of size `size`, of an input."""
        name, stride = self.name, base.stride
        if name in _SAME_ORDER:
            new_stride = stride_of_view(base.size, stride, size)
            if new_stride is None:
                raise Declined("a view of other sizes")
            return new_stride
        if name in _PERMUTED:
            return tuple(stride[d] for d in self._order())
        if name == "expand":
            n_new = len(size) - len(stride)
            base_stride = [s if n != 1 else 0 for s, n in zip(stride, base.size, strict=True)]
            return (*[0] * n_new, *base_stride)
        if name == "select":
            return (*stride[: self._dim], *stride[self._dim + 1 :])
        if name == "slice":
            step = self.arguments.get("step", 1)
            return tuple(s * step if d == self._dim else s for d, s in enumerate(stride))
        return stride

    def _order(self) -> tuple[int, ...]:
        """The dimensions of the base in the order in which the view has them."""
        n_dims = len(self.base_size)
        if self.name == "permute":
            return tuple(d % n_dims for d in self.arguments["dims"])
        order = [*range(n_dims)]
        if n_dims > 1:
            # `t` has no arguments
            dim0 = self.arguments.get("dim0", 0) % n_dims
            dim1 = self.arguments.get("dim1", 1) % n_dims
            order[dim0], order[dim1] = dim1, dim0
        return tuple(order)

    def _place(self, index: Indices) -> Indices:
        """The index in the base of the element at `index` in the view."""
        name, arguments = self.name, self.arguments
        if name in ("alias", "detach"):
            return index
        if name == "expand":
            return broadcast(self.base_size)(index)
        if name == "diagonal":
            return self._place_in_diagonal(index)
        if name == "unfold":
            dim = arguments["dimension"] % max(len(self.base_size), 1)
            place = index[dim].times(arguments["step"]) + index[-1]
            return (*index[:dim], place, *index[dim + 1 : -1])
        dim, first = self._dim, Index((), self._first)
        if name == "select":
            return (*index[:dim], first, *index[dim:])
        place = index[dim].times(arguments.get("step", 1)) + first
        return (*index[:dim], place, *index[dim + 1 :])

    def _place_in_diagonal(self, index: Indices) -> Indices:
        starts = self._starts_of_diagonal()
        place = [*index[:-1]]
        for dim in sorted(starts):
            place.insert(dim, index[-1] + Index((), starts[dim]))
        return tuple(place)

    def _starts_of_diagonal(self) -> dict[int, int]:
        """The index at which the diagonal begins, by each of its two dimensions."""
        n_dims, offset = len(self.base_size), self.arguments.get("offset", 0)
        dim1, dim2 = self.arguments.get("dim1", 0) % n_dims, self.arguments.get("dim2", 1) % n_dims
        return {dim1: max(-offset, 0), dim2: max(offset, 0)}


def _inferred(size: tuple[int, ...], n: int) -> tuple[int, ...]:
    """A size of `n` elements, in which -1 is replaced by what follows from the other dimensions."""
    n_known = prod(m for m in size if not _is_inferred(m))
    return tuple(n // n_known if _is_inferred(m) else m for m in size)


def _is_inferred(size: Any) -> bool:
    return isinstance(size, int) and size == -1
