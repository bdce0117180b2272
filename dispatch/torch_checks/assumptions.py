"""Checks what this package relies on in Python and torch though neither promises it.

In: the running Python and torch. Out: `checks()`, each with what was found instead if it fails.
`lazy_tensor` asks `failed()` at import. If a check fails nothing is recorded, programs run as in
eager, and `why_off()` says why. `python -m lazy_tensor doctor` shows all checks.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.torch_checks import names
from lazy_tensor.dispatch.trie.liveness import live_values
from lazy_tensor.kernels.disk import Disk
from lazy_tensor.kernels.extension import cpp

IN_PYTHON = "to record in Python, which is slow, set LAZY_TENSOR_HITS=python"
VERSIONS = "torch 2.10 to 2.13 on Python 3.11 to 3.13"


@dataclass(frozen=True, slots=True)
class Check:
    """An assumption, what was found instead ("" if it holds), and what to do."""

    name: str
    problem: str
    remedy: str = f"use {VERSIONS}, or a newer lazy-tensor"


@functools.cache
def checks() -> tuple[Check, ...]:
    """Every check, each after those that it relies on. Those that rely on torch's private names are
    left out if one of the first four fails."""
    first = (
        Check("the system is not Windows", _problem(_has_system), "use WSL, which is Linux"),
        Check("one thread runs Python at a time", _problem(_has_gil), "use a Python with the GIL"),
        Check("the recorder's C++ is compiled, or can be", _problem(_has_cpp), IN_PYTHON),
        Check("torch's private names exist", _problem(_has_names)),
    )
    if any(check.problem for check in first):
        return first
    try:
        # here, not above: to import it raises where a name is missing
        from lazy_tensor.dispatch.torch_checks import behavior
    except (ImportError, AttributeError) as error:
        return (*first, Check("torch's private names exist", f"{error}"))
    found: list[Check] = []
    own: tuple[tuple[str, Callable[[], str]], ...] = (
        ("reference counts tell who holds a value", _counts_tell_owners),
        ("C++ finds attributes in slots", _slots_are_pointers),
    )

    def run() -> None:
        found.extend(Check(name, _problem(find)) for name, find in (*own, *behavior.CHECKS))

    if getattr(torch.__spec__, "_initializing", False):
        # TORCH_LOGS names us, so torch imports us while it is imported itself. Another thread would
        # wait for torch's import, and torch's import for that thread.
        run()
        return (*first, *found)
    # in a new thread no mode is entered, and what the program has set so far isn't in force
    thread = threading.Thread(target=run, name="lazy_tensor-checks")
    thread.start()
    thread.join()
    return (*first, *found)


def failed() -> tuple[Check, ...]:
    """The checks that failed; () where recording works."""
    return tuple(check for check in checks() if check.problem)


def why_off() -> str:
    """Why nothing is recorded and what to do, as one sentence; "" where recording works."""
    found = failed()
    if not found:
        return ""
    first = found[0]
    others = f" (and {len(found) - 1} more)" if found[1:] else ""
    return (
        f"{first.problem} (torch {torch.__version__}, Python {platform.python_version()}); "
        f"it needs that {first.name}{others}; {first.remedy}; "
        "`python -m lazy_tensor doctor` lists the checks"
    )


def _problem(find: Callable[[], str]) -> str:
    """What a check finds instead of what it should; "" if it holds."""
    try:
        return find()
    except Exception as error:
        return f"checking it raised {type(error).__name__}: {error}"


def _has_system() -> str:
    return "this is Windows" if platform.system() == "Windows" else ""


def _has_gil() -> str:
    return "this Python is a free-threaded build" if "t" in sys.abiflags else ""


def _has_cpp() -> str:
    # Python alone takes three to eight times as long as eager for small ops
    problem = "" if settings.records_in_python() else cpp.HITS.problem()
    if not problem or cpp.HITS.built() is not None:
        return ""
    disk = Disk(Path(settings.current().cache_dir))
    return problem if disk.is_off or disk.get(cpp.HITS.key()) is None else ""


def _has_names() -> str:
    lacking = names.missing((*names.NEEDED, *names.OF_OBJECTS))
    return f"torch has no {', '.join(lacking)}" if lacking else ""


class _Held:
    """An object whose references the checks know."""

    value: Any = None


def _counts_tell_owners() -> str:
    # As in a trace: some values are held by the list of values alone, others also by an attribute,
    # another list or a local variable.
    owner, in_attribute = _Held(), _Held()
    owner.value = in_attribute
    in_list, in_local = [_Held()], _Held()
    values = [_Held(), in_attribute, _Held(), in_list[0], in_local]
    owned = [values[1], values[3], values[4]]
    del in_attribute
    expected = list(map(id, owned))
    owned.clear()  # it holds them too
    if list(map(id, live_values(values))) != expected:
        return "a value that a list alone holds counts as one with an owner, or the reverse"
    owner.value = None
    in_list.clear()
    if list(map(id, live_values(values))) != [id(in_local)]:
        return "a value without its last owner counts as one with an owner"
    return ""


class _Slotted:
    __slots__ = ("first", "second")

    def __init__(self, first: Any, second: Any) -> None:
        self.first = first
        self.second = second


def _slots_are_pointers() -> str:
    # C++ reads attributes of a trace and its states in this way (`Member` in `native/objects.h`)
    slotted = _Slotted(_Held(), _Held())
    start, size = id(slotted) + object.__basicsize__, ctypes.sizeof(ctypes.c_void_p)
    found = [ctypes.c_void_p.from_address(start + i * size).value for i in range(2)]
    expected = [id(slotted.first), id(slotted.second)]
    return "" if found == expected else "they hold other things than pointers to their objects"
