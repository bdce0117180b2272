"""Modules whose parameters are computed, tied, lazy in torch's sense or changed in place."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from lazy_tensor import lazy_mode, materialize, unwrap, wrap
from tests.invariants.compare import WAYS, assert_same


def weight_norm():
    return parametrizations.weight_norm(nn.Linear(4, 4))


def spectral_norm():
    return parametrizations.spectral_norm(nn.Linear(4, 4))


def orthogonal():
    return parametrizations.orthogonal(nn.Linear(4, 4))


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).mT


def symmetric():
    model = nn.Linear(4, 4)
    parametrize.register_parametrization(model, "weight", Symmetric())
    return model


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def pruned():
    return prune.random_unstructured(nn.Linear(4, 4), "weight", 0.5)


def normed():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.Dropout(0.3))


def recurrent():
    return nn.Sequential(nn.GRUCell(4, 4), nn.Linear(4, 4))


class Counting(nn.Module):
    seen: torch.Tensor

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.seen += y.mean(0)
        return y + self.seen.clone()


class Replacing(Counting):
    def forward(self, x):
        self.seen = self.seen * 0.9 + x.mean(0) * 0.1
        return self.linear(x) + self.seen


def with_buffer_written():
    return Counting()


def with_buffer_replaced():
    return Replacing()


def with_frozen_half():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    return model


MODELS = [
    weight_norm, spectral_norm, orthogonal, symmetric, tied, pruned, normed, recurrent,
    with_buffer_written, with_buffer_replaced, with_frozen_half,
]  # fmt: skip


def trained(model, x):
    torch.manual_seed(5)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [t.detach() for t in (*model.parameters(), *model.buffers())]


def built(make):
    torch.manual_seed(3)
    return make()


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_training_is_bit_equal(make, way):
    x = torch.rand(6, 4)
    expected = trained(built(make), x)
    model = built(make)
    if make is pruned:
        with torch.no_grad():
            model(x)  # its weight holds a graph, which wrap() refuses
    if way == "mode":
        with lazy_mode():
            got = trained(model, x)
    else:
        got = trained(wrap(model), x)
    assert_same(got, expected)


@pytest.mark.parametrize("make", [weight_norm, orthogonal], ids=lambda make: make.__name__)
def test_a_parametrization_is_removed_from_a_wrapped_model(make):
    model = wrap(built(make))
    expected = materialize(model.weight.detach())
    parametrize.remove_parametrizations(model, "weight")
    assert_same(unwrap(model).weight.detach(), expected)


def test_a_parametrized_weight_set_by_hand_is_taken():
    model = weight_norm()
    with lazy_mode():
        model.weight = torch.eye(4) * 2
    torch.testing.assert_close(materialize(model.weight.detach()), torch.eye(4) * 2)


@pytest.mark.parametrize(
    ("uninitialized", "initialized"),
    [(lambda: nn.LazyLinear(3), nn.Linear), (nn.LazyBatchNorm1d, nn.BatchNorm1d)],
    ids=["parameters", "buffers"],
)
def test_torchs_lazy_modules_get_their_shape_in_the_mode(uninitialized, initialized):
    model = uninitialized()
    with lazy_mode():
        model(torch.rand(5, 7))
    assert type(model) is initialized
    assert model.weight.shape[-1] == 7


@pytest.mark.parametrize("change", [nn.Module.double, nn.Module.half, nn.Module.cpu])
def test_a_wrapped_model_changes_its_dtype_as_in_eager(change):
    model, wrapped = built(normed), wrap(built(normed))
    objects = list(wrapped.parameters())
    change(model)
    change(wrapped)
    assert [t.dtype for t in wrapped.parameters()] == [t.dtype for t in model.parameters()]
    assert all(p is q for p, q in zip(wrapped.parameters(), objects, strict=True))
    assert_same(dict(wrapped.state_dict()), dict(model.state_dict()))


def test_a_model_made_empty_on_meta_is_filled_in_the_mode():
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    with lazy_mode():
        model.to_empty(device="cpu")
        nn.init.constant_(model.weight, 2.0)
        nn.init.zeros_(model.bias)
        y = model(torch.ones(1, 3))
    assert y.tolist() == [[6.0, 6.0]]
