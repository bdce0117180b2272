"""Small convolutional networks in the style of ResNet and UNet, called as the zoo's others are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Checkpointed(nn.Module):
    """What `transformers` models have: blocks that can be recomputed in the backward pass."""

    recompute = False

    def gradient_checkpointing_enable(self) -> None:
        self.recompute = True

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.recompute and self.training:
            x = checkpoint(block, x, use_reentrant=False)
        else:
            x = block(x)
        return x


class Residual(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False), nn.BatchNorm2d(n_out),
            nn.ReLU(inplace=True), nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(n_out),
        )  # fmt: skip
        self.short: nn.Module = nn.Identity()
        if stride != 1 or n_in != n_out:
            self.short = nn.Sequential(
                nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        y += self.short(x)
        return F.relu(y, inplace=True)


class ResNet(Checkpointed):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        self.blocks = nn.ModuleList([Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1)])
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Output:
        h = self.stem(x)
        for block in self.blocks:
            h = self.run(block, h)
        logits = self.head(self.drop(F.adaptive_avg_pool2d(h, 1).flatten(1)))
        return Output(F.cross_entropy(logits, y, label_smoothing=0.1), logits)


class DoubleConv(nn.Sequential):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(
            nn.Conv2d(n_in, n_out, 3, padding=1), nn.GroupNorm(4, n_out), nn.SiLU(),
            nn.Dropout2d(0.1), nn.Conv2d(n_out, n_out, 3, padding=1, padding_mode="reflect"),
            nn.GroupNorm(4, n_out), nn.SiLU(),
        )  # fmt: skip


class UNet(Checkpointed):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = DoubleConv(3, 8), DoubleConv(8, 16)
        self.shrink = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.middle = DoubleConv(16, 16)
        self.grow2 = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.up2, self.up1 = DoubleConv(32, 8), DoubleConv(16, 8)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Output:
        a = self.run(self.down1, x)
        b = self.run(self.down2, self.shrink(a))
        c = self.run(self.middle, F.avg_pool2d(b, 2))
        d = self.run(self.up2, torch.cat([self.grow2(c), b], dim=1))
        d = F.interpolate(d, scale_factor=2, mode="bilinear", align_corners=False)
        logits = self.head(self.run(self.up1, torch.cat([d, a], dim=1)))
        return Output(F.binary_cross_entropy_with_logits(logits, y), logits)
