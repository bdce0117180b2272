"""Tells whether a number that a program reads is only returned, so that nothing is decided by it.

In: a frame that waits for the number, as `.item()` gives it. Out: whether the number, and all that
it is put into, goes nowhere but to the caller, and on to a given function. `replay` asks: a number
that is only returned may be another one at each call. It follows the bytecode of Python 3.11 to
3.13. What it doesn't know counts as a use of the number.
"""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType

Stack = tuple[bool, ...]
"""Which values on top of a frame's stack hold the number. All below are other values."""
Place = tuple[int, Stack, frozenset[str]]
"""An instruction's number, the stack before it, and the local variables that hold the number."""

READS, CONVERTS = ("item", "tolist"), ("bool", "float", "int")
"""Methods of tensors, and types, that give the number itself. Other calls that read a tensor, such
as `max`, do something with the number before they give anything."""
LOOKS_AROUND = frozenset({
    "currentframe", "dir", "eval", "exec", "f_locals", "_getframe", "globals", "locals", "vars",
})  # fmt: skip
"""Functions by which code may find its variables unseen."""
GLOBAL_LOADS, METHOD_LOADS = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_ATTR", "LOAD_METHOD")
LOADS = (*GLOBAL_LOADS, *METHOD_LOADS, "LOAD_DEREF", "LOAD_FAST")
CALLS = frozenset({"PRECALL", "CALL", "CALL_KW", "CALL_FUNCTION_EX"})
RETURNS = frozenset({"RETURN_VALUE", "RETURN_CONST"})
RAISES = frozenset({"RERAISE", "RAISE_VARARGS"})
JUMPS = frozenset({"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"})
NOTHING = frozenset({"CACHE", "EXTENDED_ARG", "KW_NAMES", "NOP", "PRECALL", "RESUME"})
PUSHES = frozenset({"LOAD_CONST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "PUSH_NULL"})
TAKES = frozenset({
    "BINARY_OP", "BINARY_SUBSCR", "CALL", "CALL_FUNCTION_EX", "CALL_KW", "COMPARE_OP",
    "CONTAINS_OP", "GET_ITER", "IS_OP", "LOAD_ATTR", "LOAD_METHOD", "MAKE_FUNCTION", "TO_BOOL",
    "UNARY_NOT", "UNPACK_SEQUENCE",
})  # fmt: skip
"""Instructions that take values off the stack and push what they make of them."""
MOST_PLACES = 10_000
"""Places that are followed in one function; in a longer one the number counts as used."""


class _Used(Exception):
    """The number may decide something."""


def is_only_returned(frame: FrameType | None, until: CodeType | None) -> bool:
    """Whether the number that `frame` waits for is only returned by it and by its callers, up to
    the function that has the code `until`."""
    called: CodeType | None = None
    while frame is not None and frame.f_code is not until:
        if called is None:
            names = (*READS, *(name for name in CONVERTS if name not in frame.f_globals))
        else:
            names = (called.co_name,)
        if not _returns(frame.f_code, frame.f_lasti, names):
            return False
        called, frame = frame.f_code, frame.f_back
    return frame is not None


@lru_cache(1024)
def _returns(code: CodeType, offset: int, names: tuple[str, ...]) -> bool:
    """Whether a function calls one of these functions at `offset` of its bytecode, and only returns
    the result."""
    return not LOOKS_AROUND.intersection(code.co_names) and _Function(code).returns(offset, names)


class _Function:
    def __init__(self, code: CodeType) -> None:
        self._code = code
        self._steps = list(dis.get_instructions(code))
        self._number_at = {step.offset: i for i, step in enumerate(self._steps)}
        self._handlers = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]

    def returns(self, offset: int, names: tuple[str, ...]) -> bool:
        """See `_returns`."""
        steps = self._steps
        call = max(i for i, step in enumerate(steps) if step.offset <= offset)
        # in Python 3.11 PRECALL may do all of the call
        call += steps[call].opname == "PRECALL"
        if not self._calls(call, names):
            return False
        waiting: list[Place] = [(call + 1, (True,), frozenset())]
        seen: set[Place] = set()
        try:
            while waiting:
                place = waiting.pop()
                if place not in seen:
                    seen.add(place)
                    waiting += self._following(place)
                if len(seen) > MOST_PLACES:
                    return False
        except _Used:
            return False
        return True

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
        """The places behind an instruction, as long as something holds the number."""
        i, stack, names = place
        step = self._steps[i]
        name = step.opname
        for entry in self._handlers:
            # at a handler the stack is that of the statement, which has no value in it
            if entry.start <= step.offset < entry.end:
                yield from _held(self._number_at[entry.target], (), names)
        if name in RETURNS or (name in RAISES and not any(stack)):
            return
        if name.startswith("YIELD"):
            raise _Used
        if not _jumps(step):
            yield from _held(i + 1, *_after(step, stack, names))
            return
        is_loop = name == "FOR_ITER"
        if any(stack) and name.startswith("POP_JUMP"):
            stack = _without(stack, 1)
        elif any(stack) and not (name in JUMPS or is_loop):
            raise _Used
        target = self._number_at[step.argval]
        # at a loop's end the iterator leaves the stack, and the instructions for that are skipped
        if is_loop and self._steps[target].opname == "END_FOR":
            target += 1 + (sys.version_info >= (3, 13))
        yield from _held(target, _without(stack, 1) if is_loop else stack, names)
        if name not in JUMPS:
            yield from _held(i + 1, (*stack, False) if is_loop else stack, names)


def _jumps(step: dis.Instruction) -> bool:
    return step.opcode in dis.hasjrel or step.opcode in dis.hasjabs


def _is_decorator(code: CodeType) -> bool:
    """Whether a function is what decorators such as `torch.no_grad()` make of another, which it
    calls and whose result it returns."""
    return code.co_name == "decorate_context" and code.co_filename.endswith("_contextlib.py")


def _held(i: int, stack: Stack, names: frozenset[str]) -> Iterator[Place]:
    """A place to go on from, if anything holds the number there."""
    while stack and not stack[0]:
        stack = stack[1:]
    if stack or names:
        yield i, stack, names


def _without(stack: Stack, n: int) -> Stack:
    """The stack without its top `n` values, which something uses."""
    if any(stack[-n:]) and n:
        raise _Used
    return stack[: max(len(stack) - n, 0)]


def _after(
    step: dis.Instruction, stack: Stack, names: frozenset[str]
) -> tuple[Stack, frozenset[str]]:
    """The stack and the names behind an instruction that is no jump."""
    name, n = step.opname, step.arg or 0
    if "_FAST" in name:
        return _after_fast(name, step.argval, stack, names)
    if not any(stack) or name in NOTHING:
        # a value that isn't the number is as good as one of those below
        return stack, names
    stack = (False,) * (2 * n + 4) + stack
    if name in PUSHES:
        # with the lowest bit set LOAD_GLOBAL pushes NULL too
        return (*stack, *[False] * (1 + (name == "LOAD_GLOBAL" and n & 1))), names
    if name == "POP_TOP":
        return stack[:-1], names
    if name == "COPY":
        return (*stack, stack[-n]), names
    if name == "SWAP":
        changed = list(stack)
        changed[-1], changed[-n] = stack[-n], stack[-1]
        return tuple(changed), names
    if name in ("BUILD_TUPLE", "BUILD_LIST"):
        return (*stack[: len(stack) - n], any(stack[len(stack) - n :])), names
    if name == "BUILD_CONST_KEY_MAP":
        return (*stack[: -n - 1], any(stack[-n - 1 :])), names
    if name == "BUILD_MAP" and not any(stack[len(stack) - 2 * n :: 2]):
        return (*stack[: len(stack) - 2 * n], any(stack[len(stack) - 2 * n :])), names
    if name == "LIST_APPEND" or (name == "MAP_ADD" and not stack[-2]):
        is_held, rest = stack[-1], list(stack[: -1 if name == "LIST_APPEND" else -2])
        rest[-n] |= is_held
        return tuple(rest), names
    if name not in TAKES:
        raise _Used
    n_made = 1
    if name == "UNPACK_SEQUENCE":
        n_made = n
    elif name == "LOAD_METHOD" or (name == "LOAD_ATTR" and sys.version_info >= (3, 12) and n & 1):
        n_made = 2  # the method, and the object or NULL
    # in Python 3.11 the effect of a call is said to be that of PRECALL and CALL together
    n_taken = n + 2 if name == "CALL" else n_made - dis.stack_effect(step.opcode, step.arg)
    return (*_without(stack, n_taken), *[False] * n_made), names


def _after_fast(
    name: str, variables: str | tuple[str, ...], stack: Stack, names: frozenset[str]
) -> tuple[Stack, frozenset[str]]:
    """The same behind an instruction on local variables, such as `STORE_FAST_LOAD_FAST`."""
    changed, kept = list(stack), set(names)
    variables = (variables,) if isinstance(variables, str) else variables
    for what, variable in zip(re.findall("LOAD|STORE|DELETE", name), variables, strict=True):
        is_held = variable in kept
        if what == "LOAD":
            changed.append(is_held)
        if what != "LOAD" or name.endswith("_AND_CLEAR"):
            kept.discard(variable)
        if what == "STORE" and changed and changed.pop():
            kept.add(variable)
    return tuple(changed), frozenset(kept)
