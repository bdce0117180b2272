"""Writes and views: what one name writes, every other name of the memory sees, in program order."""

from contextlib import nullcontext

import pytest
import torch

from lazy_tensor import lazy_mode, materialize, wrap
from lazy_tensor.dispatch.trie.trace import local


def base_and_view(x):
    v = x[1:3]
    x.add_(1)
    v.mul_(10)
    return x, v, x.sum()


def siblings(x):
    a, b = x[:3], x[2:]
    a.add_(1)
    return a, b, b * 2


def cache_slices(x):
    cache = torch.zeros(2, 6)
    for i in range(6):
        cache[:, i] = x[0, i % 2] + i
        if i == 3:
            seen = cache.sum()
    return cache, seen


def read_before_write(x):
    y = x * 2
    x.add_(1)
    z = x * 2
    return y, z, x


def transposed_write(x):
    t = x.t()
    t[0] = 5
    return x, t.contiguous()


def chunked(x):
    parts = x.chunk(2)
    parts[1].zero_()
    return x, *parts


def copy_between_overlapping(x):
    y = x.clone()
    y[1:].copy_(x[:-1])
    return x, y


def in_columns(x, write):
    """Between slices of the same memory. A kernel would read all before it writes."""
    y = x * 1
    write(y)
    return y + 1


def written_to_the_right(x):
    return in_columns(x, lambda y: y[:, 1:].copy_(y[:, :-1]))


def multiplied_by_the_left(x):
    return in_columns(x, lambda y: y[:, 1:3].mul_(y[:, :2]))


def divided_by_the_first(x):
    return in_columns(x, lambda y: y.div_(y[:, :1] + 0).div_(y[:, :1]))


def added_to_the_diagonal(x):
    return in_columns(x, lambda y: y[:3].diagonal().add_(y[:3, 0]))


def chained_inplace(x):
    return x.mul(2).add_(1).relu_().sub_(0.5)


def expand_and_sum(x):
    e = x[:1].expand(4, 4)
    x.add_(1)
    return e + 0, x


def index_put(x):
    x[torch.tensor([0, 2])] = 9.0
    x[x > 0.5] = 0.25
    return x


def masked_fill(x):
    y = x.masked_fill(x > 0, 1.0)
    x.masked_fill_(x < 0, -1.0)
    return x, y


def two_names(x):
    a = x.detach()
    a.add_(3)
    b = x.view(-1)
    b[0] = -1
    return x, a, b


def unused_write_to_dead_memory(x):
    y = x + 1
    y.add_(1)
    del y
    return x * 2


def batch_norm(x):
    mean, var = torch.zeros(4), torch.ones(4)
    y = torch.nn.functional.batch_norm(x, mean, var, training=True)
    return y, mean, var


PROGRAMS = [
    base_and_view, siblings, cache_slices, read_before_write, transposed_write, chunked,
    copy_between_overlapping, written_to_the_right, multiplied_by_the_left, divided_by_the_first,
    added_to_the_diagonal, chained_inplace, expand_and_sum, index_put, masked_fill, two_names,
    unused_write_to_dead_memory, batch_norm,
]  # fmt: skip


def results(program, x):
    out = program(x)
    return out if isinstance(out, tuple) else (out,)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.parametrize("way", ["mode", "wrap"])
def test_agrees_with_eager(program, way):
    start = torch.randn(4, 4)
    expected_input = start.clone()
    expected = results(program, expected_input)
    for _ in range(3):  # interpreted, planned, planned and known
        x = start.clone()
        if way == "mode":
            with lazy_mode():
                got = results(program, x)
        else:
            x = wrap(x)
            got = results(program, x)
        for a, b in zip(materialize(got), expected, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
        assert torch.equal(materialize(x), expected_input)


def test_values_alive_after_a_flush_still_share_memory():
    x = wrap(torch.zeros(4))
    y = x + 1
    v = y[:2]
    assert y.tolist() == [1.0] * 4
    v.add_(5)
    assert y.tolist() == [6.0, 6.0, 1.0, 1.0]


def test_equal_values_keep_their_own_memory():
    x = wrap(torch.ones(3))
    a = x + 1
    b = x + 1
    assert a.tolist() == b.tolist()
    a.add_(1)
    assert b.tolist() == [2.0] * 3


def test_saved_tensor_modified_raises_as_in_eager():
    w = torch.ones(3, requires_grad=True)
    with lazy_mode():
        y = w.exp()
        z = y * y
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def test_version_counts_writes_when_they_are_recorded():
    x = torch.zeros(3)
    with lazy_mode():
        x.add_(1)
        assert x._version == 1
    assert x._version == 1


@pytest.mark.parametrize("target", ["plain", "wrapped", "computed"])
@pytest.mark.parametrize("records", ["all", "debug", "cold"])
def test_matmul_writes_its_out(target, records):
    a = torch.rand(2, 3, 4)
    for right in ((2, 4, 5), (4,), (4, 5), (1, 4, 5)) * 2:
        b = torch.rand(right)
        expected = a @ b
        if target == "computed":
            with lazy_mode():
                out = torch.empty(expected.shape)
        else:
            out = torch.empty_like(expected)
        with lazy_mode(debug=records == "debug"):
            if records == "cold":
                local.trace.policy.cold = 1
            lazy = wrap(out) if target == "wrapped" else out
            torch.matmul(a, b, out=lazy)
            torch.matmul(wrap(a), b, out=lazy)
        assert torch.equal(materialize(out), expected)
        assert torch.equal(materialize(lazy), expected)
        local.trace.policy.reset()


def test_a_view_that_was_made_while_nothing_was_recorded_sees_later_writes():
    with lazy_mode():
        x = torch.zeros(4) + 1
    with lazy_mode():
        local.trace.policy.cold = 1
        v = x[:2]
    local.trace.policy.reset()
    for i in range(4):
        x.add_(1)
        assert v.tolist() == [i + 2.0] * 2


def test_an_alias_of_a_leaf_begins_where_the_leaf_does():
    base = torch.arange(40.0)
    for i in range(1, 5):
        part = base[4 * i : 4 * i + 4]
        with lazy_mode():
            part + 1
            alias = part.detach()
            shifted = alias.as_strided((2,), (1,), alias.storage_offset() + 1)
        assert alias.storage_offset() == 4 * i
        assert shifted.tolist() == part[1:3].tolist()


def test_a_copy_behind_a_product_with_out_is_left_out_only_within_that_out():
    def multiplied(block):
        v = torch.arange(12.0).view(3, 4)
        first, row, rest = v[0], v[1], v[2:]
        with block():
            torch.mv(2 * torch.eye(4), first, out=row)
            rest.copy_(row)
        return v.tolist()

    assert multiplied(lazy_mode) == multiplied(nullcontext)


@pytest.mark.parametrize("becomes_conj", [False, True])
def test_data_that_is_set_brings_its_conjugate_bit(becomes_conj):
    x = torch.tensor([1 + 2j, 3 - 1j])
    with lazy_mode():
        y, other = x + 0, (x + 0).conj()
        if not becomes_conj:
            y, other = other, y
        y.data = other
        is_conj, parts = y.is_conj(), torch.view_as_real(y.resolve_conj())
    expected = torch.view_as_real((x.conj() if becomes_conj else x).resolve_conj())
    assert is_conj is becomes_conj
    assert parts.tolist() == expected.tolist()
