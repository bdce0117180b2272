"""Treatments: wrappers for functions that reach a tensor's memory, class or dispatch without an op.

In: the name of a function and the function, `own`. Out: the wrapper that takes its place. The table
in `interop.patch_table` says which treatment is used where, and why.

From the second block on the patches stay in place (see `dispatch.patches`). So a wrapper may be
called outside of any block, and must ask first whether there is anything to do.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from types import FunctionType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lazy_tensor.convert import unwrap
from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.record import sync_points
from lazy_tensor.dispatch.record.eager_fallback import sees_pending
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.run.debug_view import is_looked_at, peek_memory, shown
from lazy_tensor.dispatch.run.tape import stop_tape
from lazy_tensor.dispatch.torch_private import no_modes
from lazy_tensor.dispatch.trie.trace import Trace, local
from lazy_tensor.dispatch.wording import method_name
from lazy_tensor.interop.held import made_plain, make_attributes_plain
from lazy_tensor.interop.torch_ways import compiled_from
from lazy_tensor.tensor import LazyTensor, computed, flush_here, plain_alias, shared


class _Here(threading.local):
    """What this thread has entered.

    `blocks` are weak references to the entries of its `lazy_mode` blocks that have not ended, in
    the order of their begin, without those that are bypassed. `mode.py` changes them.
    """

    mode: Any = None  # the `RecordingMode` of the outermost block; None outside, and if bypassed
    n_own = 0  # torch's own modes that are entered, one inside the other
    saving: Any = None  # puts aside the hooks by which `replay` sees what a module saves

    def __init__(self) -> None:
        self.blocks: list[weakref.ref[Any]] = []


here = _Here()


def is_active() -> bool:
    """Whether this thread is in a `lazy_mode` block that isn't bypassed."""
    return bool(here.blocks)


def _flush(cause: str, why: str, *, quiet: bool = False) -> None:
    """Run what is pending, for `cause`. A call that `replay` records learns `why` it can't be
    replayed."""
    stop_tape(why)
    flush_here(cause, quiet=quiet)


READS_VALUES = ("numpy", "tolist")
"""Methods that are sync points, though they call no op in eager."""


def flushing(
    name: str, own: Any, *, whose: str = "", before: Callable[[Any], object] | None = None
) -> Any:
    """A method of plain tensors, or of storages, that reads memory: run what is pending first.

    `before` is called with the object in between. `whose` stands before the name in reports.
    """
    cause = f"{whose}{method_name(name)}"
    is_read = name in READS_VALUES and not whose

    @functools.wraps(own)
    def flush_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        # `LazyTensor` overrides these methods itself
        if isinstance(self, LazyTensor):
            return own(self, *args, **kwargs)
        if is_read and sync_points.asleep and get_ident() in sync_points.asleep:
            _pass_read(self)
        if not is_active():
            return own(self, *args, **kwargs)
        # the recorder itself calls it: a flush here would run a half-recorded trace, and the mode
        # would record what the method calls
        if local.trace.busy:
            with no_modes():
                return own(self, *args, **kwargs)
        # a debugger must not flush the program's trace
        if name == "__repr__" and is_looked_at():
            found = peek_memory(local.trace, self)
            return f"<{type(self).__name__}, pending>" if found is None else shown(found)
        if is_read and sync_points.ends_region(self):
            sync_points.at_read(local.trace)
        _flush(cause, f"{cause} reads memory")
        with no_modes():
            if before is not None:
                before(self)
            return own(self, *args, **kwargs)

    return flush_first


flushing_storage = functools.partial(flushing, whose="a storage's ")
"""The same for storages. All that is pending runs: a storage may have been taken before a write to
its memory was recorded."""


def converting(name: str, own: Any) -> Any:
    """A conversion of a plain tensor to a Python number or a list.

    It is a sync point. C++ may have put modes aside, while it reads the items of a list: then what
    is pending has to run before.
    """

    asleep = sync_points.asleep

    @functools.wraps(own)
    def flush_first(self: torch.Tensor) -> Any:
        # Every read of every plain tensor comes here. So no function is called before it is known
        # that the read is ours: it would cost as much as the read.
        if asleep and get_ident() in asleep:
            _pass_read(self)
        elif here.blocks and not isinstance(self, LazyTensor) and not local.trace.busy:
            if torch_private.are_modes_put_aside():
                stop_tape(f"{method_name(name)} reads a tensor's values")
                _flush_if_pending([self], method_name(name))
            elif sync_points.ends_region(self):
                sync_points.at_read(local.trace)
        return own(self)

    return flush_first


