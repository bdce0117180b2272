"""When a call raises in a flush: what is still computed, and what the error tells.

In: the exception, and the plan or graph that it came from. Out: the values that eager execution
would have had, and those that don't depend on what failed; notes on the exception. Called by
`flush`.

Writes that were recorded after the failing call don't happen: eagerly the program would not have
got there.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch import host
from lazy_tensor.dispatch.graph import Graph
from lazy_tensor.dispatch.interpret import interpret, run_node
from lazy_tensor.dispatch.plan import Plan, Step
from lazy_tensor.dispatch.trace import Node
from lazy_tensor.kernels.aten import call_at
from lazy_tensor.kernels.segment import Ref, ScalarRef

Values = dict[int, torch.Tensor]


def rescue(error: BaseException, ran: Plan | Graph) -> Values:
    """What is computed after `error`, by slot; notes on `error` which call raised it, given what.

    After an interrupt (Ctrl-C) all that was recorded is run: the program had got past it.
    """
    for frame, line in traceback.walk_tb(error.__traceback__):
        if isinstance(ran, Plan) and frame.f_code.co_filename == ran.filename:
            values = _rescue_from_plan(error, ran, dict(frame.f_locals), line)
        elif frame.f_code is interpret.__code__:
            values = _rescue_from_graph(error, frame)
        else:
            continue
        frame.clear()  # else the traceback keeps every value alive
        return values
    return {}


def without_frames(error: BaseException) -> BaseException:
    """An exception like `error`, notes included, that keeps no frames and so no tensors alive.

    Values that failed keep one, and raise another each time they are read.
    """
    kind = type(error)
    try:
        twin = kind.__new__(kind, *error.args)
    except TypeError:
        return error  # its class wants to know more than its arguments
    twin.__dict__.update(error.__dict__)
    return twin


@dataclass(slots=True)
class _Later:
    """A part of a flush not yet run: the slots that it reads, the calls in it, how to run it."""

    reads: Iterable[int]
    nodes: Iterable[Node]
    run: Callable[[], object]


def _by_slot(names: Mapping[str, Any]) -> Values:
    """The values among a plan's variables."""
    return {int(name[1:]): value for name, value in names.items() if name[1:].isdigit()}


def _rescue_from_plan(error: BaseException, plan: Plan, names: dict[str, Any], line: int) -> Values:
    number = plan.number_at(line)
    if number is None:
        return {}
    if isinstance(error, Exception):
        _note_step(error, plan.steps[number], _looked_up(_by_slot(names), names["S"]))
    later = [
        _Later(step.reads, step.nodes, partial(exec, step.code, plan.names, names))
        for step in plan.steps[number:]
    ]
    _carry_on(error, later, plan.root, plan.lasting, lambda slot: f"v{slot}" in names)
    return _by_slot(names)


def _rescue_from_graph(error: BaseException, frame: FrameType) -> Values:
    graph, node, values, scalars = (
        frame.f_locals[name] for name in ("graph", "node", "values", "scalars")
    )
    if isinstance(error, Exception):
        _note_call(error, node, _looked_up(values, scalars))
    first = next(i for i, other in enumerate(graph.nodes) if other is node)
    later = [
        _Later(n.reads, (n,), partial(run_node, n, values, scalars, graph.spec))
        for n in graph.nodes[first:]
    ]
    _carry_on(error, later, graph.root, graph.lasting, lambda slot: slot in values)
    return dict(values)


def _carry_on(
    error: BaseException,
    later: list[_Later],
    root: Mapping[int, int],
    lasting: frozenset[int],
    is_there: Callable[[int], bool],
) -> None:
    """Run what does not depend on the failed first of `later`, and writes nothing that lasts."""
    failed = isinstance(error, Exception)
    is_lost = failed and _communicates(later[0])
    spoiled = {root[slot] for node in later[0].nodes for slot in node.writes} if failed else set()
    if failed or any(node.writes for node in later[0].nodes):
        later = later[1:]  # an interrupt comes after a call, whose writes are done
    new: set[int] = set()  # memory that eager, which stopped, would not have made
    for part in later:
        written = {root[slot] for node in part.nodes for slot in node.writes}
        touched = {root[slot] for slot in part.reads} | written
        if (
            not (touched & spoiled or (failed and written & lasting - new))
            and all(map(is_there, part.reads))
            and not (is_lost and _communicates(part))  # nor would it come to an end
        ):
            try:
                part.run()
                new.update(s for node in part.nodes for s in node.outs if s is not None)
                continue
            except Exception:
                pass  # the first error is the one that is raised
        spoiled |= written


def _communicates(part: _Later) -> bool:
    return any(node.facts.communicates for node in part.nodes)


def _note_step(error: BaseException, step: Step, value_of: Callable[[Any], Any]) -> None:
    """Say which of a step's calls raised; inside a segment its op-by-op replay tells."""
    if len(step.nodes) == 1:
        _note_call(error, step.nodes[0], value_of)
        return
    for frame, line in traceback.walk_tb(error.__traceback__):
        position = call_at(frame.f_code, line)
        if position is not None and position < len(step.nodes):
            _note_call(error, step.nodes[position], value_of)
            return
    error.add_note("in one of " + "; ".join(f"{n.facts.op} {_recorded(n)}" for n in step.nodes))


def _note_call(error: BaseException, node: Node, value_of: Callable[[Any], Any]) -> None:
    error.add_note(f"{described(node, value_of)} {_recorded(node)}")
    if node.facts.communicates and host.who_is_missing is not None:
        error.add_note(host.who_is_missing())


def _recorded(node: Node) -> str:
    file, _, line = node.where.rpartition(":")
    source = linecache.getline(file, int(line)).strip() if line.isdigit() else ""
    return f"recorded at {node.where}{': ' if source else ''}{source}"


def _looked_up(values: Mapping[int, Any], scalars: list[complex]) -> Callable[[Any], Any]:
    def value_of(ref: Any) -> Any:
        return values.get(ref.index) if isinstance(ref, Ref) else scalars[ref.index]

    return value_of


MAX_SHOWN = 8
"""Elements of a tensor that a note shows; of a longer one of integers the least and greatest."""


def described(node: Node, value_of: Callable[[Any], Any]) -> str:
    """The call with the values it got: `aten.index.Tensor(float32[4], [int64[2] = [0, 9]])`."""
    arguments = [_text(argument, value_of) for argument in node.args]
    arguments += [f"{name}={_text(argument, value_of)}" for name, argument in node.kwargs]
    op: OpOverload = node.facts.op
    return f"{op}({', '.join(arguments)})"


def _text(argument: Any, value_of: Callable[[Any], Any]) -> str:
    if isinstance(argument, (Ref, ScalarRef)):
        argument = value_of(argument)
        if argument is None:
            return "..."  # made inside the segment
    if isinstance(argument, torch.Tensor):
        return _tensor_text(argument)
    if type(argument) is tuple:
        return f"[{', '.join(_text(item, value_of) for item in argument)}]"
    return repr(argument)


def _tensor_text(tensor: torch.Tensor) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if tensor.device.type != "cpu":
        return f"{text} on {tensor.device}"  # reading it could fail, or wait
    if 0 < tensor.numel() <= MAX_SHOWN:
        return f"{text} = {tensor.tolist()}"
    is_index = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    if tensor.numel() and is_index:
        return f"{text} in {tensor.min().item()}..{tensor.max().item()}"
    return text
