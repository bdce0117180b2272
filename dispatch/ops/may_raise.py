"""Ops whose kernels check values, so that only running them tells whether they raise.

In: an op and the dtypes of its tensors. Out: whether the call may raise for its values. In a plan
such a call runs even if nobody uses its results, because eager would have raised. No write to
memory that outlives the flush moves across it. Called by `plan.graph` and `plan.partition`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch._ops import OpOverload

from lazy_tensor.kernels.fusible import base_name

# fmt: off
CHECK_VALUES = frozenset(
    """binary_cross_entropy cholesky cholesky_inverse embedding fractional_max_pool2d gather
    fractional_max_pool3d histc index index_add index_copy index_fill index_put
    index_reduce index_select inverse linalg_cholesky_ex linalg_eig linalg_inv_ex
    linalg_ldl_factor_ex linalg_lstsq linalg_lu_factor_ex lu_unpack masked_scatter
    max_unpool2d max_unpool3d
    multi_margin_loss multilabel_margin_loss_forward nll_loss2d_forward nll_loss_forward put
    scatter scatter_add
    scatter_reduce searchsorted segment_reduce take _assert_async _ctc_loss
    _functional_assert_async _index_put_impl _linalg_eigh _linalg_solve_ex _linalg_svd""".split()  # noqa: SIM905
)
# fmt: on
"""Names of ops that raise for some values, as `base_name` gives them: `put` is `put_` too."""
DIVISIONS = frozenset({"div", "floor_divide", "fmod", "remainder"})
"""Ops that raise for integers alone, if a divisor is 0."""


def divides_integers(op: OpOverload, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether the call is a division of integers, which raises if a divisor is 0."""
    return base_name(op) in DIVISIONS and not any(
        dtype.is_floating_point or dtype.is_complex for dtype in dtypes
    )


def may_raise(op: OpOverload, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether the call may raise for its values, given that its shapes and dtypes are right."""
    return base_name(op) in CHECK_VALUES or divides_integers(op, dtypes)
