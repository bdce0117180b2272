"""A lazy runtime for PyTorch: record aten ops, run them as fused kernels when a value is needed."""

import atexit
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ != "lazy_tensor":  # who walks the packages of a checkout's root finds this one again
    raise ImportError(f"{__name__} is lazy_tensor itself")

# In a checkout the modules of `dispatch`, `kernels` and `sharding` lie in folders at its root, and
# these packages find them by this path. Links would do as well, but a checkout on Windows without
# the right to make links, and a zip download, have text files in their place.
__path__ = (
    __path__
    if Path(__file__).with_name("kernels").joinpath("backend.py").exists()
    else [*__path__, str(Path(__file__).parents[1])]
)

from lazy_tensor.dispatch.torch_checks import assumptions as _assumptions

if TYPE_CHECKING or not _assumptions.failed():
    from lazy_tensor.capture.replay import replay
    from lazy_tensor.convert import flush, is_lazy, is_pending, materialize, unwrap, wrap
    from lazy_tensor.interop.leaving import let_workers_finish as _let_workers_finish
    from lazy_tensor.mode import lazy_mode
    from lazy_tensor.report import (
        cache_clear,
        cache_info,
        configure,
        explain,
        reset_stats,
        stats,
    )
    from lazy_tensor.tensor import LazyTensor

    atexit.register(_let_workers_finish)
else:
    from lazy_tensor.unrecorded import (
        LazyTensor,
        cache_clear,
        cache_info,
        configure,
        explain,
        flush,
        is_lazy,
        is_pending,
        lazy_mode,
        materialize,
        replay,
        reset_stats,
        stats,
        unwrap,
        wrap,
    )

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
