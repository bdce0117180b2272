"""What a function's code mentions: attributes, globals, modules that it imports.

In: a code object. Out: `Mentions`, those of nested functions included; read once for each.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mentions:
    """What a function's code mentions: `names` that it may use as an attribute's, those in strings
    included; the modules that it imports when it runs; globals; and whether it looks at attributes
    whose names don't stand in it."""

    names: frozenset[str]
    imports: tuple[str, ...]
    globals: tuple[str, ...]
    computes_names: bool


@functools.lru_cache(1 << 14)
def mentions_of(code: types.CodeType) -> Mentions:
    """All that `code` mentions."""
    names: set[str] = set()
    imports: list[str] = []
    used: dict[str, None] = {}
    computes_names = False
    for part in _codes(code):
        names.update(part.co_names)
        for constant in part.co_consts:  # patterns name attributes in tuples
            several = constant if isinstance(constant, tuple) else (constant,)
            names.update(c for c in several if isinstance(c, str) and c.isidentifier())
        computes_names |= not _ALL_ATTRIBUTES.isdisjoint(part.co_names)
        waits = has_name = False  # for the name that a `getattr` takes
        for instruction in dis.get_instructions(part):
            name, argument = instruction.opname, instruction.argval
            if name == "IMPORT_NAME":
                imports.append(argument)
            elif name in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME"):
                used[argument] = None
            if argument in _BY_NAME and name.startswith("LOAD_"):
                waits, has_name = True, False
            elif waits and name.startswith(("FORMAT_", "BUILD_STRING", "BINARY_OP")):
                computes_names, waits = True, False
            elif name == "LOAD_CONST" and isinstance(argument, str):
                has_name = True
            elif waits and name.startswith("CALL"):
                computes_names |= not has_name
                waits = False
    return Mentions(frozenset(names), tuple(imports), tuple(used), computes_names)


_BY_NAME = frozenset({"getattr", "setattr", "hasattr", "delattr", "attrgetter"})
_ALL_ATTRIBUTES = frozenset({"__dict__", "vars", "eval", "exec"})


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
