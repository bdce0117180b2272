"""The names that a function's code mentions: attributes, globals, modules that it imports.

In: a code object. Out: its `Mentions`, with those of nested functions. Each code object is read
once. `object_graph` asks for them, to follow only objects that the code can get at.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ANY_NAME = "*"
"""Among the names of code that may also get at attributes whose names don't occur in it."""


@dataclass(frozen=True, slots=True)
class Mentions:
    """What a function's code mentions.

    `names` may be names of attributes; those in strings are included, as `getattr` takes strings.
    `of_self` are those of attributes of a function's first argument, `stored` those of attributes
    and variables, not the function's own, that get another value; of items `rates_stored`, as
    `['lr']`. `imports` are modules that it may look up when it runs, relative ones with their dots.
    """

    names: frozenset[str]
    of_self: frozenset[str]
    stored: frozenset[str]
    rates_stored: frozenset[str]
    imports: tuple[str, ...]
    globals: tuple[str, ...]


@functools.lru_cache(1 << 14)
def mentions_of(code: types.CodeType) -> Mentions:
    """All that `code` mentions."""
    names: set[str] = set()
    of_self: set[str] = set()
    stored: set[str] = set()
    rates: set[str] = set()
    imports: list[str] = []
    used: dict[str, None] = {}
    for part in codes_in(code):
        names.update(part.co_names)
        texts = [one for one in part.co_consts if isinstance(one, str)]
        if "globals" in part.co_names:
            used.update(dict.fromkeys(texts))
        if not _MODULES.isdisjoint(part.co_names):
            imports += texts
        names |= names_in_texts(part)
        if looks_around(part) or _computes_names(part):
            names.add(ANY_NAME)
        found = [item_name(key) for key in _RATES if key in texts and "param_groups" in names]
        if found and any(one.opname == "STORE_SUBSCR" for one in dis.get_instructions(part)):
            rates.update(found)
        before: Any = None  # the variable that the last instruction loads
        loaded: list[Any] = []  # constants; before an import its level and the names taken from it
        for instruction in dis.get_instructions(part):
            name, argument = instruction.opname, instruction.argval
            if name in ("LOAD_CONST", "LOAD_SMALL_INT"):
                loaded.append(argument)
            elif name in ("STORE_ATTR", "STORE_DEREF"):
                stored.add(argument)
            elif name in ("LOAD_ATTR", "LOAD_METHOD") and before in part.co_varnames[:1]:
                of_self.add(argument)
            elif name == "IMPORT_NAME":
                imports.append("." * loaded[-2] + argument)
            elif name in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME"):
                used[argument] = None
                stored |= {argument} if name == "STORE_GLOBAL" else set()
            before = argument if "LOAD_FAST" in name else None
            if isinstance(before, tuple):  # of two variables, in Python 3.13
                before = before[-1]
    return Mentions(
        frozenset(names), frozenset(of_self), frozenset(stored), frozenset(rates), tuple(imports),
        tuple(used),
    )  # fmt: skip


def item_name(key: Any) -> str:
    """How an item under a constant key is called where others are called by their names."""
    return f"[{key!r}]"


@functools.lru_cache(1 << 14)
def names_looked_up(code: types.CodeType) -> frozenset[str]:
    """Names of attributes that code may get at by strings: by `getattr`, or by a class pattern."""
    has_patterns = any(one.opname == "MATCH_CLASS" for one in dis.get_instructions(code))
    if has_patterns or not _BY_NAME.isdisjoint(code.co_names):
        return names_in_texts(code)
    return frozenset()


def names_in_texts(code: types.CodeType) -> frozenset[str]:
    """What may be names of attributes in a code object's strings."""
    names: set[str] = set()
    # a class pattern has the names of its attributes in a tuple; so have keyword arguments
    for constant in set(code.co_consts) - _keywords(code):
        several = constant if isinstance(constant, tuple) else (constant,)
        # `attrgetter` takes a path: names with dots between them
        paths = [one.split(".") for one in several if isinstance(one, str)]
        names.update(name for path in paths for name in path if name.isidentifier())
    return frozenset(names)


def _keywords(code: types.CodeType) -> set[Any]:
    """Tuples that only name the keyword arguments of calls, which are no attributes."""
    steps = list(dis.get_instructions(code))
    # until Python 3.12 they have an instruction, later the call takes them from the stack
    loaded = [
        (one.argval, following.opname == "CALL_KW")
        for one, following in zip(steps, steps[1:], strict=False)
        if one.opname == "LOAD_CONST" and isinstance(one.argval, tuple)
    ]
    named = {code.co_consts[one.arg or 0] for one in steps if one.opname == "KW_NAMES"}
    named |= {constant for constant, is_named in loaded if is_named}
    return named - {constant for constant, is_named in loaded if not is_named}


@functools.lru_cache(1 << 14)
def looks_around(code: types.CodeType) -> bool:
    """Whether code may get at attributes or variables whose names don't occur in it."""
    globals_ = {one.argval for one in dis.get_instructions(code) if one.opname in GLOBAL_LOADS}
    return not (_FUNCTIONS.isdisjoint(globals_) and _ATTRIBUTES.isdisjoint(code.co_names))


def _computes_names(code: types.CodeType) -> bool:
    """Whether `getattr` or the like may get a name that is no constant string.

    True, too, where only a run could tell: the arguments depend on a condition, or the function is
    called under another name.
    """
    # of each call of such a function, innermost last: the function, and for each argument on the
    # stack whether it is a constant string. None is the NULL that Python 3.13 puts before them.
    calls: list[tuple[str, list[bool | None]]] = []
    for instruction in dis.get_instructions(code):
        name, opcode = instruction.opname, instruction.opcode
        if name == "EXTENDED_ARG":
            continue  # the next instruction has the whole argument
        if calls and (opcode in dis.hasjrel or opcode in dis.hasjabs):
            return True
        effect = dis.stack_effect(opcode, instruction.arg, jump=False)
        is_text = name == "LOAD_CONST" and isinstance(instruction.argval, str)
        pushed = None if name == "PUSH_NULL" else is_text
        while calls and len(calls[-1][1]) + effect <= 0:  # the call itself, or another use
            function, arguments = calls.pop()
            if arguments[:1] == [None]:
                del arguments[0]
            names = arguments if function == "attrgetter" else arguments[1:2]
            if not names or not all(names):
                return True
        for _, arguments in calls:
            if effect > 0:
                arguments += [pushed] * effect
            else:
                # its result lies on top; only the net effect is known, so that counts as computed
                del arguments[len(arguments) + effect :]
                arguments[-1] = False
        if name.startswith("LOAD_") and name != "LOAD_CONST" and instruction.argval in _BY_NAME:
            calls.append((instruction.argval, []))
    return False


_RATES = ("lr", "momentum", "weight_decay")
"""Keys of optimizers' groups under which programs set numbers."""
_BY_NAME = frozenset({"getattr", "setattr", "hasattr", "delattr", "attrgetter"})
_MODULES = frozenset({"modules", "import_module", "__import__"})
"""Names by which code gets at modules, under names in strings."""
GLOBAL_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
_FUNCTIONS = frozenset({"dir", "eval", "exec", "globals", "locals", "vars"})
_ATTRIBUTES = frozenset({
    "__dict__", "__getattribute__", "builtins", "cell_contents", "currentframe", "f_locals",
    "_getframe",
})  # fmt: skip
"""Functions, which aren't methods of such names, and attributes by which code looks around."""


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)
