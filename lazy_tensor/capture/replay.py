"""`replay`: repeated calls of a function run as a plan, without the function's Python.

In: a function and its calls. Out: the results that recording each call would give. Calls are
recorded (`take`) until one does the same as an earlier one. From then on the plan of that call runs
(`captured_call`), as long as nothing that the function can see has changed (`object_graph`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import random
import re
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Generic, Literal, ParamSpec, TypeVar, Unpack, overload

import torch

from lazy_tensor.capture.arguments import Arguments
from lazy_tensor.capture.captured_call import CapturedCall
from lazy_tensor.capture.cuda_graph import CudaGraph
from lazy_tensor.capture.numbers.kept_numbers import MovedNumbers
from lazy_tensor.capture.numbers.number_arguments import followed_arguments
from lazy_tensor.capture.object_graph import ObjectGraph, explore
from lazy_tensor.capture.outline import Outline
from lazy_tensor.capture.sizes.kin import Kin
from lazy_tensor.capture.sizes.size_texts import TOO_SMALL
from lazy_tensor.capture.take import Take, seen_by, take
from lazy_tensor.capture.watched_object import Obstacle, is_atom
from lazy_tensor.dispatch import settings, torch_private
from lazy_tensor.dispatch.options import KNOWN, Options, unknown
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.run.plan_cache import may_capture
from lazy_tensor.dispatch.stats import STATS
from lazy_tensor.dispatch.trie.trace import local, names_in_force
from lazy_tensor.dispatch.user_frame import warn_user
from lazy_tensor.dispatch.wording import with_article
from lazy_tensor.kernels.cache import Cache
from lazy_tensor.kernels.extension import program
from lazy_tensor.mode import RecordingMode, lazy_mode, listening_mode, reject_generators
from lazy_tensor.tensor import flush_here

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=torch.nn.Module)

MOST_SIGNATURES, SIGNATURES_BEFORE_WARNING = 64, 16
"""Signatures that a replay remembers, and how many may come, with no call replayed, before it warns
that the arguments keep changing."""
MOST_CAPTURED = 4
"""Captured calls kept for one signature. There are several because state outside the arguments
decides too: a call that finds a gradient and a call that finds None have different plans."""
TAKES_BEFORE_WARNING = 3
"""Takes of one signature in a row that captured nothing, before the user is warned."""
LEARNING_CALLS = 4
"""First calls of a function in which all ops are recorded, though they are new."""
CHANGES_BEFORE_WARNING = 16
"""Calls recorded because something that the function sees keeps changing, with none replayed,
before the user is warned."""
MOST_CALLS_BETWEEN_TAKES = 1000
"""Bound on the calls that are recorded without a take after takes have failed."""
UNCHECKED = 16
"""Replays before the first check, at least. A check records the call, which takes as long as
several replays."""
# a generator of its own: checks must not change what the program draws
_random = random.Random()


class _Here(threading.local):
    is_recording = False
    """Whether this thread records a call for some replay."""


_here = _Here()


@contextmanager
def recording() -> Iterator[None]:
    """Replays that are called inside run their Python: they are part of a recorded call."""
    was_recording, _here.is_recording = _here.is_recording, True
    try:
        yield
    finally:
        _here.is_recording = was_recording


class _Signature:
    """What is known of calls whose arguments have equal keys."""

    def __init__(self, objects: list[tuple[str, Any]]) -> None:
        # kept alive: the key has their ids, which Python would give to new objects
        self.objects = objects
        self.captured: list[CapturedCall] = []  # tried in this order, the latest first
        self.outlines: deque[Outline] = deque(maxlen=MOST_CAPTURED)  # of the latest takes
        self.n_calls = 0  # recorded without a take; the first `warmup` are
        self.n_failed = 0  # takes in a row that captured nothing
        self.wait = 0  # calls to record without a take before the next take

    def postpone(self) -> None:
        """Wait longer after each failed take: 0, 2, 6, 14 … calls."""
        self.n_failed += 1
        self.wait = min(2**self.n_failed - 2, MOST_CALLS_BETWEEN_TAKES)


@dataclass(slots=True)
class _Fit:
    """What to do about a call. "replay" the captured call that fits; "teach": record, though it
    fits; "check": record, and compare with it; "settle": record, as its sizes should have a plan of
    their own; "record", as none fits. `change` says why not, if some nearly did.

    `found` is what `CapturedCall.find` gave, `alike` the list that has the captured call.
    """

    does: Literal["replay", "teach", "check", "settle", "record"]
    captured: Any = None
    found: Any = None
    alike: Any = None
    change: str = ""


OWN_OPTIONS = ("state", "warmup", "check_every", "cuda_graphs")


class ReplayOptions(Options, total=False):
    """The options of `replay`."""

    state: Any
    warmup: int
    check_every: int
    cuda_graphs: bool


Outcome = tuple[Any, CapturedCall | None, _Signature | None, bool]
"""The call's result; the captured call that was replayed, or that fits though the call was
recorded; the call's signature; whether the call was replayed."""


