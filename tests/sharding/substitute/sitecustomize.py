"""Puts our sharding names in the place of torch's, as a program would that changed its imports.

On the path of the processes that run PyTorch's own tests (see `upstream.py`): each test module, and
torch's modules of helpers for them, gets ours when it has been executed.
"""

import importlib.abc
import importlib.machinery
import os
import sys

NAMES = (
    "DTensor", "distribute_tensor", "distribute_module", "zeros", "ones", "empty", "full", "rand",
    "randn", "parallelize_module", "ColwiseParallel", "RowwiseParallel", "SequenceParallel",
    "PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput", "ParallelStyle",
    "loss_parallel", "local_map", "fully_shard", "register_sharding", "CommDebugMode",
)  # fmt: skip
HELPERS = (
    "torch.testing._internal.distributed._tensor.common_dtensor",
    "torch.testing._internal.common_fsdp",
)
TESTS = os.environ["UPSTREAM_TESTS"]


class Finder(importlib.abc.MetaPathFinder):
    """Finds what others find; of the modules that matter it wraps the loader."""

    def find_spec(self, name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None or spec.origin is None:
            return None
        if name not in HELPERS and not spec.origin.startswith(TESTS):
            return None
        execute = spec.loader.exec_module

        def execute_and_substitute(module):
            execute(module)
            import lazy_tensor.sharding as ours

            for known, value in list(vars(module).items()):
                if known in NAMES and str(getattr(value, "__module__", "")).startswith("torch."):
                    setattr(module, known, getattr(ours, known, value))
                elif value is sys.modules.get("torch.distributed.tensor"):
                    setattr(module, known, ours)

        spec.loader.exec_module = execute_and_substitute
        return spec


sys.meta_path.insert(0, Finder())
