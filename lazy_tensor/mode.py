"""`lazy_mode`: inside it every aten op is recorded, on ordinary tensors too.

In: a `with` block or a decorated function. Out: nothing pending when it is left. Holds what must
change while a mode is active: the plain-tensor methods that hand out memory without an op.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch

from lazy_tensor.dispatch import hits, settings, torch_private
from lazy_tensor.dispatch.flush import close_segment
from lazy_tensor.dispatch.peek import is_looked_at, peek_memory, shown
from lazy_tensor.dispatch.stats import STATS
from lazy_tensor.dispatch.torch_private import TorchDispatchMode, no_modes
from lazy_tensor.dispatch.trace import local, restart_empty_traces
from lazy_tensor.dispatch.where import user_line
from lazy_tensor.tensor import LazyTensor, computed, flush_here, record

P = ParamSpec("P")
R = TypeVar("R")


class RecordingMode(TorchDispatchMode):
    """The dispatch mode: torch calls it for each op, `record` does the work.

    Backward runs in the calling thread, on CUDA too, where autograd's own threads would record in
    traces of their own: a step would be several, and none could be replayed.
    """

    supports_higher_order_operators = True
    __torch_dispatch__ = record

    def __enter__(self) -> RecordingMode:
        self._engine = torch.autograd.set_multithreading_enabled(False)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._engine.__exit__(*exception)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that this avoids costs 0.5 us an op

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


hits.use(LazyTensor, RecordingMode, close_segment)
_active = threading.local()


def _active_here() -> bool:
    return getattr(_active, "depth", 0) > 0


class lazy_mode:
    """Record instead of run: `with lazy_mode():` around any PyTorch program, or `@lazy_mode()`.

    Every aten op inside, autograd's and the optimizer's too, is recorded and gives a `LazyTensor`.
    Leaving the block runs what is pending. Re-entrant. `options` are those of `configure`, for this
    block and thread's flushes alone; TypeError for an unknown one. Where a program never does the
    same again its ops run as in eager, and blocks of them are let alone.

    >>> with lazy_mode():
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    """

    def __init__(self, **options: Any) -> None:
        settings.updated(settings.current(), options, "lazy_mode()")
        self._options = options
        self._entered: list[tuple[RecordingMode | None, int, settings.Settings]] = []
        self._function: Any = None  # the decorated one

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def in_mode(*args: P.args, **kwargs: P.kwargs) -> R:
            mode = lazy_mode(**self._options)
            mode._function = function
            with mode:
                return function(*args, **kwargs)

        return in_mode

    def __enter__(self) -> lazy_mode:
        if self._options:
            flush_here("options changed", quiet=True)
        before = settings.current()
        after = settings.updated(before, self._options, "lazy_mode()")
        mode, depth = None, getattr(_active, "depth", 0)
        if depth == 0:
            flush_here("enter", quiet=True)
            if self._listens(sys._getframe(1), after):
                _leaks.stop()
                mode = RecordingMode()  # type: ignore[no-untyped-call]
                mode.__enter__()
        settings.put(after)
        restart_empty_traces()
        # within a block that is let alone one may record all the same
        _active.depth = depth + (depth > 0 or mode is not None)
        self._entered.append((mode, depth, before))
        return self

    def _listens(self, caller: FrameType, options: settings.Settings) -> bool:
        """Whether ops must come here: not where all of them would be let pass."""
        code = caller.f_code if self._function is None else self._function
        place = (id(code), caller.f_lasti)
        listens = local.trace.budget.begin_block((place, options))
        if not listens:
            STATS.counts["unrecorded_blocks"] += 1
        return listens

    def __exit__(self, *exception: Any) -> None:
        mode, _active.depth, before = self._entered.pop()
        if mode is not None:
            mode.__exit__(*exception)
            _leaks.resume()
        if _active.depth == 0:
            local.trace.budget.end_block()
        try:
            if _active.depth == 0 or self._options:
                flush_here("exit", quiet=True)
        finally:
            if self._options:
                settings.put(before)
                restart_empty_traces()


class listening_mode(lazy_mode):
    """A `lazy_mode` that sees all ops, though the program may not repeat itself."""

    def _listens(self, caller: FrameType, options: settings.Settings) -> bool:
        local.trace.budget.begin_block(None)
        return True


@functools.cache
def _flushing(name: str, method: Any) -> Any:
    @functools.wraps(method)
    def flush_first(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # busy: the call comes from within recording, which reads storages and metadata only
        if not isinstance(self, LazyTensor) and _active_here() and not local.trace.busy:
            if name == "__repr__" and is_looked_at():
                found = peek_memory(local.trace, self)
                return f"<{type(self).__name__}, pending>" if found is None else shown(found)
            if local.trace.tape is not None:
                local.trace.tape.stop(f"Tensor.{name} at {user_line()} reads memory")
            flush_here(f"Tensor.{name}")
            with no_modes():
                return method(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    return flush_first


@functools.cache
def _on_plain_tensors(function: Any) -> Any:
    """`function`, which C++ or files need memory for, outside the mode and on computed values."""

    @functools.wraps(function)
    def without_mode(*args: Any, **kwargs: Any) -> Any:
        if not _active_here():
            return function(*args, **kwargs)
        if local.trace.tape is not None:
            local.trace.tape.stop(f"torch.{function.__name__} runs inside")
        flush_here(f"torch.{function.__name__}", quiet=True)
        plain = [computed(a) if isinstance(a, LazyTensor) else a for a in args]
        with no_modes():
            return function(*plain, **kwargs)

    return without_mode


@functools.cache
def _with_plain_second(function: Any) -> Any:
    """`function`, recorded as ever, but for its second argument, whose memory C++ reads before any
    mode is asked: indices, or the sizes of batches."""

    def plain(argument: Any) -> Any:
        if not isinstance(argument, LazyTensor):
            return argument
        if local.trace.tape is not None:
            local.trace.tape.stop(f"torch.{function.__name__} reads a tensor's values")
        return computed(argument)

    @functools.wraps(function)
    def with_plain_second(*args: Any, **kwargs: Any) -> Any:
        name = "tensor_indices_or_sections"
        if name in kwargs:
            kwargs[name] = plain(kwargs[name])
        elif len(args) > 1:
            args = (args[0], plain(args[1]), *args[2:])
        return function(*args, **kwargs)

    return with_plain_second


@functools.cache
def _with_plain_memory(function: Any) -> Any:
    """The same for one that writes the memory of new tensors, too: those are none of the mode's."""

    @functools.wraps(function)
    def without_mode(*args: Any, **kwargs: Any) -> Any:
        if not _active_here():
            return function(*args, **kwargs)
        with no_modes():
            return function(*args, **kwargs)

    return _with_plain_second(without_mode)


