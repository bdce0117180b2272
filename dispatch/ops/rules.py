"""The table of op rules: what becomes of a call that no state knows.

In: an op. Out: its `Rule`, from the table where the schema alone can't tell, else from the schema
(`rule_of`). `recorder` and the C++ of hits ask for it. Also why an op runs at once, for reports.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.ops import rnn_layer
from lazy_tensor.dispatch.ops.schema import OpFacts, facts_of, functional_of

aten = torch.ops.aten


class Rule(Enum):
    """How a call is treated when no state knows it."""

    RECORD = "record it"
    ALIAS = "another handle on the same value"
    EAGER = "flush, then run it"
    DECOMPOSE = "record what it is made of"
    ZEROS = "record zeros, with memory"
    SAME = "hand the argument back"
    DRAW = "draw the random numbers now, into memory of the argument's shape"
    DRAW_INTO = "draw the random numbers now, record a copy into the argument"
    DROPOUT = "draw the mask now, record its application"
    SAMPLE = "draw the random numbers now, record what tensors make of them"
    INDEX = "run now if an index is a mask, else record"
    WAIT = "record that it is waited for"
    IF_NO_DROPOUT = "run now if it drops out, else record"
    RNN = "record it, with its workspace where backward may come"
    VIEW_IN_PLACE = "record the view that the argument becomes, if it is pending"


READS_VALUES = "it reads values"
SHAPE_BY_VALUES = "values decide the shape of its result"
DRAWS = "it draws random numbers"
MISJUDGED_SHAPE = "torch's meta function for it gives another shape or layout than its kernel"

EAGER_BECAUSE: dict[OpOverload, str] = {
    **dict.fromkeys(  # their tags don't say so
        (
            aten._pack_padded_sequence.default, aten._embedding_bag.default,
            aten._embedding_bag_forward_only.default,
        ),
        SHAPE_BY_VALUES,
    ),
    **dict.fromkeys(
        (aten.multilabel_margin_loss_forward.default, aten.max_unpool2d.default), MISJUDGED_SHAPE
    ),
    aten.as_strided_scatter.default: "its kernel looks at the size of the memory",
    **dict.fromkeys(
        (aten.select_scatter.default, aten.slice_scatter.default, aten.diagonal_scatter.default),
        "torch's meta function for it accepts a `src` of any size",
    ),
    **dict.fromkeys((aten.pin_memory.default, aten._pin_memory.default), "it reserves memory"),
    # some of these are composite, and would be decomposed
    **dict.fromkeys(torch_private.RANGE_OPS, "it marks a range for profilers"),
}  # fmt: skip
"""Ops that run at once though their schemas don't say so, and why."""
METADATA_FROM_RUN = frozenset({rnn_layer.TRAINING, rnn_layer.INFERENCE})
"""Ops whose meta functions don't know all of their outputs: each runs once for its sizes.

oneDNN's recurrent layers keep a workspace for backward. Sizes alone decide how large it is, but
only oneDNN knows how.
"""
VIEWS_IN_PLACE = {
    aten.squeeze_.default: aten.squeeze.default, aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims, aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int, aten.unsqueeze_.default: aten.unsqueeze.default,
}  # fmt: skip
"""Ops that turn their argument into a view of itself, and the ops that give this view."""

RULES: dict[OpOverload, Rule] = {
    aten.detach.default: Rule.ALIAS,
    aten.alias.default: Rule.ALIAS,
    aten.lift_fresh.default: Rule.SAME,
    aten._efficientzerotensor.default: Rule.ZEROS,
    aten.index.Tensor: Rule.INDEX,
    aten._unsafe_index.Tensor: Rule.INDEX,
    aten.native_dropout.default: Rule.DROPOUT,
    **dict.fromkeys(
        (
            aten.bernoulli.default,
            aten.multinomial.default,
            aten.normal.Tensor_Tensor,
            aten.normal.Tensor_float,
            aten.normal.float_Tensor,
        ),
        Rule.SAMPLE,
    ),
    **dict.fromkeys(EAGER_BECAUSE, Rule.EAGER),
    **dict.fromkeys(VIEWS_IN_PLACE, Rule.VIEW_IN_PLACE),
    aten.mkldnn_rnn_layer.default: Rule.RNN,
    rnn_layer.TRAINING: Rule.RECORD,
    rnn_layer.INFERENCE: Rule.RECORD,
}
for _packet, _overloads in {
    "bernoulli": ("p",), "rand_like": ("default", "generator"),
    "randn_like": ("default", "generator"),
    "randint_like": ("default", "low_dtype", "generator", "low_generator_dtype"),
}.items():  # fmt: skip
    for _name in _overloads:
        # not every torch has all of these overloads
        if hasattr(getattr(aten, _packet), _name):
            RULES[getattr(getattr(aten, _packet), _name)] = Rule.DRAW
for _packet, _overloads in {
    "bernoulli_": ("float",), "normal_": ("default",), "uniform_": ("default",),
    "exponential_": ("default",), "geometric_": ("default",), "log_normal_": ("default",),
    "cauchy_": ("default",), "random_": ("default", "from", "to"),
}.items():  # fmt: skip
    for _name in _overloads:
        RULES[getattr(getattr(aten, _packet), _name)] = Rule.DRAW_INTO
for _packet in (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_fused_attention_overrideable",
):  # fmt: skip
    if hasattr(aten, _packet):
        RULES[getattr(aten, _packet).default] = Rule.IF_NO_DROPOUT


COLLECTIVES = frozenset(
    "_c10d_functional::" + name
    for name in (
        "all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_reduce",
        "all_reduce_coalesced", "all_to_all_single", "broadcast", "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced", "wait_tensor",
    )
)  # fmt: skip
"""Functional collectives that give new memory: recorded, and run in program order."""


