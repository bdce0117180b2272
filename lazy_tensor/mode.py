"""`lazy_mode`: inside such a block every aten op is recorded, on plain tensors too.

In: a `with` block or a decorated function. Out: nothing is pending after the outermost block.

While a block runs, the patches of `lazy_tensor.interop.patch_table` guard the functions that reach
tensors without an op. `dispatch.tiering.policy` decides which blocks are bypassed. `replay` and
`explain` use `listening_mode`, which is never bypassed.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType, MethodType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, cast, overload

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lazy_tensor import convert
from lazy_tensor.dispatch import settings, torch_private
from lazy_tensor.dispatch.ops import composite_overrides
from lazy_tensor.dispatch.options import Options
from lazy_tensor.dispatch.record import eager_fallback, sync_points
from lazy_tensor.dispatch.record.recorder import record
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.run.compile_service import begin_hits
from lazy_tensor.dispatch.stats import STATS
from lazy_tensor.dispatch.tiering.policy import Policy
from lazy_tensor.dispatch.torch_private import TorchDispatchMode, is_mode_entered
from lazy_tensor.dispatch.trie.trace import local, restart_own_trace
from lazy_tensor.interop import patch_table
from lazy_tensor.interop.wrappers import here
from lazy_tensor.tensor import LazyTensor, flush_here

P = ParamSpec("P")
R = TypeVar("R")
DETACH = torch.ops.aten.detach.default


class RecordingMode(TorchDispatchMode):
    """The dispatch mode: torch calls it for each op, and `record` does the work.

    While it is entered, backward runs in the calling thread, on CUDA too. Autograd's own threads
    would record into traces of their own. A training step would then be several traces, and none
    of them could be replayed.
    """

    # without it torch raises an error at a higher-order op such as `torch.cond`
    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Torch hands over each result that autograd saves, past the dispatcher and so past C++.
        if func is DETACH and hits.native is not None:
            detached = hits.native.detached(args[0])
            if detached is not None:
                return detached
        return record(self, func, types, args, kwargs)

    def __init__(self) -> None:
        # For each `__enter__`, whether autograd's engine might use threads before it. `__exit__`
        # puts that back.
        self._had_threads: list[bool] = []

    def __enter__(self) -> RecordingMode:
        # as `TorchDispatchMode.__enter__`, without the flags that it sets for torch.compile
        self._had_threads.append(torch_private.let_engine_have_threads(False))
        torch_private.push_mode(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        # The mode may be off torch's stack: an interrupt may have `_leave` run twice, and a thread
        # that is asleep may not have woken (see `sync_points.listen`).
        if torch_private.is_innermost_mode(self):
            torch_private.pop_mode(None)
        if self._had_threads:
            torch_private.let_engine_have_threads(self._had_threads.pop())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # if True, torch wraps `__torch_dispatch__` to hide it from dynamo, at 0.5 us an op
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # torch.compile compiles as if this mode weren't entered
        return True

    def sleeps(self, asleep: bool) -> None:
        """Record nothing while one of torch's own modes is entered, such as fake tensors.

        The ops below such a mode are torch's, not the program's. The class changes because C++
        takes calls only under a mode of exactly the class `RecordingMode`.
        """
        self.__class__ = _SleepingMode if asleep else RecordingMode


class _SleepingMode(RecordingMode):
    """A recording mode that hands every op on without recording it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def _leave_mode() -> None:
    """Leave the mode that this thread has entered."""
    # Before torch 2.13, torch's stack holds no reference to the mode. So `here` holds one, and may
    # drop it only after the mode is off the stack.
    here.mode.__exit__(None, None, None)
    here.mode = None


def _after_step(*_: Any) -> None:
    """What torch calls after each `Optimizer.step`: a sync point, if this program is recorded."""
    if here.mode is not None or Policy.has_wrapped or sync_points.asleep:
        sync_points.at_step(local.trace)


