"""Tensor and sequence parallel: torch's own styles, executed once more for our `DTensor`.

In: a module, a mesh, a plan. Out: the module, its parameters sharded, its inputs and outputs
converted by hooks. `loss_parallel` keeps the logits sharded through the cross entropy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.tensor import experimental as _experimental
from torch.distributed.tensor.parallel import api as _api, style as _style

from lazy_tensor.dispatch.trie.trace import setting_apart
from lazy_tensor.sharding import torch_private
from lazy_tensor.sharding.api import distribute_module, distribute_tensor
from lazy_tensor.sharding.tensor import DTensor

style = torch_private.second_instance(
    _style,
    "lazy_tensor.sharding.style",
    DTensor=DTensor,
    distribute_tensor=distribute_tensor,
    distribute_module=distribute_module,
)
ParallelStyle = style.ParallelStyle
ColwiseParallel = style.ColwiseParallel
RowwiseParallel = style.RowwiseParallel
SequenceParallel = style.SequenceParallel
PrepareModuleInput = style.PrepareModuleInput
PrepareModuleOutput = style.PrepareModuleOutput
PrepareModuleInputOutput = style.PrepareModuleInputOutput

parallelize_module = torch_private.rebound(_api.parallelize_module, ParallelStyle=ParallelStyle)
parallelize_module.__globals__["parallelize_module"] = parallelize_module  # it calls itself

local_map = torch_private.local_map_for(DTensor)
register_sharding = _experimental.register_sharding
implicit_replication = _experimental.implicit_replication


_n_inside = 0
_lock = threading.Lock()


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Within it, a cross entropy on logits sharded by class keeps them so: see
    `torch.distributed.tensor.parallel.loss_parallel`."""
    global _n_inside
    with _lock:
        _n_inside += 1
        torch_private.keep_classes_sharded(True)
    try:
        with setting_apart("loss_parallel"):
            yield
    finally:
        with _lock:
            _n_inside -= 1
            if not _n_inside:
                torch_private.keep_classes_sharded(False)
