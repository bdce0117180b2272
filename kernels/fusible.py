"""Which aten ops a kernel can hold, as tables: Inductor itself would take seconds to import.

In: a call. Out: None if it can be part of a segment, else the reason. The `refuses` methods of the
backends ask here, each with its own set of ops. `tests/kernels/test_fusible.py` checks the tables
against Inductor's lowerings and decompositions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch._ops import OpOverload

from lazy_tensor.kernels.scalar_rules import scalars_refused
from lazy_tensor.kernels.segment import Call, ScalarRef, TensorSpec, base_name as base_name


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Names are those of `base_name`: without namespace, overload and the `_` of in-place ops. The
# groups matter too: other modules treat views, norms and pointwise ops in different ways.
POINTWISE = _names(
    """abs acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_left_shift
    bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clone
    copy copysign cos cosh deg2rad div elu elu_backward eq erf erfc erfinv exp exp2 expm1 fill floor
    floor_divide fmax fmin fmod frac ge gelu gelu_backward glu glu_backward gt hardsigmoid
    hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward heaviside hypot
    isfinite isinf isnan le leaky_relu leaky_relu_backward lerp log log10 log1p log2
    log_sigmoid_backward log_sigmoid_forward logaddexp logical_and logical_not logical_or
    logical_xor logit lt masked_fill maximum minimum mish mish_backward mul nan_to_num
    native_dropout_backward ne neg pow rad2deg reciprocal relu remainder round rsqrt rsub selu sgn
    sigmoid sigmoid_backward sign signbit silu silu_backward sin sinc sinh softplus
    softplus_backward sqrt square sub tan tanh tanh_backward threshold threshold_backward tril triu
    trunc where xlogy zero _prelu_kernel
    _prelu_kernel_backward _to_copy __and__ __or__ __xor__"""
)
REDUCTIONS = _names(
    """all amax amin aminmax any argmax argmin linalg_vector_norm logsumexp max mean min
    mse_loss mse_loss_backward l1_loss smooth_l1_loss smooth_l1_loss_backward huber_loss
    huber_loss_backward binary_cross_entropy_backward
    binary_cross_entropy_with_logits norm prod std std_mean sum var var_mean _log_softmax
    _log_softmax_backward_data _softmax _softmax_backward_data _safe_softmax"""
)
NORMS = _names(
    """native_batch_norm native_batch_norm_backward native_group_norm native_group_norm_backward
    native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward
    _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training"""
)
VIEWS = _names(
    """alias detach diagonal expand permute select slice split split_with_sizes squeeze t transpose
    unbind unfold unsafe_split unsqueeze view _reshape_alias _unsafe_view"""
)
MOVES = _names(
    """arange cat constant_pad_nd embedding expand_copy flip full full_like gather index_select
    new_full new_ones new_zeros nll_loss_backward nll_loss_forward ones ones_like repeat roll
    scalar_tensor select_backward slice_backward stack view_copy zeros zeros_like"""
)
FUSIBLE = POINTWISE | REDUCTIONS | NORMS | VIEWS | MOVES
SLOW_ALONE = _names(
    """all any argmax argmin floor_divide fmod gather heaviside logit masked_fill mse_loss
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional remainder sinc
    smooth_l1_loss stack std std_mean var var_mean where xlogy"""
)
"""Ops for which eager's kernel on the CPU often takes two times as long as one of this package, or
longer: 30 times for the variance of rows, 10 for `where` by a random mask. So each is a segment,
even if nothing beside it can be fused with it."""
REDUCES_BYTES_WRONGLY = _names("amax amin aminmax argmax argmin max min prod sum")
"""Reductions whose vector code on the CPU is wrong for numbers of one byte. Inductor pads the last
vector with zeros, which are then the largest or the smallest number (torch 2.13)."""
LIBRARY = _names(
    """addmm baddbmm bmm convolution convolution_backward embedding_dense_backward
    max_pool2d_with_indices max_pool2d_with_indices_backward mm
    _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward"""
)
"""Ops that call a library and never raise because of the values they get. In a plan that is
compiled whole they run between the fused kernels (see `backends.whole`)."""

# The reason for each op that is not fused though one may expect it. Any other op has a general one.
_WHY_NOT = {
    "a matrix product is a library call": """addbmm addmm addmv addr baddbmm bmm dot linear matmul
        mm mv vdot _addmm_activation _grouped_mm _int_mm _scaled_mm""",
    "a convolution is a library call": """convolution convolution_backward _convolution
        convolution_overrideable mkldnn_convolution cudnn_convolution""",
    "attention is one kernel of its own": """_efficient_attention_backward
        _efficient_attention_forward _flash_attention_backward _flash_attention_forward
        _scaled_dot_product_cudnn_attention
        _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention
        _scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention
        _scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_attention_math""",
    "it adds to elements in an order of its own": """embedding_dense_backward index_add index_put
        scatter scatter_add scatter_reduce _index_put_impl _unsafe_index_put put""",
    "its order of elements is a library call": "argsort kthvalue median mode msort sort topk",
    "it checks its values": "binary_cross_entropy",
    "a scan is a library call": "cummax cummin cumprod cumsum logcumsumexp",
}
_REASONS = {name: reason for reason, names in _WHY_NOT.items() for name in names.split()}

DTYPES = frozenset({
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
})  # fmt: skip
"""The dtypes of tensors in kernels: those for which Inductor has vector code on the CPU."""

# An op with one of these tags can't be in a kernel, whatever its name.
_TAGS = {
    torch.Tag.nondeterministic_seeded: "it draws random numbers",
    torch.Tag.dynamic_output_shape: "the shape of its output depends on data",
    torch.Tag.data_dependent_output: "it reads a value",
    torch.Tag.inplace_view: "it changes the shape of its argument",
}


def refuses(call: Call, taken: frozenset[str] = FUSIBLE) -> str | None:
    """Why `call` can't be part of a kernel; None if it can.

    `taken` are the names of the ops that the backend's kernels can hold.
    """
    reason = _refuses_op(call.op, taken)
    if reason is not None:
        return reason
    for spec in call.outputs:
        if spec is not None and spec.dtype not in DTYPES:
            return f"{call.op}: dtype {spec.dtype} can't be fused"
    return scalars_refused(call)


def refuses_dtypes(call: Call, inputs: Sequence[TensorSpec]) -> str | None:
    """Why Inductor can't have `call` because of dtypes, those of its tensors `inputs`; else None.

    `sum` and `prod` compute in their result's dtype, the others in their argument's.
    """
    name, given = base_name(call.op), dict(call.arguments())
    written = [spec.dtype for spec in (*call.outputs, *inputs) if spec is not None]
    numbers = [given[n] for n in _numbers(call.op) if type(given.get(n)) in (int, float)]
    if written and any(_is_beyond(number, written[0]) for number in numbers):
        return f"{call.op}: for some ops eager raises for a number that {written[0]} can't hold"
    dtypes = {spec.dtype for spec in inputs}
    if name in ("add", "sub", "rsub") and dtypes == {torch.bool} and given.get("alpha", 1) != 1:
        return f"{call.op}: Inductor writes integers into bools"
    is_integer = bool(dtypes) and not any(dtype.is_floating_point for dtype in dtypes)
    if name == "pow" and is_integer and isinstance(given.get("exponent"), ScalarRef):
        return f"{call.op}: a negative power of an integer must raise"
    if name in ("all", "any") and any(spec.dtype is torch.uint8 for spec in inputs):
        return f"{call.op}: Inductor gives bools where eager gives uint8"
    if name not in REDUCES_BYTES_WRONGLY:
        return None
    computed_in = call.outputs if name in ("prod", "sum") else inputs
    if any(spec is not None and spec.dtype.itemsize == 1 for spec in computed_in):
        return f"{call.op}: Inductor reduces numbers of one byte wrongly"
    return None


@cache
def _numbers(op: OpOverload) -> tuple[str, ...]:
    """The names of the arguments that are numbers of any type, and no sizes."""
    arguments = op._schema.arguments
    return tuple(a.name for a in arguments if str(a.type) in ("number", "Optional[number]"))


def _is_beyond(number: float, dtype: torch.dtype) -> bool:
    """Whether the number, unless it is infinity, is beyond the range of `dtype`, as NaN is of
    integers.

    Negative numbers wrap around where the dtype has none.
    """
    if dtype is torch.bool or dtype not in DTYPES or number in (math.inf, -math.inf):
        return False
    if number != number:
        return not dtype.is_floating_point
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return number > info.max or -number > max(info.max, -info.min)


@cache
def _refuses_op(op: OpOverload, taken: frozenset[str]) -> str | None:
    """The part of `refuses` that depends on the op alone, and not on its arguments."""
    if op.namespace != "aten":
        return f"{op} is not an aten op"
    name = base_name(op)
    # first the particular reason, then the general ones
    if name in _REASONS and name not in taken:
        return f"{op}: {_REASONS[name]}"
    for tag, reason in _TAGS.items():
        if tag in op.tags:
            return f"{op}: {reason}"
    if name not in taken:
        return f"{op}: not among the ops that are fused"
    # overloads of fusible ops that do something else
    if any(argument.is_out for argument in op._schema.arguments):
        return f"{op}: an out= form"
    if op is torch.ops.aten.view.dtype:
        return f"{op}: reads memory as another dtype"
    return None
