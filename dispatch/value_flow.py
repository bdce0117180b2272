"""Tells what a program does with a number that it reads, as far as its bytecode says so.

In: a frame that waits for the number, as `.item()` gives it; or code that loads a number, such as
`self.n_steps`. Out: whether the number, and all that it is put into, goes nowhere but to the
caller, and on to a given function. `replay` asks: a number that is only returned may be another one
at each call. On its way Python may compute with a number that notes this (`TracedNumber`), and put
it where numbers are kept for the next call. The bytecode is that of Python 3.11 to 3.13. What isn't
known here counts as a use of the number.
"""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from types import CodeType, FrameType

from lazy_tensor.dispatch.mentions import GLOBAL_LOADS, looks_around, names_looked_up
from lazy_tensor.dispatch.traced_number import PLAIN_TYPES, TracedNumber

OTHER, PLAIN, NUMBER, HOLDER = "", "plain", "number", "holder"
"""Kinds of values: an unknown one; a Python number; the number that is followed, or one computed
from it; a list, tuple or dict that holds it. The kind of a function of `NOTED`, and of a method
`ITEM`, that may be called next is its name."""
HELD = frozenset({NUMBER, HOLDER})
NOTED = frozenset({"abs", "dict", "len", "max", "min", "round"})
"""Functions that a number may be given to: they call its methods, or keep it as `dict` does. `len`
gives a plain number."""
ITEM = "item"
"""The method that gives a plain number, unless a class of the user's has another one."""
OPERATORS = frozenset({"+", "-", "*", "/", "//", "%", "**"})
Stack = tuple[str, ...]
"""What the values on top of a frame's stack are. All below are unknown."""
KEEPERS = ("ATTR", "DEREF", "GLOBAL")
"""How instructions call what keeps numbers for the next call: attributes and such variables."""
Names = frozenset[tuple[str, str]]
"""Local variables that are known, each with what it is."""
Rules = tuple[frozenset[str], frozenset[str], bool]
"""The functions of `NOTED`, and `ITEM`, that have these names in the code, the names under which
numbers are kept, and whether what comparisons give counts as a number."""
Place = tuple[int, Stack, Names]
"""An instruction's number, and the stack and the local variables before it."""

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


def is_only_returned(
    frame: FrameType | None,
    until: CodeType | None,
    *,
    is_noted: bool = False,
    traces_bools: bool = False,
    kept: frozenset[str] = frozenset(),
    unknown: frozenset[str] = frozenset(),
) -> bool:
    """Whether the number that `frame` waits for is only returned by it and by its callers, up to
    the function that has the code `until`.

    If it `is_noted`, Python may also compute with the number and compare it, and keep results under
    the names `kept`. With `traces_bools` the outcomes of comparisons are followed, too. `unknown`
    has `ITEM` if a class of the user's has such a method.
    """
    called: CodeType | None = None
    kind = NUMBER if is_noted else HOLDER
    while frame is not None and frame.f_code is not until:
        if not kind:  # it isn't returned
            frame = frame.f_back
            continue
        if called is None:
            names = (*READS, *(name for name in CONVERTS if name not in frame.f_globals))
        else:
            names = (called.co_name,)
        rules = known_functions(frame.f_globals, unknown), kept, traces_bools
        kinds = _returned(frame.f_code, frame.f_lasti, names, kind, rules, frozenset())
        if kinds is None and kind == NUMBER:
            # its variables are looked at only here: their dict would keep tensors alive
            numbers = frozenset(
                (name, PLAIN)
                for name, value in frame.f_locals.items()
                if type(value) in (*PLAIN_TYPES, TracedNumber)
            )
            kinds = _returned(frame.f_code, frame.f_lasti, names, kind, rules, numbers)
        if kinds is None or len(kinds) > 1:
            return False
        kind = "".join(kinds)
        called, frame = frame.f_code, frame.f_back
    return frame is not None


def known_functions(seen: Collection[str], unknown: frozenset[str]) -> frozenset[str]:
    """The functions that have their usual meaning in code that sees the globals `seen`."""
    return NOTED.difference(seen) | {ITEM} - unknown


@lru_cache(1024)
def _returned(
    code: CodeType, offset: int, names: tuple[str, ...], kind: str, rules: Rules, variables: Names
) -> frozenset[str] | None:  # fmt: skip
    """What a function returns that holds the result of one of these functions, called at `offset`
    of its bytecode, if it does nothing else with the result; else None.

    The result is of this kind.
    """
    if looks_around(code):
        return None
    return _Function(code, rules).returned(offset, names, kind, variables)


