"""Checks that eager makes of a call and that torch's meta functions leave out.

In: an op and its inputs' metadata. Out: whether the call passes. One that doesn't is run at once,
so that eager raises its own error at the program's line. Called by `record.extend_trie`.
"""

from __future__ import annotations

import torch

from lazy_tensor.dispatch.metadata.infer import Meta, Outcome
from lazy_tensor.dispatch.metadata.other_formulas import broadcast
from lazy_tensor.dispatch.ops.schema import OpFacts, is_pointwise

aten = torch.ops.aten

MISFIT = Outcome(runs_now="its arguments don't fit each other")

FLOATING_ONLY = frozenset({aten.glu.default})
"""Ops that refuse integers and that `kernel_probe` doesn't try."""


def passes(facts: OpFacts, metas: list[Meta]) -> bool:
    """Whether eager wouldn't raise for sizes and dtypes that a meta function accepts."""
    if facts.op in FLOATING_ONLY and not metas[0][3].is_floating_point:
        return False
    if facts.returns_arg == 0 and is_pointwise(facts.op):
        # an in-place op can't change the size of the tensor that it writes
        sizes = [tuple(meta[0]) for meta in metas]
        return broadcast(sizes) == sizes[0]
    return True
