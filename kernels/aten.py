"""The reference backend: a segment's calls, one by one, as eager execution would make them.

In: any segment. Out: a straight-line generated function, bit-equal to eager. Every other backend is
measured and checked against it, and falls back to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType
from typing import Any

from lazy_tensor.kernels.backend import Kernel
from lazy_tensor.kernels.bindings import callable_of
from lazy_tensor.kernels.segment import Call, Ref, ScalarRef, Segment, TensorSpec, creates, refs


class AtenBackend:
    """Runs op by op and fuses nothing; `compile` takes every segment: it is the fallback."""

    name = "aten"

    def unavailable(self, device_type: str) -> str | None:
        return None

    def refuses(self, call: Call, inputs: Sequence[TensorSpec] = ()) -> str | None:
        return "aten runs op by op"

    def compile(self, segment: Segment) -> Kernel:
        return compile_aten(segment)


def compile_aten(segment: Segment) -> Kernel:
    """The function that runs `segment`'s calls in order; tens of microseconds, compiles nothing."""
    constants: dict[str, Any] = {}
    source = source_of(segment, constants)
    exec(compile(source, f"{FILE}{segment.digest[:12]}>", "exec"), constants)
    kernel: Kernel = constants["kernel"]
    return kernel


FILE = "<aten segment "
FIRST_LINE = 3


def call_at(code: CodeType, line: int) -> int | None:
    """Which of its segment's calls stands on a line of a function of `compile_aten`'s."""
    return line - FIRST_LINE if code.co_filename.startswith(FILE) else None


def source_of(segment: Segment, constants: dict[str, Any]) -> str:
    """Python source of `kernel(tensors, scalars)`; the objects it names go into `constants`."""
    tensors = _names(range(len(segment.inputs)))
    scalars = "".join(f"s{i}, " for i in range(len(segment.scalars)))
    lines = ["def kernel(tensors, scalars):", f" ({tensors}), ({scalars}) = tensors, scalars"]
    dying = _last_uses(segment)
    n_values = len(segment.inputs)
    for position, call in enumerate(segment.calls):
        code = f" {_assignment(call, n_values)}{_invocation(call, position, constants)}"
        n_values += len(call.outputs)
        if dying[position]:
            # a value that dies here gives its memory to the next op's output, as in eager
            code += f"; del {_names(dying[position])}"
        lines.append(code)  # one line a call: see `call_at`
    lines.append(f" return ({_names(segment.outputs)})")
    return "\n".join(lines)


def _names(numbers: Sequence[int] | range) -> str:
    return "".join(f"v{i}, " for i in numbers)


def _assignment(call: Call, n_values: int) -> str:
    """The left-hand side that takes what `call` creates; empty if it creates nothing."""
    if not call.outputs:
        return ""
    numbers = range(n_values, n_values + len(call.outputs))
    returns = call.op._schema.returns
    if len(returns) == 1:
        is_list = str(returns[0].type).startswith("List")
        return f"{_names(numbers) if is_list else f'v{n_values}'} = "
    created = iter(numbers)
    return "".join(f"v{next(created)}, " if new else "_, " for new in creates(call)) + "= "


def _invocation(call: Call, position: int, constants: dict[str, Any]) -> str:
    constants[f"op{position}"] = callable_of(call.op, by_name=bool(call.kwargs))
    args = [_expression(arg, constants) for arg in call.args]
    args += [f"{name}={_expression(value, constants)}" for name, value in call.kwargs]
    return f"op{position}({', '.join(args)})"


def _expression(value: Any, constants: dict[str, Any]) -> str:
    match value:
        case Ref(index):
            return f"v{index}"
        case ScalarRef(index):
            return f"s{index}"
        case tuple():
            return f"({''.join(_expression(v, constants) + ', ' for v in value)})"
        case bool() | int() | str() | None:
            return repr(value)
    name = f"c{len(constants)}"
    constants[name] = value
    return name


def _last_uses(segment: Segment) -> list[list[int]]:
    """For each call, the created values that nothing names after it."""
    last: dict[int, int] = {}
    n_values = len(segment.inputs)
    for position, call in enumerate(segment.calls):
        for number in range(n_values, n_values + len(call.outputs)):
            last[number] = position
        n_values += len(call.outputs)
        for ref in refs(value for _, value in call.arguments()):
            if ref.index >= len(segment.inputs):
                last[ref.index] = position
    dying: list[list[int]] = [[] for _ in segment.calls]
    for number, position in last.items():
        if number not in segment.outputs:
            dying[position].append(number)
    return dying
