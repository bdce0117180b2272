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


def made_in_inference_mode(w):
    """Tensors of every kind: new ones, views, aliases, drawn, of what runs at once, of no ops."""
    made = torch.ones(4)
    doubled = made * 2
    return {
        "made": made,
        "doubled": doubled,
        "of w": w * 2,
        "parts": doubled.split(2)[1],
        "part of w": w[1:3],
        "its alias": doubled.detach(),
        "w's alias": w.detach(),
        "transposed": doubled.view(2, 2).t(),
        "w transposed": w.view(2, 2).t(),
        "like w": torch.zeros_like(w),
        "conjugate": torch.view_as_complex(doubled.view(2, 2)).conj(),
        "drawn": torch.bernoulli(w / 2),
        "indices": torch.nonzero(w),
        "written": w.add_(1),
        "tiny": w.sum() + 1,
    }


@pytest.mark.parametrize("way", ["always", "auto", "wrap"])
def test_tensors_are_of_inference_mode_where_eagers_are(way):
    def whose(found):
        return {name: tensor.is_inference() for name, tensor in found.items()}

    def used_outside(found):
        x, y = found["doubled"], found["w transposed"]
        return {"part": x[1:], "alias": x.detach(), "new": x + 1, "w's": y[1:]}

    def outcome(w, mode):
        with mode:
            with torch.inference_mode():
                found = made_in_inference_mode(w)
            then = whose(used_outside(found))
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside"):
            found["doubled"].add_(1)
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            torch.ones(4, requires_grad=True) * found["doubled"]
        found["part of w"].add_(1)
        return whose(found), then, whose(used_outside(found)), w.sum().item()

    w = torch.ones(4)
    expected = outcome(w.clone(), nullcontext())
    for _ in range(4):
        if way == "wrap":
            assert outcome(wrap(w.clone()), nullcontext()) == expected
        else:
            assert outcome(w.clone(), lazy_mode(record=way)) == expected


@pytest.mark.parametrize("way", ["mode", "wrap"])
def test_a_tensor_that_changes_its_shape_stays_of_its_mode(way):
    """Pooling of channels that come last gives its result other strides by an op in place."""
    x = torch.randn(2, 8, 3)

    def pooled(x):
        with torch.inference_mode():
            made = nn.functional.adaptive_avg_pool1d((x * 2).transpose(1, 2), 1)
            x.unsqueeze_(0).squeeze_(0)
            made.squeeze_(2)
        return made, x.is_inference(), made.is_inference(), x.add_(1)

    expected = pooled(x.clone())
    for _ in range(3):
        if way == "wrap":
            assert_same(materialize(pooled(wrap(x.clone()))), expected)
        else:
            assert_same(materialize(lazy_mode(record="always")(pooled)(x.clone())), expected)


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


@pytest.mark.recorded
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
