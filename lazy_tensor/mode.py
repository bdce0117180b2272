"""`lazy_mode`: inside it every aten op is recorded, on ordinary tensors too.

In: a `with` block or a decorated function. Out: nothing pending when it is left. What reaches
tensors by other ways than ops is seen to meanwhile (`lazy_tensor.interop.patch_table`).
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
from lazy_tensor.dispatch.torch_private import TorchDispatchMode, is_own_mode_entered
from lazy_tensor.dispatch.trie.trace import local, restart_own_trace
from lazy_tensor.interop import patch_table
from lazy_tensor.interop.wrappers import here
from lazy_tensor.tensor import LazyTensor, flush_here

P = ParamSpec("P")
R = TypeVar("R")


class RecordingMode(TorchDispatchMode):
    """The dispatch mode: torch calls it for each op, `record` does the work.

    Backward runs in the calling thread, on CUDA too, where autograd's own threads would record in
    traces of their own: a step would be several, and none could be replayed.
    """

    supports_higher_order_operators = True
    __torch_dispatch__ = record

    def __init__(self) -> None:
        self._had_threads: list[bool] = []  # of autograd's engine, at each entry

    def __enter__(self) -> RecordingMode:
        # as `TorchDispatchMode` does, less the notes it keeps for code that runs compiled
        self._had_threads.append(torch_private.let_engine_have_threads(False))
        torch_private.push_mode(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        if torch_private.is_innermost_mode(self):
            torch_private.pop_mode(None)
        if self._had_threads:
            torch_private.let_engine_have_threads(self._had_threads.pop())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that this avoids costs 0.5 us an op

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def sleeps(self, asleep: bool) -> None:
        """Record nothing while one of torch's own modes is entered: what it runs is its own."""
        self.__class__ = _SleepingMode if asleep else RecordingMode


class _SleepingMode(RecordingMode):
    """A recording mode that lets all pass."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def _leave_mode() -> None:
    """Leave the mode that this thread has entered. `here` holds it until then: torch's stack alone
    does not, before torch 2.13."""
    here.mode.__exit__(None, None, None)
    here.mode = None
    patch_table.IN_MODE.take_back()
    patch_table.WITH_LAZY.take_back()


def _after_step(*_: Any) -> None:
    if here.mode is not None or Policy.has_wrapped or sync_points.asleep:
        sync_points.at_step(local.trace)
        if local.trace.policy.is_asleep:
            convert.make_met_plain()  # the optimizer's state, which was recorded


@functools.cache
def _see_steps() -> None:
    """Have steps of optimizers end regions, from now on."""
    register_optimizer_step_post_hook(_after_step)


hits.use(
    LazyTensor,
    RecordingMode,
    sync_points.close_segment,
    sync_points.at_turn,
    eager_fallback.share_with_parts,
)
convert.before_wrapping += begin_hits, _see_steps
composite_overrides.install(LazyTensor, RecordingMode)


class _BlocksWithoutParentheses(type):
    """Makes `with lazy_mode:` mean `with lazy_mode():`."""

    def __enter__(cls) -> lazy_mode:
        block = _BareBlock()
        _bare.blocks.append(block)
        return block.__enter__()

    def __exit__(cls, *exception: Any) -> None:
        _bare.blocks.pop().__exit__(*exception)


class lazy_mode(metaclass=_BlocksWithoutParentheses):
    """Record instead of run: `with lazy_mode():` around any PyTorch program, or `@lazy_mode()`.
    Without options the parentheses may be left out.

    Every aten op inside, autograd's and the optimizer's too, is recorded and gives a `LazyTensor`.
    Leaving the block runs what is pending. Re-entrant. `options` are those of `configure`, for this
    block and thread's flushes alone; TypeError for an unknown one. Where a program never does the
    same again, and while its kernels are built, ops run as in eager, and blocks of them are let
    alone.

    >>> with lazy_mode():
    ...     loss = model(x).square().mean()
    ...     loss.backward()
    """

    _listens_always = False

    _options: Options
    _entered: list[Any]
    """What each exit has to undo: an `_Entry`; None for a block that rests, `_COUNTED` for one that
    C++ counts."""
    _function: Any  # the decorated one

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
        refuse_what_runs_later(function, "lazy_mode()", "put `with lazy_mode():` into it")

        @functools.wraps(function)
        def in_mode(*args: P.args, **kwargs: P.kwargs) -> R:
            mode = lazy_mode(**options)
            mode._function = function
            with mode:
                return function(*args, **kwargs)

        return in_mode

    def __enter__(self) -> lazy_mode:
        native, has_own_way = hits.native, self._options or self._listens_always
        if not (native is None or has_own_way) and native.begin_rest(self._function):
            self._entered.append(_COUNTED)
            return self
        if here.blocks:
            _has_ended(None)
        if here.mode is not None and not here.blocks:
            sync_points.listen(local.trace)
            _leave_mode()  # an interrupt in the last block's begin or end has left it entered
        if self._rests(sys._getframe(1)):
            STATS.counts["unrecorded_blocks"] += 1
            self._entered.append(None)
            return self
        if self._options:
            flush_here("options changed", quiet=True)
        after = settings.updated(settings.current(), self._options, "lazy_mode()")
        is_outermost = not here.blocks
        if is_outermost or self._options or self._listens_always:
            sync_points.listen(local.trace)
        if is_outermost:
            flush_here("enter", quiet=True)
            if not is_own_mode_entered() and self._listens(sys._getframe(1), after):
                _see_steps()
                if local.thread is not threading.main_thread():
                    begin_hits()
                patch_table.WITH_LAZY.put()
                patch_table.IN_MODE.put()
                here.mode = RecordingMode()
                here.mode.__enter__()
        entry = _Entry(bool(self._options))
        try:
            if self._options:
                settings.put_here(after)
                restart_own_trace()
                if not is_outermost and after.record == "always":
                    local.trace.policy.try_again_at_once()
            # within a block that is bypassed one may record all the same
            if here.mode is not None:
                here.blocks.append(weakref.ref(entry))
            self._entered += [entry]  # no call, as in `__exit__`
        except BaseException:  # an interrupt, after which `with` calls no `__exit__`
            _has_ended(entry)
            if self._options:
                settings.put_here(entry.before)
            raise
        return self

    def _place(self, caller: FrameType, options: settings.Settings) -> tuple[Any, ...]:
        """Where in the program this block is, and how it runs."""
        code = caller.f_code if self._function is None else self._function
        return (id(code), caller.f_lasti, options)

    def _rests(self, caller: FrameType) -> bool:
        """Whether the block is one of many at its place that are bypassed, with nothing to do."""
        trace = local.trace
        has_own_way = bool(self._options) or self._listens_always
        if has_own_way or here.blocks or trace.state is not trace.root:
            return False
        return trace.policy.rests(self._place(caller, settings.current()))

    def _listens(self, caller: FrameType, options: settings.Settings) -> bool:
        """Whether ops must come here: not where all of them would be let pass."""
        trace = local.trace
        sync_points.at_sync_point(trace)
        place, must_record = self._place(caller, options), options.record == "always"
        may_choose = sync_points.may_choose(trace, options)
        if trace.policy.begin_block(place, may_choose=may_choose, must_record=must_record):
            return True
        STATS.counts["unrecorded_blocks"] += 1
        convert.make_met_plain()
        return False

    def __exit__(self, *exception: Any) -> None:
        entered = self._entered[-1]
        del self._entered[-1]  # and no `pop`: after a call an interrupt may come
        if entered is _COUNTED:
            if not hits.native.end_rest():
                flush_here("exit", quiet=True)
            return
        if entered is None:
            flush_here("exit", quiet=True)
            local.trace.policy.end_rest()
            return
        try:
            self._leave(entered)
        except BaseException:  # an interrupt, which may come where a function begins: once more
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
                sync_points.at_sync_point(local.trace)  # it may warn, which may raise
        finally:
            self._end(entry)

    def _end(self, entry: _Entry) -> None:
        """Leave nothing pending, and the options as they were."""
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
_RUN_LATER = (
    inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
)  # fmt: skip


def refuse_what_runs_later(function: Any, caller: str, remedy: str) -> None:
    """TypeError for generators and coroutines: their calls end before their bodies have begun."""
    if any(is_kind(inspect.unwrap(function)) for is_kind in _RUN_LATER):
        name = getattr(function, "__qualname__", function)
        raise TypeError(f"{caller}: a call of {name} runs nothing yet; {remedy}")


class _Entry:
    """A block that has begun, and what its exit has to undo. It holds its mode, which torch's stack
    doesn't, before torch 2.13, and a forked process lets go of."""

    __slots__ = ("__weakref__", "before", "has_options", "mode", "number")
    _numbers = itertools.count()

    def __init__(self, has_options: bool) -> None:
        self.before, self.mode = settings.of_block(), here.mode
        self.has_options = has_options
        self.number = next(self._numbers)


