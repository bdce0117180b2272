"""Tells what a program does with a number, as far as its bytecode says so.

In: a frame that waits for a number, such as `.item()` gives; or code that loads one, such as
`self.n_steps`. Out: whether the program only returns the number, from one caller to the next up to
a given function. Of a `TracedNumber`, which notes operations on it, the code may do more: compute,
compare, call ops, keep results. The bytecode is that of Python 3.11 to 3.13. What isn't known here
counts as a use of the number. `tape` and `kept_numbers` ask for `replay`.
"""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import CodeType, FrameType, FunctionType

from lazy_tensor.dispatch.mentions import GLOBAL_LOADS, item_name, looks_around, names_looked_up
from lazy_tensor.dispatch.number_takers import (
    ASKING,
    FUNCTIONS,
    NOTED,
    OP,
    OPERATOR_METHODS,
    InPython,
    Known,
    known_in,
    member_of,
)

OTHER, NUMBER, HOLDER, KEY = "", "number", "holder", "key"
"""Kinds of values: an unknown one; the number that is followed; a list, tuple or dict that holds
it; a key under which numbers are kept. Functions and modules that `number_takers` knows have kinds
of their own."""
HELD = frozenset({NUMBER, HOLDER, KEY})
OPERATORS = frozenset({"+", "-", "*", "/", "//", "%", "**"})
RESULTS = ("BINARY_OP", "COMPARE_OP", "UNARY_NEGATIVE")
"""Instructions that ask a number, and push what it gives."""
Stack = tuple[str, ...]
"""What the values on top of a frame's stack are. All below are unknown."""
KEEPERS = ("ATTR", "DEREF", "GLOBAL")
"""How instructions call what keeps numbers for the next call: attributes and such variables."""
Names = frozenset[tuple[str, str]]
"""Local variables that are known, each with what it is."""
Rules = tuple[Known, frozenset[str], frozenset[str]]
"""The globals that are known, each with what it is; the names under which numbers are kept; and the
names of the user's functions and attributes, which are no ops of torch's."""
Place = tuple[int, Stack, Names]
"""An instruction's number, and the stack and the local variables before it."""
Exits = tuple[frozenset[str], bool]
"""What is returned that holds a number, and whether an op is called with the number."""
NO_EXITS: Exits = frozenset(), False

READS, CONVERTS = ("item", "tolist"), ("bool", "float", "int")
"""Methods of tensors, and types, that give the number itself. Other calls that read a tensor, such
as `max`, do something with the number before they give anything."""
METHOD_LOAD = "LOAD_METHOD" if sys.version_info < (3, 12) else "LOAD_ATTR"
METHOD_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
LOADS = (*GLOBAL_LOADS, *METHOD_LOADS, "LOAD_DEREF", "LOAD_FAST")
CALLS = frozenset({"PRECALL", "CALL", "CALL_KW", "CALL_FUNCTION_EX"})
RETURNS = frozenset({"RETURN_VALUE", "RETURN_CONST"})
RAISES = frozenset({"RERAISE", "RAISE_VARARGS"})
JUMPS = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"})
NOTHING = frozenset({"CACHE", "EXTENDED_ARG", "KW_NAMES", "NOP", "PRECALL", "RESUME"})
PUSHES = frozenset({"LOAD_DEREF", "LOAD_NAME", "PUSH_NULL"})
TAKES = frozenset({
    "BINARY_OP", "BINARY_SLICE", "BINARY_SUBSCR", "BUILD_SLICE", "BUILD_STRING", "CALL",
    "CALL_FUNCTION_EX", "CALL_KW", "COMPARE_OP", "CONTAINS_OP", "CONVERT_VALUE", "FORMAT_SIMPLE",
    "FORMAT_VALUE", "FORMAT_WITH_SPEC", "GET_ITER", "IS_OP", "LOAD_ATTR", "LOAD_METHOD",
    "MAKE_FUNCTION", "TO_BOOL", "UNARY_INVERT", "UNARY_NEGATIVE", "UNARY_NOT", "UNPACK_SEQUENCE",
})  # fmt: skip
"""Instructions that take values off the stack and push what they make of them."""
MOST_PLACES = 10_000
"""Places that are followed in one function; in a longer one the number counts as used."""


class _Used(Exception):
    """The number may decide something."""