class Replay(Generic[P, R]):
    """A function whose repeated calls run as plans: what `replay` returns.

    `n_replayed` and `n_recorded` count its calls, `n_signatures` the signatures that came.
    `obstacle` says why the latest recorded call was not replayed, "" if nothing stands in the way.
    """

    def __init__(
        self,
        function: Callable[P, R],
        *,
        state: Any = None,
        warmup: int = 1,
        check_every: int = 1000,
        cuda_graphs: bool = False,
        is_part: bool = False,
        **options: Any,
    ) -> None:
        if not callable(function):
            given = with_article(type(function).__name__)
            raise TypeError(
                f"replay(): function is {given}, which can't be called; pass a function or a module"
            )
        reject_generators(function, "replay()", "pass a function that returns its results")
        for name, value in (("warmup", warmup), ("check_every", check_every)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"replay(): {name}={value!r} is not a whole number")
            if value < 0:
                raise ValueError(f"replay(): {name}={value!r} must be at least 0")
        for name in options:
            if name not in KNOWN:
                raise unknown(name, "replay()", OWN_OPTIONS)
        # raises for a wrong value here, and not at the first call
        now = settings.updated(settings.current(), options, "replay()")
        for one in state if isinstance(state, (list, tuple)) else (state,):
            if one is not None and is_atom(one):
                raise TypeError(
                    f"replay(): state={one!r} can't change; name modules, optimizers, tensors, "
                    "generators, or what holds them, as in state=[model, optimizer]"
                )
        self._function = function
        self._state = state
        self._in_mode = lazy_mode(**options)(function)
        self._warmup = warmup
        self._check_every = check_every
        self._cuda_graphs = cuda_graphs
        self._is_part = is_part  # whether it runs a module's forward or backward
        self._cuda_graph: CudaGraph | None = None  # of the call captured last, for `summary()`
        self._options = options
        self._any_size = now.sizes == "any"
        # for a copy or a pickle, which begins without captured calls
        own = (state, warmup, check_every, cuda_graphs)
        self._made_with = {**dict(zip(OWN_OPTIONS, own, strict=True)), **options}
        self._lock = threading.RLock()
        self._here = threading.local()  # `is_inside`
        self._signatures: Cache[Any, _Signature] = Cache("", MOST_SIGNATURES)
        self._kin: Cache[Any, Kin] = Cache("", MOST_SIGNATURES)
        self._followed = {} if is_part else followed_arguments(function)
        self._names: set[str] = set()  # that the function's code mentions, as far as is known
        self._moved = MovedNumbers()
        self._told: set[str] = set()  # kinds of obstacles that the user was warned of
        self.n_signatures = 0
        self._rest = 0  # calls to record unseen, as long as none could be replayed
        self.period = STATS.period  # at the last call: reports leave out replays of earlier periods
        # key of each argument of the last call, for a warning while no signature repeats
        self._keys: dict[str, Any] = {}
        self.obstacle = ""
        self.n_replayed = self.n_recorded = 0
        self._replayed_s, self._fastest_recorded_s = 0.0, math.inf
        # without the function's `__dict__`, whose names could hide attributes of this object
        functools.update_wrapper(self, function, updated=())
        REPLAYS.add(self)

    @property
    def __replayed__(self) -> Callable[P, R]:
        """The function itself: an `ObjectGraph` looks through replays by this name."""
        return self._function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self.call(args, kwargs)[0]
        return result

    def call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        must_record: Callable[[CapturedCall], bool] = lambda _: False,
        checks: bool = False,
    ) -> Outcome:
        """Call the function, and say how that was done.

        If `must_record` says so of the captured call that fits, the call is recorded all the same.
        If it `checks`, the call is recorded, and compared with the captured one.
        """
        if _here.is_recording or getattr(self._here, "is_inside", False):
            # part of a call that is recorded, or a recursive call
            return self._function(*args, **kwargs), None, None, False
        self._here.is_inside = True
        try:
            return self._call(args, kwargs, must_record, checks)
        finally:
            self._here.is_inside = False

    def is_seen_by_others(self) -> bool:
        """Whether a call must run its Python: another replay records it, or something besides our
        mode sees its ops."""
        if _here.is_recording or torch_private.is_traced():
            return True
        watched = torch_private.is_watched(RecordingMode, saves=not self._is_part)
        if watched is not None:
            self._note_obstacle(watched)
        return watched is not None

    def captured(self) -> list[CapturedCall]:
        """The calls that can be replayed, of all signatures."""
        of_all: list[_Signature | Kin] = [*self._signatures.values(), *self._kin.values()]
        return [one for known in of_all for one in known.captured]

    def runs_any_size(self) -> bool:
        """Whether calls of any size can be replayed."""
        return any(kin.captured for kin in self._kin.values())

    def may_improve(self) -> bool:
        """Whether nothing can be replayed yet, or a faster plan may still replace one."""
        captured = self.captured()
        return not captured or any(one.plan.tier is not None for one in captured)

    def forget(self) -> None:
        """Drop all signatures, with the calls captured for them."""
        with self._lock:
            self._signatures.clear()
            self._kin.clear()

    def recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call and learn nothing from it."""
        start = perf_counter()
        # Ops that are new run once for their metadata here. On a tape they can't: fake tensors tell
        # them then, for which torch would first import its compiler.
        learns = self.n_recorded < LEARNING_CALLS
        with recording(), local.trace.policy.new_calls_recorded() if learns else nullcontext():
            result = self._in_mode(*args, **kwargs)
        self._account_recorded(start)
        return result

    def _call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        must_record: Callable[[CapturedCall], bool],
        checks: bool,
    ) -> Outcome:
        start = perf_counter()
        self.period = STATS.period
        # a take begins with an empty trace, and a plan reads tensors that have their data
        flush_here("replay", quiet=True)
        if not self._is_part and self.is_seen_by_others():
            return self._function(*args, **kwargs), None, None, False
        if self._rest:
            self._rest -= 1
            return self.recorded(args, kwargs), None, None, False
        if not self.may_plan():
            return self.recorded(args, kwargs), None, None, False
        arguments = Arguments(args, kwargs, self._followed)
        key = self._key_of(arguments)
        known = self._signatures.get(key)
        # held until the plan has run: another thread's replay could change what `find` has checked.
        # Not while the function's Python runs, which may wait for a thread that calls this replay.
        with self._lock:
            fit = self._fit(known, arguments, key, must_record, checks)
            if fit.does == "replay":
                result = fit.captured.run(fit.found, arguments.tensors)
                self._account(start)
                return result, fit.captured, known, True
        if known is None:
            known = self._new_signature(key, arguments)
        if fit.does == "teach":
            return self.recorded(args, kwargs), fit.captured, known, False
        if fit.does == "check":
            return self._verified(known, fit, arguments)
        kin = self._kin_of(arguments, key)
        kin.met(arguments.key[1])
        learns = kin.learns(self._warmup, arguments) and fit.change != TOO_SMALL
        notes_sizes = fit.does == "settle" or learns
        if not notes_sizes and (known.wait > 0 or known.n_calls < self._warmup):
            known.n_calls += 1
            known.wait -= known.wait > 0
            return self.recorded(args, kwargs), None, known, False
        result, taken = self._taken(arguments, earlier=[*known.outlines], notes_sizes=notes_sizes)
        confirmed = None
        with self._lock:
            self._learn(known, taken, arguments, fit.change, kin, is_quiet=learns)
            if not known.captured:
                capture = partial(self._captured, arguments)
                confirmed = kin.learn(taken, arguments, capture, notes_sizes=notes_sizes)
            if kin.learns(self._warmup, arguments):
                self._rest = known.wait = 0  # `Kin` says itself when it waits
        return result, confirmed, known, False

    def _fit(
        self,
        known: _Signature | None,
        arguments: Arguments,
        key: Any,
        must_record: Callable[[CapturedCall], bool],
        checks: bool,
    ) -> _Fit:
        """The captured call that fits a call, and what to do with it."""
        change = ""
        for alike, captured in self._captured_for(known, arguments, key):
            try:
                found = captured.find(arguments.tensors, arguments.numbers)
            except Obstacle as reason:
                self.obstacle = change = str(reason)
                continue  # another captured call of this signature may fit
            fit = _Fit("replay", captured, found, alike)
            is_due = self._check_every and captured.n_runs >= captured.next_check
            if must_record(captured):
                self.obstacle = ""
                fit.does = "teach"
            elif is_due or checks:
                # it leaves the list until the check has found no difference
                alike.remove(captured)
                fit.does = "check"
            elif captured.any_size is not None and captured.any_size.settles():
                fit.does = "settle"
            else:
                self.obstacle = ""
                # of calls that differ in what they decide, the latest is most likely to come again
                if captured is not alike[0]:
                    alike.remove(captured)
                    alike.insert(0, captured)
                return fit
            captured.drop(found)
            return fit
        return _Fit("record", change=change)

    def _captured_for(
        self, known: _Signature | None, arguments: Arguments, key: Any
    ) -> Iterator[tuple[list[CapturedCall], CapturedCall]]:
        """The captured calls that may fit a call, the likeliest first, each with the list that has
        it."""
        of_one_size = [] if known is None else known.captured
        for captured in [*of_one_size]:
            yield of_one_size, captured
        kin = self._kin_of(arguments, key)
        of_any_size = kin.of(arguments)
        for captured in of_any_size:
            yield kin.captured, captured
        if not (of_any_size or of_one_size):
            moved = kin.move(arguments, partial(self._look, arguments))
            if moved is not None and moved.any_size is not None:
                yield kin.captured, moved
            elif moved is not None:
                known = known or self._new_signature(key, arguments)
                known.captured.append(moved)
                yield known.captured, moved

    def _look(self, arguments: Arguments, roots: list[tuple[str, Any]] | None) -> ObjectGraph:
        """What a call with these arguments can see; from these objects alone if some are given."""
        follows_code = self._state is None
        if roots is None:
            return seen_by(self._root, arguments, self._names, follows_code=follows_code)
        return explore(roots, arguments.tensors, self._names, follows_code=follows_code)

    @property
    def _root(self) -> tuple[str, Any]:
        """What the function can look into besides its arguments, with a label."""
        if self._state is not None:
            return "state", self._state
        return getattr(self._function, "__name__", ""), self._function

    def _kin_of(self, arguments: Arguments, key: Any) -> Kin:
        """What is known of calls that differ from this one in sizes alone."""
        kind = (arguments.kind, *key[1:])
        found = self._kin.get(kind)
        if found is None:
            found = Kin(any_size=self._any_size)
            self._kin.put(kind, found)
        return found

    def _key_of(self, arguments: Arguments) -> Any:
        """What calls have in common that may run the same plan."""
        # grad mode, autocast, default dtype and the like decide, too, what ops a call makes
        environment = (
            hits.loaded.call_environment(), torch_private.is_parametrization_cached(),
            names_in_force(),
        )  # fmt: skip
        return (arguments.key, environment, settings.current())

    def _new_signature(self, key: Any, arguments: Arguments) -> _Signature:
        known = _Signature(arguments.objects)
        self._signatures.put(key, known)
        self.n_signatures += 1
        # one call earlier than the warning, which compares two calls
        if self.n_signatures >= SIGNATURES_BEFORE_WARNING - 1 and not self.n_replayed:
            self._compare_arguments(arguments.args, arguments.kwargs)
        return known

    def _compare_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn which arguments differ from the last call's, where no signature repeats."""
        named = {f"`argument {i}`": value for i, value in enumerate(args, 1)}
        named |= {f"`{name}`": value for name, value in kwargs.items()}
        keys = {name: Arguments((value,), {}).key for name, value in named.items()}
        before, self._keys = self._keys, keys
        if not before:
            return
        told = []
        for name, (values, tensors) in keys.items():
            if hasattr(named[name], "__array_interface__"):
                told.append(f"{name} is an array; pass what torch.from_numpy makes of it")
            # by hash: `==` of tensors that are keys would be a tensor
            elif name not in before or values not in {before[name][0]}:
                told.append(f"{name} has another value at each call")
            elif before[name][1] != tensors:
                told.append(f"{name} has another size, dtype or layout at each call")
        self._note_obstacle(
            "; ".join(told) or "grad mode, autocast or options are others", tells=True
        )

    def may_plan(self) -> bool:
        """Whether plans can be made and run; if not, ask for the C++ that runs them."""
        if program.are_there() and hits.loaded is not None:
            return True
        with lazy_mode(**self._options):
            if may_capture():
                return True
        extension = hits.EXTENSION if program.are_there() else program.EXTENSION
        is_coming = extension.status in ("compiling", "compiled")
        self._note_obstacle(f"the C++ that runs plans: {extension.status}", tells=not is_coming)
        return False

    def _taken(self, arguments: Arguments, **others: Any) -> tuple[Any, Take | str]:
        """Record a call with a tape on: its result, and its take or the obstacle to one. `others`
        are further arguments of `take`."""
        start = perf_counter()
        # `listening_mode`, as `lazy_mode` may bypass the block, which leaves nothing in the trace
        with recording(), listening_mode(**self._options):
            taken = take(
                self._function, arguments, self._root, self._names, self._moved,
                follows_code=self._state is None, may_have_graphs=self._is_part, **others,
            )  # fmt: skip
        self._account_recorded(start)
        for place in arguments.used:
            self._followed.pop(place, None)
        return taken

    def _learn(
        self,
        known: _Signature,
        taken: Take | str,
        arguments: Arguments,
        changed: str,
        kin: Kin,
        *,
        is_quiet: bool,
    ) -> None:
        """Capture the call if it did the same as an earlier take; else note what differs. `changed`
        says why the calls captured before could not be replayed, "" if there were none. If it
        `is_quiet`, it doesn't warn: `kin` may still learn to run calls of any size."""
        obstacle: str | None = "it was recorded once" if isinstance(taken, Take) else taken
        if isinstance(taken, Take):
            for outline in known.outlines:
                obstacle = taken.outline.difference(outline)
                if obstacle is None:
                    break
            known.outlines.append(taken.outline)
        if obstacle is None:
            assert isinstance(taken, Take)
            try:
                captured = self._captured(arguments, taken, outline)
                known.captured.insert(0, captured)
                kin.keep(captured)
            except RuntimeError as error:
                obstacle = str(error)
            else:
                del known.captured[MOST_CAPTURED:]
                known.n_failed = 0
                self.obstacle = ""
                # each captured call is outdated before it can run: only recorded calls would show
                if changed and not self.n_replayed and self.n_recorded >= CHANGES_BEFORE_WARNING:
                    self._note_obstacle(changed, tells=True)
                return
        known.postpone()
        if not (self.n_replayed or self._is_part):
            self._rest, known.wait = known.wait, 0
        tells = known.n_failed >= TAKES_BEFORE_WARNING and not is_quiet
        self._note_obstacle(obstacle, tells=tells)

    def _captured(self, arguments: Arguments, taken: Take, before: Outline) -> CapturedCall:
        name = f"replay({self._name})"
        with lazy_mode(**self._options):  # a plan depends on the options in force
            captured = CapturedCall(
                taken, before, arguments.tensors, name,
                cuda_graphs=self._cuda_graphs, gives_plain=self._is_part,
            )  # fmt: skip
        captured.next_check = self._next_check(0)
        self._cuda_graph = captured.cuda_graph
        return captured

    def _verified(self, known: _Signature, fit: _Fit, arguments: Arguments) -> Outcome:
        """Record a call that could be replayed; RuntimeError if it did something else."""
        captured, any_size = fit.captured, fit.captured.any_size
        notes_sizes = any_size is not None or bool(captured.outline.sizes_read)
        try:
            result, taken = self._taken(arguments, like=captured.outline, notes_sizes=notes_sizes)
        except BaseException:
            # the user's exception says nothing of the plan
            with self._lock:
                fit.alike.insert(0, captured)
            raise
        if isinstance(taken, str):
            # a replay would not have met the obstacle, so the plan may be wrong by now: it is lost
            self._note_obstacle(taken)
            self._drop(captured)
            return result, None, known, False
        # `by_value`: a rate that is again what it was is not recorded as an input, though it may
        # be one of the plan
        if any_size is None:
            found = taken.outline.difference(captured.outline, by_value=True)
        else:
            found = any_size.difference(taken.outline)
        if found is not None:
            # replays of such calls were wrong: the next capture needs two new takes that agree
            known.outlines.clear()
            self._drop(captured)
            raise RuntimeError(
                f"replay({self._name}): recorded again after {captured.n_runs} replays, the call "
                f"did something else: {found}. What the function reads must reach it as an "
                "argument, or from where replay can watch it"
            )
        # a tuple, say: the plan has to find the new one from now on
        if taken.made_anew and any_size is None:
            n_runs = captured.n_runs
            captured = self._captured(arguments, taken, captured.outline)
            captured.n_runs = n_runs
        with self._lock:
            captured.n_runs += 1
            captured.next_check = self._next_check(captured.n_runs)
            fit.alike.insert(0, captured)
        return result, captured, known, False

    def _drop(self, captured: CapturedCall) -> None:
        """Forget a captured call that did something else, and those that share its plan."""
        with self._lock:
            for kin in self._kin.values():
                kin.drop(captured)
            for known in self._signatures.values():
                known.captured = [one for one in known.captured if one.plan is not captured.plan]

    def _next_check(self, n_runs: int) -> int:
        """How many replays must be done before the next check, after `n_runs` of them.

        It is random, so that checks don't always meet the same phase of a program's rhythm.
        """
        # checks get rarer: the gap is between half of and all of the replays done so far
        most = min(max(n_runs, 2 * UNCHECKED), self._check_every)
        least = min(UNCHECKED, most) if n_runs == 0 else (most + 1) // 2
        return n_runs + _random.randint(least, most)

    def _account_recorded(self, start: float) -> None:
        self.n_recorded += 1
        self._fastest_recorded_s = min(self._fastest_recorded_s, perf_counter() - start)

    def _account(self, start: float) -> None:
        seconds = perf_counter() - start
        self.n_replayed += 1
        self._replayed_s += seconds
        STATS.counts["replayed"] += 1
        STATS.add_work(start, seconds)
        local.trace.policy.add_replay(seconds)

    def _note_obstacle(self, obstacle: str, *, tells: bool = False) -> None:
        """Note why a call was recorded; if it `tells`, warn the user, once for each kind."""
        self.obstacle = obstacle = re.sub(r"\bargument (\d+)", self._parameter, obstacle)
        # obstacles that differ in their numbers alone, such as a value read, are of one kind
        kind = re.sub(r"[\d.]+", "#", obstacle)
        if tells and kind not in self._told:
            self._told.add(kind)
            warn_user(f"replay({self._name}) goes on recording: {obstacle}{_remedy(obstacle)}")

    def _parameter(self, found: re.Match[str]) -> str:
        """The name of the function's parameter with that number; the text itself if it has none."""
        # functions in C may have no signature
        with suppress(TypeError, ValueError, IndexError):
            parameters = list(inspect.signature(self._function).parameters.values())
            parameter = parameters[int(found[1]) - 1]
            if parameter.kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD:
                return parameter.name
        return found[0]

    def summary(self) -> str:
        """A line for `explain()`: how many calls were replayed and recorded, and why."""
        words = [f"replay({self._name}): {self.n_replayed} calls replayed"]
        if self.n_replayed:
            mean = self._replayed_s / self.n_replayed
            words.append(f"{mean * 1e3:.2f} ms each")
        words.append(f"{self.n_recorded} recorded")
        if self.n_recorded:
            words.append(f"{self._fastest_recorded_s * 1e3:.2f} ms at best")
        if self._cuda_graph is not None:
            words.append(self._cuda_graph.told())
        for told in [one.any_size.told() for one in self.captured() if one.any_size is not None]:
            sizes = re.sub(r"\bargument (\d+)", self._parameter, told)
            words.append(f"one plan for all sizes ({sizes})")
        missed = {kin.obstacle for kin in self._kin.values() if kin.obstacle and not kin.captured}
        words += [f"no plan for all sizes, as {obstacle}" for obstacle in sorted(missed)]
        if self.obstacle:
            words.append(f"recorded last because {self.obstacle}{_remedy(self.obstacle)}")
        return ", ".join(words)

    @property
    def _name(self) -> str:
        return str(getattr(self._function, "__qualname__", type(self._function).__name__))

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> Replay[P, R]:
        options = {**self._made_with, "state": copy.deepcopy(self._state, memo)}
        return Replay(copy.deepcopy(self._function, memo), **options)

    def __reduce__(self) -> Any:
        return functools.partial(replay, **self._made_with), (self._function,)


