"""The table of fusible ops, against what Inductor itself can lower."""

import math
import sys
from subprocess import run

import pytest
import torch

from lazy_tensor.kernels import Call, Ref, ScalarRef, TensorSpec
from lazy_tensor.kernels.backends.inductor import InductorBackend
from lazy_tensor.kernels.fusible import FUSIBLE, LIBRARY, base_name, refuses
from lazy_tensor.kernels.scalar_rules import RULES

aten = torch.ops.aten
FLOATS = TensorSpec((4,), (1,), torch.float32, torch.device("cpu"))


def call(op, *args, outputs=(FLOATS,), **kwargs):
    return Call(op, args, tuple(kwargs.items()), outputs)


@pytest.fixture(scope="module")
def lowered_by_inductor():
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import fallbacks, lowerings

    ops = [*(op for op in lowerings if op not in fallbacks), *select_decomp_table()]
    return {base_name(op) for op in ops if isinstance(op, torch._ops.OpOverload)}


# the C++ functionalization turns these into ops that are lowered
COMPOSITE = {"view_copy", "expand_copy", "new_full", "scalar_tensor"}


def test_inductor_lowers_every_op_of_the_table(lowered_by_inductor):
    assert FUSIBLE - lowered_by_inductor - COMPOSITE == set()


def test_every_name_of_the_table_is_an_aten_op():
    names = FUSIBLE | LIBRARY | set(RULES)
    assert [name for name in sorted(names) if not hasattr(aten, name)] == []


@pytest.mark.parametrize("name", sorted(RULES))
def test_run_time_scalars_are_arguments_of_the_op(name):
    packet = getattr(aten, name)
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    names = {argument.name for schema in schemas for argument in schema.arguments}
    assert set(RULES[name].scalars.split()) <= names


@pytest.mark.parametrize(
    "op",
    [
        aten.add.Tensor, aten.add_.Tensor, aten.gelu.default,
        aten.native_layer_norm_backward.default,
        aten._softmax.default, aten.sum.dim_IntList, aten.cat.default, aten.view.default,
        aten.embedding.default, aten.nll_loss_forward.default, aten.addcdiv_.default,
        aten._to_copy.default, aten.where.self, aten.__and__.Tensor,
    ],
)  # fmt: skip
def test_ops_of_a_training_step_are_fusible(op):
    assert refuses(call(op)) is None


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (aten.mm.default, "aten.mm.default: a matrix product is a library call"),
        (aten.convolution_backward.default, "a convolution is a library call"),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, "attention is one kernel"),
        (aten.embedding_dense_backward.default, "adds to elements in an order of its own"),
        (aten.bernoulli.default, "draws random numbers"),
        (aten.native_dropout.default, "draws random numbers"),
        (aten.nonzero.default, "the shape of its output depends on data"),
        (aten._local_scalar_dense.default, "reads a value"),
        (aten.t_.default, "changes the shape of its argument"),
        (aten._foreach_add_.List, "not among the ops that are fused"),
        (aten._fused_adamw_.default, "not among the ops that are fused"),
        (aten.linalg_eigh.default, "not among the ops that are fused"),
        (aten.add.out, "an out= form"),
        (aten.view.dtype, "reads memory as another dtype"),
        (torch.ops.prims.add.default, "is not an aten op"),
    ],
)
def test_other_ops_say_why_they_run_alone(op, reason):
    assert reason in str(refuses(call(op)))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.uint16])
def test_dtypes_without_vector_code_are_refused(dtype):
    spec = TensorSpec((4,), (1,), dtype, torch.device("cpu"))
    assert refuses(call(aten.mul.Tensor, outputs=(spec,))) == (
        f"aten.mul.Tensor: dtype {dtype} can't be fused"
    )


def _spec(dtype):
    return TensorSpec((4, 70), (70, 1), dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.bool])
