"""Every public callable of torch that may be given tensors, by name.

In: nothing. Out: `names()`, and `resolve(name)`, which gives a function of the operands. A method
is a function of what it belongs to; a property is one of a single argument, and its setter, whose
name ends in `=`, one of two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from zlib import crc32

import torch
import torch.autograd.functional
import torch.masked
import torch.multiprocessing
import torch.nested
import torch.nn.utils.rnn
import torch.nn.utils.stateless
import torch.sparse
import torch.testing
import torch.utils.checkpoint
import torch.utils.data
import torch.utils.dlpack

from lazy_tensor.interop import patch_table
from tests.sweep.patterns import OF_ONE

CLASSES: dict[str, Any] = {
    "Tensor": torch.Tensor,
    "UntypedStorage": torch.UntypedStorage,
    "TypedStorage": torch.TypedStorage,
}
MODULES: dict[str, ModuleType] = {
    "torch": torch,
    "functional": torch.nn.functional,
    "linalg": torch.linalg,
    "fft": torch.fft,
    "special": torch.special,
    "jit": torch.jit,
    "multiprocessing": torch.multiprocessing,
    "utils": torch.utils,
    "utils.dlpack": torch.utils.dlpack,
    "utils.checkpoint": torch.utils.checkpoint,
    "utils.data": torch.utils.data,
    "nn": torch.nn,
    "nn.init": torch.nn.init,
    "nn.utils": torch.nn.utils,
    "nn.utils.rnn": torch.nn.utils.rnn,
    "nn.utils.stateless": torch.nn.utils.stateless,
    "autograd": torch.autograd,
    "autograd.functional": torch.autograd.functional,
    "func": torch.func,
    "masked": torch.masked,
    "nested": torch.nested,
    "sparse": torch.sparse,
    "testing": torch.testing,
}
SETTERS = ("data", "grad", "real", "imag", "requires_grad", "names")
TENSOR_CLASSES = {
    "torch": {
        "Tensor", "Size", "FloatTensor", "DoubleTensor", "LongTensor", "IntTensor", "BoolTensor",
        "FloatStorage", "LongStorage", "UntypedStorage",
    },
    "utils.data": {
        "TensorDataset", "SubsetRandomSampler", "WeightedRandomSampler", "StackDataset", "Subset",
        "ConcatDataset", "BatchSampler", "RandomSampler", "SequentialSampler", "DataLoader",
    },
    "nn": {"Parameter", "Buffer", "ParameterList"},
    "masked": {"MaskedTensor"},
}  # fmt: skip
"""The classes among a module's names that are made of tensors; no others are swept."""

SKIPPED: dict[str, str] = {
    r"(Tensor|UntypedStorage|TypedStorage)\.(cuda|xpu|ipu|mps|hpu|mtia|is_cuda|is_hpu|pin_memory|"
    r"is_pinned|record_stream|_share_cuda_)": "needs a device",
    r"torch\.(cudnn_|miopen_|cuda|xpu|mps|hpu|mtia|vulkan)\w*": "needs a device",
    r"torch\.(set_|init_num_threads|manual_seed|seed|initial_seed|use_deterministic|"
    r"fill_uninit|autocast_|clear_autocast|merge_type|parse_|import_ir|unify_type|_).*": "sets "
    "what holds for the whole process, or is about the compiler's types",
    r"torch\.(compile|fork|wait|get_file_path|prepare_multi|export|typename|load)": "compiles, or "
    "reads files, or is a part of TorchScript's language",
    r"autograd\.(set_|Function|variable).*": "sets what holds for the whole process",
    r"jit\.(set_|enable_|load|jit_module|fuser|optimized_exec|last_exec|onednn|export_op).*":
    "sets what holds for the whole process, or needs a file",
    r"multiprocessing\.(?!SimpleQueue|Queue|Pipe|Array|Value).*": "starts processes, or sets how",
    r"utils\.(rename|generate|get_cpp|set_module).*": "is about devices and modules",
    r"nn\.(factory_kwargs|parallel|Module).*": "is about modules",
    r"\w+\.(handle_torch_function|has_torch_function\w*)": "is how torch calls itself",
    r"torch\.lobpcg": "takes a minute",
    r"nn\.utils\.rnn\.invert_permutation": "leaves memory unwritten, given no permutation",
    r"\w+\.__delitem__": "crashes eagerly",
    r"(Tensor|UntypedStorage|TypedStorage)\.__(class|del|dict|dir|doc|getattribute|getstate|hash|"
    r"init|init_subclass|module|new|setattr|setstate|sizeof|subclasshook|torch_dispatch|"
    r"torch_function|weakref|slotnames|reduce|orig_bases|parameters|class_getitem|delattr|"
    r"cuda_array_interface|annotations|firstlineno|static_attributes|type_params)__":
    "is Python's own, and none of it reads values",
    r"Tensor\.__(c_dlpack_exchange_api|dlpack_c_exchange_api)__": "is an address",
    r"Tensor\.(module_load)": "is about modules",
}  # fmt: skip
"""Patterns of names that are left out, with the reason."""
_PRIVATE = re.compile(r"_(?!_)")


def names() -> list[str]:
    """The names that are swept, in an order that is fixed."""
    return [
        name for name in all_names() if not any(is_skipped_by(name, pattern) for pattern in SKIPPED)
    ]


def core(every: int = 24) -> list[str]:
    """Those that reach tensors without an op, or that have patterns of their own; and one in so
    many others, alike in every environment, whatever names an import has added there."""
    return [
        name
        for name in names()
        if name in OF_ONE or _is_a_way(name) or crc32(name.encode()) % every == 0
    ]


def _is_a_way(name: str) -> bool:
    owner, attribute = name.rsplit(".", 1)
    of = CLASSES.get(owner) or MODULES[owner]
    return any((of, attribute.removesuffix("=")) in way.places for way in patch_table.TABLE)


def is_skipped_by(name: str, pattern: str) -> bool:
    """Whether a pattern of `SKIPPED` is about a name."""
    return re.fullmatch(pattern, name) is not None


def all_names() -> Iterator[str]:
    """The names, those that are left out too."""
    for owner, cls in CLASSES.items():
        for attribute in dir(cls):
            if not _PRIVATE.match(attribute):
                yield f"{owner}.{attribute}"
    for attribute in SETTERS:
        yield f"Tensor.{attribute}="
    for owner, module in MODULES.items():
        for attribute in dir(module):
            value = getattr(module, attribute)
            if attribute.startswith("_") or not callable(value) or not _is_of_torch(value):
                continue
            if not isinstance(value, type) or attribute in TENSOR_CLASSES.get(owner, ()):
                yield f"{owner}.{attribute}"


def _is_of_torch(value: Any) -> bool:
    module = getattr(value, "__module__", None) or "torch"
    return module.split(".")[0] not in ("typing", "collections", "contextlib", "builtins", "copy")


def resolve(name: str) -> Callable[..., Any]:
    """The function of that name, looked up as a program does when it calls it."""
    owner, attribute = name.rsplit(".", 1)
    if owner in MODULES:
        return lambda *args, **kwargs: getattr(MODULES[owner], attribute)(*args, **kwargs)
    if attribute.endswith("="):
        return lambda self, value: setattr(self, attribute[:-1], value)
    if callable(getattr(CLASSES[owner], attribute, None)):
        return lambda self, *args, **kwargs: getattr(self, attribute)(*args, **kwargs)
    return lambda self: getattr(self, attribute)
