"""Imports all modules with rules, which register them in `translate.RULES` on import."""

from __future__ import annotations

from lazy_tensor.kernels.nvfuser import pointwise, reductions, shapes
from lazy_tensor.kernels.nvfuser.translate import rule_of

MODULES = (pointwise, reductions, shapes)

__all__ = ["MODULES", "rule_of"]
