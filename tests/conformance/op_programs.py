"""Programs made of one sample of an op: functional, in-place, `out=`, a write through a view.

In: an `OpInfo` and a `SampleInput`. Out: `Program`s by the name of the variant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.conformance.spread import seed
from tests.conformance.ways import Program, Tolerance

UNINITIALISED = frozenset({
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
})  # fmt: skip

NOT_REPEATABLE = frozenset({"linalg.lstsq"})
"""Ops whose LAPACK driver rounds by where its work space lies: eager differs from eager."""
ROUNDING = Tolerance(1e-4, 1e-4)

Arguments = tuple[Any, tuple[Any, ...], dict[str, Any]]


def samples_of(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    """The op's samples, the same in every process."""
    seed()
    differentiates = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    yield from op.sample_inputs("cpu", dtype, requires_grad=differentiates)


def programs_of(op: Any, sample: Any) -> Iterator[tuple[str, Program]]:
    """Each variant that `op` has for `sample`, with its name."""
    for variant, program in _exact_programs(op, sample):
        tolerance = ROUNDING if op.name in NOT_REPEATABLE else None
        compares = op.name not in UNINITIALISED
        yield variant, program._replace(compares_values=compares, tolerance=tolerance)


def _exact_programs(op: Any, sample: Any) -> Iterator[tuple[str, Program]]:
    yield "functional", Program(lambda: fresh(sample), _functional(op))
    if op.inplace_variant is not None and can_be_written(sample):
        yield "in-place", _in_place(op, sample)
    template = result_without_grad(op, sample)
    if template is None:
        return
    result, shares_memory = template
    if op.supports_out and is_tensors(result):
        for name, make_out in OUTS.items():
            yield name, _with_out(op, sample, result, make_out)
    if shares_memory:
        yield "written view", Program(lambda: fresh(sample, False), _written_view(op))


def fresh(sample: Any, keeps_grad: bool = True) -> Arguments:
    """The sample's arguments with new tensors: same strides, and shared tensors stay shared."""
    copies: dict[int, torch.Tensor] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = copy_of(tensor, keeps_grad and tensor.requires_grad)
        return copies[id(tensor)]

    given = (sample.input, sample.args, sample.kwargs)
    copy: Arguments = pytree.tree_map_only(torch.Tensor, copied, given)
    return copy


def copy_of(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    with torch.no_grad():
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            copy = tensor.detach().clone()
        else:
            storage = tensor.untyped_storage().clone()
            copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
                storage, tensor.storage_offset(), tensor.size(), tensor.stride()
            )
    return copy.requires_grad_(requires_grad)


def is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def gradients(outputs: Any, inputs: Any) -> Any:
    """The gradients of the sum of `outputs` with regard to `inputs`."""
    outputs = [t for t in pytree.tree_leaves(outputs) if is_differentiable(t)]
    inputs = [t for t in pytree.tree_leaves(inputs) if is_differentiable(t)]
    if not (outputs and inputs):
        return ()
    ones = [torch.ones_like(t) for t in outputs]
    return torch.autograd.grad(outputs, inputs, ones, allow_unused=True)


def _functional(op: Any) -> Callable[[Arguments], Any]:
    def run(given: Arguments) -> Any:
        tensor, args, kwargs = given
        result = op(tensor, *args, **kwargs)
        return result, gradients(result, given), given

    return run


def can_be_written(sample: Any) -> bool:
    return (
        isinstance(sample.input, torch.Tensor)
        and sample.input.layout is torch.strided
        and not sample.broadcasts_input
    )


def _in_place(op: Any, sample: Any) -> Program:
    """The op's in-place form on a view: the write must show in the base and in other views."""
    differentiates = op.supports_inplace_autograd and sample.input.requires_grad

    def prepare() -> Any:
        tensor, args, kwargs = fresh(sample, op.supports_inplace_autograd)
        with torch.no_grad():
            base = torch.stack([tensor, tensor.clone(), tensor]).contiguous()
        return base.requires_grad_(differentiates), args, kwargs

    def run(given: Any) -> Any:
        leaf, args, kwargs = given
        base = leaf.clone() if differentiates else leaf
        view, sibling = base[1], base[1:]
        result = op.inplace_variant(view, *args, **kwargs)
        return result is view, result, view, sibling, base, gradients((sibling, base), given)

    return Program(prepare, run)


def result_without_grad(op: Any, sample: Any) -> tuple[Any, bool] | None:
    """Eager's result, and whether it shares memory with an argument; None where eager raises."""
    tensor, args, kwargs = given = fresh(sample, False)
    torch.manual_seed(3)
    try:
        result = op(tensor, *args, **kwargs)
    except Exception:
        return None
    memory = {pointer(t) for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor)}
    results = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    return result, any(pointer(t) in memory for t in results if t.numel())


def pointer(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def is_tensors(result: Any) -> bool:
    items = result if isinstance(result, (list, tuple)) else [result]
    return bool(items) and all(
        isinstance(t, torch.Tensor) and t.layout is torch.strided for t in items
    )


def _of_right_size(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.ones(like.shape, dtype=like.dtype)
    return out, out


def _inside_a_buffer(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    buffer = torch.ones(2 * like.numel() + 5, dtype=like.dtype)
    return buffer[3 : 3 + like.numel()].view(like.shape), buffer


def _of_wrong_size(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.ones((*like.shape, 2), dtype=like.dtype)
    return out, out


def _empty(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # with room for the result, so that what an op fails to write has a known value
    out = torch.ones(like.numel(), dtype=like.dtype).resize_(0)
    return out, out


OUTS = {
    "out": _of_right_size,
    "out in a buffer": _inside_a_buffer,
    "out resized": _of_wrong_size,
    "out empty": _empty,
}


def _with_out(op: Any, sample: Any, result: Any, make_out: Callable[..., Any]) -> Program:
    """`out=` memory that is written before and after too, by ops that are recorded."""

    def prepare() -> Any:
        if isinstance(result, torch.Tensor):
            out, memory = make_out(result)
            return fresh(sample, False), out, memory
        pairs = [make_out(tensor) for tensor in result]
        return fresh(sample, False), tuple(out for out, _ in pairs), [memory for _, memory in pairs]

    def run(given: Any) -> Any:
        (tensor, args, kwargs), out, memory = given
        pytree.tree_map(change, out)
        results = op(tensor, *args, **kwargs, out=out)
        seen = pytree.tree_map(torch.clone, results)
        pytree.tree_map(change, out)
        return seen, results, out, memory

    return Program(prepare, run, compares_warnings=True)


def _written_view(op: Any) -> Callable[[Arguments], Any]:
    """A view written, then its base: each write must show in both."""

    def run(given: Arguments) -> Any:
        tensor, args, kwargs = given
        results = op(tensor, *args, **kwargs)
        with torch.no_grad():
            for result in pytree.tree_leaves(results):
                if isinstance(result, torch.Tensor):
                    change(result)
            seen = pytree.tree_map_only(torch.Tensor, torch.clone, (results, given))
            if isinstance(tensor, torch.Tensor):
                change(tensor)
        return seen, results, given

    return run


def change(tensor: torch.Tensor) -> None:
    """Write to `tensor` so that no element keeps its value, or few do."""
    if tensor.dtype is torch.bool:
        tensor.logical_not_()
    else:
        tensor.mul_(2).add_(1)
