"""Traces a segment to the graph that Inductor or nvFuser compiles.

The graph is functional except for writes to inputs, and its ops are those that a table of
decompositions leaves. In: a segment. Out: a `Lowered`: an `fx.GraphModule` traced on fake tensors,
whose results are the segment's outputs. Called by the backends' `build`, usually in a worker.
Nothing here reads or writes real tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lazy_tensor.kernels import scalar_rules
from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.backends import index_checks
from lazy_tensor.kernels.backends.artifact import SCALAR_DTYPES
from lazy_tensor.kernels.backends.torch_inductor import SymbolicSizes
from lazy_tensor.kernels.fusible import NORMS, base_name
from lazy_tensor.kernels.generic import Generic, strides_like
from lazy_tensor.kernels.segment import Call, Segment, TensorSpec, creates, substituted

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Lowered:
    """A graph to compile, whose results are the segment's outputs.

    The graph takes `inputs`: the segment's inputs as fake tensors, then its scalars as 0-dim
    tensors. `strides` and `sizes` are those that eager execution gives each result. If `has_check`,
    one more result says whether an index was out of range. `symbols` is set for a generic segment.
    """

    graph: fx.GraphModule
    inputs: list[torch.Tensor]
    strides: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    has_check: bool
    symbols: SymbolicSizes | None

    def check_strides(self, compiled: Sequence[tuple[int, ...] | None]) -> None:
        """Raise a RuntimeError if the compiled function returns other strides that matter."""
        for size, expected, actual in zip(self.sizes, self.strides, compiled, strict=True):
            if actual is None or _differs(size, actual, expected):
                raise RuntimeError(f"a result has strides {actual} instead of {expected}")


def lower(
    segment: Segment,
    decompositions: dict[Any, Callable[..., Any]],
    *,
    checks_index: bool | None = None,
) -> Lowered:
    """The graph of `segment`, in the ops that `decompositions` leaves.

    With `checks_index` indices are clamped, and one more result says whether one was out of range;
    by default that is so on the CPU. The sizes of a generic segment are symbolic.

    Raises RuntimeError if the segment can't be lowered, and Declined if Inductor would compile it
    to a wrong kernel.
    """
    specs = {n: spec for n in segment.outputs if (spec := segment.specs[n]) is not None}
    symbols: SymbolicSizes | None = None
    input_specs, calls = segment.inputs, segment.calls
    if isinstance(segment, Generic):
        of_inputs = {size.symbols for size in segment.of_inputs if size.is_symbol}
        if len(of_inputs) < len(segment.own_values):
            raise RuntimeError("torch's symbols are sizes of inputs")
        symbols = SymbolicSizes(segment.own_values)
        input_specs, calls = segment.with_symbols(symbols.values)
    if checks_index is None:
        checks_index = segment.device.type == "cpu"
    checks_index = checks_index and index_checks.has_any(segment)
    # Writes are functionalized, and composite ops decomposed.
    with symbols.fake_mode if symbols is not None else FakeTensorMode():
        # scalars on the CPU wherever the segment runs: Inductor passes 0-dim CPU tensors by value
        inputs = [_empty(spec) for spec in input_specs]
        inputs += [torch.empty((), dtype=SCALAR_DTYPES[kind]) for kind in segment.scalars]
        program = _program(segment, calls, specs, checks_index)
        functional = torch.func.functionalize(program, remove="mutations")
        graph = make_fx(functional, decomposition_table=decompositions)(*inputs)
    # Inductor compiles such an offset as 0 (torch 2.13)
    if any(node.target is aten.sym_storage_offset.default for node in graph.graph.nodes):
        raise RuntimeError("a view begins at a place that depends on sizes")
    results: Any = graph.graph.output_node().args[0]
    if any(_would_be_an_input(node, graph.graph) for node in results):
        raise Declined("a result is a copy of an input that is written in part")
    if checks_index and segment.device.type == "cpu" and _writes_of_inputs(graph.graph):
        raise Declined("an input would be written before the check of an index raises")
    strides = [spec.stride for spec in specs.values()]
    sizes = [spec.size for spec in specs.values()]
    # the check is a 0-dim result behind the others
    if checks_index:
        strides.append(())
        sizes.append(())
    # Inductor keeps the strides of results with this mark, and may choose those of any other
    graph.graph.output_node().meta["user_visible_output_idxs"] = list(range(len(strides)))
    return Lowered(graph, inputs, tuple(strides), tuple(sizes), checks_index, symbols)


PARTS = frozenset({
    aten.index_put.default, aten._unsafe_index_put.default, aten.as_strided_scatter.default,
    aten.diagonal_scatter.default, aten.select_scatter.default, aten.slice_scatter.default,
})  # fmt: skip
"""Ops that return their first argument with a part replaced. Inductor may write it in place."""
MAY_CHANGE_NOTHING = frozenset({
    aten.alias.default, aten.cat.default, aten.ceil.default, aten.clone.default,
    aten.constant_pad_nd.default, aten.copy.default, aten.floor.default, aten.pow.Tensor_Scalar,
    aten.repeat.default, aten.round.decimals, aten.round.default, aten.trunc.default,
    torch.ops.prims.convert_element_type.default, torch.ops.prims.device_put.default,
})  # fmt: skip
"""Ops that Inductor removes where their result equals their argument."""


def _would_be_an_input(result: fx.Node, graph: fx.Graph) -> bool:
    """Whether Inductor would return an input's memory for a result that must have its own.

    In `x[0] = 1; y = x.clone()` Inductor removes the copy and writes `x` in place. Then `y` shares
    memory with `x` (torch 2.13; `torch.compile` has the same bug). This happens where the input is
    written, only ops that may change nothing or replace a part lie between the input and the
    result, and at least one of them replaces a part.
    """
    origin, has_parts = _origin(result)
    return has_parts and origin in {copy.args[0] for copy in _writes_of_inputs(graph)}


def read_before_written(graph: fx.Graph) -> None:
    """Order the final copies to inputs so that each input is read before it is written.

    In `old.copy_(now); now.copy_(new)` the copies are in the order of the inputs, and Inductor
    removes the copy of `now` that keeps its old value (torch 2.13; `torch.compile` has the same
    bug). Raises Declined if there is no such order, as where two inputs are swapped.
    """
    copies = _writes_of_inputs(graph)
    if len(copies) < 2:
        return
    read_by: dict[Any, Any] = {}
    for copy in copies:
        origin, has_parts = _origin(copy.args[1])
        read_by[copy] = None if has_parts or origin is copy.args[0] else origin
    last = copies[-1]
    while copies:
        still_read = {read_by[copy] for copy in copies}
        # writing this input loses nothing: no other copy reads its old value any more
        first = next((copy for copy in copies if copy.args[0] not in still_read), None)
        if first is None:
            raise Declined("inputs are copied to each other")
        copies.remove(first)
        if first is not last:
            last.append(first)
            last = first


def _writes_of_inputs(graph: fx.Graph) -> list[fx.Node]:
    """The writes to inputs: functionalization makes each a `copy_` at the end of the graph."""
    return [node for node in graph.nodes if node.target is aten.copy_.default]


def _origin(node: Any) -> tuple[Any, bool]:
    """The node from which ops that may change nothing or replace a part make a value.

    And whether one of these ops replaces a part.
    """
    has_parts = False
    # along first arguments
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target in PARTS:
            has_parts = True
        elif node.target not in MAY_CHANGE_NOTHING and not _is_view(node):
            break
        # `copy` returns its second argument, and `cat` takes a list
        source = node.args[1] if node.target is aten.copy.default else node.args[0]
        node = source[0] if isinstance(source, (list, tuple)) else source
    return node, has_parts


def _is_view(node: fx.Node) -> bool:
    op = node.target
    return isinstance(op, OpOverload) and any(
        argument.alias_info is not None for argument in op._schema.arguments
    )


def _empty(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=spec.device)


def _tensors_of_call(call: Call, returned: Any) -> list[torch.Tensor | None]:
    """The new tensors among the results of the op of `call`; None for undefined ones.

    Those of a norm are cast to the recorded dtypes, since `_promote` has widened its arguments.
    """
    created = _new_tensors(call, returned)
    if base_name(call.op) not in NORMS:
        return created
    return [
        value if value is None or spec is None else value.to(spec.dtype)
        for value, spec in zip(created, call.outputs, strict=True)
    ]


def _new_tensors(call: Call, returned: Any) -> list[torch.Tensor | None]:
    if not call.outputs:
        return []
    if isinstance(returned, torch.Tensor):
        return [returned]
    if len(call.op._schema.returns) > 1:
        returned = [v for v, new in zip(returned, creates(call), strict=True) if new]
    return [value if isinstance(value, torch.Tensor) else None for value in returned]


def _program(
    segment: Segment, calls: Sequence[Call], specs: dict[int, TensorSpec], checks_index: bool
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """`calls`, those of the segment, as a function that `make_fx` can trace.

    It takes the inputs and then the scalars, all as tensors. It returns the values numbered in
    `specs`, and whether an index was out of range if `checks_index`.
    """

    def program(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values: list[Any] = list(arguments[: len(segment.inputs)])
        scalars = arguments[len(segment.inputs) :]
        bad: list[torch.Tensor] = []
        for call in calls:
            if scalar_rules.has_scalars(call):
                operands = {
                    name: substituted(value, values, scalars) for name, value in call.arguments()
                }
                returned = scalar_rules.computed(call, operands, segment.scalars)
            else:
                returned = _run_op(call, values, bad if checks_index else None)
            values += _tensors_of_call(call, returned)
        # the specs were recorded under the user's modes, which could have changed a dtype
        if any(values[n].dtype is not spec.dtype for n, spec in specs.items()):
            raise RuntimeError("a result has another dtype than was promised")
        results = [
            _with_strides(values[n], _stride(segment, spec, values[n])) for n, spec in specs.items()
        ]
        if checks_index:
            results.append(torch.stack(bad).any())
        return tuple(results)

    return program


def _stride(segment: Segment, spec: TensorSpec, traced: torch.Tensor) -> Sequence[int]:
    """The strides that a result must have."""
    if isinstance(segment, Generic):
        return strides_like(spec, traced.size())
    return spec.stride


def _run_op(call: Call, values: Sequence[Any], bad_indices: list[torch.Tensor] | None) -> Any:
    """What the op returns; checks of its indices go to `bad_indices`, unless that is None."""
    op, args = call.op, substituted(call.args, values, ())
    if base_name(op) in NORMS:
        args = _promote(args)
    if base_name(op) in scalar_rules.OF_OWN_DTYPE:
        args = [args[0], *(_in_dtype(number, args[0].dtype) for number in args[1:])]
    if op is aten.native_batch_norm.default:
        op, args = _declared_batch_norm(args)
    if bad_indices is not None:
        args = index_checks.clamped(op, args, bad_indices)
    return op(*args, **{name: substituted(value, values, ()) for name, value in call.kwargs})


def _promote(args: list[Any]) -> list[Any]:
    """A norm's arguments, with tensors of several dtypes promoted to one.

    Eager's kernels compute in the widest dtype. The decompositions would compute the statistics in
    the dtype of the input, and round them.
    """
    dtypes = {a.dtype for a in args if isinstance(a, torch.Tensor)}
    if len(dtypes) < 2:
        return args
    widest = functools.reduce(torch.promote_types, dtypes)
    return [
        a.to(widest) if isinstance(a, torch.Tensor) and a.dtype is not widest else a for a in args
    ]


def _in_dtype(number: Any, dtype: torch.dtype) -> Any:
    """A number to fill into a tensor of this dtype.

    A float would promote integers and bools to float32, which loses bits.
    """
    if type(number) is not float or dtype.is_floating_point or dtype.is_complex:
        return number
    return bool(number) if dtype is torch.bool else int(number)


def _declared_batch_norm(args: list[Any]) -> tuple[Any, list[Any]]:
    """A batch norm op whose schema marks the running statistics as written, and its arguments.

    Functionalization goes by the schema: under `native_batch_norm` it would lose those writes.
    """
    inputs, weight, bias, mean, var, *rest = args
    if mean is None:
        return aten._native_batch_norm_legit.no_stats, [inputs, weight, bias, *rest]
    return aten._native_batch_norm_legit.default, args


def _with_strides(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """`tensor`, or a dense copy with its dimensions in the memory order of `stride`, if needed."""
    if not _differs(tensor.size(), tensor.stride(), stride):
        return tensor
    order = sorted(range(tensor.ndim), key=lambda dim: -stride[dim])
    dense = tensor.permute(order).clone(memory_format=torch.contiguous_format)
    return dense.permute([order.index(dim) for dim in range(tensor.ndim)])


def _differs(size: Sequence[int], actual: Sequence[int], expected: Sequence[int]) -> bool:
    # the stride of a dimension of one element addresses nothing
    return any(n > 1 and a != e for n, a, e in zip(size, actual, expected, strict=True))
