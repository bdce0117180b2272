"""Tells whether a number that a program reads is only returned, so that nothing is decided by it.

In: a frame that waits for a call's result. Out: whether that result, and all that it is put into,
goes nowhere but to the caller, and on to a given function. `replay` asks: a number that is only
returned may be another one at each call. It follows the bytecode of Python 3.11 to 3.13. An
instruction that it doesn't know counts as a use of the number.
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

CALLS = frozenset({"PRECALL", "CALL", "CALL_KW", "CALL_FUNCTION_EX"})
ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RERAISE"})
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
    """Whether the result that `frame` waits for is only returned by it and by its callers, up to
    the function that has the code `until`."""
    while frame is not None and frame.f_code is not until:
        if not _returns(frame.f_code, frame.f_lasti):
            return False
        frame = frame.f_back
    return frame is not None


@lru_cache(1024)
def _returns(code: CodeType, offset: int) -> bool:
    """Whether a function only returns the result of the call at `offset` of its bytecode."""
    steps = list(dis.get_instructions(code))
    call = max(i for i, step in enumerate(steps) if step.offset <= offset)
    if steps[call].opname not in CALLS:
        return False
    # in Python 3.11 PRECALL may do all of the call
    call += steps[call].opname == "PRECALL"
    number_at = {step.offset: i for i, step in enumerate(steps)}
    waiting: list[Place] = [(call + 1, (True,), frozenset())]
    seen: set[Place] = set()
    try:
        while waiting:
            place = waiting.pop()
            if place not in seen:
                seen.add(place)
                waiting += _following(steps, number_at, place)
            if len(seen) > MOST_PLACES:
                return False
    except _Used:
        return False
    return True


def _following(
    steps: list[dis.Instruction], number_at: dict[int, int], place: Place
) -> Iterator[Place]:
    """The places behind an instruction, as long as something holds the number."""
    i, stack, names = place
    step = steps[i]
    name = step.opname
    if name in ENDS:
        return
    if name.startswith("YIELD"):
        raise _Used
    is_loop = name == "FOR_ITER"
    jumps = step.opcode in dis.hasjrel or step.opcode in dis.hasjabs
    if jumps and any(stack):
        if name.startswith("POP_JUMP"):
            stack = _without(stack, 1)
        elif name not in JUMPS and not is_loop:
            raise _Used
    if jumps:
        target = number_at[step.argval]
        # at a loop's end the iterator leaves the stack, and the instructions for that are skipped
        if is_loop and steps[target].opname == "END_FOR":
            target += 1 + (sys.version_info >= (3, 13))
        yield from _held(target, _without(stack, 1) if is_loop else stack, names)
        if name not in JUMPS:
            yield from _held(i + 1, (*stack, False) if is_loop else stack, names)
        return
    if name != "RAISE_VARARGS" or any(stack):
        yield from _held(i + 1, *_after(step, stack, names))


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
