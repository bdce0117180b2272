"""One definition for all sizes: compiled from two, right for a third."""

import functools
import json

import pytest
import torch
from torch.nn import functional as F

from lazy_tensor.kernels.generic import generic_of, structure_of
from lazy_tensor.kernels.nvfuser.backend import NvfuserBackend, definition_of, kernel_of
from lazy_tensor.kernels.nvfuser.definition import loaded
from lazy_tensor.kernels.service.verify import difference
from tests.kernels.conftest import record
from tests.nvfuser.conftest import check_build_if_there
from tests.nvfuser.interpreter import run

aten = torch.ops.aten


def norm_gelu(x, w, b):
    normal, mean, rstd = aten.native_layer_norm.default(x, [x.shape[-1]], w, b, 1e-5)
    return F.gelu(normal) + x, mean, rstd


def softmax_of_heads(x):
    b, n, width = x.shape
    heads = x.view(b, n, 4, width // 4).transpose(1, 2)
    return (heads.softmax(-1) * 0.5).sum((0, 2))


def rotated(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1) * 2


def losses(x, target):
    return F.log_softmax(x, -1).gather(1, target).neg().mean()


def mean_and_variance(x):
    return x.mean(1), x.var(2), x.std(), x.argmax(-1)


def in_place(x, y):
    x.mul_(0.9).add_(y, alpha=0.1)
    return x.sqrt() + 1


def filled(x):
    return torch.zeros_like(x) + x.new_full(x.shape, 2.0) + x.expand(3, *x.shape).sum(0)


def structure(recorded):
    found = structure_of(recorded.segment)
    assert found is not None
    return found


def inputs(*shapes):
    return [torch.rand(shape) + 0.1 for shape in shapes]


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (norm_gelu, lambda b, n, w: inputs((b, n, w), (w,), (w,))),
        (softmax_of_heads, lambda b, n, w: inputs((b, n, w))),
        (rotated, lambda b, n, w: inputs((b, n, w))),
        (losses, lambda b, n, w: [torch.randn(b, n), torch.randint(0, n, (b, 1))]),
        (mean_and_variance, lambda b, n, w: inputs((b, n, w))),
        (in_place, lambda b, n, w: inputs((b, n), (b, n))),
        (filled, lambda b, n, w: inputs((b, n, w))),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_definition_from_two_sizes_is_right_for_a_third(function, shapes):
    one, other, third = (
        record(function, shapes(*sizes)) for sizes in ((2, 6, 8), (3, 10, 8), (5, 7, 8))
    )
    generic = generic_of([structure(one), structure(other)], other.segment)
    assert generic is not None
    artifact = definition_of(generic)
    symbols = generic.values_of(structure(third))
    assert symbols is not None
    assert NvfuserBackend().fits(artifact, symbols)
    lines = loaded(json.loads(artifact)["lines"])
    assert any(-1 in line.args[0] for line in lines if line.op == "input")
    kernel = kernel_of(artifact, (), functools.partial(run, lines))
    check_build_if_there(lines)
    given = third.fresh()
    results = kernel(given, ())
    assert difference(list(results), third.results) is None
    assert difference(given, third.written) is None
