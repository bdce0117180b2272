"""The private torch names that `dispatch` and `lazy_tensor` need, each behind a name of ours.

Tested on torch 2.13; with a torch that lacks one of these, which `torch_checks.names` lists,
nothing is recorded and this isn't imported. Nothing else in these folders touches `torch._C`, or a
name of torch that begins with an underscore (an `OpOverload`'s `_op` and `_schema` excepted), but
`lazy_tensor.interop.torch_ways`, which names what is replaced.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload, _len_torch_dispatch_stack_pre_dispatch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from wrapt import register_post_import_hook

from lazy_tensor.kernels.segment import extent

below_autograd: Callable[[], Any] = torch._C._AutoDispatchBelowADInplaceOrView
"""Context manager: ops go straight to the device's kernels, no graph, no version bump."""

no_dispatch: Callable[[], Any] = torch._C._DisableTorchDispatch
"""Context manager: neither modes nor tensor subclasses see what runs."""


def no_inference() -> AbstractContextManager[Any]:
    """Context manager: new tensors are ordinary ones, even if `torch.inference_mode()` is on."""
    if not torch.is_inference_mode_enabled():
        return _NOTHING
    return torch._C._InferenceMode(False)


def no_modes() -> AbstractContextManager[Any]:
    """Context manager: no dispatch mode sees what runs, tensor subclasses still do."""
    if not is_mode_entered() and not _len_torch_dispatch_stack_pre_dispatch():
        return _NOTHING  # 6 us less
    return _disable_current_modes()


_NOTHING: AbstractContextManager[Any] = nullcontext()

make_wrapper: Callable[..., torch.Tensor] = torch.Tensor._make_wrapper_subclass
"""A tensor without storage: `(cls, size, stride, offset, memory_format, dtype, layout, device)`."""


no_memory: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
"""Have whoever writes, or might write, a wrapper's memory in C++ get an error: there is none."""


def in_backward() -> bool:
    """Whether autograd's engine is at work in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


RANGE_BEGINS = torch.ops.profiler._record_function_enter_new.default
RANGE_OPS = frozenset({RANGE_BEGINS, torch.ops.profiler._record_function_exit._RecordFunction})
"""What `torch.profiler.record_function` calls where it begins and ends."""


def is_profiled() -> bool:
    """Whether torch's profiler records what this thread does."""
    return bool(torch._C._autograd._profiler_enabled())


def is_mode_entered() -> bool:
    """Whether a dispatch mode would see the next op; never our own within its own handler."""
    return bool(torch._C._len_torch_dispatch_stack())


def new_wrapper(
    tensor_class: type[Any], meta: tuple[Any, ...], like: torch.Tensor | None = None
) -> Any:
    """`make_wrapper(tensor_class, *meta)`, a tensor of inference mode if that is on.

    What shares memory with `like` is what that is: autograd refuses another.
    """
    if like is None or like.is_inference() is torch.is_inference_mode_enabled():
        made = make_wrapper(tensor_class, *meta)
    else:
        with torch._C._InferenceMode(like.is_inference()):
            made = make_wrapper(tensor_class, *meta)
    no_memory(made)
    return made


def is_dispatched(tensor: torch.Tensor) -> bool:
    """Whether ops on the tensor come to its class."""
    return bool(torch._C._dispatch_keys(tensor).has(DispatchKey.Python))


def _key_sets() -> tuple[Any, ...]:
    """The dispatch keys included, excluded below autograd and autocast, and below dispatch too.

    Taken from a fresh thread, which nobody has set anything for.
    """
    found: list[Any] = []

    def look() -> None:
        found.append(torch._C._dispatch_tls_local_include_set())
        with torch._C._DisableAutocast(), torch._C._AutoDispatchBelowADInplaceOrView():
            found.append(torch._C._dispatch_tls_local_exclude_set())
            with torch._C._DisableTorchDispatch():
                found.append(torch._C._dispatch_tls_local_exclude_set())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return tuple(found)