def _pass_read(tensor: torch.Tensor) -> None:
    """Count a read by this thread, which is asleep."""
    if not hits.native.pass_read(tensor):
        sync_points.pass_read(local.trace)


def _flush_if_pending(tensors: list[torch.Tensor], cause: str) -> None:
    """Run what is pending if it writes one of these; other reads must not cost a flush."""
    if not local.trace.busy and sees_pending(local.trace, tensors):
        _flush(cause, f"{cause} reads memory")


def on_plain_tensors(name: str, own: Any) -> Any:
    """A function that reads or fills memory in C++: called outside the mode, on plain tensors."""

    def computed_all(arguments: Any) -> Any:
        _flush(name, f"{name}() runs inside", quiet=True)
        return pytree.tree_map_only(LazyTensor, computed, arguments)

    return _outside(own, computed_all)


def _outside(own: Any, prepared: Callable[[Any], Any] | None = None) -> Any:
    """`own`, called outside the mode if this thread is in one. `prepared` changes `(args, kwargs)`
    before."""

    @functools.wraps(own)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if not is_active():
            return own(*args, **kwargs)
        if prepared is not None:
            args, kwargs = prepared((args, kwargs))
        with no_modes():
            return own(*args, **kwargs)

    return outside


def on_computed(name: str, own: Any) -> Any:
    """A function whose C++ reads values of its arguments: called on plain aliases, once they are
    computed. It may return one of its arguments, which is then the lazy tensor again."""

    @functools.wraps(own)
    def on_memory(*args: Any, **kwargs: Any) -> Any:
        lazy = [a for a in _flat(args, kwargs) if isinstance(a, LazyTensor)]
        if not (lazy or is_active()):
            return own(*args, **kwargs)
        _flush(name, f"{name}() reads a tensor's values")
        plain_of = {id(tensor): plain_alias(tensor) for tensor in lazy}
        lazy_of = {id(plain_of[id(tensor)]): tensor for tensor in lazy}
        args, kwargs = pytree.tree_map_only(
            LazyTensor, lambda tensor: plain_of[id(tensor)], (args, kwargs)
        )
        with no_modes():
            result = own(*args, **kwargs)
        return lazy_of.get(id(result), result)

    return on_memory


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments, and the items of those that are lists or tuples."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, (list, tuple)):
            yield from argument
        else:
            yield argument


def to_dlpack(name: str, own: Any) -> Any:
    """`torch.to_dlpack`, which reads memory in C++: the method that does the same is called."""

    @functools.wraps(own)
    def by_method(tensor: torch.Tensor) -> Any:
        return tensor.__dlpack__()

    return by_method


def disabling_hooks(name: str, own: Any) -> Any:
    """`disable_saved_tensors_hooks`, which `torch.func.grad` calls: torch's raises while hooks are
    entered, so those of a `replay` are taken off meanwhile."""

    @contextlib.contextmanager
    def disable(*args: Any, **kwargs: Any) -> Iterator[None]:
        aside = contextlib.nullcontext if here.saving is None else here.saving
        with aside(), own(*args, **kwargs):
            yield

    return disable


def with_plain_integers(name: str, own: Any) -> Any:
    """A function that is recorded, but for an integer tensor in the second place, whose memory C++
    reads before any mode is asked: that one is given as a plain tensor."""

    def plain(argument: Any) -> Any:
        # the second argument of an RNN may also be its initial state, whose gradient must flow
        if not isinstance(argument, torch.Tensor) or argument.is_floating_point():
            return argument
        stop_tape(f"torch.{name} reads a tensor's values")
        return computed(argument) if isinstance(argument, LazyTensor) else argument

    @functools.wraps(own)
    def with_plain(*args: Any, **kwargs: Any) -> Any:
        if "batch_sizes" in kwargs:
            kwargs["batch_sizes"] = plain(kwargs["batch_sizes"])
        if len(args) > 1:
            args = (args[0], plain(args[1]), *args[2:])
        return own(*args, **kwargs)

    return with_plain