def is_only_returned(frame: FrameType | None, until: CodeType | None) -> bool:
    """Whether what `frame` waits for is only returned by it and by its callers, up to the function
    that has the code `until`: a number, or a list of numbers."""
    return _exits_of(frame, until, HOLDER, READS, (frozenset(), frozenset())) is not None


def calls_ops(
    frame: FrameType | None,
    until: CodeType | None,
    *,
    is_read: bool = False,
    kept: frozenset[str] = frozenset(),
    of_users: frozenset[str] = frozenset(),
) -> bool | None:
    """Whether the number that `frame` waits for may be given to an op by a call; None if other code
    may use it unnoticed.

    The number is the result of an operator or of a function of `NOTED` or of `math`; or `is_read`
    from a tensor. `until` is the code of the function that may return it. For `kept` and `of_users`
    see `Rules`.
    """
    exits = _exits_of(frame, until, NUMBER, READS if is_read else (), (kept, of_users))
    return None if exits is None else exits[1]


def _exits_of(
    frame: FrameType | None,
    until: CodeType | None,
    kind: str,
    names: tuple[str, ...],
    of_program: tuple[frozenset[str], frozenset[str]],
) -> Exits | None:
    """The exits of what the frame waits for, behind all its callers up to `until`."""
    called: CodeType | None = None
    has_ops = False
    while frame is not None and frame.f_code is not until:
        if kind:  # else it isn't returned
            if called is not None:
                names = (called.co_name,)
            elif names:
                names += tuple([name for name in CONVERTS if name not in frame.f_globals])
            rules = (known_in(frame.f_code, frame.f_globals), *of_program)
            exits = _exits(frame.f_code, frame.f_lasti, names, kind, rules)
            if exits is None or len(exits[0]) > 1:
                return None
            kind, has_ops = "".join(exits[0]), has_ops or exits[1]
        called, frame = frame.f_code, frame.f_back
    return None if frame is None else (frozenset(), has_ops)


@lru_cache(1024)
def _exits(
    code: CodeType, offset: int, names: tuple[str, ...], kind: str, rules: Rules
) -> Exits | None:  # fmt: skip
    """The exits of a value of this kind that an instruction at `offset` of a function's bytecode
    pushes; None if the function does something else with it, too.

    The instruction calls one of the functions `names`; without them, see `calls_ops`.
    """
    if looks_around(code):
        return None
    return _Function(code, rules).exits(offset, names, kind)


@lru_cache(1024)
def may_be_kept(code: CodeType, rules: Rules, *, may_return: bool) -> tuple[frozenset[str], ...]:
    """Those of the names for kept numbers in `rules` whose numbers a function only computes with,
    gives to ops, keeps under such names, and returns if it `may_return` them; and those of them
    that it gives to ops by a call."""
    known, kept, of_users = rules
    if looks_around(code):
        return frozenset(), frozenset()
    mentioned = {*code.co_names, *code.co_freevars, *code.co_cellvars}
    mentioned.update(map(item_name, code.co_consts))
    kept -= names_looked_up(code)
    if mentioned.isdisjoint(kept):
        return kept, frozenset()
    function = _Function(code, (known, kept, of_users))
    exits = {one: function.keeps(one, may_return=may_return) for one in kept}
    return (
        frozenset(one for one in kept if exits[one] is not None),
        frozenset(one for one in kept if exits[one]),
    )


@lru_cache(1024)
def exits_of_argument(
    code: CodeType, name: str, rules: Rules, callers: tuple[CodeType, ...] = ()
) -> Exits | None:
    """The exits of a number that a function gets as an argument, and may return; None if it does
    something else with it. `callers` are the functions that are being followed up to its call."""
    # a variable that nested functions see, too, is followed by name there
    if looks_around(code) or name in (*code.co_cellvars, *code.co_freevars):
        return None
    return _Function(code, rules, callers).goes_to((0, (), frozenset({(name, NUMBER)})))


