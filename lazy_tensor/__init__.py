"""A lazy runtime for PyTorch: record aten ops, run them as fused kernels when a value is needed."""

import atexit

from lazy_tensor.convert import flush, is_lazy, is_pending, materialize, unwrap, wrap
from lazy_tensor.leaving import let_workers_finish
from lazy_tensor.mode import lazy_mode
from lazy_tensor.replay import replay
from lazy_tensor.report import (
    cache_clear,
    cache_info,
    configure,
    explain,
    reset_stats,
    stats,
)
from lazy_tensor.tensor import LazyTensor

__all__ = [
    "LazyTensor",
    "cache_clear",
    "cache_info",
    "configure",
    "explain",
    "flush",
    "is_lazy",
    "is_pending",
    "lazy_mode",
    "materialize",
    "replay",
    "reset_stats",
    "stats",
    "unwrap",
    "wrap",
]
__version__ = "0.1.0"

atexit.register(let_workers_finish)
