"""Views whose place in memory is known when they are planned: C++ makes them without calling an op.

In: a recorded call. Out: where its view begins, counted from the tensor that it views, or None if
only the op can tell. Called by `plan.Step`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lazy_tensor.dispatch.trie.trace import Node
from lazy_tensor.kernels.segment import TensorSpec

aten = torch.ops.aten
BEGIN_WITH_BASE = frozenset(
    {
        aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default,
        aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
        aten.view.default,
    }
)  # fmt: skip
"""Ops whose view begins at the first element of the tensor that it is of."""


def offset_of(node: Node, spec: Mapping[int, TensorSpec]) -> int | None:
    """Elements from the begin of the tensor that the call reads to the begin of the view it makes.

    None if the call doesn't make exactly one view of one tensor, or if the offset isn't known.
    """
    if node.view_of is None or len(node.reads) != 1 or not node.is_single:
        return None
    op = node.facts.op
    if op in BEGIN_WITH_BASE:
        return 0
    if op is aten.select.int:
        return _offset_of_element(spec[node.reads[0]], *node.args[1:])
    return None


def _offset_of_element(base: TensorSpec, dim: Any, index: Any) -> int | None:
    if type(dim) is not int or type(index) is not int:
        return None  # a run-time scalar
    size, stride = base.size[dim], base.stride[dim]
    # Kernels may choose any stride for a dim of one element, so the recorded one says nothing.
    return 0 if size == 1 else (index % size) * stride