class _Function:
    def __init__(self, code: CodeType, rules: Rules, callers: tuple[CodeType, ...] = ()) -> None:
        self._code, self._callers = code, (*callers, code)
        self._known, self._kept, self._of_users = dict(rules[0]), *rules[1:]
        # an object of the user's on the left of an operator may do anything with the number
        self._may_ask_users = not OPERATOR_METHODS.isdisjoint(self._of_users)
        self._steps = list(dis.get_instructions(code))
        self._number_at = {step.offset: i for i, step in enumerate(self._steps)}
        self._handlers = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
        self._kinds: set[str] = set()  # that are returned
        self._calls_ops = False
        self._loads: set[int] = set()  # instructions that load an item by a key

    def exits(self, offset: int, names: tuple[str, ...], kind: str) -> Exits | None:
        """See `_exits`."""
        steps = self._steps
        at = max(i for i, step in enumerate(steps) if step.offset <= offset)
        # in Python 3.11 PRECALL may do all of the call
        at += steps[at].opname == "PRECALL"
        is_result = not names and steps[at].opname in RESULTS
        if is_result or self._calls(at, names or (*NOTED, *FUNCTIONS["math"])):
            return self._pushed_by(at, kind)
        return None

    def keeps(self, name: str, *, may_return: bool) -> bool | None:
        """Whether a number that is loaded by a name may be given to an op by a call; None if
        something else may be done with it than to keep it, or to return it if that may be."""
        calls_ops = False
        pushed = self._loads_of(name)
        for i, kind in pushed or ():
            exits = self._pushed_by(i, kind)
            if exits is None or (exits[0] and not may_return):
                return None
            calls_ops |= exits[1]
        return None if pushed is None else calls_ops

    def _loads_of(self, name: str) -> list[tuple[int, str]] | None:
        """The instructions that load what has a name, or the key that it is kept under, each with
        the kind; None if one that isn't known has the name."""
        loads: list[tuple[int, str]] = []
        for i, step in enumerate(self._steps):
            verb, _, keeper = step.opname.partition("_")
            if keeper == "CONST":
                loads += [(i, KEY)] if item_name(step.argval) == name else []
                continue
            if step.argval != name or verb == "STORE":
                continue
            if step.opname in ("LOAD_CLOSURE", "MAKE_CELL"):
                continue  # for another function
            # a call of it, or an instruction that isn't known
            effect = dis.stack_effect(step.opcode, step.arg)
            if verb != "LOAD" or keeper not in KEEPERS or effect != (keeper != "ATTR"):
                return None
            loads.append((i, NUMBER))
        if any(kind == KEY for _, kind in loads):
            with suppress(_Used):
                self._loads.clear()
                for _ in self._walk((0, (), frozenset())):
                    pass
                return [*loads, *((i, NUMBER) for i in self._loads)]
            return None
        return loads

    def _pushed_by(self, i: int, kind: str) -> Exits | None:
        """The exits of a value of this kind that instruction `i` pushes."""
        try:
            stack, variables = self._before(i)
            is_by_key = stack[-1:] == (KEY,) and self._steps[i].opname == "BINARY_SUBSCR"
            stack = (*stack[:-1], OTHER) if is_by_key else stack
            stack = _without(_padded(stack, self._steps[i]), _n_taken(self._steps[i], 1))
        except _Used:
            return None
        return self.goes_to((i + 1, (*stack, kind), variables))

    def goes_to(self, start: Place) -> Exits | None:
        """The exits of all that is held at a place; None if something else is done with it."""
        self._kinds, self._calls_ops = set(), False
        try:
            for _ in self._walk(start, only_held=True):
                pass
        except _Used:
            return None
        return frozenset(self._kinds), self._calls_ops

    def _before(self, i: int) -> tuple[Stack, Names]:
        """What is known of the stack before an instruction, and of the variables."""
        places = [place for place in self._walk((0, (), frozenset())) if place[0] == i]
        if not places:
            raise _Used  # no way leads there
        variables = frozenset.intersection(*[names for _, _, names in places])
        return _merged([stack for _, stack, _ in places]), variables

    def _walk(self, start: Place, *, only_held: bool = False) -> Iterator[Place]:
        """All places that may come from `start` on; with `only_held` while anything holds the
        number."""
        waiting, seen = [start], set[Place]()
        while waiting:
            i, stack, names = waiting.pop()
            while stack and stack[0] == OTHER:
                stack = stack[1:]
            place = i, stack, names
            if place in seen or (only_held and not _is_held(place)):
                continue
            seen.add(place)
            if len(seen) > MOST_PLACES:
                raise _Used
            yield place
            waiting += self._following(place)

    def _calls(self, call: int, names: tuple[str, ...]) -> bool:
        """Whether the call at this place is of a function, or a method, of one of these names."""
        step = self._steps[call]
        if step.opname not in CALLS:
            return False
        # these call what they are given at once
        if names[0] in ("<dictcomp>", "<listcomp>") or is_decorator(self._code):
            return True
        if step.opname == "CALL_FUNCTION_EX":
            return False
        # Walk back over the arguments: the function was loaded before them.
        wanted, depth = (step.arg or 0) + (step.opname == "CALL_KW"), 0
        loads: tuple[str, ...] = LOADS
        if names[0] in READS:
            # `x.item()` and `float(x)`, but not `x.float()`, nor variables of these names
            if wanted > 1:
                return False
            loads = GLOBAL_LOADS if wanted else METHOD_LOADS
            names = tuple([name for name in names if (name in CONVERTS) == bool(wanted)])
        call -= self._steps[call - 1].opname == "PRECALL"
        for before in reversed(self._steps[:call]):
            if depth == wanted and before.opname == "PUSH_NULL":
                continue
            if depth == wanted:
                return before.opname in loads and before.argval in names
            if _jumps(before) or depth > wanted:
                return False
            depth += dis.stack_effect(before.opcode, before.arg)
        return False

    def _following(self, place: Place) -> Iterator[Place]:
        """The places behind an instruction."""
        i, stack, names = place
        step = self._steps[i]
        name = step.opname
        for entry in self._handlers:
            # at a handler the stack is that of the statement, which has no value in it
            if entry.start <= step.offset < entry.end:
                yield self._number_at[entry.target], (), names
        if name in RETURNS:
            self._kinds |= HELD.intersection(stack[-1:])
            return
        if name in RAISES and not _holds(stack):
            return
        if not _jumps(step):
            if name.startswith("YIELD") and _is_held(place):
                raise _Used
            yield i + 1, *self._after(step, stack, names)
            return
        is_loop = name == "FOR_ITER"
        if name.startswith("POP_JUMP"):
            # a number notes that its truth is asked for
            is_asked = stack[-1:] == (NUMBER,) and name.endswith(("_TRUE", "_FALSE"))
            stack = stack[:-1] if is_asked else _without(stack, 1)
        elif stack[-1:] == (NUMBER,) and name.endswith("_OR_POP"):
            yield self._number_at[step.argval], stack, names
            yield i + 1, stack[:-1], names
            return
        elif not (name in JUMPS or is_loop):
            if _holds(stack):
                raise _Used
            stack = ()
        target = self._number_at[step.argval]
        # at a loop's end the iterator leaves the stack, and the instructions for that are skipped
        if is_loop and self._steps[target].opname == "END_FOR":
            target += 1 + (sys.version_info >= (3, 13))
        yield target, _without(stack, 1) if is_loop else stack, names
        if name not in JUMPS:
            yield i + 1, (*stack, OTHER) if is_loop else stack, names

    def _after(self, step: dis.Instruction, stack: Stack, names: Names) -> tuple[Stack, Names]:
        """The stack and the names behind an instruction that is no jump."""
        name, n = step.opname, step.arg or 0
        if "_FAST" in name:
            return self._after_fast(name, step.argval, stack, names)
        if name in NOTHING:
            return stack, names
        if name == "LOAD_CONST":
            is_key = item_name(step.argval) in self._kept
            return (*stack, KEY if is_key else OTHER), names
        if name == "STORE_SUBSCR" and stack[-1:] == (KEY,):
            stack = _padded(stack, step)
            self._calls_ops |= stack[-3] == NUMBER  # an optimizer gives it to ops
            if HOLDER in stack[-3:]:
                raise _Used
            return stack[:-3], names
        if name == "BINARY_SUBSCR" and stack[-1:] == (KEY,):
            self._loads.add(self._number_at[step.offset])
            return (*_without(stack[:-1], 1), OTHER), names
        verb, _, keeper = name.partition("_")
        is_kept = keeper in KEEPERS and step.argval in self._kept
        n_owners = keeper == "ATTR"  # on top of the stack
        if is_kept and verb == "STORE" and _padded(stack, step)[-1 - n_owners] == NUMBER:
            return stack[: -1 - n_owners], names
        if is_kept and verb == "LOAD" and keeper != "GLOBAL":
            return (*_without(stack, n_owners), OTHER), names
        if name == "LOAD_GLOBAL":
            kind = self._known.get(step.argval, OTHER)
            # with the lowest bit set it pushes NULL too: before the function until Python 3.12
            pushed = [OTHER] * (n & 1)
            pushed.insert(0 if sys.version_info >= (3, 13) else n & 1, kind)
            return (*stack, *pushed), names
        if name in METHOD_LOADS:
            is_method = name == METHOD_LOAD and _n_taken(step, 2) == 1
            member = member_of(_padded(stack, step)[-1], step.argval, self._of_users)
            return (*_without(stack, 1), member, *[OTHER] * is_method), names
        if not any(stack):
            # an unknown value is as good as one of those below
            return stack, names
        stack = _padded(stack, step)
        if name in ("CALL", "CALL_KW"):
            function, given, rest = _call(step, stack)
            if name == "CALL" and isinstance(function, InPython) and NUMBER in given:
                return (*rest, self._given_to(function.function, step, given)), names
            self._calls_ops |= function == OP and NUMBER in given
        has_two = step.opname in ("BINARY_OP", "COMPARE_OP")
        if has_two and self._may_ask_users and stack[-1] == NUMBER != stack[-2]:
            raise _Used
        return _after_others(step, stack), names

    def _given_to(self, function: FunctionType, call: dis.Instruction, given: Stack) -> str:
        """What a call of a function in Python gives, whose arguments, `given`, hold the number."""
        code, i = function.__code__, self._number_at[call.offset]
        is_named = "KW_NAMES" in (self._steps[i - 1].opname, self._steps[i - 2].opname)
        is_whole = not code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR)
        is_known = is_whole and not is_named and len(given) <= code.co_argcount
        if not is_known or code in self._callers or not HELD.intersection(given) <= {NUMBER}:
            raise _Used
        rules = known_in(code, function.__globals__), self._kept, self._of_users
        returned: set[str] = set()
        for name, kind in zip(code.co_varnames, given, strict=False):
            exits = exits_of_argument(code, name, rules, self._callers) if kind else NO_EXITS
            if exits is None or not exits[0] <= {NUMBER}:
                raise _Used
            returned |= exits[0]
            self._calls_ops |= exits[1]
        return "".join(returned)

    def _after_fast(
        self, name: str, variables: str | tuple[str, ...], stack: Stack, names: Names
    ) -> tuple[Stack, Names]:
        """The same behind an instruction on local variables, such as `STORE_FAST_LOAD_FAST`."""
        changed, kept = list(stack), dict(names)
        variables = (variables,) if isinstance(variables, str) else variables
        for what, variable in zip(re.findall("LOAD|STORE|DELETE", name), variables, strict=True):
            if what == "LOAD":
                changed.append(kept.get(variable, OTHER))
            if what != "LOAD" or name.endswith("_AND_CLEAR"):
                kept.pop(variable, None)
            if what == "STORE":
                stored = changed.pop() if changed else OTHER
                if stored:
                    kept[variable] = stored
        return tuple(changed), frozenset(kept.items())


