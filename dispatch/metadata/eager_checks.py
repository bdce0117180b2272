"""Checks that eager makes of a call and that torch's meta functions leave out.

In: an op and its inputs' metadata. Out: whether the call passes. One that doesn't is run at once,
so that eager raises its own error at the program's line. Called by `record.extend_trie`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.metadata.infer import Meta, Outcome
from lazy_tensor.dispatch.metadata.other_formulas import broadcast
from lazy_tensor.dispatch.ops.schema import OpFacts, is_pointwise
from lazy_tensor.kernels.segment import substituted

aten = torch.ops.aten

MISFIT = Outcome(runs_now="its arguments don't fit each other")

SCATTERS: dict[OpOverload, OpOverload] = {
    aten.select_scatter.default: aten.select.int,
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.diagonal_scatter.default: aten.diagonal.default,
    aten.as_strided_scatter.default: aten.as_strided.default,
}
"""Ops that return `self` with `src` in place of a view of it, and the ops that make the view."""

FLOATING_ONLY = frozenset({aten.glu.default})
"""Ops that refuse integers and that `kernel_probe` doesn't try."""


def passes(
    facts: OpFacts, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], metas: list[Meta]
) -> bool:
    """Whether eager wouldn't raise for sizes and dtypes that a meta function accepts."""
    if facts.op in FLOATING_ONLY and not metas[0][3].is_floating_point:
        return False
    if facts.op in SCATTERS:
        return _src_fits(facts, args, kwargs, metas)
    if facts.returns_arg == 0 and is_pointwise(facts.op):
        # an in-place op can't change the size of the tensor that it writes
        sizes = [tuple(meta[0]) for meta in metas]
        return broadcast(sizes) == sizes[0]
    return True


def _src_fits(
    facts: OpFacts, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], metas: list[Meta]
) -> bool:
    """Whether `src` has the size of the view that it replaces: a kernel would read beyond it."""
    named = {**dict(zip(facts.argument_names, args, strict=False)), **dict(kwargs)}
    src = named.pop("src")

    def view(stand_ins: list[torch.Tensor]) -> Any:
        plain = {name: substituted(a, stand_ins) for name, a in named.items()}
        return SCATTERS[facts.op](**plain)

    try:
        return bool(torch_private.meta_call(metas, view).shape == metas[src.index][0])
    except Exception:
        return False  # no such view, which eager says best
