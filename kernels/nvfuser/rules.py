"""All rules together: the modules register theirs when they are imported."""

from __future__ import annotations

from lazy_tensor.kernels.nvfuser import pointwise, reductions, shapes
from lazy_tensor.kernels.nvfuser.translate import rule_of

MODULES = (pointwise, reductions, shapes)

__all__ = ["MODULES", "rule_of"]
