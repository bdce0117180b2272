"""Strides: of contiguous tensors, and of elementwise results by the rule of `at::TensorIterator`.

In: sizes and strides. Out: strides. torch's own meta functions, written in Python, guess otherwise
where the inputs of an elementwise op are laid out differently.
"""

from __future__ import annotations

from collections.abc import Sequence

Layout = tuple[Sequence[int], Sequence[int]]
"""Size and stride."""


def dense_stride(size: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this size."""
    stride, step = [], 1
    for n in reversed(size):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))


def is_contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    return 0 in size or all(
        n == 1 or given == dense
        for n, given, dense in zip(size, stride, dense_stride(size), strict=True)
    )


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill a stretch of memory, each place once."""
    expected = 1
    for step, n in sorted(zip(stride, size, strict=True)):
        if n != 1:
            if step != expected:
                return False
            expected *= n
    return True


def elementwise_stride(shape: tuple[int, ...], inputs: Sequence[Layout]) -> tuple[int, ...]:
    """The strides of an elementwise result of `shape`, to which `inputs` broadcast.

    See `fast_set_up`, `reorder_dimensions` and `allocate_or_resize_outputs` in
    aten/src/ATen/TensorIterator.cpp.
    """
    if all(tuple(size) == shape for size, _ in inputs):
        if all(is_contiguous(size, stride) for size, stride in inputs):
            return dense_stride(shape)
        first = tuple(inputs[0][1])
        if is_dense(shape, first) and all(tuple(stride) == first for _, stride in inputs):
            return first
    order = _fastest_first(shape, [_broadcast(shape, layout) for layout in inputs])
    if order == list(reversed(range(len(shape)))):
        return dense_stride(shape)
    stride, step = [0] * len(shape), 1
    for dim in order:
        stride[dim] = step
        step *= shape[dim]
    return tuple(stride)


def _broadcast(shape: tuple[int, ...], layout: Layout) -> list[int]:
    """The strides with which a tensor is read as one of `shape`: 0 where it repeats."""
    size, stride = layout
    lead = len(shape) - len(size)
    own = [
        0 if n == 1 and shape[lead + i] != 1 else step
        for i, (n, step) in enumerate(zip(size, stride, strict=True))
    ]
    return [0] * lead + own


def _fastest_first(shape: tuple[int, ...], strides: list[list[int]]) -> list[int]:
    """The dimensions from fastest to slowest: an insertion sort, for not all pairs compare."""
    order = list(reversed(range(len(shape))))
    for i in range(1, len(order)):
        current = i
        for other in reversed(range(i)):
            compared = _compare(shape, strides, order[other], order[current])
            if compared > 0:
                order[other], order[current] = order[current], order[other]
                current = other
            elif compared < 0:
                break
    return order


def _compare(shape: tuple[int, ...], strides: list[list[int]], one: int, two: int) -> int:
    """1 if dimension `one` is slower than `two`, -1 if faster, 0 if no input tells."""
    for stride in strides:
        if stride[one] == 0 or stride[two] == 0:
            continue
        if stride[one] != stride[two]:
            return 1 if stride[one] > stride[two] else -1
        if shape[one] > shape[two]:
            return 1
    return 0
