"""When a call raises in a flush: what is still computed, and what the error tells.

In: the exception, and the plan or graph that it came from. Out: the values that eager execution
would have had, and those that don't depend on what failed; notes on the exception. Called by
`flush`.

Writes that were recorded after the failing call don't happen: eagerly the program would not have
got there.
"""

from __future__ import annotations

import dis
import linecache
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import CodeType, TracebackType
from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch.plan.graph import Graph
from lazy_tensor.dispatch.plan.interpret import interpret, run_node
from lazy_tensor.dispatch.plan.plan import Plan, Step
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.dispatch.trie.trace import Node
from lazy_tensor.kernels.backends.artifact import SOURCE, WRAPPER
from lazy_tensor.kernels.segment import Ref, ScalarRef

Values = dict[int, torch.Tensor]


def rescue(error: BaseException, ran: Plan | Graph, scalars: list[complex]) -> Values | None:
    """What is computed after `error`, by slot; None if it did not come from what ran.

    Notes on `error` say which call raised it, given what. After an interrupt (Ctrl-C) all that was
    recorded is run: the program had got past it.
    """
    if isinstance(ran, Plan):
        return _rescue_from_plan(error, ran, scalars)
    place = _frame_of(interpret.__code__, error)
    if place is None:
        return None
    values = _rescue_from_graph(error, dict(place.tb_frame.f_locals), place)
    place.tb_frame.clear()  # else the traceback keeps every value alive
    return values


def _frame_of(code: CodeType, error: BaseException) -> TracebackType | None:
    """Where the error passed through a function."""
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code is not code:
        place = place.tb_next
    return place


def _had_run(place: TracebackType) -> bool:
    """Whether the call at `place` had run before an interrupt came.

    Python looks for signals after a call in C, or where a function of its own begins. A function
    that runs a segment keeps what it gives in `results`. One of Inductor's, which calls kernels one
    after the other, is finished here.
    """
    while True:
        frame, instruction, after = place.tb_frame, *_instructions(place)
        if "results" in frame.f_locals:
            return True
        if frame.f_code.co_filename == WRAPPER:
            return _finish_wrapper(place)
        stores_results = after.argrepr.startswith("results")
        if "results" in frame.f_code.co_varnames and not stores_results:
            return False  # it prepared
        inner = _called_at(place)
        if inner is None:
            return instruction.opname.startswith(CALLS)
        place = inner


CALLS = ("CALL", "PRECALL")
"""What the names of instructions that call begin with."""


def _instructions(place: TracebackType) -> tuple[dis.Instruction, dis.Instruction]:
    """The instruction at which a frame was interrupted, or called; and what follows it."""
    instructions = list(dis.get_instructions(place.tb_frame.f_code))
    n = sum(one.offset <= place.tb_lasti for one in instructions)
    at = instructions[n - 1]
    return at, next((one for one in instructions[n:] if not one.opname.startswith(CALLS)), at)


def _finish_wrapper(place: TracebackType) -> bool:
    """Run what an interrupt left of a wrapper of Inductor's, but for what it gives."""
    frame, instruction, after = place.tb_frame, *_instructions(place)
    number, names = place.tb_lineno, dict(frame.f_locals)
    if instruction.opname == "RESUME" or after.opname == "POP_TOP":
        number += 1  # it had not begun, or the call that is all of this line is over
    for line in frame.f_globals[SOURCE].splitlines()[number - 1 :]:
        if line.lstrip().startswith("return"):
            break
        exec(line.strip(), frame.f_globals, names)
    return True


def _called_at(place: TracebackType) -> TracebackType | None:
    """The function of Python's that was running at `place`; not a signal's handler, which raised
    the interrupt there."""
    inner = place.tb_next
    if inner is None or inner.tb_frame.f_code in map(_code_of, map(signal.getsignal, SIGNALS)):
        return None
    return inner


def _code_of(handler: Any) -> CodeType | None:
    """The code of a signal's handler, if that is Python's: a function, a method, an object."""
    function = handler if hasattr(handler, "__code__") else getattr(handler, "__func__", None)
    if function is None:
        function = vars(type(handler)).get("__call__")
    code: CodeType | None = getattr(function, "__code__", None)
    return code


