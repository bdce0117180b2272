"""The options of `configure` and `lazy_mode`, their defaults, and their environment variables.

In: keyword options and `LAZY_TENSOR_<NAME>`. Out: one frozen `Settings`, read through `current()`.
The only module that reads the environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lazy_tensor.kernels import logs
from lazy_tensor.kernels.backend import backend_of

_CHOICES = {
    "compile": ("background", "blocking", "off"),
    "flush_policy": ("auto", "at_once", "at_materialization"),
    "record": ("auto", "always"),
}
_FORBIDDABLE = ("flush", "compile", "fallback", "redistribute")


def _default_cache_dir() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(base) / "lazy_tensor")


@dataclass(frozen=True, slots=True)
class Settings:
    """Every option, validated. See the README's table for what each does."""

    backend: str = "auto"
    compile: Literal["background", "blocking", "off"] = "background"
    cache_dir: str = dataclasses.field(default_factory=_default_cache_dir)
    segment_cache_size: int = 1024
    schema_cache_size: int = 16384
    sharding_cache_size: int = 4096
    bucket_bytes: int = 25 << 20
    max_segment_ops: int = 16384
    max_pending_bytes: int = 1 << 36
    remat_interval: int = 0
    flush_policy: str = "auto"
    record: Literal["auto", "always"] = "auto"
    compile_threshold: int = 2
    verify_every: int = 0
    forbid: frozenset[str] = frozenset()
    debug: bool = False
    warn: bool = True
    records_all: bool = dataclasses.field(init=False, repr=False, compare=False)
    """Whether ops are recorded whatever that costs: who waits for compilers doesn't count
    milliseconds, and rematerialization needs the trace whole."""

    plans_by: tuple[str, str, int] = dataclasses.field(init=False, repr=False, compare=False)
    """What a state's plans depend on."""
    _hash: int = dataclasses.field(init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return self._hash

    def __post_init__(self) -> None:
        values = tuple([getattr(self, name) for name in NAMES])
        object.__setattr__(self, "_hash", hash(values))
        plans_by = (self.backend, self.compile, self.remat_interval)
        object.__setattr__(self, "plans_by", plans_by)
        must = self.compile == "blocking" or self.record == "always" or self.remat_interval > 0
        object.__setattr__(self, "records_all", must)
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                options = ", ".join(repr(choice) for choice in allowed)
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {options}")
        for name in (
            "segment_cache_size",
            "schema_cache_size",
            "sharding_cache_size",
            "bucket_bytes",
            "max_segment_ops",
            "max_pending_bytes",
            "compile_threshold",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 1")
        for name in ("remat_interval", "verify_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 0 (0 is off)")
        for what in self.forbid:
            if what not in _FORBIDDABLE:
                options = ", ".join(repr(choice) for choice in _FORBIDDABLE)
                raise ValueError(f"forbid={what!r} is not one of {options}")


_TYPES = {f.name: str(f.type) for f in dataclasses.fields(Settings) if f.init}
NAMES = tuple(_TYPES)


def _as_set(value: str | Iterable[str]) -> frozenset[str]:
    if isinstance(value, str):
        return frozenset(part.strip() for part in value.split(",") if part.strip())
    return frozenset(value)


def _as_bool(value: object) -> bool:
    if isinstance(value, str):
        if value.lower() not in ("0", "1", "true", "false", "on", "off", "yes", "no", ""):
            raise ValueError(f"{value!r} is not a boolean; use 0 or 1")
        return value.lower() in ("1", "true", "on", "yes")
    return bool(value)


def _as_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"{value!r} is not a whole number")
    return int(value)


_CONVERT: dict[str, Callable[[Any], Any]] = {
    "int": _as_int, "bool": _as_bool, "frozenset[str]": _as_set
}  # fmt: skip


def updated(settings: Settings, options: dict[str, Any], caller: str) -> Settings:
    """`settings` with `options` over it.

    TypeError for an unknown name, naming the nearest; ValueError or TypeError for a bad value,
    naming the option.
    """
    if not options:
        return settings
    given = tuple(
        (k, frozenset(v) if isinstance(v, (set, list)) else v) for k, v in options.items()
    )
    try:
        hash(given)
    except TypeError:
        return _updated.__wrapped__(settings, given, caller)
    return _updated(settings, given, caller)


@functools.lru_cache(64, typed=True)  # a block in a loop asks each time
def _updated(settings: Settings, options: tuple[tuple[str, Any], ...], caller: str) -> Settings:
    values: dict[str, Any] = {}
    for name, value in options:
        if name not in _TYPES:
            near = difflib.get_close_matches(name, NAMES, 1, 0.4)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(NAMES)}"
            raise TypeError(f"{caller}: unknown option {name!r}{hint}")
        try:
            values[name] = _CONVERT.get(_TYPES[name], str)(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{caller}: {name}={value!r}: {error}") from None
    if values.get("backend", "auto") != "auto":
        _check_backend(values["backend"], caller)
    return dataclasses.replace(settings, **values)


def _check_backend(name: str, caller: str) -> None:
    """ValueError if there is no such backend, RuntimeError if it can run on no device here."""
    try:
        backend = backend_of(name)
    except ValueError as error:
        raise ValueError(f"{caller}: {error}") from None
    reasons = [backend.unavailable(device_type) for device_type in ("cpu", "cuda")]
    if None not in reasons:
        on_cpu, on_cuda = reasons
        told = on_cpu if on_cpu == on_cuda else f"on cpu: {on_cpu}; on cuda: {on_cuda}"
        raise RuntimeError(
            f"{caller}: backend {name!r} asked for, but {told}; "
            "backend='auto' takes one that can run"
        )


def from_environment() -> Settings:
    """The defaults with `LAZY_TENSOR_<NAME>` over them."""
    found = {
        name: os.environ[variable]
        for name in NAMES
        if (variable := f"LAZY_TENSOR_{name.upper()}") in os.environ
    }
    return updated(Settings(), found, "environment (LAZY_TENSOR_*)")


def records_in_python() -> bool:
    """Whether hits are to come to Python all the same: `LAZY_TENSOR_HITS=python`, for debugging."""
    return os.environ.get("LAZY_TENSOR_HITS") == "python"


logs.show(os.environ.get("LAZY_TENSOR_LOGS", ""))
_current = from_environment()
_listeners: list[Callable[[Settings], None]] = []


class _Here(threading.local):
    block: Settings | None = None


_here = _Here()


def current() -> Settings:
    """The settings in force in this thread: those of its innermost block that has options of its
    own, else the process's."""
    return _here.block or _current


def put(settings: Settings) -> Settings:
    """Make `settings` the process's, tell the listeners, return the previous ones."""
    global _current
    previous, _current = _current, settings
    _tell(previous, settings)
    return previous


def put_here(settings: Settings | None) -> Settings | None:
    """Make `settings` those of a block of this thread, None those of the process; return what the
    block around had."""
    previous, before = _here.block, current()
    _here.block = settings
    _tell(before, current())
    return previous


def change(options: dict[str, Any], caller: str) -> None:
    """Put `options` over the process's settings, and over those of a block that this thread is in.

    Raises as `updated` does, nothing changed then.
    """
    new = updated(_current, options, caller)
    if _here.block is not None:
        put_here(updated(_here.block, options, caller))
    put(new)


def _tell(previous: Settings, settings: Settings) -> None:
    if settings is not previous and settings != previous:
        for listener in _listeners:
            listener(settings)


def on_change(listener: Callable[[Settings], None]) -> None:
    """Call `listener(settings)` now and after each change."""
    _listeners.append(listener)
    listener(_current)
