"""Runs a definition's lines with torch on the CPU, and refuses what nvFuser refuses.

Each op is torch's of the same meaning; dtypes of results follow nvFuser's rules, not torch's. The
tests that have nvFuser build the same lines with it and compare the dtypes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from lazy_tensor.kernels.nvfuser.definition import DTYPES, KINDS, Line, V

FLOATS = ("Double", "Float", "Half", "BFloat16")
HALVES = ("Half", "BFloat16")


class Refused(RuntimeError):
    """nvFuser would raise for this line."""


@dataclass(frozen=True)
class Tensor:
    """A value: `ones` are the dimensions that nvFuser knows to be broadcast. A number has no
    dimensions and `is_number`."""

    data: torch.Tensor
    ones: frozenset[int] = frozenset()
    is_number: bool = False
    expanded: frozenset[int] = frozenset()

    @property
    def kind(self) -> str:
        return KINDS[self.data.dtype]


def run(lines: Sequence[Line], inputs: Sequence[torch.Tensor | float]) -> list[torch.Tensor]:
    """The outputs that are not written to inputs; the others are written."""
    interpreter = Interpreter(inputs)
    for line in lines:
        interpreter.take(line)
    for target, value in interpreter.writes:
        target.copy_(value)
    return interpreter.outputs


class Interpreter:
    def __init__(self, inputs: Sequence[torch.Tensor | float]) -> None:
        self.given = list(inputs)
        self.n_taken = 0
        self.values: list[Any] = []
        self.outputs: list[torch.Tensor] = []
        self.writes: list[tuple[torch.Tensor, torch.Tensor]] = []

    def take(self, line: Line) -> None:
        args = [self.resolved(arg) for arg in line.args]
        if line.op == "output":
            self.output(*args)
            return
        if line.op in ("input", "scalar"):
            self.values.append(self.input(line))
            return
        made = (
            OPS[line.op](*args, **dict(line.options)) if line.op != "constant" else _constant(line)
        )
        results = list(made) if isinstance(made, tuple) else [made]
        for result, kind in zip(results, line.kinds, strict=True):
            if isinstance(result, Tensor) and kind and result.kind != kind:
                raise AssertionError(f"{line.op} gives {result.kind}, the line says {kind}")
        self.values += results

    def tensors(self) -> list[torch.Tensor]:
        return [given for given in self.given if isinstance(given, torch.Tensor)]

    def resolved(self, arg: Any) -> Any:
        if isinstance(arg, V):
            return self.values[arg.index]
        if isinstance(arg, (list, tuple)):
            return [self.resolved(item) for item in arg]
        return arg

    def input(self, line: Line) -> Tensor:
        value = self.given[self.n_taken]
        self.n_taken += 1
        kind = line.kinds[0]
        if line.op == "scalar":
            if isinstance(value, torch.Tensor):
                raise Refused("a tensor for a number")
            return Tensor(torch.tensor(value, dtype=DTYPES[kind]), is_number=True)
        assert isinstance(value, torch.Tensor)
        shape, contiguity, order, is_cpu = line.args
        if value.dtype is not DTYPES[kind]:
            raise Refused(f"{value.dtype} for an input of {kind}")
        if is_cpu and value.ndim:
            raise Refused("a CPU tensor with dimensions")
        _check_layout(value, shape, contiguity, order)
        by_place = sorted(range(value.ndim), key=lambda d: -order[d])
        steady = {d for d, dense in zip(by_place, contiguity, strict=True) if dense is None}
        ones = frozenset(d for d, n in enumerate(shape) if n == 1)
        return Tensor(value, ones, expanded=frozenset(steady - ones))

    def output(self, value: Tensor, alias: Tensor | None) -> None:
        if value.is_number:
            raise Refused("an output that is a number")
        if value.expanded:
            raise AssertionError("an output whose elements nvFuser would not repeat")
        if alias is None:
            memory = [x.untyped_storage().data_ptr() for x in (*self.tensors(), *self.outputs)]
            if value.data.untyped_storage().data_ptr() in memory and value.data.numel():
                raise AssertionError("an output that nvFuser would return as a view")
            self.outputs.append(value.data)
            return
        if not any(alias.data is given for given in self.given):
            raise Refused("an alias of what is no input")
        if alias.data.dtype is not value.data.dtype or alias.data.shape != value.data.shape:
            raise AssertionError("an aliased output that differs from its input")
        self.writes.append((alias.data, value.data.clone()))


def _check_layout(
    tensor: torch.Tensor, shape: list[int], contiguity: list[bool | None], order: list[int]
) -> None:
    if not len(shape) == len(contiguity) == len(order) == tensor.ndim:
        raise Refused("a rank that differs")
    by_place = sorted(range(tensor.ndim), key=lambda d: -order[d])
    expected = 1
    for dim, is_contiguous in reversed(list(zip(by_place, contiguity, strict=True))):
        size, stride = tensor.size(dim), tensor.stride(dim)
        if shape[dim] < -1 or (shape[dim] > 0 and shape[dim] != size):
            raise Refused(f"size {size} for {shape[dim]}")
        if (shape[dim] == 1 or stride == 0) != (is_contiguous is None):
            raise Refused(f"contiguity {is_contiguous} of a dimension of {shape[dim]}")
        if is_contiguous and stride != expected:
            raise Refused(f"stride {stride} where {expected} was declared")
        if is_contiguous is not None:
            expected = size * stride


def _constant(line: Line) -> Tensor:
    return Tensor(torch.tensor(line.args[0], dtype=DTYPES[line.kinds[0]]), is_number=True)


OPS: dict[str, Callable[..., Any]] = {}


F = TypeVar("F", bound=Callable[..., Any])


def op(*names: str) -> Callable[[F], F]:
    def register(function: F) -> F:
        OPS.update(dict.fromkeys(names, function))
        return function

    return register


def _number(value: Any) -> Any:
    """A size or a place that may be a value."""
    return int(value.data) if isinstance(value, Tensor) else value


def _broadcast(operands: Sequence[Tensor]) -> frozenset[int]:
    """The broadcast dimensions of the result; Refused where one would have to be stretched that
    nvFuser takes for an ordinary one."""
    shape = torch.broadcast_shapes(*(x.data.shape for x in operands))
    ones = set(range(len(shape)))
    for x in operands:
        offset = len(shape) - x.data.ndim
        for dim, n in enumerate(x.data.shape):
            if dim not in x.ones:
                ones.discard(dim + offset)
                if n != shape[dim + offset]:
                    raise Refused("a dimension of size 1 that was not declared so is stretched")
    return frozenset(ones)


def elementwise(
    compute: Callable[..., torch.Tensor],
    operands: Sequence[Any],
    kind: Callable[[str], str],
) -> Tensor:
    for x in operands:
        if not isinstance(x, Tensor):
            raise AssertionError("a plain number: its dtype would be nvFuser's guess")
    first = operands[0].kind
    if any(x.kind != first for x in operands):
        raise AssertionError(f"operands of kinds {[x.kind for x in operands]}")
    dtype = DTYPES[kind(first)]
    data = compute(*(x.data for x in operands)).to(dtype)
    is_number = all(x.is_number for x in operands)
    return Tensor(data, _broadcast(operands), is_number, _expanded(operands))


def _expanded(operands: Sequence[Tensor]) -> frozenset[int]:
    """The dimensions that are repeated in all operands that have them."""
    n = max(x.data.ndim for x in operands)
    found = set()
    for dim in range(n):
        own = [(x, dim - n + x.data.ndim) for x in operands if dim >= n - x.data.ndim]
        moving = [(x, d) for x, d in own if d not in x.ones]
        if moving and all(d in x.expanded for x, d in moving):
            found.add(dim)
    return frozenset(found)


def _wide(kind: str) -> str:
    return "Float" if kind in HALVES else kind


def _float(kind: str) -> str:
    return "Double" if kind == "Double" else "Float"


def _same(kind: str) -> str:
    return kind


def _bool(kind: str) -> str:
    return "Bool"


def _integers(kind: str) -> str:
    if kind in FLOATS:
        raise Refused(f"a bitwise op on {kind}")
    return kind


def _bools(kind: str) -> str:
    if kind != "Bool":
        raise AssertionError(f"a logical op on {kind}")
    return kind


def _define(names: str, kind: Callable[[str], str], compute: Any = None) -> None:
    for name in names.split():
        function = compute or getattr(torch, name)
        OPS[name] = lambda *operands, function=function: elementwise(function, operands, kind)


_define(
    """exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh
    asinh acosh atanh erf erfc erfinv lgamma sigmoid reciprocal""",
    _float,
)
_define("abs sign floor ceil round trunc", _same)
_define("silu", _same, torch.nn.functional.silu)
_define("neg", _wide)
_define("isnan isinf isfinite isneginf isposinf signbit eq ne lt le gt ge", _bool)
_define("logical_and logical_or logical_not", _bools)
_define("bitwise_not bitwise_and bitwise_or bitwise_xor", _integers)
_define("bitwise_left_shift bitwise_right_shift", _integers)
_define("add sub mul fmod remainder pow maximum minimum", _wide)
_define("atan2", _float)
_define("mod", _same, torch.fmod)


@op("div")
def _div(a: Any, b: Any) -> Any:
    if a.kind in FLOATS:
        return elementwise(torch.div, (a, b), _wide)
    return elementwise(lambda x, y: torch.div(x, y, rounding_mode="trunc"), (a, b), _same)


@op("where")
def _where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if condition.kind != "Bool":
        raise Refused(f"a condition of {condition.kind}")
    if a.kind != b.kind:
        raise AssertionError(f"sides of {a.kind} and {b.kind}")
    operands = (condition, a, b)
    data = torch.where(condition.data, a.data, b.data)
    is_number = all(x.is_number for x in operands)
    return Tensor(data, _broadcast(operands), is_number, _expanded(operands))


@op("cast")
def _cast(x: Tensor, dtype: str) -> Tensor:
    if dtype == "Bool" and x.kind in FLOATS:
        raise AssertionError("a cast of a float to Bool")
    return Tensor(x.data.to(DTYPES[dtype], copy=True), x.ones, x.is_number, x.expanded)


# Sizes, computed as plain numbers by way of 0-dim integers


@op("size")
def _size(x: Tensor, dim: int) -> Tensor:
    return Tensor(torch.tensor(x.data.size(dim)), is_number=True)


for _name, _function in {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul,
    "div": operator.floordiv, "mod": operator.mod,
}.items():  # fmt: skip

    def _on_sizes(a: Any, b: Any, function: Any = _function, on_tensors: Any = OPS[_name]) -> Any:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return on_tensors(a, b)
        one, other = (_number(x) for x in (a, b))
        for x in (a, b):
            if isinstance(x, Tensor) and not (x.is_number and x.kind == "Int"):
                raise AssertionError("a plain number: its dtype would be nvFuser's guess")
        return Tensor(torch.tensor(function(one, other)), is_number=True)

    OPS[_name] = _on_sizes


# Reductions


def _reduced(data: torch.Tensor, x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    if not dims:
        raise Refused("a reduction of no dimensions")
    if keepdim:
        return Tensor(data, x.ones | frozenset(dims))
    left = [d for d in range(x.data.ndim) if d not in dims]
    return Tensor(data, frozenset(i for i, d in enumerate(left) if d in x.ones))


@op("sum")
def _sum(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    dtype = x.data.dtype if x.kind in FLOATS else torch.int64
    return _reduced(x.data.sum(dims, keepdim, dtype=dtype), x, dims, keepdim)


@op("prod")
def _prod(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    data = x.data if x.kind in FLOATS else x.data.long()
    for dim in dims:
        data = data.prod(dim, keepdim=True)
    data = data if keepdim else data.squeeze(dims)
    return _reduced(data, x, dims, keepdim)


@op("max")
def _max(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    return _reduced(x.data.amax(dims, keepdim), x, dims, keepdim)


@op("min")
def _min(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    return _reduced(x.data.amin(dims, keepdim), x, dims, keepdim)


@op("var")
def _var(x: Tensor, dims: list[int], correction: int, keepdim: bool) -> Tensor:
    _check_var(x, correction)
    return _reduced(x.data.var(dims, correction=correction, keepdim=keepdim), x, dims, keepdim)


@op("var_mean")
def _var_mean(x: Tensor, dims: list[int], correction: int, keepdim: bool) -> tuple[Tensor, ...]:
    _check_var(x, correction)
    pair = torch.var_mean(x.data, dims, correction=correction, keepdim=keepdim)
    return tuple(_reduced(data, x, dims, keepdim) for data in pair)


def _check_var(x: Tensor, correction: int) -> None:
    if x.kind in HALVES:
        raise Refused(f"the variance of {x.kind}")
    if x.kind not in FLOATS:
        raise AssertionError("the variance of integers")
    if type(correction) is not int:
        raise Refused("a correction that is no integer")


# Shapes


def _ones_of(shape: Sequence[Any]) -> frozenset[int]:
    """The dimensions that a definition gives the size 1 in so many words."""
    return frozenset(d for d, n in enumerate(shape) if not isinstance(n, Tensor) and n == 1)


def _static_ones(data: torch.Tensor) -> frozenset[int]:
    return frozenset(d for d, n in enumerate(data.shape) if n == 1)


@op("reshape")
def _reshape(x: Tensor, shape: list[Any]) -> Tensor:
    return Tensor(x.data.reshape([_number(n) for n in shape]), _ones_of(shape))


@op("permute")
def _permute(x: Tensor, dims: list[int]) -> Tensor:
    ones, expanded = (
        frozenset(i for i, d in enumerate(dims) if d in kept) for kept in (x.ones, x.expanded)
    )
    return Tensor(x.data.permute(dims), ones, expanded=expanded)


@op("broadcast")
def _broadcast_op(x: Tensor, is_new: list[bool]) -> Tensor:
    if len(is_new) - sum(is_new) != x.data.ndim:
        raise Refused("a broadcast of another rank")
    kept = [d for d, new in enumerate(is_new) if not new]
    ones = {d for d, new in enumerate(is_new) if new}
    data = x.data.reshape(
        [1 if new else x.data.size(kept.index(d)) for d, new in enumerate(is_new)]
    )
    expanded = frozenset(kept[d] for d in x.expanded)
    return Tensor(data, frozenset(ones | {kept[d] for d in x.ones}), expanded=expanded)


@op("squeeze")
def _squeeze(x: Tensor, dims: list[int]) -> Tensor:
    if not set(dims) <= x.ones:
        raise Refused("squeeze of a dimension that is not declared 1")
    left = [d for d in range(x.data.ndim) if d not in dims]
    return Tensor(x.data.squeeze(dims), frozenset(i for i, d in enumerate(left) if d in x.ones))


@op("expand")
def _expand(x: Tensor, shape: list[Any]) -> Tensor:
    sizes = [_number(n) for n in shape]
    if len(sizes) != x.data.ndim:
        raise Refused("expand to another rank")
    for dim, n in enumerate(sizes):
        if n != x.data.size(dim) and dim not in x.ones:
            raise Refused("expand of a dimension that is not declared 1")
    ones = frozenset(d for d in x.ones if sizes[d] == 1)
    return Tensor(x.data.expand(sizes), ones, expanded=x.expanded | (x.ones - ones))


@op("broadcast_in_dim")
def _broadcast_in_dim(x: Tensor, shape: list[Any], dims: list[int]) -> Tensor:
    is_new = [d not in dims for d in range(len(shape))]
    return _expand(_broadcast_op(x, is_new), shape)


@op("stride_order")
def _stride_order(x: Tensor, order: list[int]) -> Tensor:
    by_place = sorted(range(x.data.ndim), key=lambda d: -order[d])
    if x.data.permute(by_place).is_contiguous():
        return x  # as nvFuser: a view
    dense = x.data.permute(by_place).clone(memory_format=torch.contiguous_format)
    return Tensor(dense.permute([by_place.index(d) for d in range(x.data.ndim)]), x.ones)


@op("slice")
def _slice(x: Tensor, starts: list[Any], ends: list[Any]) -> Tensor:
    data = x.data
    for dim, (start, end) in enumerate(zip(starts, ends, strict=True)):
        first, last = _number(start), _number(end)
        if first < 0:
            raise Refused("a negative start")
        data = data.narrow(dim, first, min(last, data.size(dim)) - first)
    return Tensor(data, _static_ones(data))


@op("select")
def _select(x: Tensor, index: Any, dim: int) -> Tensor:
    if not isinstance(index, Tensor):
        raise Refused("a plain number for the index")
    left = [d for d in range(x.data.ndim) if d != dim]
    ones = frozenset(i for i, d in enumerate(left) if d in x.ones)
    return Tensor(x.data.select(dim, int(index.data)), ones)


@op("cat")
def _cat(tensors: list[Tensor], dim: int) -> Tensor:
    if len({x.kind for x in tensors}) != 1:
        raise Refused("a cat of several dtypes")
    data = torch.cat([x.data for x in tensors], dim)
    ones = frozenset.intersection(*(x.ones for x in tensors)) - {dim}
    return Tensor(data, ones)


@op("pad")
def _pad(x: Tensor, widths: list[Any], value: Tensor) -> Tensor:
    numbers = [_number(n) for n in widths]
    if x.kind != value.kind:
        raise AssertionError("a padding of another dtype")
    data = torch.nn.functional.pad(x.data, numbers, value=value.data.item())
    padded = {x.data.ndim - 1 - i // 2 for i, n in enumerate(numbers) if n}
    return Tensor(data, x.ones - padded | (_static_ones(data) & frozenset(padded)))


@op("index_select")
def _index_select(x: Tensor, index: Tensor, dim: int) -> Tensor:
    _check_index(index)
    if index.data.ndim != 1:
        raise AssertionError("an index of another rank than 1")
    ones = x.ones - {dim} | ({dim} if 0 in index.ones else set())
    return Tensor(x.data.index_select(dim, index.data), frozenset(ones))


@op("gather")
def _gather(x: Tensor, index: Tensor, dim: int) -> Tensor:
    _check_index(index)
    return Tensor(x.data.gather(dim, index.data.long()), index.ones)


def _check_index(index: Tensor) -> None:
    if index.kind not in ("Int", "Int32"):
        raise Refused(f"an index of {index.kind}")


@op("full")
def _full(shape: list[Any], value: Any, dtype: str) -> Tensor:
    if not (isinstance(value, Tensor) and value.is_number):
        raise AssertionError("a fill value that is no number of the definition")
    sizes = [_number(n) for n in shape]
    if any(n < 0 for n in sizes):
        raise Refused("a size that nothing gives")
    return Tensor(torch.full(sizes, value.data.item(), dtype=DTYPES[dtype]), _ones_of(shape))


@op("iota")
def _iota(length: Any, start: Any = 0, step: Any = 1, dtype: str = "Int") -> Tensor:
    n, first, by = (x.data.item() if isinstance(x, Tensor) else x for x in (length, start, step))
    if (dtype in FLOATS) != (isinstance(first, float) and isinstance(by, float)):
        raise Refused("an iota of floats from integers, or the other way")
    data = first + by * torch.arange(n, dtype=torch.float64 if dtype in FLOATS else torch.int64)
    return Tensor(data.to(DTYPES[dtype]), _ones_of([length]))
