"""The functions of torch, private ones among them, that reach a tensor's memory, class or dispatch
without a recorded op.

Tested on torch 2.13; names that another torch lacks are left out of the lists. In: nothing. Out:
lists of attributes, named for what their functions do. `patch_table` says how each list is treated.
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
"""An attribute: its owner, which is a module or a class, and its name."""


def of(owner: Any, *names: str) -> tuple[Place, ...]:
    """Attributes of one owner, whether it has them or not; see `_existing`."""
    return tuple((owner, name) for name in names)


def _existing(*places: Place) -> tuple[Place, ...]:
    return tuple((owner, name) for owner, name in places if hasattr(owner, name))


# methods of plain tensors; `LazyTensor` overrides those that need it
READS_MEMORY = _existing(*of(
    torch.Tensor, "numpy", "tolist", "data_ptr", "__array__", "untyped_storage", "_typed_storage",
    "storage", "share_memory_", "__repr__", "__deepcopy__", "__reduce_ex__", "apply_", "new",
    "const_data_ptr",
))  # fmt: skip
# what reads, writes or copies a storage's memory
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
"""Composite ops whose C++ reads the integers in the second place (the sizes of a packed sequence's
batches) before any mode is asked."""
PAD_PACKED = _existing(*of(_VF, "_pad_packed_sequence"))
"""The same; its C++ also writes the memory of its result, which a lazy tensor doesn't have."""
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
"""Functions whose C++ reads tensors from files or other ranks, or writes them there."""
COMMUNICATES: tuple[Place, ...] = ()
"""Methods that begin a collective, or a message to another rank. They return a `Work`, and C++ uses
the tensors' memory until that has ended."""
MESSAGES = frozenset({"send", "recv", "recv_anysource"})
"""Those of them that end when the program drops their `Work`."""
WAITS: tuple[Place, ...] = ()
"""The method that waits for the end of a collective."""
if torch.distributed.is_available():
    COMMUNICATES = _existing(*of(
        torch.distributed.ProcessGroup, "_allgather_base", "_reduce_scatter_base",
        "all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "allgather",
        "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
        "allreduce_coalesced", "alltoall", "alltoall_base", "broadcast", "gather", "reduce",
        "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced", "scatter", *MESSAGES,
    ))  # fmt: skip
    WAITS = of(torch.distributed.Work, "wait")
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
"""Functions that run a program through one of torch's tracers, or run what a tracer has made."""
COMPILER = "torch._dynamo.eval_frame"
"""The module behind `torch.compile`. torch imports it with the first function to compile or the
first optimizer, which takes a second."""


def compiled_modules(compiler: Any) -> tuple[Place, ...]:
    """The call of a compiled module. `compiler` is the module `COMPILER`."""
    return of(compiler.OptimizedModule, "__call__")


def compiles(compiler: Any) -> tuple[Place, ...]:
    """The call that makes a compiled function, which is traced when it is called first."""
    return of(compiler._TorchDynamoContext, "__call__")


STAGER = "torch.distributed.checkpoint._state_dict_stager"
"""The module that copies what `async_save` saves in the background."""


def stages(stager: Any) -> tuple[Place, ...]:
    """The method that copies a tensor. `stager` is the module `STAGER`."""
    return _existing((stager.StateDictStager, "_offload_tensor"))


OWN_MODES = tuple(
    place
    for mode in (FakeTensorMode, FunctionalTensorMode, proxy_tensor.ProxyTorchDispatchMode)
    for place in of(mode, "__enter__", "__exit__")
)
"""Begin and end of torch's own modes. Ops below them are on tensors of torch's own."""


def compiled_from(function: Any) -> Any:
    """The user's function of which torch.compile made this one; None for any other function."""
    return getattr(function, "_torchdynamo_orig_callable", None)
