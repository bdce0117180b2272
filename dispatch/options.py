"""Options as users give them: names, types and meanings, and checks of their values.

In: an option's name and a value. Out: the value as `Settings` holds it, or an error that says what
is accepted and which word was probably meant. Called by `settings`. `docs/options.md` has its table
from here.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, TypedDict, get_args

Compile = Literal["background", "blocking", "off"]
FlushPolicy = Literal["auto", "at_once", "at_materialization"]
Record = Literal["auto", "always"]
Sizes = Literal["any", "fixed"]
Forbidden = Literal["flush", "compile", "fallback", "redistribute"]
Mode = Literal["exact", "default", "fast"]


class Options(TypedDict, total=False):
    """The options of `configure`, `lazy_mode` and `replay`, for editors and type checkers.

    `Settings` has the same names, except `mode`, with their defaults; a test compares names and
    types. `docs/options.md` says what each option does.
    """

    backend: str
    compile: Compile
    cache_dir: str | os.PathLike[str]
    segment_cache_size: int
    schema_cache_size: int
    sharding_cache_size: int
    bucket_bytes: int
    max_segment_ops: int
    max_pending_bytes: int
    remat_interval: int
    flush_policy: FlushPolicy
    record: Record
    sizes: Sizes
    compile_threshold: int
    verify_every: int
    forbid: str | Collection[Forbidden]
    debug: bool
    warn: bool
    mode: Mode


PRESETS: dict[str, dict[str, Any]] = {
    "exact": {"backend": "aten", "compile": "off"},
    "default": {"backend": "auto", "compile": "background", "record": "auto", "remat_interval": 0},
    "fast": {"record": "always", "compile": "blocking", "remat_interval": 4},
}
"""The options that each `mode` sets. Options that are given beside it win."""

KNOWN = tuple(Options.__annotations__)
NAMES = tuple(name for name in KNOWN if name != "mode")
"""The options that `Settings` holds."""

CHOICES: dict[str, tuple[str, ...]] = {
    "compile": get_args(Compile), "flush_policy": get_args(FlushPolicy),
    "record": get_args(Record), "sizes": get_args(Sizes), "mode": get_args(Mode),
}  # fmt: skip
AT_LEAST = {
    "segment_cache_size": 1, "schema_cache_size": 1, "sharding_cache_size": 1, "bucket_bytes": 1,
    "max_segment_ops": 1, "max_pending_bytes": 1, "compile_threshold": 1, "remat_interval": 0,
    "verify_every": 0,
}  # fmt: skip
"""The options that are whole numbers, and the least that each may be. 0 turns an option off."""

# for errors: some users look for an option that switches recording off
RECORDS_NOTHING = "to record nothing, don't enter lazy_mode"


def nearest(word: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """The word of `known` that is most like `word`; None if none is like it."""
    return next(iter(difflib.get_close_matches(word, list(known), 1, likeness)), None)


def unknown(name: str, caller: str, others: tuple[str, ...] = ()) -> TypeError:
    """The error for an option that doesn't exist. `others` are options that only the caller has."""
    known = (*others, *KNOWN)
    near = nearest(name, known)
    hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
    if name in ("enable", "enabled", "disable", "disabled"):
        hint = RECORDS_NOTHING
    return TypeError(f"{caller}: unknown option {name!r}; {hint}")


def checked(name: str, value: Any, label: str) -> Any:
    """`value` as `Settings` holds it. A bad one raises TypeError or ValueError that begins with
    `label`.

    Not for `backend`: its choices are registered at run time, and `settings` checks it.
    """
    if name in CHOICES:
        if value not in CHOICES[name]:
            raise one_of(name, value, CHOICES[name], label)
        return str(value)
    if name in AT_LEAST:
        return _number(name, value, label)
    return _CHECKS[name](value, label)


def one_of(name: str, value: object, choices: Iterable[str], label: str) -> ValueError:
    """The error for a value that is none of an option's choices; it names the probable one."""
    choices = tuple(choices)
    word = str(value).strip().lower()
    meant = nearest(word, choices)
    listed = ", ".join(map(repr, choices))
    hint = "" if meant is None else f"; did you mean {meant!r}?"
    if name == "record":
        hint += f"; {RECORDS_NOTHING}"
    return ValueError(f"{label}={value!r} is not one of {listed}{hint}")


def _number(name: str, value: Any, label: str) -> int:
    """A whole number. Environment variables give it as text."""
    least = AT_LEAST[name]
    off = " (0 is off)" if least == 0 else ""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"{label}={value!r} is not a whole number{off}")
    try:
        number = int(value)
    except ValueError:
        raise ValueError(f"{label}={value!r} is not a whole number{off}") from None
    if number < least:
        raise ValueError(f"{label}={value!r} must be at least {least}{off}")
    return number


def _folder(value: Any, label: str) -> str:
    if isinstance(value, (str, os.PathLike)) and (path := str(os.fspath(value))):
        return path
    raise TypeError(f"{label}={value!r} is not a folder's path; leave it out for the default")


def _words(value: Any, label: str) -> frozenset[str]:
    """The events of `forbid`, given as a collection, or as text with commas."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    known = get_args(Forbidden)
    words: list[Any] = list(value) if isinstance(value, Iterable) else [value]
    if not all(isinstance(word, str) for word in words):
        listed = ", ".join(map(repr, known))
        raise TypeError(f"{label}={value!r} is not a set of any of {listed}; () forbids nothing")
    for word in words:
        if word not in known:
            raise one_of("forbid", word, known, label)
    return frozenset(words)


def _truth(value: Any, label: str) -> bool:
    """A boolean, given as any object, or as one of a few words."""
    if not isinstance(value, str):
        return bool(value)
    if value.lower() not in ("0", "1", "true", "false", "on", "off", "yes", "no", ""):
        raise ValueError(f"{label}={value!r} is not a boolean; use 0 or 1")
    return value.lower() in ("1", "true", "on", "yes")


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "cache_dir": _folder, "forbid": _words, "debug": _truth, "warn": _truth
}  # fmt: skip