@functools.cache
def _see_steps() -> None:
    """Make the end of each optimizer's step a sync point, from now on.

    Called by the first block that records and by `wrap`, so that a program that only imports the
    package has no hook.
    """
    register_optimizer_step_post_hook(_after_step)


# `dispatch` may not import this folder, so it is handed the classes and functions that it needs.
hits.use(
    tensor_class=LazyTensor,
    mode_class=RecordingMode,
    close_segment=sync_points.close_segment,
    at_turn=sync_points.at_turn,
    to_read=eager_fallback.to_read,
    share_with_parts=eager_fallback.share_with_parts,
)
convert.before_wrapping += begin_hits, _see_steps
composite_overrides.install(LazyTensor, RecordingMode)


class lazy_mode:
    """Record ops instead of running them: `with lazy_mode():` around any PyTorch program, or
    `@lazy_mode()`, or `@lazy_mode`, on a function.

    Every aten op inside is recorded and gives a `LazyTensor`, those of autograd and of the
    optimizer too. The end of the block runs what is pending. Blocks may be nested. `options` are
    those of `configure`. They hold for this block, in this thread alone; an unknown one raises
    TypeError. Where a program never repeats itself, and while its kernels are built, ops run as in
    eager, and whole blocks are bypassed.

    >>> with lazy_mode():
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    """

    # Three ways to run a block. It *records*: the mode is entered. It is *bypassed*: no mode, but a
    # look at the policy at its begin and end. It *rests*: one of many bypassed blocks in a row at
    # one place, of which only the time is noted, by Python or by C++.

    _listens_always = False
    """Whether the ops must be seen even where they run as in eager: True in `listening_mode`."""

    _options: Options
    _entered: list[Any]
    """What each `__exit__` has to undo, innermost last: an `_Entry`, None for a block that rests,
    `_COUNTED` for one that rests and is counted by C++. A list, because one object may be entered
    again inside itself."""
    _function: Any  # the decorated function, whose identity is the block's place; else None

    if TYPE_CHECKING:

        @overload
        def __new__(  # type: ignore[misc]
            cls, function: Callable[P, R], /, **options: Unpack[Options]
        ) -> Callable[P, R]: ...
        @overload
        def __new__(cls, **options: Unpack[Options]) -> lazy_mode: ...
        def __new__(cls, *args: Any, **options: Any) -> Any: ...

    else:

        def __init__(self, function: Any = None, /, **options: Unpack[Options]) -> None:
            if options:
                settings.updated(settings.current(), options, "lazy_mode()")
            self._options = options
            self._entered = []
            self._function = None
            if function is not None:
                _decorate(self, function)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        options = self._options
        reject_generators(function, "lazy_mode()", "put `with lazy_mode():` into it")

        @functools.wraps(function)
        def in_mode(*args: P.args, **kwargs: P.kwargs) -> R:
            mode = lazy_mode(**options)
            mode._function = function
            with mode:
                return function(*args, **kwargs)

        return in_mode

    def __enter__(self) -> lazy_mode:
        native, has_own_way = hits.native, self._options or self._listens_always
        # First the case that must cost least. C++ knows a block by the frame that enters it, so
        # nothing may stand between that frame and this call.
        if not (native is None or has_own_way) and native.begin_rest(self._function):
            self._entered.append(_COUNTED)
            return self
        # A generator that was dropped inside its block never came to its `__exit__`. Its block
        # must not keep this one from being the outermost.
        if here.blocks:
            _has_ended(None)
        if here.mode is not None and not here.blocks:
            sync_points.listen(local.trace)
            _leave_mode()  # an interrupt in the last block's begin or end has left it entered
        caller = sys._getframe(1)
        if self._rests(caller):
            STATS.counts["unrecorded_blocks"] += 1
            self._entered.append(None)
            return self
        if self._options:
            flush_here("options changed", quiet=True)
        after = settings.updated(settings.current(), self._options, "lazy_mode()")
        is_outermost = not here.blocks
        # the thread may be asleep: a block around a loop that runs as in eager. These see all ops.
        if is_outermost or self._options or self._listens_always:
            sync_points.listen(local.trace)
        if is_outermost:
            # wrapped tensors may have ops pending from before the block
            flush_here("enter", quiet=True)
            # another mode (`FlopCounterMode`, fake tensors) is to see each op as it runs
            if not is_mode_entered() and self._listens(caller, after):
                _see_steps()
                # C++ can take over only while one thread records: torch reads its tables of
                # kernels without a lock. So a new thread tries before its first op.
                if local.thread is not threading.main_thread():
                    begin_hits()
                patch_table.PATCHES.put()
                here.mode = RecordingMode()
                here.mode.__enter__()
                if local.trace.policy.is_bypassed and not self._listens_always:  # its first round
                    sync_points.fall_asleep(local.trace)
        entry = _Entry(bool(self._options))
        try:
            if self._options:
                settings.put_here(after)
                # some options change what is recorded: those have a root of their own in the trie
                while not restart_own_trace():
                    flush_here("options changed", quiet=True)
                # for an outermost block `begin_block` does so
                if not is_outermost and after.record == "always":
                    local.trace.policy.try_again_at_once()
            # A bypassed block isn't in `here.blocks`: a block inside it is an outermost one, and
            # may record. Weak references: a block whose generator is dropped must vanish.
            if here.mode is not None:
                here.blocks.append(weakref.ref(entry))
            # no call of `append`: a signal may raise after a call, and the entry would be lost
            self._entered += [entry]
        # an interrupt: `with` calls no `__exit__` if `__enter__` raises
        except BaseException:
            _has_ended(entry)
            if self._options:
                settings.put_here(entry.before)
            raise
        return self

    def _place(self, caller: FrameType, options: settings.Settings) -> tuple[Any, ...]:
        """Where in the program this block is, and its options: the policy's key for its times.

        C++ compares the first two items with the frame that enters a block (`native/rests.h`).
        """
        code = caller.f_code if self._function is None else self._function
        return (id(code), caller.f_lasti, options)

    def _rests(self, caller: FrameType) -> bool:
        """Whether the block rests: one of many at its place that are bypassed, with nothing to do.

        It doesn't rest if anything is pending, which its begin has to run.
        """
        trace = local.trace
        has_own_way = bool(self._options) or self._listens_always
        if has_own_way or here.blocks or trace.state is not trace.root:
            return False
        return trace.policy.rests(self._place(caller, settings.current()))

    def _listens(self, caller: FrameType, options: settings.Settings) -> bool:
        """Whether the block needs the mode; False if it is bypassed. The end of the region before
        it is accounted for first, so that its time isn't this block's.
        """
        trace = local.trace
        sync_points.at_sync_point(trace)
        place, must_record = self._place(caller, options), options.record == "always"
        may_choose = sync_points.may_choose(trace, options)
        # Only the C++ knows which calls came before. While it is compiled, or if it can't be,
        # nothing is recorded, so the mode would only cost time.
        is_blind = hits.native is None and hits.EXTENSION.is_asked_for
        if (must_record or not is_blind) and trace.policy.begin_block(
            place, may_choose=may_choose, must_record=must_record
        ):
            return True
        STATS.counts["unrecorded_blocks"] += 1
        return False

    def __exit__(self, *exception: Any) -> None:
        # no call of `pop`: a signal may raise after a call, and the entry would be lost
        entered = self._entered[-1]
        del self._entered[-1]
        if entered is _COUNTED:
            # something is pending if `wrap` was called inside
            if not hits.native.end_rest():
                flush_here("exit", quiet=True)
            return
        if entered is None:
            flush_here("exit", quiet=True)
            local.trace.policy.end_rest()
            return
        try:
            self._leave(entered)
        # An interrupt may raise where any function begins. The steps of `_leave` may be repeated,
        # so a second call does what the first one left undone.
        except BaseException:
            self._leave(entered)
            raise

    def _leave(self, entry: _Entry) -> None:
        """Do all that is left to do at the end of the block."""
        try:
            _has_ended(entry)
            if not here.blocks:
                sync_points.listen(local.trace)
                if here.mode is not None:
                    _leave_mode()
                # It may warn that little repeats, and warnings may be errors. So the mode is left
                # before, and the flush stands in a `finally`.
                sync_points.at_sync_point(local.trace)
        finally:
            self._end(entry)

    def _end(self, entry: _Entry) -> None:
        """Run what is pending, then put the options back: the flush still needs them."""
        try:
            if not here.blocks:
                local.trace.policy.end_block()
            if not here.blocks or self._options:
                flush_here("exit", quiet=True)
        finally:
            if self._options:
                _put_back(entry)
                restart_own_trace()


