"""Translates a lowered segment to an nvFuser definition, op by op, by a table of rules.

In: the graph that `backends.lower` made, in the aten ops that `RULES` has. Out: a definition.
Half and bfloat16 are computed as float, as in eager kernels. They are rounded only where they are
stored or where the program casts, and not after each op. Called by `nvfuser.backend`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.backends.lower import Lowered
from lazy_tensor.kernels.backends.torch_inductor import text_of_size
from lazy_tensor.kernels.generic import Sizes, order_of
from lazy_tensor.kernels.nvfuser.definition import KINDS, MAX_RANK, Definition, Line, V, operands
from lazy_tensor.kernels.segment import Segment, TensorSpec

WIDE = {"Half": "Float", "BFloat16": "Float"}
"""The kind in which a dtype is computed, where it is a wider one."""


class Unsupported(Declined):
    """nvFuser can't compute something; the message says what."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the graph as it stands in the definition.

    `at` is its number there and `kind` its dtype, which for half and bfloat16 may be wider than in
    the graph. `meta` is the fake tensor of the graph. If `is_number`, nvFuser has a number where
    the graph has a 0-dim tensor.
    """

    at: V
    kind: str
    meta: torch.Tensor
    is_number: bool = False


R = TypeVar("R", bound=Callable[..., Any])
Rule = Callable[..., Any]
"""`rule(translator, meta, *args, **kwargs)` adds the lines for a node and returns its value.

`meta` is the node's fake result; for several results it is a tuple, and so is what the rule
returns. The arguments are those of the op's schema, with a `Value` for each tensor.
"""

RULES: dict[str, Rule] = {}
"""Rules by the op's name, `"aten.add"`, or by its overload, `"aten.div.Tensor_mode"`."""


def rule(*names: str) -> Callable[[R], R]:
    """Register a function as the rule of aten ops, or of prims with their namespace."""

    def register(function: R) -> R:
        for name in names:
            RULES[name if name.startswith(("aten.", "prims.")) else f"aten.{name}"] = function
        return function

    return register


def rule_of(op: Any) -> Rule | None:
    """The rule of an overload; that of the overload itself goes before that of the op."""
    name = str(op)
    return RULES.get(name) or RULES.get(name.rpartition(".")[0])


def translated(lowered: Lowered, segment: Segment) -> Definition:
    """The definition of a lowered segment, which takes its inputs and then its scalars.

    Raises Unsupported or TooManyPaths if nvFuser can't compute it.
    """
    promised = [*zip(lowered.sizes, lowered.strides, strict=True)]
    translator = Translator(segment, promised, has_check=lowered.has_check)
    translator.run(lowered.graph)
    return translator.definition


