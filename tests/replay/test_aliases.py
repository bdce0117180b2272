"""Tensors that a replay returns and that share memory with another: autograd knows them as views
and `detach()`s, as in eager, so a write to one counts for the other."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lazy_tensor
from lazy_tensor import replay

pytestmark = pytest.mark.usefixtures("quiet")


def view_of_argument(x, kept):
    return x[1:], x


def detached_argument(x, kept):
    y = x * 2
    return x.detach(), x, y


def view_of_detached(x, kept):
    return x.detach()[0], x


def view_made_without_grad(x, kept):
    with torch.no_grad():
        return x[1:], x


def view_of_view(x, kept):
    return x.view(2, 6)[1][2:4], x


def view_of_kept(x, kept):
    return kept.buffer[1], kept.buffer


def view_of_renewed(x, kept):
    kept.state = kept.state * 0.5 + x
    return kept.state.t(), kept.state


def view_of_written(x, kept):
    kept.buffer.add_(x)
    return kept.buffer[:2], kept.buffer


def view_of_result(x, kept):
    y = x * 2
    return y[0], y


def result_before_its_view(x, kept):
    y = x * 2
    return y, y.view(-1)[3:]


def two_views(x, kept):
    y = x * 2
    return y[:2], y[1:]


def nested_views(x, kept):
    y = x * 2
    rows = y[1:]
    return rows[0], rows, y


def pieces(x, kept):
    first, second = x.chunk(2)
    return first, second, x


PROGRAMS = [
    view_of_argument, detached_argument, view_of_detached, view_made_without_grad, view_of_view,
    view_of_kept, view_of_renewed, view_of_written, view_of_result, result_before_its_view,
    two_views, nested_views, pieces,
]  # fmt: skip


def write_behind(saved, written, w):
    """Backward needs `saved`, and `written` is written before it."""
    loss = (w * saved.sum(-1)).sum()
    other = (w * saved).sum() if saved.shape == w.shape else (saved * saved * w[..., :1]).sum()
    written.mul_(2)
    (loss + other).backward()


def differentiable_write(saved, written, w):
    """`written` gets values with a graph, which its base, or its views, then have, too."""
    written.mul_(w.sum())
    (saved * 3).sum().backward()


def bound(program: Any, kept: SimpleNamespace) -> Any:
    return lambda x: program(x, kept)


def outcome(returned: Any, use: Any, i: int, j: int) -> list[Any]:
    """What becomes of the `i`-th tensor that a call returned if the `j`-th is written."""
    w = torch.arange(1.0, 5.0).requires_grad_()
    try:
        use(returned[i], returned[j], w)
    except RuntimeError as error:
        return [str(error).partition(" [")[0].partition(";")[0]]
    found = [w.grad, *returned]
    return [(one.requires_grad, one.detach().tolist()) for one in found if one is not None]


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("use", [write_behind, differentiable_write])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_write_counts_as_in_eager(program, use, is_wrapped):
    if program is two_views and use is differentiable_write:
        pytest.skip("the tensor that both are views of is lost: docs/choosing.md says so")
    sides = [SimpleNamespace(buffer=torch.zeros(3, 4), state=torch.zeros(3, 4)) for _ in "ab"]
    fns = [bound(program, sides[0]), replay(bound(program, sides[1]))]
    step = fns[1]
    n = len(fns[0](torch.zeros(3, 4)))
    n_replayed = 0
    for i, j in [*[(0, 0)] * 5, *itertools.product(range(n), repeat=2)]:
        outcomes = []
        for kept, fn in zip(sides, fns, strict=True):
            kept.buffer.detach_().copy_(torch.arange(12.0).reshape(3, 4))
            if kept.state.requires_grad:
                kept.state = torch.zeros(3, 4)
            x = torch.arange(12.0).reshape(4, 3).t().contiguous()
            n_before = step.n_replayed
            returned = fn(lazy_tensor.wrap(x) if is_wrapped and fn is step else x)
            n_replayed += step.n_replayed - n_before
            outcomes.append(outcome(returned, use, i, j))
        assert outcomes[1] == outcomes[0], (i, j)
    assert n_replayed >= n * n, step.obstacle
