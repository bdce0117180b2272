"""Programs run eagerly and then lazily, in the mode or on wrapped inputs; the results compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lazy_tensor import lazy_mode, materialize, wrap

WAYS = ("mode", "wrap")
N_PASSES = 3
"""A trace is interpreted at first sight, then planned, then its plan is known."""


def fresh(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def lazily(way: str, program: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    """What `program` returns when run in this way; lazy tensors stay lazy."""
    if way == "wrap":
        return program(*[wrap(x) for x in inputs])
    with lazy_mode():
        return program(*inputs)


def assert_same(got: Any, expected: Any) -> None:
    """Bit-equal tensors of one layout, equal everything else."""
    flat, tree = pytree.tree_flatten(materialize(got))
    expected_flat, expected_tree = pytree.tree_flatten(expected)
    assert tree == expected_tree
    for a, b in zip(flat, expected_flat, strict=True):
        if isinstance(b, torch.Tensor):
            assert isinstance(a, torch.Tensor)
            torch.testing.assert_close(
                a.detach(), b.detach(), rtol=0, atol=0, equal_nan=True, check_stride=True
            )
        else:
            assert (type(a), a) == (type(b), b)


def assert_agrees(way: str, program: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """`program` returns the same as in eager, each time it is run."""
    expected = program(*map(fresh, inputs))
    for _ in range(N_PASSES):
        assert_same(lazily(way, program, *map(fresh, inputs)), expected)
