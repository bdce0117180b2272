"""Calls with `out=`, recorded as writes of `out`: programs that keep their buffers.

`tests/conformance/test_ops.py` compares all ops with `out=`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lazy_tensor
from lazy_tensor import lazy_mode, materialize, replay


def buffers() -> Any:
    a, b, c = torch.zeros(40, 30), torch.zeros(40, 30), torch.zeros(40)

    def step(x: torch.Tensor) -> torch.Tensor:
        torch.mul(x, 2, out=a)
        torch.add(a, x, out=a)  # reads what it writes
        torch.exp(a, out=b)
        torch.mm(b, x.T @ x, out=a)
        torch.sum(a, 1, out=c)
        torch.sub(b[1:], b[:-1], out=a[1:])
        return a + c[:, None]

    return step, (a, b, c)


@pytest.mark.recorded
@pytest.mark.parametrize("compiles", ["off", "blocking"])
def test_a_program_that_keeps_its_buffers_is_recorded_whole(compiles):
    (eager, theirs), (step, ours) = buffers(), buffers()
    backend = "inductor" if compiles == "blocking" else "aten"
    for i in range(4):
        x = torch.linspace(0, 0.1 + i, 1200).view(40, 30)
        want = eager(x)
        lazy_tensor.reset_stats()
        with lazy_mode(backend=backend, compile=compiles):
            found = step(x)
        torch.testing.assert_close(materialize(found), want)
        for buffer, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(buffer, other)
    stats = lazy_tensor.stats()
    assert not stats["fallbacks"]
    assert stats["flushes"] == 1
    assert stats["segments"] == (0 if compiles == "off" else 2)  # beside the two products


def test_it_is_replayed():
    (eager, theirs), (step, ours) = buffers(), buffers()
    step = replay(step)
    for i in range(6):
        x = torch.linspace(0, 0.1 + i, 1200).view(40, 30)
        assert torch.equal(step(x), eager(x))
        for buffer, other in zip(ours, theirs, strict=True):
            assert torch.equal(buffer, other)
    assert step.n_replayed > 2


@pytest.mark.recorded
def test_what_overlaps_raises_as_in_eager():
    x = torch.arange(6.0)
    with lazy_mode(), pytest.raises(RuntimeError, match="memory"):
        torch.add(x[1:], 1, out=x[:-1])
    assert torch.equal(x, torch.arange(6.0))
    with lazy_mode():
        torch.add(x, 1, out=x)
    assert torch.equal(x, torch.arange(1.0, 7.0))


@pytest.mark.recorded
def test_autograd_counts_the_write():
    x, out = torch.ones(3, requires_grad=True), torch.zeros(3)
    with lazy_mode():
        y = x * out
        torch.add(torch.ones(3), 1, out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        with pytest.raises(RuntimeError, match="requires grad"):
            torch.add(x, 1, out=out)


@pytest.mark.recorded
@pytest.mark.parametrize(
    "options",
    [{"backend": "aten", "compile": "off"}, {"backend": "inductor", "compile": "blocking"}],
)
def test_what_was_written_before_an_error_is_there(options: Any):
    total, divisor, kept = torch.arange(3) + 5, torch.tensor([1, 2, 0]), list[torch.Tensor]()

    def divide() -> None:
        kept[:] = [torch.zeros(3, dtype=torch.int64)]
        torch.div(total + 0, divisor, rounding_mode="floor", out=kept[0])

    for _ in range(3):
        with (
            pytest.raises(RuntimeError, match="ZeroDivisionError"),
            lazy_mode(**options),
        ):
            divide()
        assert materialize(kept[0]).tolist() == [5, 3, 0]
