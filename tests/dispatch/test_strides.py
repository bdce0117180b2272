"""Strides of elementwise results, against what the kernels give."""

import random

import pytest
import torch

from lazy_tensor.dispatch.strides import elementwise_stride

aten = torch.ops.aten
OPS = {
    "neg": (aten.neg.default, 1), "mul": (aten.mul.Tensor, 2),
    "sub": (aten.sub.Tensor, 2), "maximum": (aten.maximum.default, 2), "eq": (aten.eq.Tensor, 2),
    "atan2": (aten.atan2.default, 2), "sigmoid_backward": (aten.sigmoid_backward.default, 2),
    "addcmul": (aten.addcmul.default, 3),
    "silu_backward": (aten.silu_backward.default, 2), "lerp": (aten.lerp.Tensor, 3),
    "clamp": (aten.clamp.Tensor, 3), "pow": (aten.pow.Tensor_Tensor, 2),
}  # fmt: skip


def laid_out_at_random(shape):
    """A tensor that broadcasts to `shape`, its dimensions in any order, some of size 1 or gone."""
    shape = [n if random.random() < 0.8 else 1 for n in shape][random.choice((0, 0, 0, 1)) :]
    order = random.sample(range(len(shape)), len(shape))
    tensor = torch.rand([2 * shape[d] for d in order])
    for dim in range(len(shape)):
        tensor = tensor[(slice(None),) * dim + (slice(shape[order[dim]]),)]
    if random.random() < 0.5:
        tensor = tensor.contiguous()
    tensor = tensor.permute([order.index(d) for d in range(len(shape))])
    return tensor.expand(shape)


@pytest.mark.parametrize("name", OPS)
def test_strides_are_those_of_the_kernel(name):
    op, n_tensors = OPS[name]
    for _ in range(200):
        shape = [random.choice((1, 2, 3, 4)) for _ in range(random.randint(0, 4))]
        tensors = [laid_out_at_random(shape) for _ in range(n_tensors)]
        result = op(*tensors)
        found = elementwise_stride(
            tuple(result.shape), [(tuple(t.shape), t.stride()) for t in tensors]
        )
        differs = [
            n > 1 and given != expected
            for n, given, expected in zip(result.shape, found, result.stride(), strict=True)
        ]
        assert not any(differs), [(t.shape, t.stride()) for t in tensors]
