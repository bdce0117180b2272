"""PyTorch's own operator database: values, metadata and gradients, lazy against eager."""

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from lazy_tensor import lazy_mode, materialize

N_SAMPLES = 2
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty",
                 "new_empty_strided"}  # fmt: skip
# Each with its reason: what stands here differs from eager today.
EXCEPTIONS = {
    "linalg.eig": "autograd leaves out a check of values for tensor subclasses",
    "prod": "autograd takes another, equally exact formula for tensor subclasses",
    "tensor_split": "a tensor of indices is read by C++ above dispatch",
    "ormqr": "the backward's strides differ: autograd's formula reads the subclass's storage",
    "t": "the gradient's stride in a dimension of size 1 differs",
}


def fresh(argument):
    if not isinstance(argument, torch.Tensor) or argument.layout is not torch.strided:
        return argument
    copied = argument.detach().clone(memory_format=torch.preserve_format)
    return copied.requires_grad_(argument.requires_grad)


def run(op, sample):
    torch.manual_seed(3)
    tensor, args, kwargs = pytree.tree_map(fresh, (sample.input, sample.args, sample.kwargs))
    result = op(tensor, *args, **kwargs)
    outputs = [t for t in pytree.tree_leaves(result) if is_differentiable(t)]
    inputs = [t for t in pytree.tree_leaves((tensor, args, kwargs)) if is_differentiable(t)]
    if not (outputs and inputs):
        return result
    ones = [torch.ones_like(t) for t in outputs]
    return result, torch.autograd.grad(outputs, inputs, ones, allow_unused=True)


def is_differentiable(value):
    return isinstance(value, torch.Tensor) and value.requires_grad


def assert_same(got, expected):
    got, expected = pytree.tree_leaves(got), pytree.tree_leaves(expected)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        if not isinstance(b, torch.Tensor):
            assert a == b or b != b
            continue
        assert (a.dtype, a.shape, a.layout) == (b.dtype, b.shape, b.layout)
        if b.layout is torch.strided and b.numel() > 1:
            assert a.stride() == b.stride()
        torch.testing.assert_close(
            materialize(a.detach()), b.detach(), rtol=0, atol=0, equal_nan=True
        )


def outcome(call):
    try:
        return call(), None
    except Exception as error:  # whatever eager raises, lazy must raise
        return None, error


@pytest.mark.parametrize("op", op_db, ids=lambda op: op.formatted_name)
@pytest.mark.filterwarnings("ignore")
def test_agrees_with_eager(op, request):
    if op.name in UNINITIALISED or not op.supports_dtype(torch.float32, "cpu"):
        pytest.skip("nothing to compare")
    if op.name in EXCEPTIONS:
        request.applymarker(pytest.mark.xfail(reason=EXCEPTIONS[op.name], strict=True))
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
    for _, sample in zip(range(N_SAMPLES), samples, strict=False):
        expected, raised = outcome(lambda sample=sample: run(op, sample))
        for _ in range(2):
            with lazy_mode():
                got, error = outcome(lambda sample=sample: run(op, sample))
            assert type(error) is type(raised), error
            assert str(error) == str(raised)
            assert_same(got, expected)
