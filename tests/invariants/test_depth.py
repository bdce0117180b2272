"""What is compiled does not grow with a model's depth."""

import pytest
import torch
from residual import loss_of, step_with

from lazy_tensor import lazy_mode

DEPTHS = (2, 4, 8, 16, 32, 64, 128)


def n_segments(counting, depth, program):
    counting.segments.clear()
    weights = [torch.randn(10, 10).div(10).requires_grad_() for _ in range(depth)]
    x = torch.randn(10, 10).requires_grad_()
    expected = program(x, weights)
    for _ in range(3):
        with lazy_mode():
            result = program(x, weights)
        assert torch.equal(result, expected)
    return len(counting.segments)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "and backward"])
def test_deep_models_compile_no_more_kernels_than_two_layers(backward, counting):
    program = (lambda x, ws: step_with(loss_of, x, ws)) if backward else loss_of
    fewest = n_segments(counting, DEPTHS[0], program)
    assert 0 < fewest <= 6
    # equal segments share a kernel: deeper models add none
    assert [n_segments(counting, depth, program) for depth in DEPTHS[1:]] == [0] * 6
