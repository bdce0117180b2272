"""Names of torch's, private ones among them, by which memory, class or dispatch of tensors is
reached without a recorded op.

Tested on torch 2.13; of the lists, what another torch lacks is left out. `patch_table` says what is
done at each.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.export
from torch import _VF
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental import proxy_tensor

Place = tuple[Any, str]
"""An attribute: its owner, a module or a class, and its name."""


def of(owner: Any, *names: str) -> tuple[Place, ...]:
    """Attributes of one owner."""
    return tuple((owner, name) for name in names)


def _existing(*places: Place) -> tuple[Place, ...]:
    return tuple((owner, name) for owner, name in places if hasattr(owner, name))


READS_MEMORY = _existing(*of(
    torch.Tensor, "numpy", "tolist", "data_ptr", "__array__", "untyped_storage", "_typed_storage",
    "storage", "share_memory_", "__repr__", "__deepcopy__", "__reduce_ex__", "apply_", "new",
    "const_data_ptr",
))  # fmt: skip
STORAGE = _existing(*of(
    torch.UntypedStorage, "__copy__", "__deepcopy__", "__getitem__", "__iter__", "__reduce__",
    "__setitem__", "_byteswap", "_get_shared_fd", "_resize_with_addr_", "_set_from_file",
    "_share_cuda_", "_share_fd_cpu_", "_share_filename_cpu_", "_swap_data_ptr_", "_to",
    "_write_file", "byteswap", "clone", "copy_", "cpu", "cuda", "data_ptr", "fill_", "pin_memory",
    "resize_", "share_memory_", "to", "tolist", "type",
))  # fmt: skip
TYPED_STORAGE = _existing(*of(
    torch.TypedStorage, "__getitem__", "__setitem__", "_getitem", "_setitem", "copy_", "fill_",
    "tolist",
))  # fmt: skip
READS_INTEGERS = _existing(*of(_VF, "lstm", "gru", "rnn_tanh", "rnn_relu"))
"""Composite ops that read the integers in the second place, in C++, before any mode is asked."""
PAD_PACKED = _existing(*of(_VF, "_pad_packed_sequence"))
"""The same, and it writes the memory of what it makes."""
READS_ARGUMENTS = _existing(
    *of(
        torch, "_sobol_engine_draw", "_sobol_engine_ff_", "_sobol_engine_initialize_state_",
        "_sobol_engine_scramble_", "choose_qparams_optimized", "fbgemm_linear_fp16_weight",
        "fbgemm_linear_fp16_weight_fp32_activation", "fbgemm_linear_int8_weight",
        "fbgemm_linear_int8_weight_fp32_activation", "fbgemm_linear_quantize_weight",
        "fbgemm_pack_gemm_matrix_fp16", "fbgemm_pack_quantized_matrix", "sparse_coo_tensor",
        "sparse_compressed_tensor", "sparse_csr_tensor", "sparse_csc_tensor", "sparse_bsr_tensor",
        "sparse_bsc_tensor",
    ),
    (torch._C, "_cuda_jiterator_compile_and_launch_kernel"),
)  # fmt: skip
"""Composite ops, and kernels of `torch.cuda.jiterator`, whose C++ reads the memory of their
arguments before any mode is asked."""
MAKES_MEMORY = _existing(
    (torch, "load"), (torch.serialization, "load"), (torch.jit, "load"), (torch.jit, "save"),
    (torch.jit._script.RecursiveScriptModule, "save"),
    (torch.jit._script.RecursiveScriptModule, "save_to_buffer"), (torch, "from_file"),
)  # fmt: skip
"""What reads tensors from files, or writes them, or those of other ranks, in C++."""
if torch.distributed.is_available():
    MAKES_MEMORY += _existing(
        (torch.distributed, "_broadcast_coalesced"),
        (torch.distributed, "_verify_params_across_processes"),
        (torch._C._distributed_c10d.Reducer, "_rebuild_buckets"),
    )
TAKES_PROGRAMS = _existing(
    (proxy_tensor._MakefxTracer, "trace"), (torch.jit, "trace"), (torch.jit, "trace_module"),
    (torch.export, "export"), (torch.export, "export_for_training"),
    (torch.export.ExportedProgram, "run_decompositions"), (torch.library, "opcheck"),
    (torch._C.ScriptFunction, "__call__"), (torch._C.ScriptMethod, "__call__"),
)  # fmt: skip
"""What runs a program, and its tensors, through tracers of torch's own."""
COMPILER = "torch._dynamo.eval_frame"
"""The module behind `torch.compile`, which torch imports with the first function to compile, or the
first optimizer: a second."""


def compiled_modules(compiler: Any) -> tuple[Place, ...]:
    """What runs a compiled module, and its tensors."""
    return of(compiler.OptimizedModule, "__call__")


def compiles(compiler: Any) -> tuple[Place, ...]:
    """What makes a function that is traced and compiled when it is called."""
    return of(compiler._TorchDynamoContext, "__call__")


OWN_MODES = tuple(
    place
    for mode in (FakeTensorMode, FunctionalTensorMode, proxy_tensor.ProxyTorchDispatchMode)
    for place in of(mode, "__enter__", "__exit__")
)
"""Where modes of torch's own begin and end."""


def compiled_from(function: Any) -> Any:
    """The user's function that a compiled one is made from; None for any other function."""
    return getattr(function, "_torchdynamo_orig_callable", None)