_COUNTED = object()
"""In `lazy_mode._entered`: a block that rests, whose time C++ notes."""
_RUN_LATER = (
    inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
)  # fmt: skip


def reject_generators(function: Any, caller: str, remedy: str) -> None:
    """TypeError for generators and coroutines, whose calls return before their bodies run.

    `caller` and `remedy` are the begin and the end of the message.
    """
    if any(is_kind(inspect.unwrap(function)) for is_kind in _RUN_LATER):
        name = getattr(function, "__qualname__", function)
        raise TypeError(f"{caller}: a call of {name} runs nothing yet; {remedy}")


class _Entry:
    """A block that has begun, and what its `__exit__` has to undo.

    `before` are the options of the block around it, None outside of any. `number` grows with each
    block. `mode` only keeps the mode alive: a forked process drops the reference in `here`, and
    before torch 2.13 torch's stack holds none.
    """

    __slots__ = ("__weakref__", "before", "has_options", "mode", "number")
    _numbers = itertools.count()

    def __init__(self, has_options: bool) -> None:
        self.before, self.mode = settings.of_block(), here.mode
        self.has_options = has_options
        self.number = next(self._numbers)


def _has_ended(entry: _Entry | None) -> None:
    """Drop a block from those that this thread is in, and blocks that died without an `__exit__`.

    Blocks that began later stay: those of asyncio tasks and of generators overlap, and need not end
    in the order in which they began.
    """
    here.blocks = [ref for ref in here.blocks if ref() not in (entry, None)]