REPLAYS: weakref.WeakSet[Replay[Any, Any]] = weakref.WeakSet()
"""All replays that are alive, for `explain()`."""


def _remedy(obstacle: str) -> str:
    """Advice to append to an obstacle; "" if there is none."""
    found = (f"; {words}" for part, words in _REMEDIES.items() if part in obstacle)
    return next(found, "")


# Advice, by a part of the obstacle's text. The first part that occurs in it counts, so a special
# case stands before the general one.
_REMEDIES = {
    ".grad`, which a replay would not": "call backward() inside the function, or return what is "
    "detached",
    "_rebuild_buckets()": "DistributedDataParallel's code can't be replayed; call replay(model) "
    "before the model is given to it, and replay(optimizer.step)",
    "torch.linalg's check for errors": "inv_ex, solve_ex and cholesky_ex make none",
    "another value at each call": "a number that changes may only be computed with, compared and "
    "given to ops; do all else where the function is called, or pass a tensor",
    "another size, dtype or layout": "pad to a few sizes",
    "which a replay would not": "keep it in a tensor, or change it outside the function; a number "
    "may be kept if all code that the function can see only computes with it, compares it, and "
    "gives it to ops",
    "Python's or numpy's random numbers": "draw from torch's, or outside the function",
    " changed": "what changes at each call must come in as an argument, a number as a tensor",
    **dict.fromkeys(
        ("it reads values", "reads a tensor's values", "where the call before read"),
        "compute and compare with what `.item()` gives by Python's operators, and return it in a "
        "tuple, list or dict; do all else where the function is called; "
        "an optimizer whose lr is a tensor reads it unless it has fused=True or capturable=True",
    ),
    "where the call before gave it": "a number that changes must come in as a tensor; so must an "
    "optimizer's betas, and the rate of an optimizer that isn't torch's own",
}


