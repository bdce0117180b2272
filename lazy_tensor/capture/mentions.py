"""The names that a function's code mentions: attributes, globals, modules that it imports.

In: a code object. Out: its `Mentions`, with those of nested functions. Each code object is read
once. `reach` asks for them, to follow only objects that the code can get at.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mentions:
    """What a function's code mentions.

    `names` may be names of attributes; those in strings are included, as `getattr` takes strings.
    `imports` are modules that it imports when it runs. `computes_names` says that it may also get
    at attributes whose names don't occur in it.
    """

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
        # a class pattern has the names of its attributes in a tuple
        for constant in part.co_consts:
            several = constant if isinstance(constant, tuple) else (constant,)
            names.update(c for c in several if isinstance(c, str) and c.isidentifier())
        computes_names |= not _ALL_ATTRIBUTES.isdisjoint(part.co_names)
        # `getattr` and the like must get a constant string, else the code computes names. `waits`:
        # `getattr` was loaded and not called yet; `has_name`: a constant string was loaded since.
        waits = has_name = False
        for instruction in dis.get_instructions(part):
            name, argument = instruction.opname, instruction.argval
            if name == "IMPORT_NAME":
                imports.append(argument)
            elif name in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME"):
                used[argument] = None
            if argument in _BY_NAME and name.startswith("LOAD_"):
                waits, has_name = True, False
            elif waits and name.startswith(("FORMAT_", "BUILD_STRING", "BINARY_OP")):
                # a string is put together: a constant one is only a part of the name
                computes_names, waits = True, False
            elif name == "LOAD_CONST" and isinstance(argument, str):
                has_name = True
            elif waits and name.startswith("CALL"):
                computes_names |= not has_name
                waits = False
    return Mentions(frozenset(names), tuple(imports), tuple(used), computes_names)


_BY_NAME = frozenset({"getattr", "setattr", "hasattr", "delattr", "attrgetter"})
_ALL_ATTRIBUTES = frozenset({"__dict__", "vars", "eval", "exec"})
"""Names by which code gets at any attribute."""


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
