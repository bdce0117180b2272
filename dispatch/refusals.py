"""What kernels refuse and meta functions let pass: dtypes, and writes to overlapping memory.

In: a call that no state knew, its outcome known. Out: whether eager should have the word at once,
so that its error comes at the user's line.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.admit import slot_of
from lazy_tensor.dispatch.meta import Meta, meta_of, substituted
from lazy_tensor.dispatch.request import Request
from lazy_tensor.dispatch.schema import OpFacts
from lazy_tensor.dispatch.strides import is_dense
from lazy_tensor.dispatch.trace import Trace
from lazy_tensor.kernels.cache import Cache

MAX_PROBED = 1 << 16
"""Elements up to which an op is tried on tensors of its own shapes."""

_refused: Cache[tuple[Any, ...], bool] = Cache("refusals", 4096)


def refuses_dtypes(
    facts: OpFacts, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], metas: list[Meta]
) -> bool:
    """Whether the op's kernels probably refuse these dtypes: asked of them with tiny tensors.

    Kernels check dtypes when they run, meta functions seldom do. Once for each op, dtypes and
    arguments, 10-20 us.
    """
    if facts.is_view or not metas:
        return False
    shapes = tuple(tuple(size) if 0 in size else len(size) for size, *_ in metas)
    key = (facts.op._op, args, kwargs, shapes, tuple(meta[3] for meta in metas))
    known = _refused.get(key)
    if known is None:
        known = _is_refused(facts, args, kwargs, metas)
        _refused.put(key, known)
    return known


def _is_refused(
    facts: OpFacts, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], metas: list[Meta]
) -> bool:
    def refusal(value: int, shapes: list[tuple[int, ...]]) -> str:
        """The op's error on such tensors, "" for none. As text: an exception keeps frames alive,
        and with them results, which autograd then has to copy."""
        tensors = [
            torch.full(shape, value, dtype=meta[3], device=meta[4])
            for shape, meta in zip(shapes, metas, strict=True)
        ]
        plain_args = [substituted(a, tensors) for a in args]
        try:
            facts.op(*plain_args, **{name: substituted(a, tensors) for name, a in kwargs})
        except Exception as error:
            unknown = isinstance(error, NotImplementedError)
            return f"not implemented: {error}" if unknown else str(error) or "?"
        return ""

    with torch_private.no_modes(), torch_private.below_autograd():
        shapes = [tuple(meta[0]) for meta in metas]
        is_small = sum(map(math.prod, shapes)) <= MAX_PROBED
        if is_small and any(0 in shape for shape in shapes):
            return bool(refusal(0, shapes))  # not all meta functions check for emptiness
        tiny = [(1,) * len(shape) for shape in shapes]
        said = refusal(0, tiny) and refusal(1, tiny)
        if not said or "not implemented" in said:
            return bool(said)
        odd = any(type(a) in (bool, complex) for i, a in enumerate(args) if i in facts.number_args)
        if all(meta[3].is_floating_point for meta in metas) and not odd:
            return False  # the shapes: these dtypes go together everywhere
        return is_small and bool(refusal(0, shapes) and refusal(1, shapes))


def overlaps(trace: Trace, request: Request) -> bool:
    """Whether eager may refuse the call for what its writes overlap.

    The rules of `at::assert_no_internal_overlap` and `at::assert_no_overlap`, see
    aten/src/ATen/MemoryOverlap.cpp.
    """
    for written in request.written():
        size, stride, *_ = meta_of(written)
        if any(n > 1 and step == 0 for n, step in zip(size, stride, strict=True)):
            return True
        others = list(request.tensors)
        del others[next(i for i, t in enumerate(others) if t is written)]
        if others and written.numel():
            root = trace.root_of(_index(trace, written))
            if any(
                trace.root_of(_index(trace, t)) == root and _collide(written, t, request.op)
                for t in others
            ):
                return True
    return False


def _index(trace: Trace, tensor: torch.Tensor) -> int:
    slot = slot_of(trace, tensor)
    assert slot is not None, "tensors are admitted before the trie grows"
    return slot.index


def _collide(written: torch.Tensor, other: torch.Tensor, op: OpOverload) -> bool:
    """Whether two tensors on one storage overlap in a way that kernels refuse."""
    if not all(is_dense(t.shape, t.stride()) for t in (written, other)):
        return False  # "too hard" to tell, says torch, and goes on
    first, last = written.storage_offset(), written.storage_offset() + written.numel()
    its_first, its_last = other.storage_offset(), other.storage_offset() + other.numel()
    if (first, last) == (its_first, its_last) and written.stride() == other.stride():
        return torch.Tag.pointwise not in op.tags
    return first < its_last and its_first < last
