"""A small image classifier trained from a `DataLoader` under `replay`, bit for bit as in eager."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from lazy_tensor import replay

EPOCHS = 3

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=2e-3),
}
SCHEDULERS = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 7, 0.3),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer,
        0.05,
        total_steps=40,
        cycle_momentum=False,  # other betas are recorded again
    ),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 30),
}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))

    def forward(self, x: Any) -> Any:
        y = F.relu(self.norms[0](self.first(x)), inplace=True)
        y = self.norms[1](self.second(y))
        y += x
        return F.relu(y)


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, 10),
    )  # fmt: skip


def trained(how, optimizer_name, scheduler_name, *, autocast):
    """Losses, means of epochs and evaluations; parameters and buffers; the step."""
    model = made()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scheduler = SCHEDULERS[scheduler_name](optimizer)
    images, labels = torch.randn(110, 3, 8, 8), torch.randint(0, 10, (110,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)

    @how
    def step(x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    history = []
    for _ in range(EPOCHS):
        model.train()
        total = 0.0
        for x, y in loader:
            loss = step(x, y).item()
            history.append(loss)
            total += loss * len(x)
            scheduler.step()
        model.eval()
        with torch.no_grad():
            history += [total / len(images), F.cross_entropy(model(images), labels).item()]
    return history, list(model.state_dict().values()), step


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:replay.* goes on recording")
def test_a_classifier_learns_the_same(optimizer, scheduler, autocast):
    torch.manual_seed(1)
    expected, expected_state, _ = trained(lambda f: f, optimizer, scheduler, autocast=autocast)
    torch.manual_seed(1)
    losses, state, step = trained(replay, optimizer, scheduler, autocast=autocast)
    assert losses == expected
    assert all(map(torch.equal, state, expected_state))
    assert step.n_replayed > EPOCHS
