"""A lazy runtime for PyTorch: record aten ops, run them as fused kernels when a value is needed."""

import atexit
from pathlib import Path
from typing import TYPE_CHECKING

# The `__path__` below makes the checkout's root a folder of this package, in which `lazy_tensor`
# lies again: a tool that walks packages (`pkgutil`) would import it a second time.
if __name__ != "lazy_tensor":
    raise ImportError(f"{__name__} is lazy_tensor itself")

# In a checkout, `dispatch`, `kernels` and `sharding` are folders at its root, beside `lazy_tensor`.
# This path makes them packages of `lazy_tensor`, as they are when it is installed. Symbolic links
# would do the same, but a zip download, and a checkout on Windows without the right to make links,
# have text files in their place.
__path__ = (
    __path__
    if Path(__file__).with_name("kernels").joinpath("backend.py").exists()
    else [*__path__, str(Path(__file__).parents[1])]
)

from lazy_tensor.dispatch.torch_checks import assumptions as _assumptions

# If this Python or torch doesn't work as the recorder needs it, the same names come from a module
# that records nothing: a program must not fail because of an import.
if TYPE_CHECKING or not _assumptions.failed():
    from lazy_tensor.capture.replay import replay
    from lazy_tensor.convert import flush, is_lazy, is_pending, materialize, unwrap, wrap
    from lazy_tensor.interop.leaving import let_workers_finish as _let_workers_finish
    from lazy_tensor.mode import lazy_mode
    from lazy_tensor.report import cache_clear, cache_info, configure, explain, reset_stats, stats
    from lazy_tensor.tensor import LazyTensor

    # registered first, so that it runs after the exit functions of the program
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