@lru_cache(1024)
def may_be_kept(code: CodeType, rules: Rules, *, may_return: bool) -> frozenset[str]:
    """Those of the names for kept numbers in `rules` whose numbers a function only computes with,
    keeps under such names, and returns if it `may_return` them."""
    known, kept, traces_bools = rules
    if looks_around(code):
        return frozenset()
    mentioned = {*code.co_names, *code.co_freevars, *code.co_cellvars}
    kept -= names_looked_up(code)
    if mentioned.isdisjoint(kept):
        return kept
    function = _Function(code, (known, kept, traces_bools))
    return kept - {one for one in kept if not function.keeps(one, may_return=may_return)}


class _Function:
    def __init__(self, code: CodeType, rules: Rules) -> None:
        self._code = code
        self._known, self._kept, self._traces_bools = rules
        self._steps = list(dis.get_instructions(code))
        self._number_at = {step.offset: i for i, step in enumerate(self._steps)}
        self._handlers = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
        self._kinds: set[str] = set()  # that are returned
        self._names_what_is_loaded = False

    def returned(
        self, offset: int, names: tuple[str, ...], kind: str, variables: Names
    ) -> frozenset[str] | None:
        """See `_returned`."""
        steps = self._steps
        call = max(i for i, step in enumerate(steps) if step.offset <= offset)
        # in Python 3.11 PRECALL may do all of the call
        call += steps[call].opname == "PRECALL"
        return self._goes_to(call, kind, variables) if self._calls(call, names) else None

    def keeps(self, name: str, *, may_return: bool) -> bool:
        """Whether a number that is loaded by a name is only kept, or returned if it may be."""
        for i, step in enumerate(self._steps):
            verb, _, keeper = step.opname.partition("_")
            if step.argval != name or verb == "STORE" or keeper == "CONST":
                continue
            if step.opname in ("LOAD_CLOSURE", "MAKE_CELL"):
                continue  # for another function
            # a call of it, or an instruction that isn't known
            effect = dis.stack_effect(step.opcode, step.arg)
            if verb != "LOAD" or keeper not in KEEPERS or effect != (keeper != "ATTR"):
                return False
            kinds = self._goes_to(i, NUMBER, frozenset())
            if kinds is None or (kinds and not may_return):
                return False
        return True

    def _goes_to(self, i: int, kind: str, variables: Names) -> frozenset[str] | None:
        """What is returned that holds the value that instruction `i` pushes, of this kind; None if
        something else is done with the value."""
        self._kinds = set()
        try:
            stack, variables = self._before(i, variables)
            stack = _without(_padded(stack, self._steps[i]), _n_taken(self._steps[i], 1))
            for _ in self._walk((i + 1, (*stack, kind), variables), _is_held):
                pass
        except _Used:
            return None
        return frozenset(self._kinds)

    def _before(self, i: int, variables: Names) -> tuple[Stack, Names]:
        """What is known of the stack before an instruction, and of the variables; some of these are
        known."""
        start: Place = (0, (), frozenset())
        places = [place for place in self._walk(start) if place[0] == i]
        if not places:
            raise _Used  # no way leads there
        of_code = frozenset.intersection(*[names for _, _, names in places])
        variables = frozenset({**dict(of_code), **dict(variables)}.items())
        # a value that was loaded from a variable is what the variable holds now
        self._names_what_is_loaded = True
        named = [stack for at, stack, _ in self._walk(start) if at == i]
        self._names_what_is_loaded = False
        stack = [OTHER, *_merged([stack for _, stack, _ in places])]
        for k, kind in enumerate(reversed(_merged(named)), 1):
            stack[:0] = [OTHER] * (k - len(stack))
            if kind[:1] == "=" and stack[-k] == OTHER:
                stack[-k] = dict(variables).get(kind[1:], OTHER)
        return tuple(stack), variables

    def _walk(
        self, start: Place, is_wanted: Callable[[Place], bool] = lambda _: True
    ) -> Iterator[Place]:
        """All places that may come from `start` on, by way of those that are wanted."""
        waiting, seen = [start], set[Place]()
        while waiting:
            i, stack, names = waiting.pop()
            while stack and stack[0] == OTHER:
                stack = stack[1:]
            place = i, stack, names
            if place in seen or not is_wanted(place):
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
        if names[0] in ("<dictcomp>", "<listcomp>") or _is_decorator(self._code):
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
            is_number = isinstance(step.argval, (int, float))
            return (*stack, PLAIN if is_number else OTHER), names
        verb, _, keeper = name.partition("_")
        is_kept = keeper in KEEPERS and step.argval in self._kept
        n_owners = keeper == "ATTR"  # on top of the stack
        if is_kept and verb == "STORE" and _padded(stack, step)[-1 - n_owners] == NUMBER:
            return stack[: -1 - n_owners], names
        if is_kept and verb == "LOAD" and keeper != "GLOBAL":
            return (*_without(stack, n_owners), PLAIN), names
        if name == "LOAD_GLOBAL":
            kind = step.argval if step.argval in self._known else PLAIN if is_kept else OTHER
            # with the lowest bit set it pushes NULL too: before the function until Python 3.12
            pushed = [OTHER] * (n & 1)
            pushed.insert(0 if sys.version_info >= (3, 13) else n & 1, kind)
            return (*stack, *pushed), names
        is_method = name == METHOD_LOAD and _n_taken(step, 2) == 1
        if is_method and step.argval == ITEM and ITEM in self._known:
            return (*_without(stack, 1), ITEM, OTHER), names
        if not any(stack):
            # an unknown value is as good as one of those below
            return stack, names
        return _after_others(step, _padded(stack, step), traces_bools=self._traces_bools), names

    def _after_fast(
        self, name: str, variables: str | tuple[str, ...], stack: Stack, names: Names
    ) -> tuple[Stack, Names]:
        """The same behind an instruction on local variables, such as `STORE_FAST_LOAD_FAST`.

        A value may be named after the variable that it is loaded from, until that changes.
        """
        changed, kept = list(stack), dict(names)
        variables = (variables,) if isinstance(variables, str) else variables
        for what, variable in zip(re.findall("LOAD|STORE|DELETE", name), variables, strict=True):
            kind = f"={variable}" if self._names_what_is_loaded else kept.get(variable, OTHER)
            if what == "LOAD":
                changed.append(kind)
            if what != "LOAD" or name.endswith("_AND_CLEAR"):
                kept.pop(variable, None)
            if what == "STORE":
                stored = changed.pop() if changed else OTHER
                changed = [OTHER if one == f"={variable}" else one for one in changed]
                if stored and not self._names_what_is_loaded:
                    kept[variable] = stored
        return tuple(changed), frozenset(kept.items())