def _put_back(entry: _Entry) -> None:
    """Put back the options that were in force before a block.

    A later block with options may still run (blocks of tasks overlap). Its options then stay in
    force, and it is the one that puts these back.
    """
    begun = [one for ref in here.blocks if (one := ref()) is not None and one.has_options]
    later = next((one for one in begun if one.number > entry.number), None)
    if later is None:
        settings.put_here(entry.before)
    else:
        later.before = entry.before


def _decorate(block: lazy_mode, function: Any) -> None:
    """Turn `block`, which was given a function, into the decorated function, in place.

    A `__new__` that returns the function would be simpler, but costs every block 0.2 us.
    """
    if not callable(function):
        raise TypeError(
            f"lazy_mode(): function={function!r} can't be called; options have names, as in "
            'lazy_mode(compile="off")'
        )
    in_mode = block(function)
    block.__class__ = _Decorated  # type: ignore[assignment]
    functools.update_wrapper(cast(Any, block), in_mode)


class _Decorated:
    """A function that runs in `lazy_mode`: the result of `@lazy_mode` without parentheses."""

    __wrapped__: Callable[..., Any]
    __qualname__: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> str:
        # pickled by its name, as functions are
        return self.__qualname__


class listening_mode(lazy_mode):
    """A `lazy_mode` that is never bypassed, for `explain(fn)` and calls that `replay` records."""

    _listens_always = True

    def _listens(self, caller: FrameType, options: settings.Settings) -> bool:
        sync_points.at_sync_point(local.trace)
        return True
