"""Eigenvalues and singular values alone, computed as in eager.

torch's composite ops ask LAPACK for the values alone where nobody needs a gradient; for tensor
subclasses and under modes they ask for the vectors too, which takes longer and rounds otherwise.
In: the classes whose ops are recorded. Out: these ops, and what is made of them (the spectral and
nuclear norms, `cond`, `matrix_rank`), ask for what eager asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch import torch_private

aten = torch.ops.aten


def _eigvalsh(tensor: torch.Tensor, uplo: str = "L") -> Any:
    return aten._linalg_eigh.default(tensor, uplo, False)[0]


def _svdvals(tensor: torch.Tensor, *, driver: str | None = None) -> Any:
    return aten._linalg_svd.default(tensor, False, False, driver=driver)[1]


WITHOUT_VECTORS: dict[OpOverload, Callable[..., Any]] = {
    aten.linalg_eigvalsh.default: _eigvalsh,
    aten.linalg_svdvals.default: _svdvals,
    aten.linalg_eigvals.default: aten._linalg_eigvals.default,
}
"""The composite ops: what each is in eager where no gradient is wanted."""


def install(tensor_class: type[Any], mode_class: type[Any]) -> None:
    """Have tensors of `tensor_class`, and plain ones under modes of `mode_class`, treated so."""

    def is_ours(tensor: torch.Tensor) -> bool:
        # under autocast the call comes again, of the tensor in the dtype that autocast gives it
        return (
            type(tensor) in (torch.Tensor, torch.nn.Parameter, tensor_class)
            and not (tensor.requires_grad and torch.is_grad_enabled())
            and not torch.is_autocast_enabled(tensor.device.type)
            and torch_private.is_seen_by_none_but(mode_class)
        )

    for op, values in WITHOUT_VECTORS.items():
        torch_private.put_above_autograd(op, is_ours, values)