@pytest.mark.parametrize("op", [aten.amax.default, aten.argmin.default, aten.max.dim])
def test_reductions_that_compute_in_bytes_are_not_inductors(op, dtype):
    inductor = InductorBackend()
    results = (_spec(dtype), _spec(torch.int64))
    assert "reduces numbers of one byte" in str(
        inductor.refuses(call(op, outputs=results), (_spec(dtype),))
    )
    assert inductor.refuses(call(op, outputs=results), (_spec(torch.int16),)) is None


def test_a_sum_of_bytes_is_inductors_if_it_computes_in_int64():
    inductor, bytes_ = InductorBackend(), (_spec(torch.uint8),)
    assert inductor.refuses(call(aten.sum.default, outputs=(_spec(torch.int64),)), bytes_) is None
    assert inductor.refuses(call(aten.sum.default, outputs=bytes_), bytes_) is not None


@pytest.mark.parametrize(
    ("dtype", "number", "is_beyond"),
    [
        (torch.float16, 65504.0, False), (torch.float16, -1e9, True), (torch.int8, 300, True),
        (torch.float16, -math.inf, False), (torch.int8, -128, False), (torch.uint8, -1, False),
        (torch.float32, 1e300, True), (torch.int32, 2**40, True), (torch.bfloat16, 1e38, False),
        (torch.float32, math.nan, False), (torch.float64, 10**400, True),
    ],
)  # fmt: skip
def test_numbers_for_which_eager_raises_are_refused(dtype, number, is_beyond):
    inductor, spec = InductorBackend(), _spec(dtype)
    calls = (
        call(aten.full_like.default, Ref(0), number, outputs=(spec,)),
        call(aten.fill_.Scalar, Ref(0), number, outputs=()),
        call(aten.clamp.default, Ref(0), None, number, outputs=(spec,)),
    )
    for one in calls:
        assert (inductor.refuses(one, (spec,)) is not None) == is_beyond
    sized = call(aten.full.default, (70_000,), 1, outputs=(spec,))
    assert inductor.refuses(sized, ()) is None
    inductor.refuses(call(aten.fill_.Scalar, Ref(0), number, outputs=()), (_spec(torch.complex64),))


def test_run_time_scalar_without_a_rule_is_refused():
    norm = call(aten.norm.Scalar, Ref(0), ScalarRef(0))
    assert refuses(norm) == "aten.norm.Scalar: 'p' can't be a run-time scalar"
    assert refuses(call(aten.div.Tensor_mode, Ref(0), ScalarRef(0), rounding_mode="floor"))
    assert refuses(call(aten.add.Tensor, Ref(0), ScalarRef(0), alpha=ScalarRef(1))) is None


def test_asking_does_not_import_inductor():
    code = """
import sys, torch
from lazy_tensor.kernels import Call, Ref, backend
for op in (torch.ops.aten.add.Tensor, torch.ops.aten.mm.default):
    backend.backend_of("inductor").refuses(Call(op, (Ref(0), Ref(1)), (), ()))
assert "torch._inductor.compile_fx" not in sys.modules
assert "torch._inductor.lowering" not in sys.modules
"""
    run([sys.executable, "-c", code], check=True)


def test_backend_answers_from_the_table():
    assert InductorBackend().refuses(call(aten.mm.default)) == refuses(call(aten.mm.default))


def test_inductor_is_not_given_bools_added_with_a_factor():
    bools = _spec(torch.bool)
    inductor, given = InductorBackend(), (Ref(0), Ref(1))
    assert "integers into bools" in str(
        inductor.refuses(call(aten.add.Tensor, *given, outputs=(bools,), alpha=2), (bools, bools))
    )
    assert inductor.refuses(call(aten.add.Tensor, *given, outputs=(bools,)), (bools, bools)) is None


@pytest.mark.parametrize("op", [aten.pow.Tensor_Scalar, aten.pow_.Scalar])
def test_integers_to_run_time_powers_are_not_fused(op):
    integers, given = _spec(torch.int64), (Ref(0), ScalarRef(0))
    inductor = InductorBackend()
    assert "must raise" in str(inductor.refuses(call(op, *given), (integers,)))
    assert inductor.refuses(call(op, *given), (FLOATS,)) is None
