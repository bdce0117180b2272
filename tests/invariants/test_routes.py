"""Ops that torch takes apart otherwise for subclasses and under modes give what eager gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lazy_tensor import lazy_mode, materialize, wrap
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.trie.trace import Node, local
from tests.invariants.compare import assert_same
from tests.invariants.test_linear_algebra import SETTINGS

PAIRS = {
    "many by one": ((4, 3, 5), (1, 5, 2)),
    "one by many": ((1, 3, 5), (4, 5, 2)),
    "none by one": ((0, 3, 5), (1, 5, 2)),
    "as many": ((4, 3, 5), (4, 5, 2)),
    "as many of four dims": ((2, 4, 3, 5), (2, 4, 5, 2)),
    "as many of one": ((2, 1, 3, 5), (2, 1, 5, 2)),
    "as many of nothing": ((4, 3, 0), (4, 0, 2)),
    "batches that broadcast": ((2, 4, 3, 5), (4, 5, 2)),
    "a matrix": ((4, 3, 5), (5, 2)),
}
matmul_taken_before: Callable[..., torch.Tensor] = torch.matmul
split_taken_before: Callable[..., Any] = torch.tensor_split


def ops_pending() -> list[str]:
    return [str(step.facts.op) for step in local.trace.state.steps() if isinstance(step, Node)]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("pair", PAIRS)
def test_products_of_batches_are_eagers(pair, setting):
    left, right = (torch.randn(shape) for shape in PAIRS[pair])
    with SETTINGS[setting]():
        expected = matmul_taken_before(left, right)
        out = torch.empty_like(expected, dtype=torch.float32)
        wrapped = wrap(left.clone()) @ wrap(right.clone())
        with lazy_mode(record="always"):
            recorded = matmul_taken_before(left, right)
            if setting != "autocast":  # eager, too, has no product written to other dtypes
                torch.matmul(left * 1, right, out=out)
    assert_same(materialize(recorded), expected)
    assert_same(materialize(wrapped), expected)
    if setting != "autocast":
        assert_same(materialize(out), expected)


@pytest.mark.parametrize("setting", ["as ever", "inference_mode"])
def test_many_matrices_are_multiplied_by_one_as_in_eager(setting):
    one, many = torch.randn(1, 4, 5), torch.randn(3, 5, 4)
    with SETTINGS[setting](), lazy_mode(record="always"):
        for product in (torch.matmul, lambda a, b: F.linear(a, torch.eye(5)) @ b):
            materialize(product(one, many))
            product(one, many)
            assert "aten.bmm.default" in ops_pending()


@pytest.mark.parametrize("setting", ["as ever", "inference_mode"])
def test_equal_batches_are_multiplied_without_views_of_the_same_sizes(setting):
    if hits.native is None:
        pytest.skip(hits.status())
    left, right = torch.randn(4, 3, 5), torch.randn(4, 5, 2)
    with SETTINGS[setting](), lazy_mode(record="always"):
        left @ right
        assert ops_pending() == ["aten.bmm.default"]


def test_gradients_of_a_product_with_itself_are_added_in_eagers_order():
    x = torch.randn(4, 6, 6, requires_grad=True)

    def gradient():
        square = x @ x
        power = square @ x @ square
        return torch.autograd.grad((power @ power * 1e3).sum(), x)[0]

    with lazy_mode(record="always"):
        found = gradient()
    assert torch.equal(materialize(found), gradient())


def test_gradients_of_equal_batches_are_eagers():
    """Its strides and its node too."""
    for sizes in ((4, 3, 5), (4, 5, 2)), ((2, 4, 3, 5), (2, 4, 5, 2)):
        left, right = (torch.randn(size).mT.contiguous().mT.requires_grad_() for size in sizes)
        with lazy_mode(record="always"):
            product = left @ right
            gradients = torch.autograd.grad(product.square().sum(), (left, right))
        expected = left @ right
        wanted = torch.autograd.grad(expected.square().sum(), (left, right))
        assert type(product.grad_fn) is type(expected.grad_fn)
        for got, want in zip((product, *gradients), (expected, *wanted), strict=True):
            assert_same(materialize(got), want)
            assert got.stride() == want.stride()


def test_a_gradient_for_one_matrix_is_of_its_size_at_once():
    one, many = torch.randn(1, 4, 5, requires_grad=True), torch.randn(3, 5, 4)
    with lazy_mode(record="always"):
        product = one @ many
        assert "aten.bmm.default" not in ops_pending()
    assert_same(materialize(product).detach(), (one @ many).detach())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("is_batch", [True, False])
def test_ctc_loss_of_lengths_in_tuples(reduction, is_batch):
    shape = (9, 2, 5) if is_batch else (9, 5)
    n_steps: Any = (9, 7) if is_batch else (9,)
    n_labels: Any = (3, 0) if is_batch else (3,)
    targets = torch.randint(1, 5, (2, 3) if is_batch else (3,))
    x = torch.randn(shape, requires_grad=True)

    def loss_and_gradient(x):
        losses = F.ctc_loss(x.log_softmax(-1), targets, n_steps, n_labels, reduction=reduction)
        return losses, torch.autograd.grad(losses.sum(), x)[0]

    expected = loss_and_gradient(x)
    with lazy_mode(record="always"):
        recorded = loss_and_gradient(x)
        assert_same(materialize(recorded), expected)


@pytest.mark.parametrize("way", ["mode", "wrapped"])
def test_splits_at_computed_places(way):
    x, at = torch.arange(12.0), torch.tensor([1, 2])
    if way == "wrapped":
        found = [split_taken_before(wrap(x.clone()), wrap(n) + 1) for n in (at, torch.tensor(2))]
    else:
        with lazy_mode(record="always"):
            found = [split_taken_before(x, n + 1) for n in (at, torch.tensor(2))]
    assert_same(materialize(found), [torch.tensor_split(x, n + 1) for n in (at, torch.tensor(2))])
    with pytest.raises(RuntimeError, match="to be a zero-dimensional or one-dimensional"):
        split_taken_before(wrap(x.clone()), wrap(at[None]) + 1)


def test_ranks_are_written_to_out():
    x = torch.randn(3, 4, 4)
    with lazy_mode(record="always"):
        for arguments in ({}, {"atol": torch.tensor(0.5)}, {"tol": 0.5}):
            out = torch.empty(3, dtype=torch.int64)
            assert torch.linalg.matrix_rank(x * 1, **arguments, out=out) is out
            assert_same(materialize(out), torch.linalg.matrix_rank(x, **arguments))