def rule_from_schema(facts: OpFacts) -> Rule:
    """The rule that the op's schema and tags give."""
    if facts.op._schema.name == "_c10d_functional::_wrap_tensor_autograd":
        return Rule.WAIT
    runs_now = (
        facts.is_random
        or facts.is_data_dependent
        or facts.changes_metadata
        or (facts.is_out and not _writes_like_in_place(facts.op))
        or not (facts.returns_tensors or facts.returns_nothing)
        # neither a result nor a written argument: it is called for another effect
        or (facts.returns_nothing and not facts.writes)
        # custom ops may do what no schema says: print, count, draw random numbers, communicate
        or (
            facts.op.namespace not in ("aten", "prims") and facts.op._schema.name not in COLLECTIVES
        )
    )
    return Rule.EAGER if runs_now else Rule.RECORD


WARN_IN_KERNELS = frozenset({"aten::index_reduce", "aten::scatter"})
"""Ops whose kernels warn: with `out=` they run at once, so that the warning comes with the call."""


def _writes_like_in_place(op: OpOverload) -> bool:
    """Whether calls of this op with `out=` are recorded, as writes of `out`.

    Those of structured ops are: one shape function and one kernel serve the forms with and without
    `out=`. `extend_trie` compares the metadata of `out` with that of the result.
    """
    functional = functional_of(op)
    return (
        functional is not None
        and op._schema.name not in WARN_IN_KERNELS
        and torch_private.is_structured(functional)
        and rule_of(functional) is Rule.RECORD
    )


RAISES_BY_VALUES = frozenset({"aten::_assert_async", "aten::_linalg_check_errors"})
"""Ops that give nothing, but raise for some values of their argument."""


@cache
def why_eager(op: OpOverload) -> str:
    """Why an op whose rule is `NOW` runs at once."""
    facts = facts_of(op)
    known = EAGER_BECAUSE.get(op)
    if known is not None:
        return known
    if torch.Tag.dynamic_output_shape in op.tags:
        return SHAPE_BY_VALUES
    # the first reason that holds is given, so special ones come before general ones
    reasons = {
        "it communicates with other ranks": op.namespace in ("c10d", "_c10d_functional"),
        "a custom op may do what its schema doesn't say": op.namespace not in ("aten", "prims"),
        "it raises by what it reads": op._schema.name in RAISES_BY_VALUES,
        READS_VALUES: facts.is_data_dependent,
        DRAWS: facts.is_random,
        "it changes a tensor's shape or memory in place": facts.changes_metadata,
        "it writes into out=": facts.is_out,
        "it returns nothing: it is called for what else it does": facts.returns_nothing,
    }
    return next((text for text, holds in reasons.items() if holds), "its result is no tensor")


@cache
def is_metadata_query(op: Any) -> bool:
    """Whether the op only asks a tensor for its size, layout or device.

    No dispatcher knows these ops. Python calls them for classes that answer themselves: nested,
    fake and functional tensors.
    """
    return isinstance(op, OpOverload) and not torch_private.is_in_dispatcher(op)


@cache
def rule_of(op: OpOverload) -> Rule:
    """The rule for `op`: the table's, else `DECOMPOSE` if it is composite, else its schema's."""
    found = RULES.get(op)
    if found is None:
        composite = torch_private.is_composite(op)
        found = Rule.DECOMPOSE if composite else rule_from_schema(facts_of(op))
    return found


@cache
def draws(op: OpOverload) -> bool:
    """Whether the op draws random numbers without a look at any tensor's values."""
    if rule_of(op) is Rule.DRAW:
        return True
    facts = facts_of(op)
    takes_tensors = any("Tensor" in str(argument.type) for argument in op._schema.arguments)
    return rule_of(op) is Rule.EAGER and facts.is_random and not takes_tensors


@cache
def is_part_of_past(op: OpOverload) -> bool:
    """Whether a call of the op tells one part of a program from another. Ops that read values end a
    region. Those that only hand on a tensor, or draw one, leave that to the ops that use it: they
    take no step in the trie."""
    no_step = rule_of(op) in (Rule.ALIAS, Rule.SAME) or draws(op)
    return not (reads_values(op) or no_step)


@cache
def reads_values(op: OpOverload) -> bool:
    """Whether a call is a read: it runs at once, and its result is no tensor or sized by values."""
    facts = facts_of(op)
    return rule_of(op) is Rule.EAGER and (facts.is_data_dependent or not facts.returns_tensors)


def run_at_once(op: OpOverload) -> None:
    """Run `op` at once from now on: its meta function was found to be wrong."""
    RULES[op] = Rule.EAGER
    EAGER_BECAUSE[op] = MISJUDGED_SHAPE
    rule_of.cache_clear()
    reads_values.cache_clear()
    why_eager.cache_clear()
    draws.cache_clear()
    is_part_of_past.cache_clear()


@cache
def needs_care(op: Any) -> bool:
    """Whether the op does something else when it is called below dispatch than above it.

    There kernels of linear algebra may fail to resolve the `conj()` that they use inside (see
    `kernels_only`). Nobody counts the writes of an in-place foreach op. The sizes of a packed
    sequence's batches stay plain, and C++ would make them lazy (see `eager_fallback`).
    """
    if not isinstance(op, OpOverload):
        return False
    names = ("linalg", "pinv", "lstsq", "::lu_", "_lu_with", "cholesky", "ormqr", "_pack_padded")
    return facts_of(op).writes_list or any(part in op._schema.name for part in names)
