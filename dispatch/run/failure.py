"""Computes what it can after a call has raised in a flush, and adds notes to the error.

In: the exception, and the plan or graph that it came from. Out: the values that don't depend on
what failed; notes on the exception that name the call, its arguments and its line. Called by
`flush` and by captured calls.

After an error, writes that were recorded behind the failing call don't happen: eager would have
stopped before them. After an interrupt (Ctrl-C) all calls run, and none writes twice: the program
had passed their lines before the signal came.
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
from lazy_tensor.kernels.segment import Ref, ScalarRef

Values = dict[int, torch.Tensor]


def rescue(error: BaseException, ran: Plan | Graph, scalars: list[complex]) -> Values | None:
    """Run what can run after `error`, and return all values by slot.

    None if `error` did not come from within `ran`. Notes on `error` say which call raised it, with
    which arguments.
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
    """The entry of the error's traceback that is in the function with this code."""
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code is not code:
        place = place.tb_next
    return place


def _had_run(place: TracebackType) -> bool:
    """Whether the call at `place` had run before an interrupt came.

    Python handles signals after a call into C, or where a Python function begins. By convention a
    function that runs a segment stores its outputs in a variable `results` at once (see `Fusion`).
    """
    while True:
        frame, instruction, after = place.tb_frame, *_instructions(place)
        if "results" in frame.f_locals:
            return True
        stores_results = after.argrepr.startswith("results")
        if "results" in frame.f_code.co_varnames and not stores_results:
            return False  # the interrupted call isn't the one that runs the segment: it prepared
        inner = _called_at(place)
        if inner is None:
            # At a call the signal came behind one into C, which has run. Any other instruction is
            # the begin of a function, whose body has not run.
            return instruction.opname.startswith(CALLS)
        place = inner


CALLS = ("CALL", "PRECALL")
"""Prefixes of the names of Python's instructions that call."""


def _instructions(place: TracebackType) -> tuple[dis.Instruction, dis.Instruction]:
    """The instruction at which a frame was interrupted, and the next one that is no part of a call.

    PRECALL and CALL make one call in Python 3.11, so both are skipped to see what takes the result.
    """
    instructions = list(dis.get_instructions(place.tb_frame.f_code))
    n = sum(one.offset <= place.tb_lasti for one in instructions)
    at = instructions[n - 1]
    return at, next((one for one in instructions[n:] if not one.opname.startswith(CALLS)), at)


def _called_at(place: TracebackType) -> TracebackType | None:
    """The Python function that was running at `place`, one frame further in.

    None if it was a call into C. A signal's handler doesn't count: it runs on top of the frame that
    it interrupts, and raised there.
    """
    inner = place.tb_next
    if inner is None or inner.tb_frame.f_code in map(_code_of, map(signal.getsignal, SIGNALS)):
        return None
    return inner


def _code_of(handler: Any) -> CodeType | None:
    """The code of a signal's handler that is a Python function, method or callable object."""
    function = handler if hasattr(handler, "__code__") else getattr(handler, "__func__", None)
    if function is None:
        function = vars(type(handler)).get("__call__")
    code: CodeType | None = getattr(function, "__code__", None)
    return code


SIGNALS = signal.valid_signals()


def without_frames(error: BaseException) -> BaseException:
    """A copy of `error`, notes included, without traceback, cause or context.

    A value that failed keeps one for as long as it lives, and raises another copy at each read. The
    frames of a traceback would keep tensors alive, and form cycles with the values.
    """
    kind = type(error)
    try:
        twin = kind.__new__(kind, *error.args)
    except TypeError:
        return error  # its class takes other arguments than those in `args`
    twin.__dict__.update(error.__dict__)
    return twin


@dataclass(slots=True)
class _Remaining:
    """A part of a flush that has not run: a plan's step, or one node of a graph.

    It has the slots that the part reads, its recorded calls, and a function that runs it.
    """

    reads: Iterable[int]
    nodes: Iterable[Node]
    run: Callable[[], object]


def _rescue_from_plan(error: BaseException, plan: Plan, scalars: list[complex]) -> Values | None:
    failed = plan.program.take_failure()
    if failed is None:
        return None
    number, values, call = failed
    is_over = isinstance(error, Exception)
    if number < len(plan.steps):  # else a signal came behind the last step: all has run
        step = plan.steps[number]
        if is_over:
            _note_step(error, step, call, _looked_up(values, scalars))
        elif step.fusion is not None and any(node.writes for node in step.nodes):
            # A single op is over before C++ looks for signals, and `number` is then that of the
            # next step. A segment may run through Python, where a signal comes at any time.
            is_over = _kernel_had_run(error)
    later = [
        _Remaining(step.reads, step.nodes, partial(plan.program.step, i, values, scalars))
        for i, step in enumerate(plan.steps)
        if i >= number
    ]
    if later:
        _carry_on(error, later, is_over, plan.root, plan.lasting, values.__contains__)
    return values


