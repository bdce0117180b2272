"""Tensor and sequence parallel: torch's own styles, with our `DTensor` in place of torch's.

In: a module, a mesh and a plan. Out: the module with sharded parameters, and with hooks that
convert its inputs and outputs. `loss_parallel` keeps logits sharded through the cross entropy.
Users call these functions.
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

# torch's styles name DTensor as a global of their module. A second instance of the module has ours
# there, and torch's own module stays as it is for programs that use both.
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
# it calls itself for a plan with several entries, and must find this copy
parallelize_module.__globals__["parallelize_module"] = parallelize_module

local_map = torch_private.local_map_for(DTensor)
register_sharding = _experimental.register_sharding
implicit_replication = _experimental.implicit_replication


_n_inside = 0  # blocks of `loss_parallel` that are entered, in all threads
_lock = threading.Lock()  # guards `_n_inside`


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Context manager: a cross entropy leaves logits sharded by class as they are; see
    `torch.distributed.tensor.parallel.loss_parallel`."""
    # torch's switch holds for the whole process and doesn't count: it is switched off by the last
    # block that is left, so that neither a nested block nor another thread's switches it off early
    global _n_inside
    with _lock:
        _n_inside += 1
        torch_private.keep_classes_sharded(True)
    try:
        # the same ops mean something else inside, so that their states are kept apart
        with setting_apart("loss_parallel"):
            yield
    finally:
        with _lock:
            _n_inside -= 1
            if not _n_inside:
                torch_private.keep_classes_sharded(False)
