"""Errors of shapes, dtypes and overlaps: eager's type and message, at the user's own line."""

import pytest
import torch

from lazy_tensor import materialize
from tests.invariants.compare import WAYS, lazily


def ints(x):
    return (x * 10).to(torch.int64)


def bools(x):
    return x > 0.5


def comparison_of_complex(x):
    z = torch.complex(x, x)
    return z > z


def bool_minus_bool(x):
    return bools(x) - bools(x)


def negated_bool(x):
    return -bools(x)


def write_to_expanded(x):
    return (x * 1)[:1].expand(4, 4).add_(1)


def write_to_own_neighbours(x):
    y = x + 0
    return y[1:].add_(y[:-1])


def write_from_own_transpose(x):
    y = x + 0
    return y.mul_(y.t()[:, 1:].t())


def copy_from_own_neighbours_by_out(x):
    y = x + 0
    return torch.add(y[1:], 1, out=y[:-1])


def copy_to_itself_with_a_dimension_more(x):
    y = x + 1
    return y.unsqueeze(-1).copy_(y)


def copy_of_a_product_to_itself(x):
    y = torch.empty(4)
    torch.mv(x, x[0], out=y)
    return y.unsqueeze(-1).copy_(y)


def negative_integer_power(x):
    n = ints(x)
    n**2
    return n**-1


def wrong_mm(x):
    return x @ x[:3]


def wrong_bmm(x):
    return torch.bmm(x.unsqueeze(0), x.unsqueeze(0)[:, :2])


def mixed_dtypes_mm(x):
    return x @ x.double()


def wrong_broadcast(x):
    return x + x[:, :3]


def wrong_view(x):
    return (x + 1).t().view(16)


def wrong_reshape(x):
    return (x + 1).reshape(3, 5)


def wrong_cat(x):
    return torch.cat([x, x[:, :2]])


def wrong_dim(x):
    return (x + 1).sum(dim=2)


def index_beyond(x):
    return (x + 1)[7]


def select_beyond(x):
    return (x + 1).select(1, 4)


def wrong_linear(x):
    return torch.nn.functional.linear(x, x[:, :2])


def wrong_conv(x):
    return torch.conv2d(x.view(1, 1, 4, 4), x.view(1, 4, 2, 2))


def inplace_to_other_dtype(x):
    return ints(x).add_(1.5)


def inplace_to_larger_shape(x):
    return (x + 0)[:1].add_(x)


def bitwise_of_floats(x):
    return x & x


def mean_of_ints(x):
    return ints(x).mean()


def clamp_without_bounds(x):
    return (x + 0).clamp_()


def float_index(x):
    return torch.gather(x, 0, x)


def item_of_many(x):
    return (x + 1).item()


def bool_of_many(x):
    return bool(x + 1)


def in_place_on_a_leaf(x):
    return (x + 0).requires_grad_().add_(1)


def matrix_from_a_vector(x):
    return torch.linalg.inv(x[0])


def loss_of_wrong_shapes(x):
    return torch.nn.functional.cross_entropy(x, ints(x)[0, :3])


def dropout_beyond_one(x):
    return torch.nn.functional.dropout(x, 1.5)


def empty_max(x):
    return (x[:0] + 1).max()


def nan_to_int_power(x):
    return torch.bitwise_left_shift(x, 2)


PROGRAMS = [
    comparison_of_complex, bool_minus_bool, negated_bool, write_to_expanded,
    write_to_own_neighbours, write_from_own_transpose, copy_from_own_neighbours_by_out,
    copy_to_itself_with_a_dimension_more, copy_of_a_product_to_itself,
    negative_integer_power, wrong_mm, wrong_bmm, mixed_dtypes_mm, wrong_broadcast, wrong_view,
    wrong_reshape, wrong_cat, wrong_dim, index_beyond, select_beyond, wrong_linear, wrong_conv,
    inplace_to_other_dtype, inplace_to_larger_shape, bitwise_of_floats, mean_of_ints, float_index,
    item_of_many, bool_of_many, in_place_on_a_leaf, matrix_from_a_vector, loss_of_wrong_shapes,
    dropout_beyond_one, empty_max, nan_to_int_power, clamp_without_bounds,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_error_is_eagers_at_the_users_line(program, way):
    with pytest.raises(Exception) as eager:  # noqa: PT011
        program(torch.rand(4, 4))
    line = [e for e in eager.traceback if e.name == program.__name__][-1].lineno
    for _ in range(2):
        with pytest.raises(type(eager.value)) as lazy:
            lazily(way, program, torch.rand(4, 4))
        assert str(lazy.value) == str(eager.value)
        assert [e for e in lazy.traceback if e.name == program.__name__][-1].lineno == line


@pytest.mark.parametrize("way", WAYS)
def test_a_refused_op_leaves_the_rest_computable(way):
    def program(x):
        y = x + 1
        with pytest.raises(RuntimeError):
            y @ y[:3]
        y.mul_(2)
        with pytest.raises(RuntimeError):
            y[1:].add_(y[:-1])
        return y

    x = torch.rand(4, 4)
    got = lazily(way, program, x.clone())
    assert torch.equal(materialize(got), (x + 1) * 2)
