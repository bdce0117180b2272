"""Every way to a tensor's memory, class or dispatch that is no recorded op, and what is done there.

In: nothing. Out: `TABLE`, in which each way stands with its reason; `IN_MODE` and `WITH_LAZY`, the
patches that a mode, and the first lazy tensor outside one, put in place. The treatments stand in
`lazy_tensor.treatments`; LazyTensor's own methods in `lazy_tensor.tensor`.
"""

from __future__ import annotations

import multiprocessing.pool
import multiprocessing.process
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.utils.dlpack

from lazy_tensor import convert, treatments
from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.patches import Patch, Patches


class Way(NamedTuple):
    """Attributes of one owner that are treated alike.

    `reason` says what would go wrong; `patch` makes the treatment of each, from its name and what
    stands there. `without_mode`: it is in place as soon as there are lazy tensors outside a mode.
    """

    owner: Any
    names: tuple[str, ...]
    reason: str
    patch: Any
    without_mode: bool = False


READS_MEMORY = (
    "numpy", "tolist", "data_ptr", "__array__", "untyped_storage", "_typed_storage",
    "storage", "share_memory_", "__repr__", "__deepcopy__", "__reduce_ex__", "apply_", "new",
    "const_data_ptr",
)  # fmt: skip
STORAGE = tuple(
    name
    for name in (
        "__copy__", "__deepcopy__", "__getitem__", "__iter__", "__reduce__", "__setitem__",
        "_byteswap", "_get_shared_fd", "_resize_with_addr_", "_set_from_file", "_share_cuda_",
        "_share_fd_cpu_", "_share_filename_cpu_", "_swap_data_ptr_", "_to", "_write_file",
        "byteswap", "clone", "copy_", "cpu", "cuda", "data_ptr", "fill_", "pin_memory", "resize_",
        "share_memory_", "to", "tolist", "type",
    )
    if hasattr(torch.UntypedStorage, name)
)  # fmt: skip
TYPED_STORAGE = ("__getitem__", "__setitem__", "_getitem", "_setitem", "copy_", "fill_", "tolist")

TABLE: tuple[Way, ...] = (
    Way(
        torch.Tensor, tuple(n for n in READS_MEMORY if hasattr(torch.Tensor, n)),
        "reads, or hands out, memory that a pending op writes", treatments.flushing,
    ),
    Way(
        torch.Tensor, ("__dlpack__",), "hands out memory that a pending op writes, for good",
        partial(treatments.flushing, before=torch_private.fix_memory),
    ),
    *(
        Way(owner, ("to_dlpack",), "C++ reads memory, and hands it out", treatments.to_dlpack,
            without_mode=True)
        for owner in (torch, torch.utils.dlpack)
    ),
    Way(
        torch.Tensor, ("__float__", "__int__", "__index__", "__bool__", "__complex__"),
        "C++ reads tensors in a list by them (`torch.tensor`), with modes put aside",
        treatments.converting,
    ),
    Way(torch.utils, ("swap_tensors",), "pending ops know tensors by their objects",
        treatments.releasing),
    Way(torch.Tensor, ("data",), "torch takes a tensor of another class for one with memory",
        lambda name, own: treatments.DATA, without_mode=True),
    Way(torch.Tensor, ("map_", "map2_"), "goes through the memory of all that it is given",
        treatments.on_computed, without_mode=True),
    Way(
        torch.UntypedStorage, STORAGE,
        "reads memory that a pending op writes; what it copies the mode would record",
        treatments.flushing_storage,
    ),
    Way(torch.TypedStorage, TYPED_STORAGE, "makes tensors that the mode would record",
        treatments.flushing_storage),
    *(
        Way(owner, (name,), "writes memory that it makes, or reads files into it",
            treatments.on_plain_tensors)
        for owner, name in torch_private.MAKES_MEMORY
    ),
    *(
        Way(owner, (name,), "C++ reads the values of what it is given before any mode is asked",
            treatments.on_computed, without_mode=True)
        for owner, name in torch_private.READS_ARGUMENTS
    ),
    *(
        Way(owner, (name,), "C++ reads its indices, or sizes of batches, before any mode is asked",
            treatments.with_plain_integers, without_mode=True)
        for owner, name in torch_private.READS_INTEGERS
    ),
    Way(
        torch_private.PAD_PACKED[0], (torch_private.PAD_PACKED[1],),
        "the same, and it writes the memory of what it makes",
        treatments.with_plain_memory, without_mode=True,
    ),
    *(
        Way(owner, (name,), "takes a program apart by means of its own: tensors, modes, proxies",
            treatments.on_plain_program, without_mode=True)
        for owner, name in torch_private.TAKES_PROGRAMS
    ),
    *(
        Way(mode, ("__enter__", "__exit__"),
            "a mode of torch's own: what runs below it is none of the program's",
            treatments.around_own_mode, without_mode=True)
        for mode in torch_private.OWN_MODES
    ),
    Way(
        torch_private.TORCH_DDP, ("__init__",), "its reducer is C++ that reads parameters' memory",
        treatments.on_plain_module, without_mode=True,
    ),
    Way(torch.Tensor, ("_make_subclass",), "one object can't have two classes",
        treatments.making_subclass, without_mode=True),
    Way(torch.Tensor, ("__new__",), "its result is recorded, and one object can't have two classes",
        treatments.making_tensor),
    Way(torch.nn.Parameter, ("__new__",), "a derived class would be lost",
        treatments.making_parameter, without_mode=True),
    Way(multiprocessing.process.BaseProcess, ("_bootstrap",),
        "a forked process ends without leaving the blocks that it was forked in",
        treatments.in_new_process),
    *(
        Way(owner, names, "another thread, or process, goes on from here without the mode",
            treatments.releasing)
        for owner, names in (
            (threading.Thread, ("start",)),
            (threading.Condition, ("notify",)),
            (ThreadPoolExecutor, ("submit",)),
            (multiprocessing.pool.Pool, ("apply_async", "_map_async", "imap", "imap_unordered")),
            (multiprocessing.process.BaseProcess, ("start",)),
        )
    ),
)  # fmt: skip

COMPILED = Way(
    torch_private.COMPILES[0], (torch_private.COMPILES[1],),
    "compiled functions are made before a mode is entered, and read memory in it",
    treatments.compiling,
)  # fmt: skip
"""In place from the import on."""


def _patches(*, without_mode: bool) -> Patches:
    return Patches(
        Patch(way.owner, name, partial(way.patch, name))
        for way in TABLE
        if way.without_mode is without_mode
        for name in way.names
    )


IN_MODE = _patches(without_mode=False)
WITH_LAZY = _patches(without_mode=True)
Patches(
    [Patch(COMPILED.owner, COMPILED.names[0], partial(COMPILED.patch, COMPILED.names[0]))]
).put()
convert.before_wrapping.append(cache(WITH_LAZY.put))