class Translator:
    """Walks a graph once and builds its definition. Rules call the public methods."""

    def __init__(
        self, segment: Segment, promised: list[tuple[Sizes, Sizes]], *, has_check: bool
    ) -> None:
        self.definition = Definition()
        self._has_check = has_check
        self._segment = segment
        # (size, strides) of each result, as eager execution gives them
        self._promised = promised
        # the value of each node translated so far
        self._env: dict[fx.Node, Any] = {}
        # a symbol's name -> an input and the dimension of it that has this size
        self._sizes: dict[str, tuple[V, int]] = {}
        self._inputs: list[Value] = []
        # values that are outputs already; two outputs may not share memory
        self._handed_out: set[int] = set()
        # (input, new value) in order; written after all results are computed
        self._writes: list[tuple[Value, V]] = []

    def run(self, module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self._env[node] = self._placeholder(node.meta["val"])
            elif node.op == "get_attr":
                self._env[node] = self._constant(getattr(module, str(node.target)))
            elif node.op == "output":
                self._outputs(node.args[0])
            elif node.target is torch.ops.aten.copy_.default:
                self._write(node)
            elif _is_tensors(node.meta.get("val")):
                self._env[node] = self._called(node)
            # else it computes a size, which `size` takes from the inputs where it is needed

    # Methods for rules

    def op(self, name: str, *args: Any, kind: str, **options: Any) -> V:
        """Add a line and return its value, of dtype `kind`. `args` are not converted."""
        made: V = self.definition.add(name, *args, kind=kind, **options)
        return made

    def held_as(self, value: Value, kind: str) -> V:
        """`value` converted to `kind` as torch does it."""
        if value.kind == kind:
            return value.at
        # any number but zero is true
        if kind == "Bool":
            zero = self.op("constant", number_of(value.kind)(0), kind=value.kind)
            return self.op("ne", value.at, zero, kind="Bool")
        return self.op("cast", value.at, kind=kind, dtype=kind)

    def wide(self, value: Value) -> V:
        """`value` in the kind in which its dtype is computed."""
        return self.held_as(value, wide_kind(value.meta.dtype))

    def size(self, n: Any) -> Any:
        """A size as an argument of a call: a number, or a value if it is symbolic."""
        if isinstance(n, torch.SymInt):
            # Evaluating the expression adds a line for each symbol and each operation in it. A name
            # that no input has, or an operator that `_Size` lacks, raises.
            try:
                found = eval(text_of_size(n), {"__builtins__": {}}, _Symbols(self, self._sizes))
            except (NameError, TypeError):
                raise Unsupported(f"a size that is {n}") from None
            return found.at if isinstance(found, _Size) else int(found)
        return n

    def sizes(self, shape: Sequence[Any]) -> list[Any]:
        return [self.size(n) for n in shape]

    def tensor(self, value: Value, shape: Sequence[Any] = ()) -> V:
        """`value` itself, or a tensor of `shape` filled with it if it is a number."""
        if not value.is_number:
            return value.at
        return self.op("full", self.sizes(shape), value.at, kind=value.kind, dtype=value.kind)

    def product(self, shape: Sequence[Any]) -> Any:
        """The number of elements of a shape: a number, or a value if a size is symbolic."""
        n: Any = 1
        for size in shape:
            n = n * size
        return self.size(n)

    def reshaped(self, value: Value, shape: Sequence[Any]) -> V:
        """`value` with its elements in the same order in another shape."""
        before, after = list(value.meta.shape), list(shape)
        at = self.tensor(value)
        if same_sizes(before, after):
            return at
        # only dimensions of one element come or go, which needs no reshape
        if same_sizes(_moving(before), _moving(after)):
            return self._with_ones(at, value.kind, before, after)
        return self.op("reshape", at, self.sizes(after), kind=value.kind)

    def expanded(self, value: Value, shape: Sequence[Any]) -> V:
        """`value` expanded to `shape`, as `Tensor.expand` does it."""
        if value.is_number:
            return self.tensor(value, shape)
        before = list(value.meta.shape)
        if same_sizes(before, shape):
            return value.at
        # the operand's dimensions are the last ones of the result; nvFuser's `expand` adds none
        places = list(range(len(shape) - len(before), len(shape)))
        sizes = self.sizes(shape)
        if not places or places[0]:
            return self.op("broadcast_in_dim", value.at, sizes, places, kind=value.kind)
        return self.op("expand", value.at, sizes, kind=value.kind)

    def along(self, vector: V, like: Value, dim: int) -> V:
        """A vector as a tensor of the rank of `like`, with its elements along `dim`."""
        is_new = [d != dim for d in range(like.meta.ndim)]
        kind = self.definition.kinds[vector.index]
        return self.op("broadcast", vector, is_new, kind=kind) if any(is_new) else vector

    def _with_ones(self, at: V, kind: str, before: list[Any], after: list[Any]) -> V:
        """`at` without its dimensions of one element, then with new ones where `after` has them."""
        ones = [d for d, n in enumerate(before) if is_one(n)]
        is_new = [is_one(n) for n in after]
        if ones:
            at = self.op("squeeze", at, ones, kind=kind)
        return self.op("broadcast", at, is_new, kind=kind) if any(is_new) else at

    # The graph's ends

    def _placeholder(self, meta: torch.Tensor) -> Value:
        """Declare an input, or a run-time scalar: those come after all inputs."""
        if len(self._inputs) == len(self._segment.inputs):
            kind = KINDS[meta.dtype]
            return Value(self.op("scalar", kind=kind, fresh=True), kind, meta, is_number=True)
        spec = self._segment.inputs[len(self._inputs)]
        # -1 is a size that is known at run time only. A size of one is always given, since nvFuser
        # treats such a dimension as a broadcast.
        shape = [n if n == 1 or not isinstance(n, torch.SymInt) else -1 for n in meta.shape]
        contiguity, order = descriptor(spec)
        is_cpu = spec.device.type == "cpu" != self._segment.device.type
        kind = kind_of(spec.dtype)
        at = self.op("input", shape, contiguity, order, is_cpu, kind=kind, fresh=True)
        for dim, n in enumerate(meta.shape):
            if isinstance(n, torch.SymInt):
                self._sizes.setdefault(text_of_size(n), (at, dim))
        value = Value(at, kind, meta)
        self._inputs.append(value)
        return value

    def _constant(self, tensor: torch.Tensor) -> Value:
        """A tensor that tracing has stored in the graph's module."""
        if tensor.numel() != 1:
            raise Unsupported("a constant tensor of several elements")
        kind = kind_of(tensor.dtype)
        at = self.op("constant", tensor.item(), kind=kind)
        return Value(at, kind, tensor, is_number=tensor.ndim == 0)

    def _called(self, node: fx.Node) -> Any:
        """Translate a node by the rule of its op."""
        meta = node.meta["val"]
        args = [self._argument(a) for a in node.args]
        if node.target is operator.getitem:
            return args[0][args[1]]
        for one in meta if isinstance(meta, (list, tuple)) else [meta]:
            if isinstance(one, torch.Tensor) and one.ndim > MAX_RANK:
                raise Unsupported(f"a tensor of more than {MAX_RANK} dimensions")
        found = rule_of(node.target)
        if found is None:
            raise Unsupported(f"no rule for {node.target}")
        kwargs = {name: self._argument(a) for name, a in node.kwargs.items()}
        return found(self, meta, *args, **kwargs)

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            # a node without a value computes a size
            return self._env[argument] if argument in self._env else argument.meta["val"]
        if isinstance(argument, (list, tuple)):
            return [self._argument(a) for a in argument]
        return argument

    def _write(self, node: fx.Node) -> None:
        """Note a `copy_` to an input, the only write that lowering leaves in a graph."""
        target, source = (self._argument(a) for a in node.args[:2])
        if not any(target is given for given in self._inputs):
            raise Unsupported("a write to what is not an input")
        self._check_device(target.meta)
        self._writes.append((target, self._own(source, target.meta.dtype)))
        self._env[node] = target

    def _outputs(self, results: Sequence[Any]) -> None:
        """Declare the results, each with its promised strides, and the writes to inputs."""
        for i, (result, promised) in enumerate(zip(results, self._promised, strict=True)):
            value = self._argument(result)
            if self._has_check and i == len(results) - 1:
                # the graph says whether an index is bad, while the device asserts that it is good
                is_good = self.op("logical_not", self.held_as(value, "Bool"), kind="Bool")
                value = Value(is_good, "Bool", value.meta)
            self._check_device(value.meta)
            at = self._own(value, value.meta.dtype)
            if len(promised[0]) > 1:
                order = stride_order(*promised)
                at = self.op("stride_order", at, order, kind=kind_of(value.meta.dtype), fresh=True)
            self.definition.output(at)
        n_results = len(results)
        # written by the kernel itself where that is safe, else copied from a result afterwards
        for target, at in self._writes:
            if self._may_write_within(target.at, at):
                self.definition.output(at, target.at)
                continue
            self.definition.output(at)
            number = next(i for i, given in enumerate(self._inputs) if given is target)
            self.definition.copies.append((number, n_results))
            n_results += 1

    def _check_device(self, meta: torch.Tensor) -> None:
        """Raise Unsupported for a result on the CPU: only inputs may be 0-dim CPU tensors."""
        if meta.device.type != self._segment.device.type:
            raise Unsupported(f"a result on {meta.device.type}")

    def _own(self, value: Value, dtype: torch.dtype) -> V:
        """`value` rounded to `dtype`, as an output with dense memory of its own.

        For a value that only moves another tensor's elements, nvFuser would return a view of that
        tensor. For repeated elements it would return an expanded tensor, with strides of 0.
        """
        kind = kind_of(dtype)
        at = self.held_as(value, kind)
        if value.is_number:
            at = self.op("full", [], at, kind=kind, dtype=kind)
        is_expanded = self._is_expanded(at)
        is_moved = self.definition.makers[at.index].op in MOVES | {"input"}
        if is_moved or is_expanded or at.index in self._handed_out:
            at = self._computed(at, kind, value.meta.shape if is_expanded else None)
        self._handed_out.add(at.index)
        return at

    def _computed(self, at: V, kind: str, shape: Sequence[Any] | None) -> V:
        """The same values computed by an op, so that they get memory of their own.

        The op is a product with 1, or `and` with true. If `shape` is given, the second operand is a
        dense tensor of that shape, so that the result is dense too.
        """
        wide = WIDE.get(kind, kind)
        held = at if wide == kind else self.op("cast", at, kind=wide, dtype=wide)
        one = self.op("constant", number_of(wide)(1), kind=wide)
        if shape:
            one = self.op("full", self.sizes(shape), one, kind=wide, dtype=wide)
        op = "logical_and" if kind == "Bool" else "mul"
        made = self.op(op, held, one, kind=wide, fresh=True)
        return made if wide == kind else self.op("cast", made, kind=kind, dtype=kind)

    def _is_expanded(self, at: V) -> bool:
        """Whether `at` is an expanded tensor or depends on one."""
        return any(
            line.op in ("expand", "broadcast_in_dim") or _has_repeats(line)
            for line in map(self.definition.makers.__getitem__, self.definition.ancestors(at))
        )

    def _may_write_within(self, target: V, at: V) -> bool:
        """Whether the kernel can safely write `at` to the memory of the input `target`.

        It can if every op that reads the input is elementwise, and contributes to `at`. Then each
        element is read before it is written, by the same thread. nvFuser checks only broadcasts, so
        the check is made here.
        """
        ancestors = self.definition.ancestors(at)
        return all(
            i in ancestors and line.op not in MOVES | NOT_ELEMENTWISE
            for i, line in enumerate(self.definition.makers)
            if line.op != "size" and target.index in operands(line.args)
        )


MOVES = frozenset({
    "broadcast", "broadcast_in_dim", "expand", "permute", "reshape", "select", "set", "slice",
    "squeeze", "stride_order",
})  # fmt: skip
"""nvFuser's ops that only move elements: their result may be a view of the operand."""
NOT_ELEMENTWISE = frozenset({
    "cat", "full", "gather", "index_select", "iota", "max", "min", "pad",
    "prod", "sum", "var", "var_mean",
})  # fmt: skip
"""nvFuser's ops in which an element of the result depends on other elements of an operand."""


class _Symbols(dict[str, Any]):
    """The names in an expression of sizes. A look-up adds a line that reads an input's size."""

    def __init__(self, translator: Translator, places: dict[str, tuple[V, int]]) -> None:
        super().__init__(places)
        self._translator = translator

    def __getitem__(self, name: str) -> _Size:
        tensor, dim = super().__getitem__(name)
        return _Size(self._translator, self._translator.op("size", tensor, dim, kind=""))


class _Size:
    """A size that is a value. Its operators add the lines of an expression of sizes."""

    def __init__(self, translator: Translator, at: Any) -> None:
        self._translator = translator
        self.at = at

    def _with(self, name: str, one: Any, other: Any) -> _Size:
        operands = [x.at if isinstance(x, _Size) else int(x) for x in (one, other)]
        return _Size(self._translator, self._translator.op(name, *operands, kind=""))

    def __add__(self, other: Any) -> _Size:
        return self._with("add", self, other)

    def __sub__(self, other: Any) -> _Size:
        return self._with("sub", self, other)

    def __mul__(self, other: Any) -> _Size:
        return self._with("mul", self, other)

    def __floordiv__(self, other: Any) -> _Size:
        return self._with("div", self, other)

    def __mod__(self, other: Any) -> _Size:
        return self._with("mod", self, other)

    def __radd__(self, other: Any) -> _Size:
        return self._with("add", other, self)

    def __rsub__(self, other: Any) -> _Size:
        return self._with("sub", other, self)

    def __rmul__(self, other: Any) -> _Size:
        return self._with("mul", other, self)

    # sympy prints a square as a power
    def __pow__(self, exponent: int) -> _Size:
        result = self
        for _ in range(exponent - 1):
            result = result * self
        return result


def _has_repeats(line: Line) -> bool:
    """Whether it is an input with repeated elements."""
    if line.op != "input":
        return False
    # `descriptor` gives None for dimensions of one element and for expanded ones
    shape: list[int] = line.args[0]
    contiguity: list[bool | None] = line.args[1]
    return shape.count(1) < contiguity.count(None)


def kind_of(dtype: torch.dtype) -> str:
    """nvFuser's name of a dtype; raises Unsupported if it has none."""
    kind = KINDS.get(dtype)
    if kind is None:
        raise Unsupported(f"nvFuser has no {dtype}")
    return kind


def wide_kind(dtype: torch.dtype) -> str:
    """The kind in which eager kernels compute `dtype`."""
    kind = kind_of(dtype)
    return WIDE.get(kind, kind)


def number_of(kind: str) -> type:
    """The Python type of a constant of `kind`."""
    return {"Bool": bool, "Int": int, "Int32": int}.get(kind, float)


def is_one(n: Any) -> bool:
    return not isinstance(n, torch.SymInt) and n == 1


def _moving(shape: Sequence[Any]) -> list[Any]:
    return [n for n in shape if not is_one(n)]


def same_sizes(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are written the same.

    Comparing the sizes themselves would add a condition on the symbols to the kernel.
    """
    return [str(n) for n in one] == [str(n) for n in other]


def _is_tensors(meta: Any) -> bool:
    return isinstance(meta, (torch.Tensor, list, tuple))


def descriptor(spec: TensorSpec) -> tuple[list[bool | None], list[int]]:
    """The contiguity and the stride order by which nvFuser describes a tensor's layout.

    Contiguity is listed from the outermost dimension in memory; it is None for a dimension of one
    element or of stride 0. The stride order is 0 for the innermost dimension. It does the same as
    nvFuser's `compute_tensor_descriptor`.
    """
    n_dims = len(spec.size)
    is_moving = [spec.size[d] != 1 and spec.stride[d] != 0 for d in range(n_dims)]
    inner = iter(sorted((d for d in range(n_dims) if is_moving[d]), key=lambda d: -spec.stride[d]))
    order = [next(inner) if is_moving[d] else d for d in range(n_dims)]
    contiguity: list[bool | None] = []
    expected = 1
    for dim in reversed(order):
        contiguity.append(spec.stride[dim] == expected if is_moving[dim] else None)
        if is_moving[dim]:
            expected = spec.stride[dim] * spec.size[dim]
    contiguity.reverse()
    return contiguity, _ranks(order)


def stride_order(size: Sizes, stride: Sizes) -> list[int]:
    """For each dimension its place in memory, 0 is innermost; Unsupported if there are gaps."""
    order = order_of(TensorSpec(size, stride, torch.float32, torch.device("cpu")))
    if order is None:
        raise Unsupported("a result with gaps in memory")
    return _ranks(order)


def _ranks(order: Sequence[int]) -> list[int]:
    """For each dimension its position in `order`, counted from the end."""
    ranks = [0] * len(order)
    for rank, dim in enumerate(reversed(order)):
        ranks[dim] = rank
    return ranks
