"""Indices from data: clamped for the kernel, and reported."""

import pytest
import torch

from lazy_tensor.kernels.backends.index_checks import clamped, has_any

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "args", "position", "safe", "is_bad"),
    [
        (aten.embedding.default, [torch.rand(5, 2), torch.tensor([0, 4])], 1, [0, 4], False),
        (aten.embedding.default, [torch.rand(5, 2), torch.tensor([-1, 5])], 1, [0, 4], True),
        (aten.gather.default, [torch.rand(2, 3), 1, torch.tensor([[3]])], 2, [[2]], True),
        (aten.index_select.default, [torch.rand(2, 3), 0, torch.tensor([1])], 2, [1], False),
        (aten.index_select.default, [torch.rand(2, 3), -1, torch.tensor([3])], 2, [2], True),
        (aten.nll_loss_forward.default,
         [torch.rand(2, 3), torch.tensor([-100, 2]), None, 1, -100], 1, [-100, 2], False),
        (aten.nll_loss_forward.default,
         [torch.rand(3), torch.tensor(3), None, 1, -100], 1, 2, True),
        (aten.nll_loss_backward.default,
         [torch.rand(()), torch.rand(2, 3), torch.tensor([0, 7]), None, 1, -100, torch.rand(())],
         2, [0, 2], True),
    ],
)  # fmt: skip
def test_index_is_made_safe_and_reported(op, args, position, safe, is_bad):
    bad: list[torch.Tensor] = []
    result = clamped(op, args, bad)
    assert result[position].tolist() == safe
    assert [bool(b) for b in bad] == [is_bad]


def test_other_arguments_stay_as_they_are():
    args = [torch.rand(5, 2), torch.tensor([7]), -1, False]
    result = clamped(aten.embedding.default, args, [])
    assert [result[i] is args[i] for i in (0, 2, 3)] == [True] * 3


def test_segments_without_such_ops_return_no_check(record):
    assert not has_any(record(lambda a: a + 1, [torch.ones(2)]).segment)
    inputs = [torch.ones(2), torch.tensor([1])]
    assert has_any(record(lambda a, i: a.index_select(0, i), inputs).segment)