@functools.cache
def _inherited(owner: Any, name: str) -> Any:
    return getattr(owner, name)


def _data_property() -> property:
    """`Tensor.data` that takes a lazy value for a plain tensor, which torch itself refuses."""
    own = torch_private.tensor_data

    def set_data(self: torch.Tensor, new: torch.Tensor) -> None:
        if isinstance(new, LazyTensor) and not isinstance(self, LazyTensor):
            new = computed(new)
        elif not isinstance(self, LazyTensor) and _active_here():
            if local.trace.tape is not None:
                local.trace.tape.stop(f"Tensor.data is set at {user_line()}")
            flush_here("Tensor.data")
        own.__set__(self, new)

    return property(own.__get__, set_data)


_DATA = _data_property()


class _Leaks:
    """What reads memory without an op, made to flush while a mode is active.

    Replaced on `torch.Tensor` itself rather than by a `TorchFunctionMode`, which would add 0.8 us
    to every call of every op.
    """

    METHODS = ("numpy", "tolist", "data_ptr", "__dlpack__", "__array__", "untyped_storage",
               "_typed_storage", "storage", "share_memory_", "__repr__", "__deepcopy__",
               "__reduce_ex__")  # fmt: skip
    FUNCTIONS = (
        (torch, "load", _on_plain_tensors),
        (torch.serialization, "load", _on_plain_tensors),
        (*torch_private.MAKE_FX, _on_plain_tensors),
        *((*function, _with_plain_second) for function in torch_private.SECOND_IS_READ),
        (*torch_private.PAD_PACKED, _with_plain_memory),
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._own: list[tuple[Any, str, Any]] = []

    def stop(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth > 1:
                return
            for name in self.METHODS:
                self._replace(torch.Tensor, name, functools.partial(_flushing, name))
            self._replace(torch.Tensor, "data", lambda own: _DATA)
            for owner, name, replaced in self.FUNCTIONS:
                self._replace(owner, name, replaced)

    def _replace(self, owner: Any, name: str, replaced: Callable[[Any], Any]) -> None:
        own = vars(owner).get(name)
        self._own.append((owner, name, own))
        setattr(owner, name, replaced(_inherited(owner, name) if own is None else own))

    def resume(self) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth:
                return
            while self._own:
                owner, name, own = self._own.pop()
                if own is None:
                    delattr(owner, name)  # it was inherited
                else:
                    setattr(owner, name, own)


_leaks = _Leaks()
