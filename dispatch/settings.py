"""The options of `configure`, `lazy_mode` and `replay`: their defaults, and which are in force.

In: options by keyword, and variables `LAZY_TENSOR_<NAME>`. Out: one frozen `Settings`, which any
module reads by `current()`. There is one for the process, and one for each thread that is in a
block with options of its own. No other module reads our variables in the environment.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from platformdirs import user_cache_dir

from lazy_tensor.dispatch import options as accepted
from lazy_tensor.dispatch.options import KNOWN, NAMES, PRESETS, Compile, FlushPolicy, Record, Sizes
from lazy_tensor.kernels import logs
from lazy_tensor.kernels.backend import available_backends, backend_of


@dataclass(frozen=True, slots=True)
class Settings:
    """Every option, with a value that was checked. `docs/options.md` says what each does.

    The last three fields are no options: they are derived, once, as many calls ask for them.
    """

    backend: str = "auto"
    compile: Compile = "background"
    cache_dir: str = dataclasses.field(default_factory=lambda: user_cache_dir("lazy_tensor"))
    segment_cache_size: int = 1024
    schema_cache_size: int = 16384
    sharding_cache_size: int = 4096
    bucket_bytes: int = 25 << 20
    max_segment_ops: int = 16384
    max_pending_bytes: int = 1 << 36
    remat_interval: int = 0
    flush_policy: FlushPolicy = "auto"
    record: Record = "auto"
    sizes: Sizes = "fixed"
    compile_threshold: int = 2
    verify_every: int = 0
    forbid: frozenset[str] = frozenset()
    debug: bool = False
    warn: bool = True
    records_all: bool = dataclasses.field(init=False, repr=False, compare=False)
    """Whether ops are recorded whatever that costs. So it is by `record="always"`; by
    `compile="blocking"`, as a program that waits for compilers doesn't count milliseconds; and by
    `remat_interval`, which needs a trace with forward and backward whole."""

    plans_by: tuple[str, str, int, int] = dataclasses.field(init=False, repr=False, compare=False)
    """What a state's plans depend on: part of their key."""
    _hash: int = dataclasses.field(init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return self._hash

    def __post_init__(self) -> None:
        # each flush looks its environment up by the settings: the hash is computed once
        values = tuple([getattr(self, name) for name in NAMES])
        object.__setattr__(self, "_hash", hash(values))
        plans_by = (self.backend, self.compile, self.remat_interval, self.verify_every)
        object.__setattr__(self, "plans_by", plans_by)
        must = self.compile == "blocking" or self.record == "always" or self.remat_interval > 0
        object.__setattr__(self, "records_all", must)


def updated(settings: Settings, options: Mapping[str, Any], caller: str) -> Settings:
    """`settings` with `options` in place of its own values.

    TypeError for an unknown name, naming the nearest; ValueError or TypeError for a bad value,
    naming the option and what it accepts.
    """
    if not options:
        return settings
    # for the cache of `_updated`; what can't be hashed is a bad value, which is then told so
    check: Callable[..., Settings] = _updated
    given = tuple(options.items())
    try:
        given = tuple((k, frozenset(v) if isinstance(v, (set, list)) else v) for k, v in given)
        hash(given)
    except TypeError:
        check = _updated.__wrapped__
    return check(settings, given, caller)


@functools.lru_cache(64, typed=True)  # a block in a loop asks each time
def _updated(settings: Settings, options: tuple[tuple[str, Any], ...], caller: str) -> Settings:
    values: dict[str, Any] = {}
    for name, value in options:
        if name not in KNOWN:
            raise accepted.unknown(name, caller)
        values[name] = _checked(name, value, f"{caller}: {name}")
    return dataclasses.replace(settings, **_without_mode(values))


def _without_mode(values: Mapping[str, Any]) -> dict[str, Any]:
    """Checked options, with the options that their `mode` sets in its place. Others win over it."""
    mode = values.get("mode")
    given = {name: value for name, value in values.items() if name != "mode"}
    return given if mode is None else {**PRESETS[mode], **given}


def _checked(name: str, value: Any, label: str) -> Any:
    """`value` as `Settings` holds it. For a bad value an error that begins with `label`."""
    return _backend(value, label) if name == "backend" else accepted.checked(name, value, label)


def _backend(name: Any, label: str) -> str:
    """A backend's name, checked. ValueError if there is no such backend, RuntimeError if it can run
    on no device here."""
    if name == "auto":
        return "auto"
    try:
        backend = backend_of(name)
    except ValueError:
        known = ("auto", *available_backends())
        raise accepted.one_of("backend", name, known, label) from None
    reasons = [backend.unavailable(device_type) for device_type in ("cpu", "cuda")]
    if None not in reasons:
        on_cpu, on_cuda = reasons
        told = on_cpu if on_cpu == on_cuda else f"on cpu: {on_cpu}; on cuda: {on_cuda}"
        raise RuntimeError(
            f"{label} {name!r} asked for, but {told}; backend='auto' takes one that can run"
        )
    return str(name)


PREFIX = "LAZY_TENSOR_"
OTHER_VARIABLES = ("HITS", "LOGS", "START_S")
"""Variables that are no options. See `records_in_python`, `kernels.logs`, `benches/bench_start.py`.
"""


def from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    """The defaults, with the values of `LAZY_TENSOR_<NAME>` in their place. What can't be used is
    ignored with a warning."""
    found: dict[str, Any] = {}
    for variable, value in environment.items():
        name = variable.removeprefix(PREFIX).lower()
        if name == variable.lower() or not value:
            continue
        if name in KNOWN:
            try:
                found[name] = _checked(name, value, variable)
            except (TypeError, ValueError, RuntimeError) as error:
                _complain(f"{error}; it is ignored")
        elif name.upper() not in OTHER_VARIABLES:
            _complain(_of_unknown(variable, name))
    if (hits := environment.get(f"{PREFIX}HITS")) not in (None, "", "python"):
        _complain(f"{PREFIX}HITS={hits!r} is not 'python', the one value it takes; it is ignored")
    return dataclasses.replace(Settings(), **_without_mode(found))


def _of_unknown(variable: str, name: str) -> str:
    """The warning for a variable that doesn't exist."""
    known = [*KNOWN, *map(str.lower, OTHER_VARIABLES)]
    near = accepted.nearest(name, known)
    listed = ", ".join(word.upper() for word in known)
    hint = f"did you mean {PREFIX}{near.upper()}?" if near else f"after {PREFIX} come {listed}"
    return f"{variable} is no variable of lazy_tensor's and is ignored; {hint}"


def _complain(message: str) -> None:
    """Warn of a variable in the environment. Where warnings are errors, print it to stderr: an
    exception here would leave the package imported in part."""
    try:
        warnings.warn_explicit(message, UserWarning, filename="environment", lineno=0)
    except UserWarning:
        print(f"lazy_tensor: {message}", file=sys.stderr)


def records_in_python() -> bool:
    """Whether hits come to Python, not to C++: by `LAZY_TENSOR_HITS=python`, for debugging."""
    return os.environ.get("LAZY_TENSOR_HITS") == "python"


if unknown_logs := logs.show(os.environ.get(f"{PREFIX}LOGS", "")):
    _complain(
        f"{PREFIX}LOGS: {', '.join(map(repr, unknown_logs))} not known; "
        f"known are {', '.join((*logs.NAMES, 'all'))}"
    )
_current = from_environment()
_listeners: list[Callable[[Settings], None]] = []


class _Here(threading.local):
    """The settings of this thread's innermost block that has options, None outside of such."""

    block: Settings | None = None


_here = _Here()


def current() -> Settings:
    """The settings in force in this thread: those of its innermost block that has options, else the
    process's."""
    return _here.block or _current


def of_process() -> Settings:
    """The settings in force where no block has options of its own."""
    return _current


def of_block() -> Settings | None:
    """The settings of this thread's innermost block that has options; None outside of such."""
    return _here.block


def put(settings: Settings) -> Settings:
    """Make `settings` those of the process, call the listeners, and return the previous ones."""
    global _current
    previous, _current = _current, settings
    _tell(previous, settings)
    return previous


def put_here(settings: Settings | None) -> None:
    """Put the settings of a block in force in this thread; by None those of the process."""
    before = current()
    _here.block = settings
    _tell(before, current())


def change(options: Mapping[str, Any], caller: str) -> None:
    """Change the process's settings, and those of a block that this thread is in, by `options`.

    Raises as `updated` does. Nothing has changed then.
    """
    # before anything changes, as it may raise
    new = updated(_current, options, caller)
    if _here.block is not None:
        put_here(updated(_here.block, options, caller))
    put(new)


def _tell(previous: Settings, settings: Settings) -> None:
    """Call the listeners if anything has changed."""
    if settings is not previous and settings != previous:
        for listener in _listeners:
            listener(settings)


def on_change(listener: Callable[[Settings], None]) -> None:
    """Call `listener(settings)` now and after each change."""
    _listeners.append(listener)
    listener(_current)