def _jumps(step: dis.Instruction) -> bool:
    return step.opcode in dis.hasjrel or step.opcode in dis.hasjabs


def is_decorator(code: CodeType | None) -> bool:
    """Whether a function is what decorators such as `torch.no_grad()` make of another, which it
    calls and whose result it returns."""
    if code is None:
        return False
    return code.co_name == "decorate_context" and code.co_filename.endswith("_contextlib.py")


def _holds(stack: Stack) -> bool:
    return not HELD.isdisjoint(stack)


def _is_held(place: Place) -> bool:
    """Whether anything holds the number."""
    return _holds(place[1]) or any(kind in HELD for _, kind in place[2])


def _merged(stacks: list[Stack]) -> Stack:
    """What is known of a stack that is one of these."""
    known: list[str] = []
    for kinds in zip(*(reversed(stack) for stack in stacks), strict=False):
        known.insert(0, kinds[0] if len({*kinds}) == 1 else OTHER)
    return tuple(known)


def _padded(stack: Stack, step: dis.Instruction) -> Stack:
    """The stack with unknown values below, as many as an instruction may take."""
    return (OTHER,) * (2 * (step.arg or 0) + 4) + stack


def _n_taken(step: dis.Instruction, n_made: int) -> int:
    """How many values an instruction takes that pushes `n_made`."""
    # in Python 3.11 the effect of a call is said to be that of PRECALL and CALL together
    if step.opname == "CALL":
        return (step.arg or 0) + 2
    return n_made - dis.stack_effect(step.opcode, step.arg)


