"""Convolutions run once each way: no backward that computes the forward again."""

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import lazy_tensor
from lazy_tensor import lazy_mode, materialize, wrap
from tests.invariants.compare import WAYS

CASTS = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
COUNTED = ("aten::convolution", "aten::convolution_backward")


def train(tensors, dtype):
    """The output, and the gradients of input, weight and bias."""
    x, weight, bias = (t.detach().requires_grad_() for t in tensors)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        y = F.conv2d(x, weight, bias, padding=1)
    y.float().square().mean().backward()
    return [y.detach(), *(t.grad for t in (x, weight, bias))]


def inputs(dtype=torch.float32):
    torch.manual_seed(0)
    shapes = (2, 3, 16, 16), (8, 3, 3, 3), (8,)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def recorded(way, dtype):
    if way == "wrap":
        return train([wrap(t) for t in inputs()], dtype)
    with lazy_mode():
        return train(inputs(), dtype)


def largest_errors(got):
    return [
        (a.double() - b).abs().max().item()
        for a, b in zip(got, train(inputs(torch.float64), None), strict=True)
    ]


@pytest.mark.parametrize("dtype", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("backend", ["aten", "counting"])
def test_forward_and_backward_run_one_convolution_each(dtype, backend, request):
    if backend == "counting":
        request.getfixturevalue("counting")
    for _ in range(3):
        results = train([wrap(t) for t in inputs()], dtype)
        # recording an op is an event for the profiler too: what runs is what runs in the flush
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
            materialize(results)
        counts = {event.key: event.count for event in profiled.key_averages()}
        assert [counts.get(name, 0) for name in COUNTED] == [1, 1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", CASTS.values(), ids=CASTS)
def test_the_error_is_no_larger_than_eagers(way, dtype, counting):
    of_eager = largest_errors(train(inputs(), dtype))
    for _ in range(3):
        of_lazy = largest_errors(materialize(recorded(way, dtype)))
        assert all(mine <= theirs for mine, theirs in zip(of_lazy, of_eager, strict=True))
    lazy_tensor.flush()
