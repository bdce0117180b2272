"""Sharded lazy tensors behind the names of `torch.distributed.tensor`, of its `parallel`, and of
`torch.distributed.fsdp.fully_shard`. A program changes its imports and nothing else.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)  # by the folder at the root of a checkout

from lazy_tensor.dispatch.torch_checks import assumptions as _assumptions

if _assumptions.failed():
    raise ImportError(
        f"lazy_tensor.sharding records, and recording is off: {_assumptions.why_off()}; or import "
        "torch.distributed.tensor, which has the same names"
    )

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from lazy_tensor.dispatch import torch_private as _dispatch_private
from lazy_tensor.dispatch.ops import rules
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.interop.patch_table import PATCHES as _PATCHES
from lazy_tensor.sharding import ranks as _ranks
from lazy_tensor.sharding.api import (
    distribute_module,
    distribute_tensor,
    empty,
    full,
    ones,
    rand,
    randn,
    zeros,
)
from lazy_tensor.sharding.comm_mode import CommDebugMode
from lazy_tensor.sharding.fsdp.states import fully_shard
from lazy_tensor.sharding.fsdp.torch_private import (  # with a clear error where torch lacks one
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    register_fsdp_forward_method,
)
from lazy_tensor.sharding.ops import calls as _calls, order as _order
from lazy_tensor.sharding.ops.decisions import get_sharding_prop_cache_info
from lazy_tensor.sharding.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    implicit_replication,
    local_map,
    loss_parallel,
    parallelize_module,
    register_sharding,
)
from lazy_tensor.sharding.tensor import REDISTRIBUTE as _REDISTRIBUTE, DTensor

__all__ = [
    "CPUOffloadPolicy", "ColwiseParallel", "CommDebugMode", "DTensor", "DataParallelMeshDims",
    "DeviceMesh", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "ParallelStyle",
    "Partial", "Placement", "PrepareModuleInput", "PrepareModuleInputOutput",
    "PrepareModuleOutput", "Replicate", "RowwiseParallel", "SequenceParallel", "Shard",
    "UnshardHandle", "distribute_module", "distribute_tensor", "empty", "full", "fully_shard",
    "get_sharding_prop_cache_info", "implicit_replication", "init_device_mesh", "local_map",
    "loss_parallel", "ones", "parallelize_module", "rand", "randn",
    "register_fsdp_forward_method", "register_sharding", "zeros",
]  # fmt: skip

rules.RULES[_REDISTRIBUTE] = rules.Rule.RECORD
tensor_types.install_sharded(DTensor, _calls.call, _ranks.who_is_missing)
hits.use_sharded(DTensor)
_dispatch_private.allow_foreach(DTensor)
_order.keep()
# sharded tensors are lazy without a block or `wrap`
_PATCHES.put()