def _without(stack: Stack, n: int) -> Stack:
    """The stack without its top `n` values, which something uses."""
    if n and _holds(stack[-n:]):
        raise _Used
    return stack[: max(len(stack) - n, 0)]


def _after_others(step: dis.Instruction, stack: Stack) -> Stack:
    """The stack behind an instruction that neither jumps nor loads by a name."""
    name, n = step.opname, step.arg or 0
    if name in PUSHES:
        return (*stack, OTHER)
    if name == "POP_TOP":
        return stack[:-1]
    if name == "COPY":
        return (*stack, stack[-n])
    if name == "SWAP":
        changed = list(stack)
        changed[-1], changed[-n] = stack[-n], stack[-1]
        return tuple(changed)
    if name in ("BUILD_TUPLE", "BUILD_LIST"):
        return (*stack[: len(stack) - n], _holder(stack[len(stack) - n :]))
    if name == "BUILD_CONST_KEY_MAP":
        return (*stack[: -n - 1], _holder(stack[-n - 1 :]))
    if name == "BUILD_MAP" and not _holds(stack[len(stack) - 2 * n :: 2]):
        return (*stack[: len(stack) - 2 * n], _holder(stack[len(stack) - 2 * n :]))
    if name == "LIST_APPEND" or (name == "MAP_ADD" and stack[-2] not in HELD):
        is_held, rest = stack[-1] in HELD, list(stack[: -1 if name == "LIST_APPEND" else -2])
        rest[-n] = HOLDER if is_held else rest[-n]
        return tuple(rest)
    asked = _asked(step, stack)
    if asked is not None:
        return asked
    if name not in TAKES:
        if _holds(stack):
            raise _Used
        return ()
    n_made = n if name == "UNPACK_SEQUENCE" else 1
    return (*_without(stack, _n_taken(step, n_made)), *[OTHER] * n_made)


