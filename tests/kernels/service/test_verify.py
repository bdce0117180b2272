"""Comparing a kernel with op-by-op execution, and what the caller gets if they differ."""

import pytest
import torch

from lazy_tensor.kernels.backends.aten import compile_aten
from lazy_tensor.kernels.counters import Counters
from lazy_tensor.kernels.service.verify import Verified, difference


@pytest.mark.parametrize(
    ("actual", "expected", "reason"),
    [
        (torch.ones(3), torch.ones(3) + 1e-6, None),
        (torch.tensor([1e-7, 1e3]), torch.tensor([0.0, 1e3]), None),
        (torch.tensor([torch.nan, torch.inf]), torch.tensor([torch.nan, torch.inf]), None),
        (torch.ones(0), torch.ones(0), None),
        (torch.ones(1, 3), torch.ones(1, 3).as_strided((1, 3), (7, 1)), None),
        (torch.ones(3), torch.tensor([1.0, 1.0, 1.5]), "result 0: differs by up to 0.5"),
        (torch.tensor([torch.nan]), torch.tensor([1.0]), "result 0: differs by up to inf"),
        (torch.arange(3), torch.tensor([0, 5, 6]), "result 0: 2 of 3 elements differ"),
        (torch.ones(3), torch.ones(3).double(), "result 0: dtype torch.float32 instead of"),
        (torch.ones(2, 3), torch.ones(3, 2).t(), "result 0: stride (3, 1) instead of (1, 2)"),
    ],
)  # fmt: skip
def test_difference_allows_rounding_and_names_anything_else(actual, expected, reason):
    found = difference([actual], [expected])
    assert str(found).startswith(str(reason))


def test_rounding_of_large_operands_is_no_difference_where_results_cancel():
    assert difference([torch.tensor(1e-6)], [torch.tensor(0.0)]) is not None
    assert difference([torch.tensor(1e-6)], [torch.tensor(0.0)], magnitude=1.0) is None


def verified(segment, kernel, every):
    reasons: list[str] = []
    counters = Counters()
    aten = compile_aten(segment)

    def disagreed(reason, tensors, scalars):
        reasons.append(reason)

    return Verified(kernel, aten, segment, every, disagreed, counters), reasons, counters


def test_first_run_and_then_one_in_n_is_compared(record):
    recorded = record(lambda a: a.exp(), [torch.rand(3)])
    kernel, reasons, counters = verified(recorded.segment, compile_aten(recorded.segment), 3)
    for _ in range(7):
        kernel(recorded.inputs, [])
    assert counters.verified == 3
    assert reasons == []


def test_wrong_kernel_gives_the_caller_the_right_results(record):
    recorded = record(lambda a, b: (a.mul_(2), b + 1)[1], [torch.rand(3), torch.rand(3)])

    def wrong(tensors, scalars):
        tensors[0].zero_()
        return (tensors[1] - 1,)

    kernel, reasons, _ = verified(recorded.segment, wrong, 1)
    inputs = recorded.fresh()
    outputs = kernel(inputs, [])
    assert torch.equal(outputs[0], recorded.results[0])
    assert torch.equal(inputs[0], recorded.written[0])
    assert reasons[0].startswith("result 0: differs by")


def test_right_kernel_writes_its_inputs_once(record):
    recorded = record(lambda a: a.mul_(2).sum(), [torch.ones(3)])
    kernel, reasons, _ = verified(recorded.segment, compile_aten(recorded.segment), 1)
    inputs = recorded.fresh()
    kernel(inputs, [])
    assert inputs[0].tolist() == [2.0, 2.0, 2.0]
    assert reasons == []
