"""Results in memory of their own, dense; inputs written where they lie, where that is safe."""

import json

import pytest
import torch

from lazy_tensor import lazy_mode, materialize
from lazy_tensor.kernels.nvfuser.backend import definition_of
from lazy_tensor.kernels.nvfuser.definition import loaded
from tests.kernels.conftest import record


def two_of_one(x):
    y = x.sin()
    return y, y.view(-1).clone(), y.t().clone()


def written_and_seen(x):
    x.add_(1)
    return x.view(-1).clone(), x[:2].clone(), x.t().clone()


def repeated(x):
    return (x.sum(1, keepdim=True) * 2).expand(-1, 4).clone(), (x[:1] * 1.5).expand(4, 4) / 24


def from_other_places(x):
    x.copy_(x.t() + 1)
    return x.sin()


def flipped(x):
    x.copy_(x.flip(0) * 2)
    return x.cos()


def shifted(x):
    x[:-1] = x[1:] * 2
    return x.sin()


def handed_on(x, y, z):
    x.copy_(y)
    y.copy_(z)
    return x + y


def exchanged(x, y):
    old = x.clone()
    x.copy_(y)
    y.copy_(old)
    return x - y


def from_a_row(x):
    x.copy_(x[0] * 2)
    return x.sin()


def optimizer(p, g, m):
    m.mul_(0.9).add_(g, alpha=0.1)
    p.addcdiv_(m, g.abs() + 1, value=-0.1)


PROGRAMS = [
    two_of_one, written_and_seen, repeated, from_other_places, flipped, shifted, handed_on,
    exchanged, from_a_row, optimizer,
]  # fmt: skip


def inputs_of(program):
    return [torch.randn(4, 4) for _ in range(program.__code__.co_argcount)]


def tensors(result):
    return [] if result is None else list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("program", PROGRAMS)
def test_values_and_writes_are_eagers(program, interpreted):
    given = inputs_of(program)
    mine = [x.clone() for x in given]
    expected = tensors(program(*given))
    with lazy_mode():
        results = [materialize(x) for x in tensors(program(*mine))]
    torch.testing.assert_close([*results, *mine], [*expected, *given])
    assert [x.stride() for x in results] == [x.stride() for x in expected]
    assert len({x.untyped_storage().data_ptr() for x in (*results, *mine)}) == len(results + mine)
    assert interpreted.declined == []
    assert interpreted.n_definitions > 0


@pytest.mark.parametrize(
    ("program", "n_within"),
    [(optimizer, 2), (flipped, 0), (from_other_places, 0), (exchanged, 0), (handed_on, 1)],
)
def test_inputs_are_written_by_the_kernel_where_no_other_thread_reads_them(program, n_within):
    def recorded(*given):
        return [*tensors(program(*given)), *(x * 1 for x in given)][:1]

    header = json.loads(definition_of(record(recorded, inputs_of(program)).segment))
    aliases = [line.args[1] for line in loaded(header["lines"]) if line.op == "output"]
    assert sum(alias is not None for alias in aliases) == n_within


@pytest.mark.parametrize("reduce", [torch.any, torch.all])
def test_an_empty_list_of_dims_reduces_nothing(reduce, interpreted):
    def program(x):
        return (reduce(x.logical_not(), dim=[]).float() + 1) * 2

    x = torch.tensor([True, False, True])
    with lazy_mode():
        result = materialize(program(x))
    assert interpreted.declined == []
    assert torch.equal(result, program(x))
