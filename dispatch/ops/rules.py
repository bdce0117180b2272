"""What a call turns into, where the schema alone can't say: the one table of op rules.

In: an op. Out: `Rule`. The default comes from the schema (`rule_of`).
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from lazy_tensor.dispatch import torch_private
from lazy_tensor.dispatch.ops import rnn_layer
from lazy_tensor.dispatch.ops.schema import OpFacts, facts_of

aten = torch.ops.aten


class Rule(Enum):
    """How a call is treated when no state knows it."""

    RECORD = "record it"
    ALIAS = "another handle on the same value"
    NOW = "flush, then run it"
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

NOW_BECAUSE: dict[OpOverload, str] = {
    **dict.fromkeys(  # which their tags don't say
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
    **dict.fromkeys((aten.pin_memory.default, aten._pin_memory.default), "it reserves memory"),
    # some torch would take them apart
    **dict.fromkeys(torch_private.RANGE_OPS, "it marks a range for profilers"),
}  # fmt: skip
"""Ops that run at once though their schemas don't say so, and why."""
TOLD_BY_RUNNING = frozenset({aten.mkldnn_rnn_layer.default, rnn_layer.WITH_WORKSPACE})
"""Ops whose meta functions don't know all that they give, which depends on sizes alone: each runs
once for its sizes. oneDNN's layers keep a workspace for backward that only oneDNN knows the size
of."""
VIEWS_IN_PLACE = {
    aten.squeeze_.default: aten.squeeze.default, aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims, aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int, aten.unsqueeze_.default: aten.unsqueeze.default,
}  # fmt: skip
"""Ops that make a view of their argument out of itself, and those that give the view."""

RULES: dict[OpOverload, Rule] = {
    aten.detach.default: Rule.ALIAS,
    aten.alias.default: Rule.ALIAS,
    aten.lift_fresh.default: Rule.SAME,
    aten._efficientzerotensor.default: Rule.ZEROS,  # it has no memory
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
    **dict.fromkeys(NOW_BECAUSE, Rule.NOW),
    **dict.fromkeys(VIEWS_IN_PLACE, Rule.VIEW_IN_PLACE),
    aten.mkldnn_rnn_layer.default: Rule.RNN,
    rnn_layer.WITH_WORKSPACE: Rule.RECORD,
}
for _packet, _overloads in {
    "bernoulli": ("p",), "rand_like": ("default", "generator"),
    "randn_like": ("default", "generator"),
    "randint_like": ("default", "low_dtype", "generator", "low_generator_dtype"),
}.items():  # fmt: skip
    for _name in _overloads:
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
"""Ops of other ranks too that give new memory: recorded, and run in the program's order."""


def rule_from_schema(facts: OpFacts) -> Rule:
    """The rule that the op's schema and tags give."""
    if facts.op._schema.name == "_c10d_functional::_wrap_tensor_autograd":
        return Rule.WAIT
    runs_now = (
        facts.is_random
        or facts.is_data_dependent
        or facts.changes_metadata
        or facts.is_out
        or not (facts.returns_tensors or facts.returns_nothing)
        or (facts.returns_nothing and not facts.writes)
        # custom ops may do what no schema says: print, count, draw random numbers, communicate
        or (
            facts.op.namespace not in ("aten", "prims") and facts.op._schema.name not in COLLECTIVES
        )
    )
    return Rule.NOW if runs_now else Rule.RECORD


RAISES_BY_VALUES = frozenset({"aten::_assert_async", "aten::_linalg_check_errors"})


@cache
def why_now(op: OpOverload) -> str:
    """Why an op whose rule is `NOW` is run, not recorded."""
    facts = facts_of(op)
    known = NOW_BECAUSE.get(op)
    if known is not None:
        return known
    if torch.Tag.dynamic_output_shape in op.tags:
        return SHAPE_BY_VALUES
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
def is_question(op: Any) -> bool:
    """Whether the op only asks a tensor for its size, layout or device: classes that answer
    themselves (nested, fake and functional tensors) get such calls, which no dispatcher knows."""
    return isinstance(op, OpOverload) and not torch_private.is_in_dispatcher(op)


@cache
def rule_of(op: OpOverload) -> Rule:
    """The rule for `op`: the table's, else what its schema says."""
    found = RULES.get(op)
    if found is None:
        composite = torch_private.is_composite(op)
        found = Rule.DECOMPOSE if composite else rule_from_schema(facts_of(op))
    return found


@cache
def reads_values(op: OpOverload) -> bool:
    """Whether the op gives what only a tensor's values say."""
    facts = facts_of(op)
    return rule_of(op) is Rule.NOW and (facts.is_data_dependent or not facts.returns_tensors)


def run_at_once(op: OpOverload) -> None:
    """Make `Rule.NOW` the rule for `op`, whose meta function was found to be wrong."""
    RULES[op] = Rule.NOW
    NOW_BECAUSE[op] = MISJUDGED_SHAPE
    rule_of.cache_clear()
    reads_values.cache_clear()
    why_now.cache_clear()


@cache
def needs_care(op: Any) -> bool:
    """Whether the op gives something else below dispatch than above it.

    Kernels of linear algebra may use `conj()` inside (see `kernels_only`), and a foreach op in
    place writes its tensors without their versions being counted.
    """
    if not isinstance(op, OpOverload):
        return False
    names = ("linalg", "pinv", "lstsq", "::lu_", "_lu_with", "cholesky", "ormqr")
    return facts_of(op).writes_list or any(part in op._schema.name for part in names)