def _kernel_had_run(error: BaseException) -> bool:
    """Whether the segment's kernel had run when an interrupt came within its step."""
    run = _frame_of(Plan.run.__code__, error) or _frame_of(Plan.run_observed.__code__, error)
    kernel = None if run is None else _called_at(run)
    return kernel is not None and _had_run(kernel)


def _rescue_from_graph(
    error: BaseException, names: Mapping[str, Any], place: TracebackType
) -> Values | None:
    if "values" not in names:
        return None  # `interpret` had not made its first variable
    graph, values, scalars = (names[name] for name in ("graph", "values", "scalars"))
    node = names.get("node")
    is_over = isinstance(error, Exception)
    if node is not None:
        if is_over:
            _note_call(error, node, _looked_up(values, scalars))
        else:
            # `run_node` returns its node: with `done` set the interrupt came behind it in the loop
            is_over = names["done"] is node or _node_had_run(place)
    first = next((i for i, other in enumerate(graph.nodes) if other is node), 0)
    later = [
        _Remaining(n.reads, (n,), partial(run_node, n, values, scalars, graph.spec))
        for n in graph.nodes[first:]
    ]
    if later:
        _carry_on(error, later, is_over, graph.root, graph.lasting, lambda slot: slot in values)
    return dict(values)


def _node_had_run(place: TracebackType) -> bool:
    """Whether the node's op had run when an interrupt came in `interpret` or `run_node`."""
    call = _called_at(place)
    if call is None:
        return False
    # a Python frame below `run_node` before it has `results` prepares the arguments, or is the op's
    # own kernel, not over yet
    is_in_op = "results" not in call.tb_frame.f_locals and _called_at(call) is not None
    return not is_in_op and _had_run(call)


def _carry_on(
    error: BaseException,
    later: list[_Remaining],
    is_over: bool,
    root: Mapping[int, int],
    lasting: frozenset[int],
    is_there: Callable[[int], bool],
) -> None:
    """Run the parts in `later`, in order, as far as eager's results allow.

    After an interrupt all of them run. After an error the first of `later` is the one that failed.
    Parts that depend on it are left out, and so are writes to memory that outlives the flush: eager
    would have stopped before them. `is_over` says whether the first part has run already.
    """
    failed = isinstance(error, Exception)
    is_lost = failed and _communicates(later[0])
    spoiled = {root[slot] for node in later[0].nodes for slot in node.writes} if failed else set()
    if failed or (is_over and any(node.writes for node in later[0].nodes)):
        # A part that wrote must not write twice. One without writes runs again, because an
        # interrupt may have come before its outputs were stored.
        later = later[1:]
    new: set[int] = set()  # memory made from here on: eager never had it, so it may be written
    for part in later:
        written = {root[slot] for node in part.nodes for slot in node.writes}
        touched = {root[slot] for slot in part.reads} | written
        if (
            not (touched & spoiled or (failed and written & lasting - new))
            and all(map(is_there, part.reads))
            # after a failed collective a rank may be missing: another one would wait for ever
            and not (is_lost and _communicates(part))
        ):
            try:
                part.run()
                new.update(slot for node in part.nodes for slot in node.makes)
                continue
            except Exception:
                pass  # the first error is the one that is raised
        # what should have been written is out of date: whoever reads that memory is left out, too
        spoiled |= written


def _communicates(part: _Remaining) -> bool:
    return any(node.facts.communicates for node in part.nodes)


def _note_step(error: BaseException, step: Step, call: int, value_of: Callable[[Any], Any]) -> None:
    """Note on `error` which of a step's calls raised.

    That is number `call` if the segment ran op by op, else -1: then the note names all its calls.
    """
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
"""Elements up to which a note shows a tensor. Of longer ones of integers it shows the least and the
greatest, which may be indices."""


def described(node: Node, value_of: Callable[[Any], Any]) -> str:
    """The call with its arguments: `aten.index.Tensor(float32[4], [int64[2] = [0, 9]])`."""
    arguments = [_text(argument, value_of) for argument in node.args]
    arguments += [f"{name}={_text(argument, value_of)}" for name, argument in node.kwargs]
    op: OpOverload = node.facts.op
    return f"{op}({', '.join(arguments)})"


def _text(argument: Any, value_of: Callable[[Any], Any]) -> str:
    if isinstance(argument, (Ref, ScalarRef)):
        argument = value_of(argument)
        if argument is None:
            return "..."  # made and used up inside the segment
    if isinstance(argument, torch.Tensor):
        return _tensor_text(argument)
    if type(argument) is tuple:
        return f"[{', '.join(_text(item, value_of) for item in argument)}]"
    return repr(argument)


def _tensor_text(tensor: torch.Tensor) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if tensor.device.type != "cpu":
        return f"{text} on {tensor.device}"  # reading it could wait, or raise
    if 0 < tensor.numel() <= MAX_SHOWN:
        return f"{text} = {tensor.tolist()}"
    is_index = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    if tensor.numel() and is_index:
        return f"{text} in {tensor.min().item()}..{tensor.max().item()}"
    return text
