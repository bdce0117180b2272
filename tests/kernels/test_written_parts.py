"""Copies of what was written, and what changes nothing about it, have memory of their own."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F

import lazy_tensor


def select(x):
    x[0] = 1.0


def slice_of_one(x):
    x[:, 1:3].add_(1)


def indexed(x):
    x[torch.tensor([0, 2])] = 3.0


def scattered(x):
    x.scatter_(0, torch.tensor([[1, 0, 2, 0]]), 5.0)


def diagonal(x):
    x.diagonal().mul_(2)


def whole(x):
    x.mul_(2)


COPIES = {
    "clone": torch.clone,
    "to": lambda x: x.to(x.dtype, copy=True),
    "two": lambda x: (x.clone(), x.clone())[1],
    "clone of a view": lambda x: x.t().clone(),
    "cat of one": lambda x: torch.cat([x]),
    "power of one": lambda x: x**1,
    "repeated once": lambda x: x.repeat(1, 1),
    "padded by nothing": lambda x: F.pad(x, (0, 0)),
    "slice": lambda x: x[1:].clone(),
    "computed": lambda x: x * 2,
}


@pytest.mark.parametrize("write", [select, slice_of_one, indexed, scattered, diagonal, whole])
def test_copies_of_what_is_written(write, tmp_path):
    def program(x):
        copies = {}
        for name, copy in COPIES.items():
            write(x)
            copies[name] = copy(x)
        return copies

    x = torch.arange(12.0).view(3, 4)
    plain = x.clone()
    expected = program(plain)
    with lazy_tensor.lazy_mode(backend="inductor", compile="blocking", cache_dir=str(tmp_path)):
        copies = program(x)
    memories = {x.untyped_storage().data_ptr()}
    for name, copy in copies.items():
        torch.testing.assert_close(lazy_tensor.materialize(copy), expected[name], msg=name)
        memories.add(lazy_tensor.unwrap(copy).untyped_storage().data_ptr())
    assert len(memories) == 1 + len(copies)
    torch.testing.assert_close(x, plain)


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_part_that_is_written(name, tmp_path):
    x = torch.arange(12.0).view(3, 4)
    with lazy_tensor.lazy_mode(backend="inductor", compile="blocking", cache_dir=str(tmp_path)):
        x[0] = 1.0
        copy = COPIES[name](x)
    before = lazy_tensor.materialize(copy)
    x.add_(1)
    assert torch.equal(lazy_tensor.unwrap(copy), before)


def swap(a, b, c):
    old = a.clone()
    a.copy_(b)
    b.copy_(old)


def rotate(a, b, c):
    old = a + 0
    a.copy_(b)
    b.copy_(c)
    c.copy_(old)


def leapfrog(a, b, c):
    """A wave equation with two buffers: the second keeps the value before."""
    new = 2 * a - b + 0.1 * c
    b.copy_(a)
    a.copy_(new)


def leapfrog_of_other_inputs(a, b, c):
    new = 2 * b - a + 0.1 * c
    a.copy_(b)
    b.copy_(new)


def averaged(a, b, c):
    old = torch.cat([a])
    a.mul_(0.9).add_(c, alpha=0.1)
    b.copy_(old)


def transposed(a, b, c):
    old = a.t().clone()
    a.copy_(b.t())
    b.copy_(old)


@pytest.mark.parametrize(
    "step", [swap, rotate, leapfrog, leapfrog_of_other_inputs, averaged, transposed]
)
def test_inputs_are_read_before_they_are_written(step, tmp_path):
    def run(*, block=nullcontext):
        tensors = [torch.arange(16.0).view(4, 4) + i for i in range(3)]
        for _ in range(4):
            with block():
                step(*tensors)
        return tensors

    def compiled():
        return lazy_tensor.lazy_mode(
            backend="inductor", compile="blocking", cache_dir=str(tmp_path)
        )

    for found, expected in zip(run(block=compiled), run(), strict=True):
        torch.testing.assert_close(lazy_tensor.materialize(found), expected)


def test_steps_with_two_buffers_are_compiled():
    tensors = [torch.ones(4, 4) for _ in range(3)]
    with lazy_tensor.lazy_mode(backend="inductor", compile="blocking"):
        leapfrog(*tensors)
    assert lazy_tensor.explain().records[-1].statuses == ("ready",)


def flat(x):
    x.add_(1)
    x.view(-1)[2:5].neg_()


def behind(x):
    x.narrow(1, x.shape[0], 3).mul_(5)


def moved(x):
    x.t()[x.shape[0] : 9].neg_()


@pytest.mark.parametrize("write", [flat, behind, moved])
def test_parts_that_begin_where_a_size_says(write):
    for rows, columns in [(2, 24), (2, 33), (2, 64), (3, 24), (3, 33)]:
        plain = torch.arange(1.0, rows * columns + 1).view(rows, columns)
        lazy = plain.clone()
        write(plain)
        with lazy_tensor.lazy_mode(record="always", compile="blocking"):
            write(lazy)
            result = lazy + 0
        assert torch.equal(lazy_tensor.materialize(result), plain)
        assert torch.equal(lazy_tensor.materialize(lazy), plain)


def test_any_and_all_of_bytes_are_bytes():
    x = torch.tensor([[0, 3, 1], [2, 2, 2]], dtype=torch.uint8)
    for _ in range(2):
        with lazy_tensor.lazy_mode(record="always", compile="blocking"):
            y = x * 1
            found = [y.any(), y.all(-1), y + 1]
        for mine, theirs in zip(found, [x.any(), x.all(-1), x + 1], strict=True):
            assert torch.equal(lazy_tensor.materialize(mine), theirs)
            assert lazy_tensor.materialize(mine).dtype is theirs.dtype
