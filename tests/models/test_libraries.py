"""Loops of other libraries, unmodified, compute with lazy models what they compute eagerly.

Lightning's `Trainer`, ignite's engines, accelerate; `test_trainer.py` and `test_fabric.py` have two
more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lazy_tensor
from lazy_tensor import lazy_mode, materialize, replay, wrap

N_EPOCHS = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.norm, self.out = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.out(self.dropout(F.gelu(self.norm(self.wide(x)))))


def batches() -> DataLoader[Any]:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


def in_lightning(net: nn.Module) -> None:
    import pytorch_lightning as lightning

    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, _):
            loss = F.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, _):
            self.log("validation", F.mse_loss(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    trainer = lightning.Trainer(
        max_epochs=N_EPOCHS, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(Regression(), batches(), batches())


def in_ignite(net: nn.Module) -> None:
    from ignite.engine import create_supervised_trainer

    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    trainer = create_supervised_trainer(net, optimizer, F.mse_loss)
    trainer.run(batches(), max_epochs=N_EPOCHS)


def by_accelerate(net: nn.Module) -> None:
    """With gradients of two batches added up."""
    Accelerator = pytest.importorskip("accelerate").Accelerator

    made_here = torch.optim.AdamW(net.parameters(), lr=1e-2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, data = accelerator.prepare(net, made_here, batches())
    for _ in range(N_EPOCHS):
        for x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()


def trained(loop: Callable[[nn.Module], None], way: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = Net()
    if way == "wrap":
        wrap(net)
    elif way == "replay":
        replay(net)
    torch.manual_seed(1)
    with lazy_mode() if way == "mode" else contextlib.nullcontext():
        loop(net)
    if way == "replay":
        assert lazy_tensor.stats()["replayed"] > 16
    return [materialize(parameter.detach()).clone() for parameter in net.parameters()]


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.torch.jit.* is deprecated",
    "ignore:.*LeafSpec.*is deprecated",
)  # fmt: skip
@pytest.mark.parametrize("way", ["mode", "wrap", "replay"])
@pytest.mark.parametrize("loop", [in_lightning, in_ignite, by_accelerate])
def test_loops_of_libraries_are_bit_equal(loop, way):
    expected = trained(loop, "eager")
    lazy_tensor.reset_stats()
    for got, wanted in zip(trained(loop, way), expected, strict=True):
        assert torch.equal(got, wanted)
