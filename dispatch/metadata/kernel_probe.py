"""Probes: runs an op's kernels on tiny tensors, to correct what its meta function said.

Meta functions seldom check dtypes, and those in Python guess the strides of results of mixed
layouts, and the dtypes of results of mixed dtypes. In: an op, its inputs' metadata, the outcome by
the meta function. Out: the outcome as kernels give it. Kernels are asked once for each op, dtypes
and layouts, on tensors of at most two elements a dimension. If a tensor overlaps itself, they are
asked on tensors like the program's. Called by `record.extend_trie`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.metadata.infer import Meta, Outcome, dense_stride, is_dense
from lazy_tensor.dispatch.metadata.shrunk import SHRUNK, tiny
from lazy_tensor.dispatch.ops.schema import OpFacts, is_pointwise
from lazy_tensor.kernels.cache import Cache
from lazy_tensor.kernels.fusible import base_name
from lazy_tensor.kernels.segment import substituted

MAX_PROBED = 1 << 16
"""Elements up to which an op may be tried on tensors of its own shapes."""

Order = tuple[int, ...]
"""The dimensions of more than one element, by their place in memory, fastest first."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What kernels did with tiny tensors.

    `refuses` says whether they raised for the dtypes; None if the tiny shapes may be the reason.
    `orders` has the order of dimensions of each result, `dtypes` its dtype, None where the probe
    doesn't tell.
    """

    refuses: bool | None
    orders: tuple[Order | None, ...] = ()
    dtypes: tuple[torch.dtype | None, ...] = ()


_said: Cache[tuple[Any, ...], ProbeResult] = Cache("probes", 4096)


def corrected_by_probe(
    outcome: Outcome,
    facts: OpFacts,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    metas: list[Meta],
) -> Outcome:
    """`outcome`, corrected where the op's kernels refuse these inputs or give other results.

    An example of dtypes: under autocast a norm's input is in bfloat16 and its parameters in
    float32, and kernels give statistics in float32. A probe takes 10-30 us.
    """
    if facts.is_view or not metas:
        return outcome
    # Only ops that check their sizes may run on other sizes than the program's: a kernel that
    # trusts them would read memory of others. Those in `SHRUNK` get sizes that fit.
    shrinks = SHRUNK.get(base_name(facts.op))
    small = None if shrinks is None or kwargs else shrinks(args, metas)
    if small is None and not is_safe(facts):
        return outcome

    def refused(value: int) -> bool:
        return isinstance(_run(facts, args, kwargs, metas, value), str)

    is_small = sum(math.prod(meta[0]) for meta in metas) <= MAX_PROBED
    if is_small and any(0 in meta[0] for meta in metas):
        # not all meta functions check for emptiness; tiny tensors would hide it, so none are used
        return REFUSED if refused(0) else outcome
    # No tiny tensor overlaps itself as the program's may, so those are tried as they are.
    are_own = any(map(_overlaps_itself, metas))
    inputs = metas if are_own else [tiny(meta) for meta in metas]
    tried = args if small is None or are_own else small
    # Arguments by `repr`, because 1 == True but kernels treat them differently. The default dtype
    # is that of results made from numbers.
    key = (facts.op._op, repr(tried), repr(kwargs), tuple(inputs), torch.get_default_dtype())
    said = _said.get(key)
    if said is None:
        said = _ask(facts, tried, kwargs, inputs)
        _said.put(key, said)
    # Where the tiny shapes may be why, the program's own decide if they are small. Zeros and ones
    # are tried, because an op may raise for one value alone.
    if said.refuses or (said.refuses is None and is_small and refused(0) and refused(1)):
        return REFUSED
    outs = outcome.outs
    if len(said.dtypes) == len(outs):
        outs = tuple(map(_with_dtype, outs, said.dtypes))
    if len(said.orders) == len(outs):
        outs = tuple(map(_laid_out, outs, said.orders))
    return replace(outcome, outs=outs)


REFUSED = Outcome(runs_now="its kernels refuse these dtypes")


# fmt: off
CHECKING = frozenset(
    """_prelu_kernel binary_cross_entropy binary_cross_entropy_with_logits bucketize complex
    dot hardsigmoid_backward hardswish hardswish_backward hardtanh_backward huber_loss
    huber_loss_backward index_put index_select log_sigmoid_forward masked_fill
    masked_scatter max median min mse_loss_backward mv native_batch_norm rsub smooth_l1_loss
    smooth_l1_loss_backward sort std std_mean trace var var_mean vdot""".split()  # noqa: SIM905
)
# fmt: on
"""Ops that aren't pointwise, but check their inputs before they touch memory."""


NOT_FOR_SIZES = ("not implemented", "Dimension out of range", "dtype")
"""Parts of errors that tiny shapes can't cause: they have as many dimensions as the program's."""