def _has_ended(entry: _Entry | None) -> None:
    """Take a block from those that this thread is in, and those that are gone without an exit, as
    interrupts may have it. Others that began later stay: blocks of tasks and generators overlap."""
    here.blocks = [ref for ref in here.blocks if ref() not in (entry, None)]


def _put_back(entry: _Entry) -> None:
    """Put the options back that were in force before a block, behind those of later ones that go
    on."""
    begun = [one for ref in here.blocks if (one := ref()) is not None and one.has_options]
    later = next((one for one in begun if one.number > entry.number), None)
    if later is None:
        settings.put_here(entry.before)
    else:
        later.before = entry.before


class _BareBlock(lazy_mode):
    """The block of a `with lazy_mode:`, which the metaclass enters for the user."""

    def _place(self, caller: FrameType, options: settings.Settings) -> tuple[Any, ...]:
        assert caller.f_back is not None, "the metaclass is called by the user's code"
        return super()._place(caller.f_back, options)


class _Bare(threading.local):
    """The blocks of this thread without parentheses, innermost last."""

    def __init__(self) -> None:
        self.blocks: list[_BareBlock] = []


_bare = _Bare()


def _decorate(block: lazy_mode, function: Any) -> None:
    """Turn a block that was given a function into the function that runs in it.

    A `__new__` that returns the function would cost every block 0.2 us.
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
    """A function that runs in `lazy_mode`: what `@lazy_mode`, without parentheses, makes of it."""

    __wrapped__: Callable[..., Any]
    __qualname__: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> str:
        return self.__qualname__  # pickled by its name, as functions are


class listening_mode(lazy_mode):
    """A `lazy_mode` that sees all ops, though the program may not repeat itself."""

    _listens_always = True

    def _listens(self, caller: FrameType, options: settings.Settings) -> bool:
        sync_points.at_sync_point(local.trace)
        return True
