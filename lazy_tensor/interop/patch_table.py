"""Every way to a tensor's memory, class or dispatch that is no recorded op, and its treatment.

Pending writes are not in memory yet, and lazy tensors have none. A function that reads memory in
C++, or hands it out, would see old values or nothing. So each is replaced by a wrapper of
`interop.wrappers` or `interop.communication`. Out: `TABLE`, with the reason for each way, and
`PATCHES`. They are put in place by the first block or `wrap`, or by the import of
`lazy_tensor.sharding`, and stay: tensors of a block need them after its end. The methods that
`LazyTensor` overrides itself are in `lazy_tensor.tensor`. `tests/sweep` looks for ways that are
missing here.
"""

from __future__ import annotations

import multiprocessing.pool
import multiprocessing.process
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.utils.dlpack
from wrapt import register_post_import_hook

from lazy_tensor import convert
from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.patches import Patch, Patches
from lazy_tensor.interop import communication, torch_ways, wrappers
from lazy_tensor.interop.torch_ways import Place, of


class Way(NamedTuple):
    """Functions and methods with the same treatment.

    `reason` says what would go wrong without it. `treatment(name, own)` returns what replaces the
    attribute `name`, whose value is `own`.
    """

    places: tuple[Place, ...]
    reason: str
    treatment: Any


TAKES_APART = "takes a program apart by means of its own: tensors, modes, proxies"
"""The reason of torch's compilers and tracers, which expect plain tensors."""

TABLE: tuple[Way, ...] = (
    Way(torch_ways.READS_MEMORY, "reads, or hands out, memory that a pending op writes",
        wrappers.flushing),
    Way(
        of(torch.Tensor, "__dlpack__"), "hands out memory that a pending op writes, for good",
        partial(wrappers.flushing, before=torch_private.fix_memory),
    ),
    Way(((torch, "to_dlpack"), (torch.utils.dlpack, "to_dlpack")),
        "C++ reads memory, and hands it out", wrappers.to_dlpack),
    Way(
        of(torch.Tensor, "__float__", "__int__", "__index__", "__bool__", "__complex__"),
        "C++ reads tensors in a list by them (`torch.tensor`), with modes put aside",
        wrappers.converting,
    ),
    Way(of(torch.Tensor, "item"), "reads a value of a program that isn't listened to",
        wrappers.converting),
    Way(of(torch.utils, "swap_tensors"), "pending ops know tensors by their objects",
        wrappers.swapping),
    Way(of(torch.Tensor, "data"), "torch takes a tensor of another class for one with memory",
        wrappers.setting_data),
    Way(of(torch.Tensor, "map_", "map2_"), "goes through the memory of all that it is given",
        wrappers.on_computed),
    Way(
        torch_ways.STORAGE,
        "reads memory that a pending op writes; what it copies the mode would record",
        wrappers.flushing_storage,
    ),
    Way(torch_ways.TYPED_STORAGE, "makes tensors that the mode would record",
        wrappers.flushing_storage),
    Way(torch_ways.MAKES_MEMORY, "writes memory that it makes, or reads files into it",
        wrappers.on_plain_tensors),
    Way(torch_ways.READS_ARGUMENTS,
        "C++ reads the values of what it is given before any mode is asked",
        wrappers.on_computed),
    Way(torch_ways.READS_INTEGERS,
        "C++ reads the sizes of batches before any mode is asked",
        wrappers.with_plain_integers),
    Way(of(torch.autograd.graph, "disable_saved_tensors_hooks"), "fails where `replay` has hooks",
        wrappers.disabling_hooks),
    Way(torch_ways.PAD_PACKED, "the same, and it writes the memory of what it makes",
        wrappers.with_plain_memory),
    Way(torch_ways.TAKES_PROGRAMS, TAKES_APART, wrappers.on_plain_program),
    Way(of(torch.jit, "script"), TAKES_APART, wrappers.on_plain_script),
    Way(torch_ways.OWN_MODES,
        "a mode of torch's own: what runs below it is none of the program's",
        wrappers.around_own_mode),
    Way(of(torch.nn.parallel.DistributedDataParallel, "__init__"),
        "its reducer is C++ that reads parameters' memory",
        wrappers.on_plain_module),
    Way(torch_ways.COMMUNICATES,
        "C++ uses memory until the end, and the dispatcher doesn't look into lists of lists",
        communication.communicating),
    Way(torch_ways.WAITS, "the end of a collective", communication.waiting),
    Way(of(torch.Tensor, "_make_subclass"), "one object can't have two classes",
        wrappers.making_subclass),
    Way(of(torch.Tensor, "__new__"),
        "its result is recorded, and one object can't have two classes",
        wrappers.making_tensor),
    Way(of(torch.nn.Parameter, "__new__"), "a derived class would be lost",
        wrappers.making_parameter),
    Way(of(multiprocessing.process.BaseProcess, "_bootstrap"),
        "a forked process ends without leaving the blocks that it was forked in",
        wrappers.in_new_process),
    Way(
        (
            (threading.Thread, "start"),
            (threading.Condition, "notify"),
            (ThreadPoolExecutor, "submit"),
            *of(multiprocessing.pool.Pool, "apply_async", "_map_async", "imap", "imap_unordered"),
            (multiprocessing.process.BaseProcess, "start"),
        ),
        "another thread, or process, goes on from here without the mode",
        wrappers.releasing,
    ),
)  # fmt: skip


def _patches(ways: Iterable[Way]) -> list[Patch]:
    return [
        Patch(owner, name, partial(way.treatment, name))
        for way in ways
        for owner, name in way.places
    ]


PATCHES = Patches(_patches(TABLE))


def _with_compiler(compiler: ModuleType) -> None:
    """Add the ways of `torch.compile`, once torch has imported it: to import it here takes a
    second."""
    runs = Way(torch_ways.compiled_modules(compiler), TAKES_APART, wrappers.on_plain_program)
    makes = Way(
        torch_ways.compiles(compiler),
        "compiled functions are made before a mode is entered, and read memory in it",
        wrappers.compiling,
    )
    PATCHES.add(_patches([runs]))
    # The function that `torch.compile` makes must be wrapped when it is made, which may be long
    # before the first block.
    Patches(_patches([makes])).put()


def _with_stager(stager: ModuleType) -> None:
    """Add the way of `async_save`, once the program has imported its module."""
    copies = Way(torch_ways.stages(stager), "makes tensors of a class without memory of their own",
                 wrappers.staging)  # fmt: skip
    PATCHES.add(_patches([copies]))


register_post_import_hook(_with_compiler, torch_ways.COMPILER)
register_post_import_hook(_with_stager, torch_ways.STAGER)
convert.before_wrapping.append(PATCHES.put)
