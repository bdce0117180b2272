"""Segments as keys: equal exactly if they compute the same, the same in every process."""

import pickle

import pytest
import torch
from torch import Tensor

from lazy_tensor.kernels import Call, Ref, ScalarRef, Segment, TensorSpec
from lazy_tensor.kernels.segment import creates, op_named

aten = torch.ops.aten
SPEC = TensorSpec((4,), (1,), torch.float32, torch.device("cpu"))


def scaled_by(number: object) -> Segment:
    return Segment((SPEC,), (), (Call(aten.mul.Tensor, (Ref(0), number), (), (SPEC,)),), (1,))


def test_equal_programs_are_equal_and_hash_alike():
    assert scaled_by(2.0) == scaled_by(2.0)
    assert hash(scaled_by(2.0)) == hash(scaled_by(2.0))
    assert scaled_by(2.0).digest == scaled_by(2.0).digest


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1, True), (1, 1.0), (2.0, ScalarRef(0))])
def test_constants_that_python_calls_equal_make_different_programs(one, other):
    assert scaled_by(one) != scaled_by(other)
    assert scaled_by(one).digest != scaled_by(other).digest


def test_nan_constants_are_equal_to_themselves():
    assert scaled_by(float("nan")) == scaled_by(float("nan"))


def test_segment_pickles_with_its_ops():
    segment = scaled_by(3.0)
    copy = pickle.loads(pickle.dumps(segment))
    assert copy == segment
    assert copy.calls[0].op is aten.mul.Tensor


def test_text_says_the_program_one_call_a_line():
    segment = Segment(
        (SPEC,), (float,), (Call(aten.add_.Tensor, (Ref(0), ScalarRef(0)), (), ()),), ()
    )
    assert segment.text().splitlines() == [
        "default torch.float32",
        "inputs (torch.float32[4][1]@cpu,)",
        "scalars ['float']",
        "aten.add_.Tensor(%0, $0)()->()",
        "outputs ()",
    ]


def test_unknown_op_name_is_an_attribute_error():
    with pytest.raises(AttributeError):
        op_named("aten.no_such_op.default")


def test_written_inputs_are_those_named_by_writing_arguments(record):
    assert record(
        lambda a, b: (a.add_(b), a * b)[1], [torch.ones(3), torch.ones(3)]
    ).segment.written == (0,)


def test_write_through_a_view_counts_for_its_base(record):
    def write(a: Tensor, b: Tensor) -> Tensor:
        b[1:].mul_(2)
        return a + 1

    assert record(write, [torch.ones(3), torch.ones(3)]).segment.written == (1,)


def test_write_to_a_value_made_inside_counts_for_no_input(record):
    assert record(lambda a: (a + 1).mul_(2), [torch.ones(3)]).segment.written == ()


def test_batch_norm_writes_statistics_that_its_schema_does_not_declare(record):
    def norm(x, mean, var):
        return aten.native_batch_norm(x, None, None, mean, var, True, 0.1, 1e-5)[0]

    inputs = [torch.randn(2, 3, 4), torch.zeros(3), torch.ones(3)]
    assert record(norm, inputs).segment.written == (1, 2)


def test_device_is_that_of_tensors_other_than_cpu():
    meta = TensorSpec((4,), (1,), torch.float32, torch.device("meta"))
    call = Call(aten.mul.Tensor, (Ref(0), Ref(1)), (), (meta,))
    assert Segment((SPEC, meta), (), (call,), (2,)).device == torch.device("meta")
    assert scaled_by(1.0).device == torch.device("cpu")


def test_outputs_are_told_from_returned_arguments(record):
    pair = record(lambda x: x.max(0)[0], [torch.rand(2, 2)]).segment.calls[0]
    assert creates(pair) == [True, True]
    attention = Call(aten._scaled_dot_product_flash_attention.default, (), (), (SPEC,) * 7)
    # the other two are numbers
    assert creates(attention) == [True] * 4 + [False] * 2 + [True] * 3
