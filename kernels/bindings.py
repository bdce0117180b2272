"""The quickest way to call an aten op from generated code.

In: an op. Out: what calls it with the same arguments: torch's own function where one stands for
just this overload, else the C++ function behind it. The first is parsed for one op's arguments
alone, the second goes through boxed values: 0.3 to 0.7 us more, half of a view's cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

BINDINGS: dict[OpOverload, Callable[..., Any]] = {
    # views
    aten.as_strided.default: torch.as_strided,
    aten.expand.default: torch.Tensor.expand,
    aten.permute.default: torch.permute,
    aten.select.int: torch.select,
    aten.squeeze.dim: torch.squeeze,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.unbind.int: torch.unbind,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
    # what is not fused
    aten.addmm.default: torch.addmm,
    aten.baddbmm.default: torch.baddbmm,
    aten.bmm.default: torch.bmm,
    aten.convolution.default: torch.convolution,
    aten.embedding.default: torch.embedding,
    aten.mm.default: torch.mm,
    aten.mv.default: torch.mv,
    # what runs alone, or before its kernel is there
    aten.add.Tensor: torch.add,
    aten.add_.Tensor: torch.Tensor.add_,
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.copy_.default: torch.Tensor.copy_,
    aten.div.Tensor: torch.div,
    aten.div_.Tensor: torch.Tensor.div_,
    aten.exp.default: torch.exp,
    aten.mean.dim: torch.mean,
    aten.mul.Tensor: torch.mul,
    aten.mul_.Tensor: torch.Tensor.mul_,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.neg.default: torch.neg,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.relu.default: torch.relu,
    aten.rsqrt.default: torch.rsqrt,
    aten.sigmoid.default: torch.sigmoid,
    aten.sqrt.default: torch.sqrt,
    aten.sub.Tensor: torch.sub,
    aten.sub_.Tensor: torch.Tensor.sub_,
    aten.sum.dim_IntList: torch.sum,
    aten.tanh.default: torch.tanh,
    aten.where.self: torch.where,
}


def callable_of(op: OpOverload, *, by_name: bool) -> Callable[..., Any]:
    """What calls `op`; `by_name` if some arguments are passed so, whose names may differ."""
    found: Callable[..., Any] | None = None if by_name else BINDINGS.get(op)
    return op._op if found is None else found
