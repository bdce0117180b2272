"""Facts about an aten op, read once from its schema and tags.

In: an `OpOverload`. Out: `OpFacts`, which recording and planning ask instead of the op's name. The
tables here add what schemas leave out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._C import Argument
from torch._ops import OpOverload


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What the schema says. Arguments are named by position, keyword-only ones by name."""

    op: OpOverload
    # the arguments that the op writes
    writes: tuple[int | str, ...]
    # the position of the written argument that comes back (`add_`); None if results are new
    returns_arg: int | None
    returns_nothing: bool
    returns_tensors: bool
    # the results share memory with an argument that is not written
    is_view: bool
    is_out: bool
    is_random: bool
    # values of a tensor decide the result's size, or what Python gets (`item`)
    is_data_dependent: bool
    # the op changes size, strides or memory of an argument in place (`t_`)
    changes_metadata: bool
    # an in-place foreach op, whose writes autograd counts tensor by tensor
    writes_list: bool
    # the op raises for some values of its `number_args`: so these are in the schema cache's key
    checks_numbers: bool
    # numbers decide the result's size: so none of them is in `number_args`
    numbers_set_shape: bool
    # Other ranks wait for the call. So a plan makes it even if nobody uses its result, and in
    # program order.
    communicates: bool
    # the arguments that may be a Python number in arithmetic, which may become a run-time input
    number_args: frozenset[int | str]
    argument_names: tuple[str, ...]

    def named(self, args: Iterable[Any], kwargs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """A call's arguments by their names in the schema. Defaults are left out."""
        return {**dict(zip(self.argument_names, args, strict=False)), **dict(kwargs)}


aten = torch.ops.aten

UNMARKED_WRITES: dict[OpOverload, tuple[int, ...]] = {
    # the running statistics
    aten.native_batch_norm.default: (3, 4),
    aten.cudnn_batch_norm.default: (3, 4),
    aten.miopen_batch_norm.default: (3, 4),
}
"""Arguments that ops write though their schemas don't mark them."""
WAITS = frozenset(
    {torch.ops._c10d_functional.wait_tensor.default} if torch.distributed.is_available() else ()
)
"""Ops that give their argument back once it is there.

They count as views, because a plan makes a view where it is first needed: so it waits late.
"""
MARKED_VIEWS: dict[OpOverload, OpOverload] = {
    aten._unsafe_view.default: aten.view.default,
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}
"""Ops that make views though their schemas don't say so, and ops that make the same views and do.

Kernels are made of the latter: a compiler must see that a write to such a view is one to its base.
"""
UNMARKED_VIEWS = frozenset({*MARKED_VIEWS, *WAITS})
NUMBERS_SET_SHAPE = frozenset({
    "aten::arange", "aten::range",
    "aten::_foreach_norm", "aten::_foreach_powsum", "aten::dist", "aten::linalg_vector_norm",
    "aten::linalg__powsum", "aten::norm", "aten::renorm", "aten::renorm_",
})  # fmt: skip
"""Ops whose numbers can't be run-time inputs.

They decide the result's size, or how the ranks' parts of a sharded result are put together.
"""
CHECK_NUMBERS = frozenset({
    "aten::_cdist_forward", "aten::celu", "aten::celu_", "aten::huber_loss",
    "aten::smooth_l1_loss", "aten::softshrink",
})  # fmt: skip
"""Ops that raise for some numbers, such as a negative `beta`."""
POWERS = frozenset({"aten::pow", "aten::pow_"})
"""Ops that raise for some numbers if their tensors are integers, for a negative exponent."""
UNMARKED_POINTWISE = frozenset({"aten::floor_divide", "aten::floor_divide_", "aten::masked_fill_"})
"""Pointwise ops that torch doesn't tag so."""


def _is_written(argument: Argument) -> bool:
    """Whether the schema marks the argument as written: `Tensor(a!)`."""
    return argument.alias_info is not None and argument.alias_info.is_write


def _label(position: int, argument: Argument) -> int | str:
    """How `OpFacts` names an argument."""
    return argument.name if argument.kwarg_only else position


def _returned_argument(arguments: list[Argument], returns: list[Any]) -> int | None:
    # a returned argument has the same alias annotation as the argument, such as `Tensor(a!)`
    if len(returns) != 1 or returns[0].alias_info is None or not returns[0].alias_info.is_write:
        return None
    returned = returns[0].alias_info.before_set
    for position, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == returned:
            return position
    return None


@cache
def functional_of(op: OpOverload) -> OpOverload | None:
    """The overload without `out`, which takes the other arguments and gives a new tensor.

    None if there is none, or if the op has no `out` or several.
    """
    given = [argument for argument in op._schema.arguments if not argument.is_out]
    if len(op._schema.returns) != 1 or len(given) + 1 != len(op._schema.arguments):
        return None
    for name in op.overloadpacket.overloads():
        functional: OpOverload = getattr(op.overloadpacket, name)
        if list(map(_described, functional._schema.arguments)) == list(map(_described, given)):
            return functional
    return None


def _described(argument: Argument) -> tuple[str, str, bool]:
    return argument.name, str(argument.type), _is_written(argument)


@cache
def is_pointwise(op: OpOverload) -> bool:
    """Whether the op is pointwise, by its tag or that of the op that it is another form of.

    Torch tags few in-place forms and forms with `out=` themselves.
    """
    if op._schema.name in UNMARKED_POINTWISE:
        return True
    if (without_out := functional_of(op)) is not None:
        return is_pointwise(without_out)
    namespace, _, name = op._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    functional = getattr(packet, op._overloadname, op)
    return torch.Tag.pointwise in op.tags or torch.Tag.pointwise in functional.tags


@cache
def facts_of(op: OpOverload) -> OpFacts:
    """The facts of `op`, from its schema and tags."""
    arguments, returns, tags = op._schema.arguments, op._schema.returns, op.tags
    tensor_types = ("Tensor", "List[Tensor]", "Optional[Tensor]", "List[Optional[Tensor]]")
    return OpFacts(
        op=op,
        writes=UNMARKED_WRITES.get(op)
        or tuple(_label(i, a) for i, a in enumerate(arguments) if _is_written(a)),
        returns_arg=_returned_argument(arguments, returns),
        returns_nothing=not returns,
        returns_tensors=all(str(r.type) in tensor_types for r in returns),
        # an argument that is annotated but not written, `Tensor(a)`, shares memory with a result
        is_view=op in UNMARKED_VIEWS
        or any(a.alias_info is not None and not a.alias_info.is_write for a in arguments),
        is_out=any(a.is_out for a in arguments),
        is_random=torch.Tag.nondeterministic_seeded in tags,
        is_data_dependent=(
            torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
        ),
        changes_metadata=torch.Tag.inplace_view in tags,
        writes_list=op._schema.name.startswith("aten::_foreach") and op._schema.name.endswith("_"),
        communicates=op.namespace == "_c10d_functional",
        checks_numbers=op._schema.name in CHECK_NUMBERS | POWERS,
        numbers_set_shape=op._schema.name in NUMBERS_SET_SHAPE,
        number_args=frozenset(
            _label(i, a)
            for i, a in enumerate(arguments)
            if op._schema.name not in NUMBERS_SET_SHAPE
            and str(a.type) in ("number", "float", "Tensor", "Optional[number]", "List[number]")
        ),
        argument_names=tuple(argument.name for argument in arguments),
    )