def _jumps(step: dis.Instruction) -> bool:
    return step.opcode in dis.hasjrel or step.opcode in dis.hasjabs


def _is_decorator(code: CodeType) -> bool:
    """Whether a function is what decorators such as `torch.no_grad()` make of another, which it
    calls and whose result it returns."""
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


def _after_others(step: dis.Instruction, stack: Stack, *, traces_bools: bool) -> Stack:
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
    computed = _computed(step, stack, traces_bools=traces_bools)
    if computed is not None:
        return computed
    if name not in TAKES:
        if _holds(stack):
            raise _Used
        return ()
    n_made = 1
    if name == "UNPACK_SEQUENCE":
        n_made = n
    elif name == "LOAD_METHOD" or (name == "LOAD_ATTR" and sys.version_info >= (3, 12) and n & 1):
        n_made = 2  # the method, and the object or NULL
    return (*_without(stack, _n_taken(step, n_made)), *[OTHER] * n_made)


def _holder(values: Stack) -> str:
    """What a list, tuple or dict of these values is."""
    return HOLDER if _holds(values) else OTHER


def _computed(step: dis.Instruction, stack: Stack, *, traces_bools: bool) -> Stack | None:
    """The stack behind an operation that calls methods of the number, or that has to do with plain
    numbers alone; None for any other."""
    name, n = step.opname, step.arg or 0
    if name in ("UNARY_NEGATIVE", "UNARY_NOT", "TO_BOOL"):
        if stack[-1] not in (NUMBER, PLAIN):
            return None
        return (*stack[:-1], stack[-1] if name == "UNARY_NEGATIVE" else OTHER)
    if name in ("BINARY_OP", "COMPARE_OP"):
        left, right = stack[-2:]
        is_operator = name == "COMPARE_OP" or step.argrepr.rstrip("=") in OPERATORS
        # Anything else on the left wouldn't ask the number: a tensor reads it as it is.
        is_asked = left == NUMBER and right != HOLDER
        is_asked |= left == PLAIN and right in (NUMBER, PLAIN)
        if not (is_asked and is_operator):
            return None
        made = NUMBER if NUMBER in (left, right) else PLAIN
        return (*stack[:-2], made if name == "BINARY_OP" or traces_bools else OTHER)
    if name not in ("CALL", "CALL_KW"):
        return None
    is_named = name == "CALL_KW"  # the names lie above the arguments
    given = stack[len(stack) - n - is_named : len(stack) - is_named]
    rest = stack[: len(stack) - n - is_named - 2]
    function = "".join({*NOTED, ITEM}.intersection(stack[len(rest) : len(rest) + 2]))
    if function == "dict":
        return (*rest, _holder(given))
    if function and (function in (ITEM, "len") or {*given} == {PLAIN}) and not _holds(given):
        return (*rest, PLAIN)
    takes_more = function == "round" and not _holds(given[1:])
    if NUMBER in given[:1] and (takes_more or (function == "abs" and n == 1)):
        return (*rest, NUMBER)
    if function in ("max", "min") and n > 1 and {*given} <= {NUMBER, PLAIN} and NUMBER in given:
        return (*rest, NUMBER)
    return None
