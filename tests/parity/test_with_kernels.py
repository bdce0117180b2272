"""Training with compiled kernels: close to eager, and no kernel is compiled twice."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lazy_tensor import lazy_mode, materialize, reset_stats, stats
from lazy_tensor.dispatch.run import compile_service
from lazy_tensor.dispatch.stats import COMPILES_AFTER_S, STATS
from lazy_tensor.kernels.backends.inductor import InductorBackend


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("kernels"))


def train(n_steps):
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.2), nn.Linear(8, 8), nn.GELU(),
        nn.LayerNorm(8), nn.Linear(8, 3),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    x, y = torch.randn(16, 6), torch.randint(0, 3, (16,))
    losses = []
    for _ in range(n_steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, [materialize(p.detach()) for p in model.parameters()]


def test_losses_and_weights_are_close_and_a_settled_loop_compiles_nothing(cache_dir):
    expected_losses, expected_weights = train(12)
    with lazy_mode(backend="inductor", compile="blocking", cache_dir=cache_dir):
        losses, weights = train(12)
        compiled = stats()["compiled"]
        assert compiled > 0
        reset_stats()
        train(12)
        assert (stats()["compiled"], stats()["loaded"]) == (0, 0)
    assert stats()["failed"] == 0
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=0)
    for got, expected in zip(weights, expected_weights, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)


class Recurrent(nn.Module):
    """Writes parts of a product, by `unsafe_split`, that backward takes from it again."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(6, 6)

    def forward(self, x):
        h = torch.zeros(16, 6)
        for _ in range(3):
            h = self.cell(x, h)
        return h


class InPlace(nn.Module):
    """Writes a product through `_unsafe_view`."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

    def forward(self, x):
        return self.second(F.leaky_relu_(self.first(x.view(4, 4, 6)))).view(16, 6)


@pytest.mark.parametrize("module", [Recurrent, InPlace])
def test_a_write_to_a_view_that_its_schema_does_not_mark_is_one_to_its_base(module, cache_dir):
    def losses():
        torch.manual_seed(3)
        model, x = module(), torch.randn(16, 6)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    expected = losses()
    with lazy_mode(backend="inductor", compile="blocking", cache_dir=cache_dir):
        torch.testing.assert_close(losses(), expected, rtol=1e-5, atol=0)


def test_background_never_waits_for_the_compiler(cache_dir, monkeypatch):
    monkeypatch.setattr(STATS, "worked_s", COMPILES_AFTER_S)
    # simple kernels may come while these steps run
    monkeypatch.setattr(InductorBackend, "build_soon", lambda *_: None)
    with lazy_mode(backend="inductor", compile="background", cache_dir=cache_dir + "-empty",
                   record="always"):  # fmt: skip
        expected, _ = train(3)
        losses, _ = train(3)
        # worker processes take seconds to start: these steps ran before any kernel was there
        assert stats()["compiled"] == 0
        assert stats()["segments"] > 0
    assert losses == expected


def test_nothing_is_built_in_the_background_for_a_program_that_may_end_soon(cache_dir, monkeypatch):
    def statuses():
        folder = cache_dir + "-new"
        with lazy_mode(backend="inductor", compile="background", cache_dir=folder, record="always"):
            for _ in range(4):
                torch.rand(64).sin().add(1).sum().item()
                compile_service.compiler()._to_load.wait(60)  # until it is known that disk has none
            return [fusion.status for fusion in compile_service.compiler().cache.values()]

    monkeypatch.setattr(STATS, "worked_s", 0.0)
    assert set(statuses()) == {"aten"}
    monkeypatch.setattr(STATS, "worked_s", COMPILES_AFTER_S)
    assert set(statuses()) != {"aten"}
