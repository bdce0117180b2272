"""`torch.inference_mode` around, inside and between lazy blocks."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lazy_tensor import is_lazy, lazy_mode, materialize, wrap
from tests.invariants.compare import assert_same


def test_inference_tensors_made_outside_are_used_and_refused_as_in_eager():
    with torch.inference_mode():
        x = torch.ones(3) * 2
    w = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        w * x
    with lazy_mode():
        assert (x + 1).tolist() == [3.0] * 3
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            w * x


def test_views_of_ordinary_tensors_are_written_through_in_inference_mode():
    base = torch.zeros(4)
    with lazy_mode(), torch.inference_mode():
        view = base[1:3]
        view.add_(1)
        total = base.sum()
    assert base.tolist() == [0.0, 1.0, 1.0, 0.0]
    assert total.item() == 2.0


def test_views_taken_in_inference_mode_of_lazy_tensors_are_written_outside():
    base = wrap(torch.zeros(4)) + 1
    with torch.inference_mode():
        view = base[1:3]
        view.mul_(3)
    base.add_(1)
    assert view.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("inner", ["mode inside", "mode outside"])
def test_inference_mode_gives_eagers_values(inner):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 2)).eval()
    x = torch.rand(5, 4)
    first, second = torch.inference_mode(), lazy_mode()
    if inner == "mode outside":
        first, second = second, first  # type: ignore[assignment]
    with torch.inference_mode():
        expected = model(x)
    for _ in range(3):
        with first, second:
            got = model(x)
            assert is_lazy(got)
        assert_same(materialize(got), expected)


def test_values_recorded_outside_inference_mode_are_computed_inside_and_trained_after():
    w = torch.ones(3, requires_grad=True)
    with lazy_mode():
        y = w * 2
        with torch.inference_mode():
            assert y.tolist() == [2.0] * 3
        y.exp().sum().backward()
    assert w.grad is not None
    torch.testing.assert_close(materialize(w.grad), (torch.ones(3) * 2).exp() * 2)


@pytest.mark.parametrize("way", ["mode", "wrap"])
def test_inference_mode_ends_though_what_was_recorded_in_it_fails(way):
    kept = []  # an error keeps the frames it came through, and with them what they entered
    x = torch.ones(5) if way == "mode" else wrap(torch.ones(5))
    try:
        with lazy_mode() if way == "mode" else nullcontext(), torch.inference_mode():
            (x * 2)[torch.tensor([7]).add(0)]
    except IndexError as error:
        kept.append(error)
    assert len(kept) == 1
    assert not torch.is_inference_mode_enabled()