UNFIT = frozenset({"glu", "linalg_ldl_solve", "linalg_lu_solve", "lu_unpack"})
"""Ops that are never probed. glu would warn about tiny inputs where the real ones give no reason.
The others pass pivots to LAPACK, which doesn't check them, and zeros are no valid pivots."""


@cache
def is_safe(facts: OpFacts) -> bool:
    """Whether the op raises for shapes that don't fit, rather than read memory of others.

    Structured kernels (those that share their shape function with the meta device), pointwise ops
    and those in `CHECKING` do.
    """
    if base_name(facts.op) in UNFIT:
        return False
    return _has_no_sizes(facts) or torch_private.is_structured(facts.op)


def _has_no_sizes(facts: OpFacts) -> bool:
    """Whether no argument of the op has to fit its tensors' shapes: tiny shapes are no reason to
    refuse."""
    return is_pointwise(facts.op) or base_name(facts.op) in CHECKING


def _run(
    facts: OpFacts,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    inputs: list[Meta],
    value: int,
) -> Any:
    """The op's result on tensors full of `value`, or its error as text.

    An exception would keep frames alive, and with them results, which autograd then has to copy.
    """
    with torch_private.kernels_only():
        tensors = [
            torch.empty_strided(size, stride, dtype=dtype, device=device).fill_(value)
            for size, stride, _, dtype, device in inputs
        ]
        plain_args = [substituted(a, tensors) for a in args]
        try:
            return facts.op(*plain_args, **{name: substituted(a, tensors) for name, a in kwargs})
        except Exception as error:
            unknown = isinstance(error, NotImplementedError)
            return f"not implemented: {error}" if unknown else str(error)


def _ask(
    facts: OpFacts, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], inputs: list[Meta]
) -> ProbeResult:
    """Run the op on tiny tensors, and say what that tells about tensors of such metadata."""
    result = _run(facts, args, kwargs, inputs, 0)
    if isinstance(result, str):
        result = _run(facts, args, kwargs, inputs, 1)
    if not isinstance(result, str):
        results = result if isinstance(result, (list, tuple)) else [result]
        # meta functions are right about the strides of results where all inputs are contiguous
        mixed = any(meta[1] != dense_stride(meta[0]) for meta in inputs)
        dtypes = tuple(t.dtype if isinstance(t, torch.Tensor) else None for t in results)
        return ProbeResult(refuses=False, orders=_orders(results) if mixed else (), dtypes=dtypes)
    is_sure = any(text in result for text in NOT_FOR_SIZES)
    if is_sure or _has_no_sizes(facts) or base_name(facts.op) in SHRUNK:
        return ProbeResult(refuses=True)
    odd = any(type(a) in (bool, complex) for i, a in enumerate(args) if i in facts.number_args)
    one_float = inputs[0][3].is_floating_point and len({meta[3] for meta in inputs}) == 1
    # Kernels take floats of one dtype. So if they raised, it was for the shapes, unless a bool or
    # complex number came with them.
    return ProbeResult(refuses=False if one_float and not odd else None)


def _overlaps_itself(meta: Meta) -> bool:
    """Whether steps in two dimensions lead to the same element, as after `unfold`."""
    size, stride, *_ = meta
    extent = 1
    for step, n in sorted(zip(stride, size, strict=True)):
        if step and n > 1:
            if step < extent:
                return True
            extent += step * (n - 1)
    return False


def _orders(results: Sequence[Any]) -> tuple[Order | None, ...]:
    return tuple(
        _order(t.shape, t.stride())
        if isinstance(t, torch.Tensor) and is_dense(t.shape, t.stride())
        else None
        for t in results
    )


def _with_dtype(meta: Meta | None, dtype: torch.dtype | None) -> Meta | None:
    if meta is None or dtype is None or dtype is meta[3]:
        return meta
    return (*meta[:3], dtype, meta[4])


def _laid_out(meta: Meta | None, order: Order | None) -> Meta | None:
    """`meta` with dense strides in this order, unless its own strides have that order."""
    if meta is None or order is None:
        return meta
    size, stride = meta[:2]
    own = _order(size, stride)
    if order == own or set(order) != set(own):
        return meta  # right already, or the tiny result has size 1 in other dimensions: no answer
    rest = [d for d in range(len(size)) if d not in order]
    steps, step = [0] * len(size), 1
    for d in (*order, *reversed(rest)):
        steps[d] = step
        step *= max(size[d], 1)
    return (size, tuple(steps), *meta[2:])


def _order(size: Sequence[int], stride: Sequence[int]) -> Order:
    """The dimensions of more than one element, fastest first."""
    dims = [d for d in range(len(size)) if size[d] > 1]
    return tuple(sorted(dims, key=lambda d: stride[d]))
