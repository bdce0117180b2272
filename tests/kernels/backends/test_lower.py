"""Segments as graphs: no writes but to inputs, and what results look like."""

from dataclasses import replace

import pytest
import torch

from lazy_tensor.kernels.backends.lower import lower

aten = torch.ops.aten


def graph_ops(recorded):
    graph = lower(recorded.segment, {}).graph.graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_write_to_an_input_is_one_copy_at_the_end(record):
    recorded = record(lambda a: (a.mul_(2).add_(1), a.sum())[1], [torch.ones(3)])
    assert graph_ops(recorded) == [
        "aten.mul.Tensor", "aten.add.Tensor", "aten.sum.default", "aten.copy_.default",
    ]  # fmt: skip


def test_write_to_an_inner_value_is_no_copy_at_all(record):
    assert graph_ops(record(lambda a: (a + 1).mul_(2), [torch.ones(3)])) == [
        "aten.add.Tensor", "aten.mul.Tensor",
    ]  # fmt: skip


def test_results_have_the_strides_that_calls_promise(record):
    recorded = record(lambda a: a * 2, [torch.ones(3, 4)])
    (call,) = recorded.segment.calls
    assert call.outputs[0] is not None
    promised = replace(call.outputs[0], stride=(1, 3))
    segment = replace(recorded.segment, calls=(replace(call, outputs=(promised,)),))
    lowered = lower(segment, {})
    assert lowered.strides == ((1, 3),)
    assert [r.stride() for r in lowered.graph(torch.ones(3, 4))] == [(1, 3)]


def test_a_result_of_another_dtype_than_was_promised_is_an_error(record):
    recorded = record(lambda a: a * 2, [torch.ones(3)])
    (call,) = recorded.segment.calls
    promised = replace(call.outputs[0], dtype=torch.float64)
    segment = replace(recorded.segment, calls=(replace(call, outputs=(promised,)),))
    with pytest.raises(RuntimeError, match="another dtype than was promised"):
        lower(segment, {})


def test_scalars_are_inputs_of_full_precision(record):
    recorded = record(lambda a, s, n: a * s + n, [torch.ones(3)], [0.5, 3])
    lowered = lower(recorded.segment, {})
    assert [t.dtype for t in lowered.inputs] == [torch.float32, torch.float64, torch.int64]


def test_index_from_data_adds_a_check(record):
    recorded = record(lambda a, i: a.index_select(0, i), [torch.ones(3), torch.tensor([1])])
    assert lower(recorded.segment, {}).has_check


def test_wrong_strides_are_noticed_where_they_matter(record):
    lowered = lower(record(lambda a: a * 2, [torch.ones(3, 1)]).segment, {})
    lowered.check_strides([(1, 99)])
    with pytest.raises(RuntimeError, match=r"strides \(2, 1\) instead of \(1, 1\)"):
        lowered.check_strides([(2, 1)])
