"""Calls that meta functions accept and eager refuses raise eager's error at their line."""

import pytest
import torch
import torch.nn.functional as F

from lazy_tensor import lazy_mode


def raises_as_eager(call):
    with pytest.raises((RuntimeError, IndexError)) as expected:
        call()
    with lazy_mode(), pytest.raises(type(expected.value)) as raised:
        call()
    assert str(raised.value) == str(expected.value)


X = torch.rand(4, 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.select_scatter(X + 1, torch.rand(1), 0, 1),
        lambda: torch.select_scatter(X + 1, src=torch.rand(2), dim=0, index=1),
        lambda: torch.select_scatter(X + 1, torch.rand(3), 0, 9),
        lambda: torch.slice_scatter(X + 1, torch.rand(1, 3), 0, 0, 2),
        lambda: torch.slice_scatter(X + 1, torch.rand(5, 3), 0, 0, 2),
        lambda: torch.diagonal_scatter(X + 1, torch.rand(2)),
        lambda: torch.as_strided_scatter(X + 1, torch.rand(2), (3,), (1,)),
    ],
)
def test_a_source_of_another_size_than_its_place_is_refused(call):
    raises_as_eager(call)


@pytest.mark.parametrize(
    "name",
    ["eq_", "ne_", "lt_", "le_", "gt_", "ge_", "copysign_", "floor_divide_", "gcd_", "heaviside_",
     "mul_", "logical_and_", "bitwise_or_"],
)  # fmt: skip
def test_what_is_written_is_not_broadcast(name):
    dtype = torch.int64 if name in ("gcd_", "bitwise_or_") else torch.float32
    one, three = torch.ones(1, dtype=dtype), torch.ones(3, dtype=dtype)
    raises_as_eager(lambda: getattr(one + 1, name)(three))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "call", [lambda x: x.softmax(5), lambda x: x.log_softmax(-3), lambda x: x.sort(5)]
)
def test_a_dimension_that_is_not_there_is_refused(call, dtype):
    raises_as_eager(lambda: call(X.to(dtype) + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("call", [torch.fill, torch.Tensor.fill_])
def test_a_value_to_fill_with_has_no_dimensions(call, dtype):
    raises_as_eager(lambda: call(X[0].to(dtype) + 1, torch.ones(1, dtype=dtype)))
    with lazy_mode():
        filled = call(X[0] + 1, torch.tensor(2.0)) * 1
    assert filled.tolist() == [2, 2, 2]


INTEGERS = torch.ones(4, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.glu(INTEGERS + 1),
        lambda: F.hardswish(INTEGERS + 1),
        lambda: F.logsigmoid(INTEGERS + 1),
        lambda: F.prelu(INTEGERS + 1, INTEGERS[0, :1] + 1),
        lambda: F.binary_cross_entropy_with_logits(INTEGERS + 0, X @ X.t()),
        lambda: F.binary_cross_entropy(X.sigmoid(), INTEGERS[:, :3] * 1),
        lambda: torch.rsub(X + 1, X > 0.5),
        lambda: F.huber_loss(INTEGERS + 1, INTEGERS),
        lambda: torch.trace(X > 0.5),
        lambda: (X > 0.5).abs_(),
        lambda: torch.index_select(X + 1, 0, X[0] * 0),
        lambda: (X + 1).index_add(0, X[:, 0] * 0, X),
    ],
)
def test_dtypes_that_kernels_refuse(call):
    raises_as_eager(call)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.index_select(X + 1, 0, INTEGERS * 0),
        lambda: torch.bmm(X + 1, X.t()),
        lambda: torch.mm(X[None] + 1, X.t()[None]),
    ],
)
def test_numbers_of_dimensions_that_kernels_refuse(call):
    raises_as_eager(call)
