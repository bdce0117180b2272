"""Eigenvalues, singular values and what is made of them: LAPACK has two ways to compute them."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import linalg

from lazy_tensor import lazy_mode, stats, wrap
from tests.invariants.compare import WAYS, assert_agrees, assert_same

OF_VALUES = {
    "eigvalsh": lambda x: linalg.eigvalsh(x + x.mT),
    "eigvalsh of the upper half": lambda x: linalg.eigvalsh(x + x.mT, UPLO="U"),
    "eigvals": linalg.eigvals,
    "svdvals": linalg.svdvals,
    "nuclear norm": lambda x: linalg.matrix_norm(x, "nuc"),
    "torch.norm": lambda x: torch.norm(x, "nuc"),
    "spectral norm": lambda x: linalg.matrix_norm(x, 2, keepdim=True),
    "smallest": lambda x: linalg.norm(x, -2),
    "cond": linalg.cond,
    "cond by nuclear norms": lambda x: linalg.cond(x, "nuc"),
    "matrix_rank": linalg.matrix_rank,
}
SETTINGS: dict[str, Callable[[], Any]] = {
    "as ever": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", OF_VALUES)
def test_values_are_computed_as_in_eager(name, setting):
    function = OF_VALUES[name]
    for n in (3, 5, 8, 17):
        x = torch.randn(n, n)
        with SETTINGS[setting]():
            expected = function(x)
            wrapped = function(wrap(x.clone()) * 1)
        for _ in range(2):
            with lazy_mode(), SETTINGS[setting]():
                recorded = function(x * 1)
            assert_same(recorded, expected)
        assert_same(wrapped, expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in OF_VALUES if name != "matrix_rank"])
def test_gradients_are_eagers(name, way):
    def gradient(x):
        y = OF_VALUES[name](x * 1)
        (y.abs() if y.is_complex() else y).sum().backward()
        return x.grad

    assert_agrees(way, gradient, torch.randn(6, 6, requires_grad=True))


def test_eigenvectors_asked_for_are_computed_with_their_values():
    x = torch.randn(9, 9)
    expected = linalg.eigh(x + x.mT), linalg.svd(x)
    with lazy_mode():
        got = linalg.eigh(x + x.mT), linalg.svd(x)
    for a, b in zip(got, expected, strict=True):
        assert_same(tuple(a), tuple(b))


@pytest.mark.recorded
def test_values_alone_are_recorded():
    with lazy_mode():
        found = [function(torch.ones(4, 4) + torch.eye(4)) for function in OF_VALUES.values()]
    assert len(found) == len(OF_VALUES)
    assert stats()["fallbacks"] == {}
    assert stats()["flushes"] == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_transforms_of_values_are_torchs():
    x = torch.randn(5, 5)
    with lazy_mode():
        y = x * 1
        gradient = torch.func.grad(lambda a: linalg.svdvals(a).sum())(y)
        batch = torch.func.vmap(linalg.eigvalsh)((y + y.mT)[None])
        tangent = torch.func.jvp(linalg.svdvals, (y,), (x,))[1]
    assert_same(gradient, torch.func.grad(lambda a: linalg.svdvals(a).sum())(x))
    assert_same(batch, torch.func.vmap(linalg.eigvalsh)((x + x.mT)[None]))
    assert_same(tangent, torch.func.jvp(linalg.svdvals, (x,), (x,))[1])