SIGNALS = signal.valid_signals()


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


def _rescue_from_plan(error: BaseException, plan: Plan, scalars: list[complex]) -> Values | None:
    failed = plan.program.take_failure()
    if failed is None:
        return None
    number, values, call = failed
    is_over = isinstance(error, Exception)
    if number < len(plan.steps):
        step = plan.steps[number]
        if is_over:
            _note_step(error, step, call, _looked_up(values, scalars))
        elif step.fusion is not None and any(node.writes for node in step.nodes):
            is_over = _kernel_had_run(error)
    later = [
        _Later(step.reads, step.nodes, partial(plan.program.step, i, values, scalars))
        for i, step in enumerate(plan.steps)
        if i >= number
    ]
    if later:
        _carry_on(error, later, is_over, plan.root, plan.lasting, values.__contains__)
    return values


def _kernel_had_run(error: BaseException) -> bool:
    """Whether an interrupt in a segment's kernel came when that had run."""
    run = _frame_of(Plan.run.__code__, error) or _frame_of(Plan.run_observed.__code__, error)
    kernel = None if run is None else _called_at(run)
    return kernel is not None and _had_run(kernel)


def _rescue_from_graph(
    error: BaseException, names: Mapping[str, Any], place: TracebackType
) -> Values | None:
    if "values" not in names:
        return None  # it had not begun
    graph, values, scalars = (names[name] for name in ("graph", "values", "scalars"))
    node = names.get("node")
    is_over = isinstance(error, Exception)
    if node is not None:
        if is_over:
            _note_call(error, node, _looked_up(values, scalars))
        else:
            is_over = names["done"] is node or _node_had_run(place)
    first = next((i for i, other in enumerate(graph.nodes) if other is node), 0)
    later = [
        _Later(n.reads, (n,), partial(run_node, n, values, scalars, graph.spec))
        for n in graph.nodes[first:]
    ]
    if later:
        _carry_on(error, later, is_over, graph.root, graph.lasting, lambda slot: slot in values)
    return dict(values)


def _node_had_run(place: TracebackType) -> bool:
    """Whether an interrupt in `interpret` came when the node's op had run."""
    call = _called_at(place)
    if call is None:
        return False
    is_in_op = "results" not in call.tb_frame.f_locals and _called_at(call) is not None
    return not is_in_op and _had_run(call)


def _carry_on(
    error: BaseException,
    later: list[_Later],
    is_over: bool,
    root: Mapping[int, int],
    lasting: frozenset[int],
    is_there: Callable[[int], bool],
) -> None:
    """Run what is left. If the first of `later` failed, nothing that depends on it or writes what
    lasts. `is_over`: the first has failed, or an interrupt came after it."""
    failed = isinstance(error, Exception)
    is_lost = failed and _communicates(later[0])
    spoiled = {root[slot] for node in later[0].nodes for slot in node.writes} if failed else set()
    if failed or (is_over and any(node.writes for node in later[0].nodes)):
        later = later[1:]  # to write again would be wrong; what else it gave is made again
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


def _note_step(error: BaseException, step: Step, call: int, value_of: Callable[[Any], Any]) -> None:
    """Say which of a step's calls raised: number `call`, if the segment ran op by op."""
    if len(step.nodes) == 1:
        call = 0
    if 0 <= call < len(step.nodes):
        _note_call(error, step.nodes[call], value_of)
    else:
        error.add_note("in one of " + "; ".join(f"{n.facts.op} {_recorded(n)}" for n in step.nodes))


def _note_call(error: BaseException, node: Node, value_of: Callable[[Any], Any]) -> None:
    error.add_note(f"{described(node, value_of)} {_recorded(node)}")
    if node.facts.communicates and tensor_types.who_is_missing is not None:
        error.add_note(tensor_types.who_is_missing())


def _recorded(node: Node) -> str:
    file, _, line = node.where.rpartition(":")
    source = linecache.getline(file, int(line)).strip() if line.isdigit() else ""
    return f"first recorded at {node.where}{': ' if source else ''}{source}"


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