@overload
def replay(function: M, **options: Unpack[ReplayOptions]) -> M: ...  # type: ignore[overload-overlap]
@overload
def replay(function: Callable[P, R], **options: Unpack[ReplayOptions]) -> Replay[P, R]: ...
@overload
def replay(**options: Unpack[ReplayOptions]) -> Callable[[Callable[P, R]], Replay[P, R]]: ...
def replay(function: Any = None, **options: Any) -> Any:
    """Run a function whose calls repeat, such as a training step, as a plan without its Python.

    `step = replay(step)`, `@replay`, or `@replay(warmup=3)`. Calls are recorded (in `lazy_mode`)
    until two do the same. From then on a call whose arguments have the same metadata runs the plan.
    With `sizes="any"` calls of three sizes are compared where sizes vary. If each size follows from
    those of the tensors that a call reads, one plan runs all sizes.
    Tensors among the arguments are taken by position. Parameters, buffers and optimizer state are
    taken by identity, and read anew at each call. Tensors that the call leaves behind (`p.grad`,
    caches) get the new values; if the program holds an old one elsewhere, that keeps its value, and
    another tensor takes its place. Returned tensors are new ones. Random ops draw new numbers.
    Values that the function reads (`if mask.all()`) are computed before the plan runs. If one
    differs, or anything else that the function can see has changed, the call is recorded. Of a
    number that is an argument, comes from `.item()`, or that the function keeps for its next call
    (`self.n_steps += 1`), only comparisons have to come out the same: what Python computes from it,
    and gives to ops, is computed anew.
    A scheduler that the function steps behind its optimizer is stepped.

    `state`, such as `[model, optimizer]`, names what a call depends on besides its arguments. All
    that these objects hold is watched. All other Python is taken as constant, tensors by identity.
    Without `state`, everything is watched that the function's code leads to.

    `replay(model)` returns the same module. Its forward, and the backward of its outputs, are
    replayed, and join the program's autograd as one node. The loss, the optimizer and all else stay
    outside and run as before. Copies and pickles of the module are not replayed.

    `warmup` calls are recorded before a call is compared with another. At random, and after
    `check_every` replays at the latest, a call is recorded and compared: RuntimeError if it did
    something else (0: never). `cuda_graphs` captures a plan in a CUDA graph if all its tensors are
    on the GPU and it doesn't communicate; arguments are copied into the graph, results out of it.
    Other options are those of `lazy_mode`. What the function prints is printed in recorded calls
    only. A call that changes other Python objects that it can see is never replayed, and one
    warning says why.
    """
    if function is None:
        return functools.partial(replay, **options)
    if isinstance(function, torch.nn.Module):
        from lazy_tensor.capture.replay_module import replay_module  # which imports `Replay`

        return replay_module(function, options)
    return Replay(function, **options)
