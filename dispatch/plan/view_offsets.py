"""Views whose place in memory is known when they are planned: no op need be called to make them.

In: a recorded call. Out: where its view begins in its base, if that is so.
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


def offset_of(node: Node, spec: Mapping[int, TensorSpec]) -> int | None:
    """Elements from the begin of its base to that of the one view that the call makes; None if it
    makes something else, or if that isn't known."""
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
        return None  # it changes
    size, stride = base.size[dim], base.stride[dim]
    # the strides of dims of one element are not what a kernel has promised
    return 0 if size == 1 else (index % size) * stride