def with_plain_memory(name: str, own: Any) -> Any:
    """The same for a function whose C++ also writes its result's memory: called outside the mode,
    which would make a result without memory."""
    return with_plain_integers(name, _outside(own))


def on_plain_program(name: str, own: Any) -> Any:
    """A function that traces, exports or compiles a program: called outside the mode.

    Its arguments, and the tensors that the program holds in closures and attributes, are plain
    aliases meanwhile, through which gradients flow. Modules among the arguments become plain for
    good.
    """

    @functools.wraps(own)
    def without_mode(*args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        for leaf in leaves:
            if isinstance(leaf, torch.nn.Module):
                _make_plain(leaf)
        is_lazy = any(isinstance(leaf, LazyTensor) for leaf in leaves)
        # below one of torch's own modes it is a part of a program that is traced already
        if not (is_active() or is_lazy) or torch_private.is_own_mode_entered():
            return own(*args, **kwargs)
        what = "what torch.compile made" if name == "__call__" else f"{name}()"
        _flush(name, f"{what} runs, which takes its program apart,", quiet=True)
        if is_lazy:
            args, kwargs = pytree.tree_map_only(LazyTensor, plain_alias, (args, kwargs))
        with made_plain((compiled_from(own), *leaves)), no_modes():
            return own(*args, **kwargs)

    return without_mode


def on_plain_script(name: str, own: Any) -> Any:
    """`torch.jit.script`, which looks up the names that a class uses in its caller's frame.

    Two frames of wrappers lie between the caller and the function.
    """
    without_mode = on_plain_program(name, own)

    @functools.wraps(own)
    def script(*args: Any, _frames_up: int = 0, **kwargs: Any) -> Any:
        return without_mode(*args, _frames_up=_frames_up + 2, **kwargs)

    return script


def _make_plain(module: torch.nn.Module) -> None:
    """Make a module's parameters, buffers and attributes plain, for good."""
    if any(isinstance(t, LazyTensor) for t in (*module.parameters(), *module.buffers())):
        unwrap(module)
    make_attributes_plain(module)


def compiling(name: str, own: Any) -> Any:
    """What makes a compiled function: the result is treated as by `on_plain_program`."""

    @functools.wraps(own)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        made = own(*args, **kwargs)
        return on_plain_program(name, made) if isinstance(made, FunctionType) else made

    return compiled


def on_plain_module(name: str, own: Any) -> Any:
    """A constructor whose object reads a module's memory in C++ (DDP): the module becomes plain."""

    @functools.wraps(own)
    def init(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        _make_plain(module)
        flush_here(type(self).__name__, quiet=True)
        with no_modes():
            own(self, module, *args, **kwargs)

    return init


def releasing(name: str, own: Any) -> Any:
    """A function that lets another thread or process go on, which must see all writes so far."""

    @functools.wraps(own)
    def flush_first(*args: Any, **kwargs: Any) -> Any:
        # `is_active()` first: a thread that just begins comes here as well, and has no trace yet,
        # which `local.trace` would make
        if is_active() and _holds_a_whole_call(local.trace):
            _flush(name, f"{name}() lets another thread go on", quiet=True)
        return own(*args, **kwargs)

    return flush_first


def swapping(name: str, own: Any) -> Any:
    """A function that gives two tensors each other's contents. A replay would not do it again."""
    swap_when_flushed = releasing(name, own)

    @functools.wraps(own)
    def swap(*args: Any, **kwargs: Any) -> Any:
        stop_tape(f"{name}() is called")
        return swap_when_flushed(*args, **kwargs)

    return swap


def in_new_process(name: str, own: Any) -> Any:
    """The main function of a new process: outside the mode, as in a process that isn't forked."""

    @functools.wraps(own)
    def run(*args: Any, **kwargs: Any) -> Any:
        # A forked process has its parent's blocks, which it never leaves. Its own writes are run at
        # its end, as nothing else would.
        sync_points.listen(local.trace)
        here.mode = None
        here.blocks.clear()
        with no_modes():
            result = own(*args, **kwargs)
            flush_here("the process ends", quiet=True)
        return result

    return run


def _holds_a_whole_call(trace: Trace) -> bool:
    """Whether something is pending, and no call is half recorded: that can't be flushed."""
    return trace.state is not trace.root and not trace.busy and trace.defers_close is None


def around_own_mode(name: str, own: Any) -> Any:
    """Begin or end of one of torch's own modes, between which nothing is recorded."""
    change = 1 if name == "__enter__" else -1

    @functools.wraps(own)
    def counted(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        # 0 at least: a mode may end here that began before the patches were in place
        here.n_own = max(here.n_own + change, 0)
        local.trace.policy.pause(here.n_own > 0)
        if here.mode is not None:
            here.mode.sleeps(here.n_own > 0)
        return result

    return counted


def making_subclass(name: str, own: Any) -> Any:
    """`Tensor._make_subclass` of a lazy tensor.

    Of class `Tensor` or `Parameter` the result is lazy. Of any other class it is a plain object on
    the lazy tensor's memory: an object can't be of two classes.
    """

    @functools.wraps(own)
    def made(cls: type[Any], data: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(data, LazyTensor):
            return own(cls, data, *args, **kwargs)
        if cls in (torch.Tensor, torch.nn.Parameter):
            requires_grad = args[0] if args else kwargs.get("require_grad", False)
            if cls is torch.nn.Parameter:
                return torch.nn.Parameter(data, requires_grad)
            return data.detach().requires_grad_(requires_grad)
        return own(cls, shared(data), *args, **kwargs)

    return staticmethod(made)


def making_tensor(name: str, own: Any) -> Any:
    """`Tensor.__new__`, which derived classes inherit: called outside the mode, on computed values.

    In the mode its result would be a lazy tensor, and not of the derived class.
    """

    @functools.wraps(own)
    def new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        derives = cls is not torch.Tensor and any(isinstance(a, LazyTensor) for a in args)
        if local.trace.busy or not (derives or is_active()):
            return own(cls, *args, **kwargs)
        # C++ reads tensors among the arguments, such as 0-dim ones among sizes
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        _flush_if_pending(tensors, "torch.Tensor")
        args = tuple(shared(a) if isinstance(a, LazyTensor) else a for a in args)
        with no_modes():
            return own(cls, *args, **kwargs)

    return staticmethod(new)


def making_parameter(name: str, own: Any) -> Any:
    """`nn.Parameter.__new__` of a derived class, on a lazy tensor: a plain object of that class."""

    @functools.wraps(own)
    def new(cls: type[Any], data: Any = None, *args: Any, **kwargs: Any) -> Any:
        if cls is not torch.nn.Parameter and isinstance(data, LazyTensor):
            data = shared(data)
        return own(cls, data, *args, **kwargs)

    return staticmethod(new)


def staging(name: str, own: Any) -> Any:
    """`async_save`'s copy of a tensor: one of a plain tensor, made outside the mode.

    It sets the storage of a new tensor of the same class, which a sharded lazy tensor doesn't have.
    """

    @functools.wraps(own)
    def offload(self: Any, x: torch.Tensor, memo: Any, *args: Any, **kwargs: Any) -> Any:
        is_lazy = isinstance(x, LazyTensor)
        if not (is_lazy or is_active()):
            return own(self, x, memo, *args, **kwargs)
        _flush("async_save", "async_save() copies memory")
        plain = unwrap(x) if is_lazy else x
        self._keep_alive(plain, memo)  # the memo knows it by its id
        with no_modes():
            return own(self, plain, memo, *args, **kwargs)

    return offload


def setting_data(name: str, own: Any) -> Any:
    """`Tensor.data` of a plain tensor that accepts a lazy value, for which torch itself raises."""

    def set_data(self: torch.Tensor, new: torch.Tensor) -> None:
        if not isinstance(self, LazyTensor):
            # pending ops know `self` by its old size
            if is_active():
                _flush("Tensor.data", "Tensor.data is set")
            if isinstance(new, LazyTensor):
                new = shared(new)
        own.__set__(self, new)

    return property(own.__get__, set_data)
