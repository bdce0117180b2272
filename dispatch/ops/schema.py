"""Facts of an aten op that its schema states, read once an op.

In: an `OpOverload`. Out: `OpFacts`, which recording and planning ask instead of the op's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._C import Argument
from torch._ops import OpOverload


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What the schema says.

    `writes` are the arguments written, by position or by keyword name. `returns_arg` is the
    position of the written argument that comes back (`add_`); None if fresh values or nothing come
    back. `is_view`: the results share memory with an argument that is not written.
    `number_args` are the positions and names of arguments that may be a Python number in
    arithmetic; `writes_list`: a foreach op in place, whose writes autograd counts tensor by tensor;
    `checks_numbers`: some of their values are refused; `numbers_decide`: they decide the result's
    size; `communicates`: other ranks wait for the call, so that it is made whoever uses its result,
    and in the program's order.
    """

    op: OpOverload
    writes: tuple[int | str, ...]
    returns_arg: int | None
    returns_nothing: bool
    returns_tensors: bool
    is_view: bool
    is_out: bool
    is_random: bool
    is_data_dependent: bool
    changes_metadata: bool
    writes_list: bool
    checks_numbers: bool
    numbers_decide: bool
    communicates: bool
    number_args: frozenset[int | str]
    argument_names: tuple[str, ...]


aten = torch.ops.aten

UNMARKED_WRITES: dict[OpOverload, tuple[int, ...]] = {
    # The running statistics, which these schemas don't mark.
    aten.native_batch_norm.default: (3, 4),
    aten.cudnn_batch_norm.default: (3, 4),
    aten.miopen_batch_norm.default: (3, 4),
}
WAITS = frozenset(
    {torch.ops._c10d_functional.wait_tensor.default} if torch.distributed.is_available() else ()
)
"""They give their argument back once it is there: so views, which plans make where first needed."""
MARKED_VIEWS: dict[OpOverload, OpOverload] = {
    aten._unsafe_view.default: aten.view.default,
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}
"""Ops that make views though their schemas don't say so, and those that do the same and say so: a
kernel must see that a write to such a view is one to its base."""
UNMARKED_VIEWS = frozenset({*MARKED_VIEWS, *WAITS})
NUMBERS_DECIDE = frozenset({
    "aten::arange", "aten::range",
    "aten::_foreach_norm", "aten::_foreach_powsum", "aten::dist", "aten::linalg_vector_norm",
    "aten::linalg__powsum", "aten::norm", "aten::renorm", "aten::renorm_",
})  # fmt: skip
"""Ops whose numbers decide the result's size, or how ranks' parts of it are put together, so that
they can't be run-time inputs."""
CHECK_NUMBERS = frozenset({"aten::pow", "aten::pow_"})
"""Ops that refuse numbers by their value: an integer to a negative power."""


def _is_written(argument: Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _label(position: int, argument: Argument) -> int | str:
    return argument.name if argument.kwarg_only else position


def _returned_argument(arguments: list[Argument], returns: list[Any]) -> int | None:
    if len(returns) != 1 or returns[0].alias_info is None or not returns[0].alias_info.is_write:
        return None
    returned = returns[0].alias_info.before_set
    for position, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == returned:
            return position
    return None


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
        checks_numbers=op._schema.name in CHECK_NUMBERS,
        numbers_decide=op._schema.name in NUMBERS_DECIDE,
        number_args=frozenset(
            _label(i, a)
            for i, a in enumerate(arguments)
            if op._schema.name not in NUMBERS_DECIDE
            and str(a.type) in ("number", "float", "Tensor", "Optional[number]", "List[number]")
        ),
        argument_names=tuple(argument.name for argument in arguments),
    )
