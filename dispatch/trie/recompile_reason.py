"""Says why a program was new to the trie: what of a call differed from the nearest known path.

In: the first state that had to be made, and the state where the trace ended. Out: a sentence, for
reports, the log of misses, and the warning that nothing repeats. All that it needs stands in the
trie, so neither hits nor misses pay for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lazy_tensor.dispatch.trie.trace import Leaf, Node, State
from lazy_tensor.dispatch.wording import op_name
from lazy_tensor.kernels.segment import Ref, ScalarRef, TensorSpec

FIRST_TIME = "it is seen for the first time"
"""The reason for a program that has nothing to be compared with."""


def latest_difference(reasons: Iterable[str]) -> str | None:
    """The last reason that names a difference; None if all was seen for the first time."""
    return next((one for one in reversed([*reasons]) if one and one != FIRST_TIME), None)


def reason_of_miss(new: State, end: State | None) -> str:
    """What was new: the state `new`, compared with what came at the same place before. `end` is
    where its trace ended."""
    known = _nearest(new)
    at_line, argument = _first_use(new, end)
    if known is None:
        before = _last_call(new.parent)
        if before is None:
            return FIRST_TIME
        return f"the program goes on with {_name(new)}{at_line}, where it ended before"
    if isinstance(new.step, Leaf) and isinstance(known.step, Leaf):
        return f"{_between_leaves(new.step, known.step)} of {argument}{at_line}"
    if isinstance(new.step, Node) and isinstance(known.step, Node):
        return _between_calls(new.step, known.step)
    return f"{_name(new)}{at_line}, where {_name(known)} came before"


def _nearest(new: State) -> State | None:
    """The state that was made last before `new` at the same place; None if there is none."""
    if new.parent is None:
        return None
    # Dicts keep the order in which states were made. A state with a `call_start` stands for a
    # sharded call as a whole, which has no step of its own to be compared.
    before: State | None = None
    for children in (new.parent, new.parent.generic or {}):
        for state in children.values():
            if state is new:
                return before
            if state.call_start is None:
                before = state
    return before


def _name(state: State) -> str:
    if isinstance(state.step, Node):
        return op_name(state.step.facts.op)
    if isinstance(state.step, Leaf):
        return f"a new tensor {_sizes(state.step.spec)}"
    return "a setting"


def _last_call(state: State | None) -> Node | None:
    """The last call on the path to `state`, which may be an end; None if it has none."""
    while state is not None:
        if isinstance(state.step, Node):
            return state.step
        state = state.parent
    return None


def _first_use(new: State, end: State | None) -> tuple[str, str]:
    """For the state `new`: the user's line, after " at ", and what a new leaf is to the call there.

    A call has a line of its own. A leaf has none: the line is that of the first call that uses it.
    """
    for state in (new, *([] if end is None else end.path(new))):
        node = state.step
        if not isinstance(node, Node):
            continue
        if not isinstance(new.step, Leaf):
            return f" at {node.where}", ""
        if new.step.slot in node.reads:
            names = [argument.name for argument in node.facts.op._schema.arguments]
            for name, given in zip(names, node.args, strict=False):
                if _holds(given, new.step.slot):
                    return f" at {node.where}", f"{name!r} of {op_name(node.facts.op)}"
            return f" at {node.where}", f"an argument of {op_name(node.facts.op)}"
    return "", "a tensor that came in"


def _holds(argument: Any, slot: int) -> bool:
    """Whether a recorded argument is this slot, or a list with it."""
    if isinstance(argument, Ref):
        return argument.index == slot
    return isinstance(argument, tuple) and any(_holds(item, slot) for item in argument)


def _sizes(spec: TensorSpec) -> str:
    return f"of sizes {list(spec.size)}"


def _between_leaves(new: Leaf, known: Leaf) -> str:
    """The first thing in which a tensor that comes in differs from the one before."""
    a, b = known.spec, new.spec
    if a.dtype != b.dtype:
        return f"dtype went {_short(a.dtype)} -> {_short(b.dtype)}"
    if a.device != b.device:
        return f"device went {a.device} -> {b.device}"
    if len(a.size) != len(b.size):
        return f"dimensions went {len(a.size)} -> {len(b.size)}"
    changed = [i for i, pair in enumerate(zip(a.size, b.size, strict=True)) if pair[0] != pair[1]]
    if changed:
        each = [f"size of dim {i} went {a.size[i]} -> {b.size[i]}" for i in changed]
        return ", ".join(each)
    if a.stride != b.stride:
        return f"strides went {a.stride} -> {b.stride}"
    if known.shares != new.shares:
        return "memory is shared otherwise"
    return "storage offset, zero or not, changed"


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _between_calls(new: Node, known: Node) -> str:
    """Which argument of a call differs from the one before, or which op came instead."""
    op = op_name(new.facts.op)
    if new.facts.op is not known.facts.op:
        other = op_name(known.facts.op)
        return f"{op} at {new.where}, where {other} at {known.where} came before"
    names = [argument.name for argument in new.facts.op._schema.arguments]
    pairs = [*zip(names, known.args, new.args, strict=False)]
    before, now = dict(known.kwargs), dict(new.kwargs)
    pairs += [(name, before.get(name), now.get(name)) for name in {**before, **now}]
    for name, a, b in pairs:
        if a != b:
            return f"{name!r} of {op} at {new.where} went {_value(a)} -> {_value(b)}"
    if len(known.args) != len(new.args):
        return f"{op} at {new.where} got {len(new.args)} arguments, {len(known.args)} before"
    return f"an input of {op} at {new.where} is placed otherwise"


def _value(argument: Any) -> str:
    if isinstance(argument, Ref):
        return f"tensor {argument.index}"
    if isinstance(argument, ScalarRef):
        return "a changing number"
    if isinstance(argument, tuple):
        return f"[{', '.join(map(_value, argument))}]"
    return str(argument)
