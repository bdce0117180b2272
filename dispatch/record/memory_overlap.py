"""Finds writes to overlapping memory, for which kernels raise and meta functions don't.

In: a call whose tensors have slots. Out: whether eager may raise for it, or reads what it has just
written. `extend_trie` then has the call run at once, so that the error comes at the user's line.
`recorder` asks for the one copy that a call of `matmul(out=)` must leave out.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.metadata.infer import is_dense, meta_of
from lazy_tensor.dispatch.ops.request import Request
from lazy_tensor.dispatch.record.inputs import index_of, is_plain, slot_of
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.dispatch.trie.trace import Trace

aten = torch.ops.aten
COPY = aten.copy_.default
PRODUCTS = frozenset({aten.mm.out, aten.mm.out._op, aten.mv.out, aten.mv.out._op})
"""What `matmul(out=)` calls with a view of `out`.

Both the overloads and their builtins: `Trace.last_op` gives a builtin for a recorded op.
"""


def overlaps(trace: Trace, request: Request) -> bool:
    """Whether eager may raise because memory that the call writes overlaps, or may read there what
    it has just written.

    The rules of errors are those of `at::assert_no_internal_overlap` and
    `at::assert_no_overlap`, see aten/src/ATen/MemoryOverlap.cpp.
    """
    # Tensors of the same root share a storage. No others can overlap.
    by_root: dict[int, list[torch.Tensor]] = {}
    for tensor in request.tensors:
        by_root.setdefault(trace.root_of(index_of(trace, tensor)), []).append(tensor)
    for written in request.written():
        # an expanded tensor: one place in memory is several elements
        size, stride, *_ = meta_of(written)
        if any(n > 1 and step == 0 for n, step in zip(size, stride, strict=True)):
            return True
        # the same object may come twice (`x.add_(x)`), so only one occurrence is left out
        others = list(by_root[trace.root_of(index_of(trace, written))])
        del others[next(i for i, t in enumerate(others) if t is written)]
        if written.numel() and any(_collide(written, t, request.op) for t in others):
            return True
    return False


def is_there_already(trace: Trace, request: Request) -> bool:
    """Whether a `copy_` copies a product that already lies in the `out` of `matmul(out=)`.

    `matmul` multiplies into a reshaped view of `out`. It then copies the view to `out` unless
    `Tensor.is_alias_of` says that they share a storage, which a wrapper hides.
    """
    # the last op tells this copy from a program's own, which must raise as in eager
    if trace.last_op() not in PRODUCTS or len(request.tensors) != 2:
        return False
    to, source = request.tensors
    return (
        to.shape != source.shape
        and to.numel() == source.numel()
        and to.storage_offset() == source.storage_offset()
        and _owner(trace, to) == _owner(trace, source)
    )


def _owner(trace: Trace, tensor: torch.Tensor) -> object:
    """The owner of the tensor's memory, to be compared: a slot of the trace, or the storage."""
    slot = slot_of(trace, tensor)
    if slot is not None:
        return trace.root_of(slot.index)
    if not (is_plain(tensor) or isinstance(tensor, tensor_types.ValueTensor)):
        return id(tensor)  # of a class that traces don't hold
    data = tensor if is_plain(tensor) else tensor_types.value_in(tensor).data
    assert data is not None, "what has no slot is computed"
    storage = torch_private.storage_id(data)
    first = trace.storages.get(storage)
    return ("storage", storage) if first is None else trace.root_of(first)


def _collide(written: torch.Tensor, other: torch.Tensor, op: OpOverload) -> bool:
    """Whether two tensors on one storage overlap so that kernels raise, or read what they wrote."""
    if not all(is_dense(t.shape, t.stride()) for t in (written, other)):
        # torch calls this "too hard" to tell, and lets it pass
        return not _are_same(written, other) and _share_elements(written, other)
    # `copy_` and kernels that go element by element may write exactly the elements that they read.
    # Other kernels raise.
    if _are_same(written, other):
        is_pointwise = torch.Tag.pointwise in op.tags or "_foreach_" in op._schema.name
        return op is not COPY and not is_pointwise
    (first, last), (its_first, its_last) = _bytes(written), _bytes(other)
    return first < its_last and its_first < last


def _are_same(written: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the elements of two tensors on one storage are the same ones, in one order."""
    places = [(t.storage_offset(), t.itemsize, t.shape, t.stride()) for t in (written, other)]
    return places[0] == places[1]


MOST_WAYS = 16
"""Multiples of one stride that are tried; tensors with more may overlap."""


def _share_elements(written: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether an element of one tensor may be one of the other, too, on one storage."""
    if written.itemsize != other.itemsize:
        return True
    # Two elements are the same one if their offsets are. Those differ by a sum of multiples of the
    # strides: here are the least and the largest multiple of each.
    least, most = Counter[int](), Counter[int]()
    for size, stride in zip(other.shape, other.stride(), strict=True):
        least[stride] -= size - 1
    for size, stride in zip(written.shape, written.stride(), strict=True):
        most[stride] += size - 1
    strides = sorted({*least, *most} - {0}, reverse=True)
    distance = int(other.storage_offset()) - int(written.storage_offset())
    return _is_sum_of(distance, [(stride, least[stride], most[stride]) for stride in strides])


def _is_sum_of(distance: int, steps: list[tuple[int, int, int]]) -> bool:
    """Whether a distance is a sum of multiples of strides, each between two bounds."""
    if not steps:
        return distance == 0
    (stride, least, most), *others = steps
    shortest = sum(step * least for step, least, _ in others)
    longest = sum(step * most for step, _, most in others)
    first = max(least, -((longest - distance) // stride))
    last = min(most, (distance - shortest) // stride)
    return last - first >= MOST_WAYS or any(
        _is_sum_of(distance - n * stride, others) for n in range(first, last + 1)
    )


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """The byte of its storage where a dense tensor begins, and the one behind its end."""
    first = int(tensor.storage_offset()) * tensor.itemsize
    return first, first + tensor.numel() * tensor.itemsize