_INCLUDED, _BELOW_AUTOGRAD, _KERNELS = _key_sets()
KERNEL_KEYS: tuple[int, int] = (_INCLUDED.raw_repr(), _KERNELS.raw_repr())
"""The keys that `kernels_only()` includes and excludes, as C++ has them."""


def kernels_only(*, dispatches: bool = False) -> AbstractContextManager[Any]:
    """Context manager: ops go straight to kernels, without a graph or autocast; by modes and
    subclasses if `dispatches`, else what is made is ordinary, in inference mode too.

    Kernels may use `conj()` inside, which works by dispatch keys that torch leaves out while a
    tensor subclass or a mode handles an op.
    """
    excluded = _BELOW_AUTOGRAD if dispatches else _KERNELS
    guard: AbstractContextManager[Any] = torch._C._ForceDispatchKeyGuard(_INCLUDED, excluded)
    if dispatches or not torch.is_inference_mode_enabled():
        return guard
    return _ordinary(guard)


@contextmanager
def _ordinary(guard: AbstractContextManager[Any]) -> Iterator[None]:
    with no_inference(), guard:
        yield


def count_writes(tensors: Iterable[torch.Tensor]) -> None:
    """Count a write to each tensor, for autograd's check that nothing saved was written."""
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def versions_kept(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Context manager: what runs counts no writes to these, which were counted when recorded.

    Kernels leave that to autograd, but for the foreach ops in place on CUDA (ForeachUtils.h).
    """
    return _versions_kept(tensors) if tensors else _NOTHING


@contextmanager
def _versions_kept(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    counted = [tensor for tensor in tensors if not tensor.is_inference()]
    versions = [tensor._version for tensor in counted]
    try:
        yield
    finally:
        torch._C._autograd._unsafe_set_version_counter(tuple(counted), tuple(versions))


def mark(tensor: torch.Tensor, is_conj: bool, is_neg: bool) -> torch.Tensor:
    """`tensor` with these conjugate and negative bits, by which C++ resolves it for most ops."""
    if is_conj:
        torch._C._set_conj(tensor, True)
    if is_neg:
        torch._C._set_neg(tensor, True)
    return tensor


lazy_clone: Callable[[torch.Tensor], torch.Tensor] = torch._lazy_clone
"""A copy that shares memory until either side is written (copy-on-write, 0.4 us)."""
CLONES = threading.Lock()
"""Held while memory becomes copy-on-write: two threads that do it to one memory at once get an
error, though both only read it."""

disabled_torch_function = torch._C._disabled_torch_function_impl

# The method itself: `lazy_mode` replaces `Tensor.untyped_storage` by one that flushes.
storage_of: Callable[[torch.Tensor], torch.UntypedStorage] = torch._C.TensorBase.untyped_storage


def storage_id(tensor: torch.Tensor) -> int:
    """A number that two tensors share while they live if they share a storage."""
    number: int = storage_of(tensor)._cdata
    return number


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor stands for zeros and has no memory, as autograd makes for itself."""
    return torch._C.TensorBase._is_zerotensor(tensor)


def n_users(tensor: torch.Tensor) -> int:
    """The tensors that have `tensor`'s storage, itself included."""
    counted: int = torch._C._storage_Use_Count(storage_of(tensor)._cdata)
    return counted - 1  # one is the storage's Python object


def is_storage_held(tensor: torch.Tensor) -> bool:
    """Whether somebody has the Python object of the tensor's storage."""
    return sys.getrefcount(storage_of(tensor)) > _UNHELD


def _references_to_an_unheld_storage() -> int:
    tensor = torch.empty(1)
    return sys.getrefcount(storage_of(tensor))


_UNHELD = _references_to_an_unheld_storage()


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as it is now: copy-on-write, or a copy if an array, a file or another process
    shares its memory, or it is pinned. A copy has no gaps; its strides are zero where the tensor's
    are, and else in the same order, so that ops on it give what they give for the tensor."""
    is_pinned = False
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowADInplaceOrView():
        if is_resizable(tensor) and not is_shared_by_processes(tensor):
            try:
                with CLONES:
                    return lazy_clone(tensor)
            except RuntimeError:  # its allocator's memory can't be copied on write: pinned memory
                is_pinned = tensor.is_pinned()
        size = [
            n if step else min(n, 1) for n, step in zip(tensor.shape, tensor.stride(), strict=True)
        ]
        once = tensor.as_strided(size, tensor.stride(), tensor.storage_offset())
        copy = once.clone()
        return (copy.pin_memory() if is_pinned else copy).expand(tensor.shape)


def fix_memory(tensor: torch.Tensor) -> None:
    """Mark the tensor's memory as one that others have too, as `Tensor.numpy` does for good."""
    if tensor.is_cpu and is_resizable(tensor):
        torch.empty(0, dtype=torch.uint8).set_(storage_of(tensor)).numpy()


def is_shared_by_processes(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is one that other processes may have; torch says so of all CUDA
    memory, which is then opened when it is sent."""
    return tensor.is_cpu and storage_of(tensor).is_shared()


def is_part(tensor: torch.Tensor) -> bool:
    """Whether the 0-dim tensor is an element of a larger one."""
    return storage_of(tensor).nbytes() > tensor.itemsize


def is_resizable(tensor: torch.Tensor) -> bool:
    """Whether torch alone owns the tensor's memory: not an array, a file or another process."""
    return storage_of(tensor).resizable()


def is_in_dispatcher(op: OpOverload) -> bool:
    """Whether C++ knows the op: not those by which Python asks tensors for their metadata."""
    return bool(torch._C._dispatch_has_kernel(op.name()))


def is_composite(op: OpOverload) -> bool:
    """Whether `op` has an implementation in terms of other ops, for devices without their own.

    On those it reaches a dispatch mode only under `torch.inference_mode()`; see
    `autograd_would_have_decomposed` in torch/utils/_python_dispatch.py.
    """
    return op.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


def decompose(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a composite op gives, taken apart as in eager: in C++ where it is written so.

    Its views are marked as views, as they would be above dispatch: `matmul` looks whether one of a
    parameter requires a gradient. A view that is handed back is marked by its caller.
    """
    key = DispatchKey.CompositeImplicitAutograd
    excluded = torch._C._dispatch_tls_local_exclude_set()
    if all(returned.alias_info is None for returned in op._schema.returns):
        excluded = excluded.remove(DispatchKey.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
            return op._op_dk(key, *args, **kwargs)
        return op.decompose(*args, **kwargs)


_ABOVE_AUTOGRAD = DispatchKey.PythonTLSSnapshot
"""A key that modes and tensor subclasses have, and that comes before all that takes ops apart."""


class KernelsAboveAutograd:
    """Kernels under modes and of tensor subclasses, before all that takes aten's ops apart."""

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")

    def put(self, op: OpOverload, takes: Callable[..., bool], kernel: Callable[..., Any]) -> None:
        """Have `kernel` called for `op` where it `takes` the op and the arguments. Calls of plain
        tensors outside modes are as ever."""
        after = torch._C._dispatch_keyset_full_after(_ABOVE_AUTOGRAD)

        def choose(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if takes(op, *args, **kwargs):
                return kernel(*args, **kwargs)
            return op.redispatch(keys & after, *args, **kwargs)

        schema = op._schema
        name = schema.name.removeprefix("aten::") + f".{schema.overload_name}".rstrip(".")
        self._library.impl(name, choose, _ABOVE_AUTOGRAD.name, with_keyset=True)

    def remove(self) -> None:
        """Leave these ops to torch again."""
        self._library._destroy()


def is_seen_by_none_but(own: type[Any]) -> bool:
    """Whether no mode but of class `own` is active, and no transform of ops."""
    n_modes = torch._C._len_torch_dispatch_stack()
    return (
        all(type(torch._C._get_dispatch_stack_at(i)) is own for i in range(n_modes))
        and torch._C._functorch.maybe_current_level() is None
        and forward_ad._current_level < 0
    )


def has_own_kernel(op: OpOverload, device: torch.device) -> bool:
    """Whether `op` has a kernel for the device itself, which autograd then doesn't take apart."""
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


Specs = Sequence[tuple[Any, ...]]
"""`(size, stride, offset, dtype, device)` of each tensor."""

NoMetaFunction = UnsupportedOperatorException
"""What `fake_call` raises for an op without a meta function."""


@functools.cache
def _fake_mode() -> FakeTensorMode:
    with _disable_current_modes():
        mode = FakeTensorMode(allow_fallback_kernels=False)
    mode.cache_enabled = False  # answers are cached by their caller
    return mode


def has_fakes() -> bool:
    """Whether fake tensors can be had at once: for the first, torch imports its compiler and
    sympy (1.2 s)."""
    return "torch._dynamo" in sys.modules


FAKES = threading.RLock()
"""Held while fake tensors are made and asked: they know of one thread only."""
for _lock in CLONES, FAKES:  # a forked child has no other thread that would let go of it
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )
_fake_log = logging.getLogger("torch._subclasses.fake_tensor")


def fake_call(specs: Specs, call: Callable[[list[torch.Tensor]], Any]) -> Any:
    """What `call` gives for fake tensors of these specs.

    Raises whatever the op's meta function raises, NotImplementedError where there is none.
    """
    # it logs what it raises, and the caller expects errors: eager words them
    _fake_log.disabled = True
    try:
        return _fake_call(specs, call)
    finally:
        _fake_log.disabled = False


def _fake_call(specs: Specs, call: Callable[[list[torch.Tensor]], Any]) -> Any:
    with FAKES, _disable_current_modes(), torch.no_grad():
        fakes: list[torch.Tensor] = [
            FakeTensor(_fake_mode(), on_meta, spec[4])
            for on_meta, spec in zip(_on_meta(specs), specs, strict=True)
        ]
        with _fake_mode():
            return call(fakes)


def meta_call(specs: Specs, call: Callable[[list[torch.Tensor]], Any]) -> Any:
    """What `call` gives for tensors on the device "meta"."""
    with _disable_current_modes(), torch._C._AutoDispatchBelowADInplaceOrView():
        return call(_on_meta(specs))


def _on_meta(specs: Specs) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for size, stride, offset, dtype, _ in specs:
        if offset:
            whole = torch.empty(extent(size, stride) + offset, dtype=dtype, device="meta")
            tensors.append(whole.as_strided(size, stride, offset))
        else:
            tensors.append(torch.empty_strided(size, stride, dtype=dtype, device="meta"))
    return tensors


def _compiled_meta_kernels(op: OpOverload) -> list[str]:
    """What the dispatcher says of the op's kernels for "meta" that are compiled with torch."""
    registered = torch._C._dispatch_dump(op.name()).splitlines()
    return [line for line in registered if line.startswith("Meta") and "RegisterMeta" in line]


def has_cpp_meta_kernel(op: OpOverload) -> bool:
    """Whether the op's kernel for "meta" is compiled with torch, and not replaced in Python."""
    return any(line.startswith("Meta:") for line in _compiled_meta_kernels(op))


@functools.cache
def import_for_subclasses() -> None:
    """Import now what torch imports with the first op on a tensor subclass (0.4 s)."""
    if torch.distributed.is_available():
        importlib.import_module("torch.distributed.tensor")


def has_meta_kernel(op: OpOverload) -> bool:
    """Whether the op can run on "meta": so what it gives depends on no values."""
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "Meta")


def is_structured(op: OpOverload) -> bool:
    """Whether torch has a compiled shape function for the op, replaced in Python or not."""
    return bool(_compiled_meta_kernels(op))


def keeps_tensors(node: Any) -> bool | None:
    """Whether a node of autograd's graph holds saved tensors; None if it never saves any."""
    names = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
    found = None
    for name in names:
        try:
            saved = getattr(node, name)
        except RuntimeError:
            found = False  # freed by a backward pass
            continue
        if isinstance(saved, torch.Tensor) or (isinstance(saved, tuple) and any(
            isinstance(item, torch.Tensor) for item in saved
        )):  # fmt: skip
            return True
    return found


def differentiated(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a replayed call returns it where eager's graph is freed: backward() raises."""
    message = (
        "Trying to backward through the graph a second time: this tensor comes from a call that "
        "lazy_tensor.replay repeated, which ran backward() inside"
    )
    result: torch.Tensor = torch._C._functions.DelayedError(message, 1)(tensor.requires_grad_())
    return result


def next_sequence_number() -> int:
    """The number of the next node of an autograd graph: nodes that were made before have less."""
    return torch._C._autograd._get_sequence_nr()


def generator_states() -> tuple[tuple[torch.Generator, torch.Tensor], ...]:
    """torch's own random generators, of the CPU and the current GPU, with their states."""
    known = [torch.default_generator]
    if torch.cuda.is_initialized():
        known.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return tuple([(generator, generator.get_state()) for generator in known])


@contextmanager
def generators_at(states: Iterable[tuple[torch.Generator, torch.Tensor]]) -> Iterator[None]:
    """Generators draw from these states meanwhile, and are as they were afterwards."""
    before = [(generator, generator.get_state()) for generator, _ in states]
    try:
        for generator, state in states:
            generator.set_state(state)
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


@contextmanager
def attributes_kept(module: torch.nn.Module) -> Iterator[None]:
    """The attributes of the module's parts, and what tensors and generators among them hold, are as
    they were afterwards; not so parameters."""
    held: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for part in module.modules():
        held += [(one, dict(one)) for one in (vars(part), part._buffers)]
    values = {id(one): one for _, kept in held for one in kept.values()}.values()
    tensors = [one for one in values if isinstance(one, torch.Tensor) and not one.is_inference()]
    copies = [one.detach().clone() for one in tensors]
    drawn = [(one, one.get_state()) for one in values if isinstance(one, torch.Generator)]
    with versions_kept(tensors):
        try:
            yield
        finally:
            for one, kept in held:
                one.clear()
                one.update(kept)
            with torch.no_grad():
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor.copy_(copy)
            for generator, state in drawn:
                generator.set_state(state)


def is_flat_list(structure: Any) -> bool:
    """Whether a structure of pytree's is a list of leaves."""
    return structure.type is list and structure.num_leaves == structure.num_children


def views_by_their_ops() -> Any:
    """A context in which autograd keeps, for each view, the op that made it.

    It does so for `LazyTensor`s anyway. Of plain tensors it keeps sizes and strides, and after a
    write to such a view runs `as_strided` in backward where the other graph has `select`.
    """
    return torch.autograd.grad_mode._force_original_view_tracking(True)


def call_module(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What calling the module gives, its hooks included, whatever `call_by` put in its place."""
    return module._call_impl(*args, **kwargs)


def call_by(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Have `call` run in place of the module when that is called; None for the module itself.

    It is no part of the module's state, nor of its copies: as `Module.compile` keeps what it made.
    """
    _leave_replicas_alone()
    module._compiled_call_impl = call


@functools.cache
def _leave_replicas_alone() -> None:
    """Have replicas, by which `DataParallel` computes with other parameters, call themselves."""
    own: Any = torch.nn.Module._replicate_for_data_parallel

    def replicate(self: torch.nn.Module) -> Any:
        replica: Any = own(self)
        if getattr(called_by(replica), "is_replay", False):
            replica._compiled_call_impl = None
        return replica

    torch.nn.Module._replicate_for_data_parallel = replicate  # type: ignore[method-assign]


def called_by(module: torch.nn.Module) -> Any:
    """What `call_by`, or `Module.compile`, has put in the module's place."""
    return module._compiled_call_impl


def hooks_of_all_modules() -> list[tuple[str, Any]]:
    """The dicts of hooks that every module, or optimizer, runs."""
    found: list[tuple[str, Any]] = []
    for owner in (torch.nn.modules.module, optimizer):
        for name, value in vars(owner).items():
            if name.startswith("_global_") and isinstance(value, dict):
                found.append((f"{owner.__name__}.{name}", value))
    return found


class _Reading(threading.local):
    read: Callable[[torch.Tensor], Any] | None = None


_reading = _Reading()
_reading_lock = threading.Lock()
_n_reading = 0
_value_for_optimizer: Any = getattr(optimizer, "_get_value", None)


def _value_or_reading(tensor: Any) -> Any:
    read = _reading.read
    found = read(tensor) if read is not None and isinstance(tensor, torch.Tensor) else None
    return _value_for_optimizer(tensor) if found is None else found


@contextmanager
def step_counts_read_by(read: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """torch's optimizers, in this thread, ask `read` for the values of step counts and the like;
    where it gives None they read as ever."""
    before, _reading.read = _reading.read, read
    _count_reading(1)
    try:
        yield
    finally:
        _count_reading(-1)
        _reading.read = before


def is_own_optimizer(value: Any) -> bool:
    """Whether `value` is an optimizer of a class of torch's own."""
    return isinstance(value, torch.optim.Optimizer) and _is_of_optim(type(value).__module__)


def _is_of_optim(module: str) -> bool:
    return module.startswith("torch.optim.")


def _count_reading(change: int) -> None:
    """Put the function in place that asks, as long as a thread wants it."""
    global _n_reading
    with _reading_lock:
        was_wanted, _n_reading = _n_reading > 0, _n_reading + change
        if was_wanted is (_n_reading > 0) or _value_for_optimizer is None:
            return
        old, new = _value_for_optimizer, _value_or_reading
        if was_wanted:
            old, new = new, old
        for name, module in list(sys.modules.items()):
            if _is_of_optim(name) and vars(module).get("_get_value") is old:
                module._get_value = new  # type: ignore[attr-defined]


def saves_by_hooks() -> bool:
    """Whether hooks see what autograd saves, as those of checkpointing do."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_traced() -> bool:
    """Whether `torch.jit.trace` takes a program apart."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


def is_forward_differentiated() -> bool:
    """Whether forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


def is_watched(own: type[Any], *, saves: bool = True) -> str | None:
    """What besides a mode of class `own` sees ops, or functions, as they are called; or None. With
    `saves` what sees the tensors that autograd saves counts too."""
    n_modes = torch._C._len_torch_dispatch_stack()
    modes = [torch._C._get_dispatch_stack_at(i) for i in range(n_modes)]
    if not all(type(mode) is own for mode in modes):
        return "another dispatch mode is active"
    if torch._C._len_torch_function_stack():
        return "a TorchFunctionMode is active (torch.set_default_device is one)"
    if torch._C._functorch.maybe_current_level() is not None:
        return "a transform of torch.func is active"
    if saves and saves_by_hooks():
        return "hooks for saved tensors are active"
    if is_forward_differentiated():
        return "forward-mode differentiation is active"
    return None


def values_of(tensor: torch.Tensor) -> Any:
    """A computed tensor's values as Python numbers, whatever mode is active."""
    with kernels_only():
        return torch._C.TensorBase.tolist(tensor)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own, whatever mode is active."""
    with kernels_only():
        return tensor.clone(memory_format=torch.preserve_format)


def generator_id(generator: torch.Generator) -> int:
    """What two Python objects for the same random generator share."""
    number: int = generator._cdata  # type: ignore[attr-defined]
    return number


TensorBase: Any = torch._C.TensorBase
"""The class that has the methods of `Tensor` as they are, whoever replaces those."""

tensor_data: Any = torch._C.TensorBase.data
"""The descriptor behind `Tensor.data`."""


_scripted: list[Any] = []


def script_as(made: Any, own: Any) -> None:
    """Let TorchScript take `made` for `own`, if that is one of the builtins, which it knows by
    their ids and can't read otherwise."""
    name = torch.jit._builtins._find_builtin(own)
    if name is not None:
        torch.jit._builtins._register_builtin(made, name)
        _scripted.append(made)  # another object would get its id


def are_modes_put_aside() -> bool:
    """Whether no mode would see the next op of this thread, ours included."""
    return not is_mode_entered() or bool(
        torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.Python)
    )


push_mode: Callable[[TorchDispatchMode], None] = torch._C._push_on_torch_dispatch_stack
"""Have this dispatch mode see all ops of this thread."""
pop_mode: Callable[[None], TorchDispatchMode] = torch._C._pop_torch_dispatch_stack
"""Take back the mode that was pushed last."""


def is_innermost_mode(mode: TorchDispatchMode) -> bool:
    """Whether `mode` sees the ops of this thread first."""
    n_modes = torch._C._len_torch_dispatch_stack()
    return n_modes > 0 and torch._C._get_dispatch_stack_at(n_modes - 1) is mode


def let_engine_have_threads(allowed: bool) -> bool:
    """Whether backward may run on threads of autograd's from now on; returns whether it might."""
    before: bool = torch._C._is_multithreading_enabled()
    torch._C._set_multithreading_enabled(allowed)
    return before


def is_own_mode_entered() -> bool:
    """Whether one of torch's own modes is active in this thread: fake tensors, functionalization,
    proxies."""
    mode = torch._C._get_dispatch_mode
    return not (mode(_FAKE) is None and mode(_FUNCTIONAL) is None and mode(_PROXY) is None)


_KEYS = torch._C._TorchDispatchModeKey
_FAKE, _FUNCTIONAL, _PROXY = _KEYS.FAKE, _KEYS.FUNCTIONAL, _KEYS.PROXY


def print_width() -> int:
    """Characters a line of a tensor's text may have (`torch.set_printoptions`)."""
    return int(torch._tensor_str.PRINT_OPTS.linewidth)


def become(tensor: torch.Tensor, twin: torch.Tensor) -> None:
    """Give a wrapper another wrapper's size, strides and dtype; it stays the same object."""
    tensor_data.__set__(tensor, twin)


def hide_from_dynamo(packages: Sequence[str]) -> None:
    """Keep `torch.compile` from tracing these packages' frames when it runs inside the mode."""

    def hide(trace_rules: Any) -> None:
        for package in packages:
            trace_rules.add(package)

    register_post_import_hook(hide, "torch._dynamo.trace_rules")


def allow_foreach(tensor_class: type[torch.Tensor]) -> None:
    """Let `torch.optim` and gradient clipping give such tensors to foreach ops, as plain ones."""
    lists: tuple[list[Any], ...] = (
        optimizer._foreach_supported_types,
        _foreach_utils._foreach_supported_types,
    )
    for types in lists:
        types.append(tensor_class)


@contextmanager
def without_weak_references(module: torch.nn.Module) -> Iterator[None]:
    """Let RNNs drop the weak references they hold to their weights, and take them anew after."""
    rnns: list[Any] = [m for m in module.modules() if isinstance(m, torch.nn.RNNBase)]
    for rnn in rnns:
        rnn._flat_weight_refs = []
    try:
        yield
    finally:
        for rnn in rnns:
            rnn._init_flat_weights()


def is_held_by_python_alone(tensor: torch.Tensor) -> bool:
    """Whether `torch.utils.swap_tensors` takes it: not in an autograd graph, or in C++."""
    return tensor._use_count() == 1 and not weakref.getweakrefs(tensor)  # type: ignore[attr-defined]


ENVIRONMENT_SETTERS = tuple(
    name
    for name in (
        "_set_default_dtype",
        "_set_default_tensor_type",
        "_set_deterministic_algorithms",
        "_set_deterministic_fill_uninitialized_memory",
        "_set_float32_matmul_precision",
        "_set_fp32_precision_setter",
        "_set_blas_preferred_backend",
        "_set_linalg_preferred_backend",
        "_set_cublas_allow_tf32",
        "_set_cublas_allow_fp16_reduced_precision_reduction",
        "_set_cublas_allow_bf16_reduced_precision_reduction",
        "_set_cublas_allow_fp16_accumulation",
        "_set_cpu_allow_fp16_reduced_precision_reduction",
        "_set_cudnn_allow_tf32",
        "_set_cudnn_benchmark",
        "_set_cudnn_deterministic",
        "_set_cudnn_enabled",
        "_set_mkldnn_enabled",
        "_set_mkldnn_deterministic",
        "_set_onednn_allow_tf32",
        "_set_nnpack_enabled",
        "set_flush_denormal",
        "set_num_threads",
        # until a GPU has shown that more is safe: what was recorded under a stream runs under it
        "_cuda_setStream",
        "_accelerator_setStream",
    )
    if hasattr(torch._C, name)
)
"""The functions of `torch._C` that change what later ops compute without being ops."""


def around_environment_changes(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Have these called before and after each later change of what `environment()` tells.

    The setters are replaced in `torch._C`, where torch's own Python looks them up at each call, and
    in `torch`, which has some of them too.
    """
    for name in ENVIRONMENT_SETTERS:
        own = getattr(torch._C, name)
        made = _surrounded(own, before, after)
        for module in (torch._C, torch):
            if getattr(module, name, None) is own:
                setattr(module, name, made)
    blocks: list[Any] = [torch.inference_mode]
    if hasattr(torch.cuda.Stream, "__enter__"):  # `with stream:`, which C++ enters
        blocks.append(torch.cuda.Stream)
    for block in blocks:
        block.__enter__ = _surrounded(block.__enter__, before, after)
        block.__exit__ = _surrounded(block.__exit__, before, after, always=True)


def _surrounded(
    setter: Callable[..., Any],
    before: Callable[[], None],
    after: Callable[[], None],
    *,
    always: bool = False,
) -> Callable[..., Any]:
    """`setter` with these calls around it; made `always`, or only if `before` doesn't raise."""

    @functools.wraps(setter)
    def surrounded(*args: Any, **kwargs: Any) -> Any:
        try:
            before()
        except BaseException:
            if always:
                setter(*args, **kwargs)
                after()
            raise
        try:
            return setter(*args, **kwargs)
        finally:
            after()

    return surrounded


_AUTOCAST_DEVICES = ("cpu", "cuda")
Autocast = tuple[tuple[bool, torch.dtype], ...]


def autocast_state() -> Autocast:
    """Whether autocast is on, and its dtype, for the CPU and for CUDA."""
    return tuple([
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in _AUTOCAST_DEVICES
    ])  # fmt: skip


@contextmanager
def autocast_as(state: Autocast) -> Iterator[None]:
    """Autocast as `autocast_state()` told."""
    with ExitStack() as stack:
        for device, (enabled, dtype) in zip(_AUTOCAST_DEVICES, state, strict=True):
            if enabled or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, dtype, enabled))
        yield


def is_parametrization_cached() -> int:
    """How many `torch.nn.utils.parametrize.cached()` are active."""
    return parametrize._cache_enabled


def environment() -> tuple[object, ...]:
    """What an op's result depends on besides its arguments, below autograd and autocast."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch._C._get_cublas_allow_tf32(),
        torch._C._get_cudnn_allow_tf32(),
        torch._C._get_mkldnn_enabled(),
        torch.is_inference_mode_enabled(),
    )
