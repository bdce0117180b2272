"""Lists torch's private names without which nothing can be recorded, for `assumptions`.

They are those that `dispatch.torch_private` and `lazy_tensor.interop.torch_ways` use; a test
compares. Names that these modules can do without are left out. So is `torch._ops.OpOverload`, which
torch's own documentation uses. Who uses one more private name there adds it here.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

NEEDED = (
    "torch.Tensor._make_wrapper_subclass", "torch._C.DispatchKey.ADInplaceOrView",
    "torch._C.DispatchKey.CompositeImplicitAutograd", "torch._C.DispatchKey.Python",
    "torch._C.DispatchKey.PythonTLSSnapshot", "torch._C.ScriptFunction", "torch._C.ScriptMethod",
    "torch._C.TensorBase._is_zerotensor", "torch._C.TensorBase.data",
    "torch._C.TensorBase.data_ptr",
    "torch._C.TensorBase.tolist", "torch._C.TensorBase.untyped_storage",
    "torch._C.DispatchKeySet", "torch._C._AutoDispatchBelowADInplaceOrView",
    "torch._C._DisableAutocast",
    "torch._C._DisableTorchDispatch", "torch._C._ExcludeDispatchKeyGuard",
    "torch._C._ForceDispatchKeyGuard",
    "torch._C._InferenceMode", "torch._C._TorchDispatchModeKey",
    "torch._C._autograd._get_sequence_nr",
    "torch._C._autograd._profiler_enabled",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._autograd._unsafe_set_version_counter", "torch._C._current_graph_task_id",
    "torch._C._disabled_torch_function_impl", "torch._C._dispatch_dump",
    "torch._C._dispatch_has_computed_kernel_for_dispatch_key", "torch._C._dispatch_has_kernel",
    "torch._C._dispatch_has_kernel_for_dispatch_key", "torch._C._dispatch_key_for_device",
    "torch._C._dispatch_keys", "torch._C._dispatch_keyset_full_after",
    "torch._C._dispatch_tls_is_dispatch_key_excluded",
    "torch._C._dispatch_tls_local_exclude_set", "torch._C._dispatch_tls_local_include_set",
    "torch._C._functions.DelayedError", "torch._C._functorch.maybe_current_level",
    "torch._C._get_dispatch_mode", "torch._C._get_dispatch_stack_at",
    "torch._C._get_fp32_precision_getter", "torch._C._get_mkldnn_enabled",
    "torch._C._is_cow_tensor",
    "torch._C._is_multithreading_enabled", "torch._C._len_torch_dispatch_stack",
    "torch._C._len_torch_function_stack", "torch._C._parse_dispatch_key",
    "torch._C._pop_torch_dispatch_stack",
    "torch._C._push_on_torch_dispatch_stack", "torch._C._set_conj",
    "torch._C._set_multithreading_enabled", "torch._C._set_neg",
    "torch._C._set_throw_on_mutable_data_ptr", "torch._C._storage_Use_Count", "torch._VF",
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", "torch._lazy_clone",
    "torch._ops._len_torch_dispatch_stack_pre_dispatch",
    "torch._subclasses.fake_tensor.FakeTensor", "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException",
    "torch._subclasses.functional_tensor.FunctionalTensorMode",
    "torch._tensor_str.PRINT_OPTS.linewidth", "torch.autograd.forward_ad._current_level",
    "torch.fx.experimental.proxy_tensor._MakefxTracer", "torch.jit._builtins._find_builtin",
    "torch.autograd.grad_mode._force_original_view_tracking",
    "torch.jit._builtins._register_builtin", "torch.jit._script.RecursiveScriptModule",
    "torch.nn.Module._replicate_for_data_parallel", "torch.nn.utils.parametrize._cache_enabled",
    "torch.ops.profiler._record_function_enter_new.default",
    "torch.ops.profiler._record_function_exit._RecordFunction",
    "torch.optim.optimizer._foreach_supported_types",
    "torch.utils._foreach_utils._foreach_supported_types",
    "torch.utils._pytree.tree_structure", "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._disable_current_modes",
)  # fmt: skip
"""Names that can be imported."""
OF_OBJECTS = (
    "torch.Generator._cdata", "torch.Tensor._version",
    "torch.UntypedStorage._cdata", "torch.ops.aten.add.Tensor._op_dk",
    "torch.library.Library._destroy", "torch.nn.RNNBase._init_flat_weights",
)  # fmt: skip
"""Attributes of objects: the modules use them on an object, so no import would show that one is
missing."""


def missing(names: tuple[str, ...]) -> list[str]:
    """The names that the installed torch lacks."""
    return [name for name in names if not _exists(name)]


def _exists(name: str) -> bool:
    """Whether `from owner import name` finds it, as an attribute or as a module."""
    found: Any = torch
    parts = name.split(".")
    for i, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(parts[:i]))
            except ImportError:
                return False
    return True