def _holder(values: Stack) -> str:
    """What a list, tuple or dict of these values is."""
    return HOLDER if _holds(values) else OTHER


def _asked(step: dis.Instruction, stack: Stack) -> Stack | None:
    """The stack behind an operation that asks the number, so that what it gives is followed by
    itself, or that gives the number again; None for any other."""
    name = step.opname
    if name in ("UNARY_NEGATIVE", "UNARY_NOT", "TO_BOOL"):
        return (*stack[:-1], OTHER) if stack[-1] == NUMBER else None
    if name in ("BINARY_OP", "COMPARE_OP"):
        operands = stack[-2:]
        sign = step.argrepr.rstrip("=")
        is_operator = name == "COMPARE_OP" or sign in OPERATORS
        # what stands on the left of `%` may be a text, which doesn't ask
        is_asked = is_operator and (sign != "%" or operands[0] == NUMBER)
        return (*stack[:-2], OTHER) if is_asked and HOLDER not in operands else None
    if name not in ("CALL", "CALL_KW"):
        return None
    function, given, rest = _call(step, stack)
    if function == "dict":
        return (*rest, _holder(given))
    if HOLDER in given:
        return (*rest, OTHER) if function == "len" else None
    if function in ("max", "min"):
        is_alone = name == "CALL_KW" or len(given) == 1
        if NUMBER in given:
            return None if is_alone else (*rest, NUMBER)
        return (*rest, OTHER)
    # `round` doesn't ask its number of digits
    is_asked = function in ASKING and (function != "round" or NUMBER not in given[1:])
    return (*rest, OTHER) if is_asked else None


def _call(step: dis.Instruction, stack: Stack) -> tuple[str, Stack, Stack]:
    """What a call calls, if that is known; what it is given; and the stack below."""
    n, is_named = step.arg or 0, step.opname == "CALL_KW"  # the names lie above the arguments
    given = stack[len(stack) - n - is_named : len(stack) - is_named]
    rest = stack[: len(stack) - n - is_named - 2]
    # the function stands before an object or NULL, or behind it
    known = [one for one in stack[len(rest) : len(rest) + 2] if one and one not in HELD]
    return known[0] if len(known) == 1 else "".join(known), given, rest
