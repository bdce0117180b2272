"""One training run in plain PyTorch, as its users write it: nothing here knows lazy tensors.

In: a recipe. Out: a `Trainer`, which `sides.py` runs eagerly, lazily or compiled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from lazy_tensor.cli.gpt import GPT, SIZES, GPTConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that fixes a training run: equal recipes give equal losses."""

    size: str = "small"
    steps: int = 150
    batch: int = 8
    device: str = "cpu"
    seed: int = 0
    dropout: float = 0.0
    learning_rate: float = 1e-3
    text: str | None = None

    @property
    def model_config(self) -> GPTConfig:
        return replace(SIZES[self.size], dropout=self.dropout)


class RandomStream:
    """PyTorch's default generators as one run alone in the process would see them.

    Code inside `active()` draws from where the last `active()` block of this stream stopped.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        with self._forked():
            torch.manual_seed(seed)
            self._save()

    @contextmanager
    def active(self) -> Iterator[None]:
        with self._forked():
            torch.set_rng_state(self._cpu)
            for device, state in zip(self._devices, self._cuda, strict=True):
                torch.cuda.set_rng_state(state, device)
            try:
                yield
            finally:
                self._save()

    @contextmanager
    def _forked(self) -> Iterator[None]:
        with torch.random.fork_rng(self._devices):
            yield

    def _save(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = [torch.cuda.get_rng_state(device) for device in self._devices]


class Trainer:
    """A model, its optimizer and its own random stream; `step` is the training loop's body."""

    def __init__(self, recipe: Recipe) -> None:
        self.device = torch.device(recipe.device)
        self.random = RandomStream(recipe.seed, self.device)
        with self.random.active():
            self.model: nn.Module = GPT(recipe.model_config).to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.learning_rate, weight_decay=0.1
        )
        self.scheduler = LambdaLR(self.optimizer, lambda step: warmup_cosine(step, recipe.steps))

    def step(self, tokens_BT: Tensor, targets_BT: Tensor) -> float:
        """Train on one batch; its loss before the update, in nats a byte."""
        tokens_BT, targets_BT = tokens_BT.to(self.device), targets_BT.to(self.device)
        logits_BTV = self.model(tokens_BT)
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()


def warmup_cosine(step: int, n_steps: int) -> float:
    """Share of the full learning rate: a linear rise, then a cosine down to a tenth."""
    warmup = max(1, n_steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, n_steps - warmup))
    return 0.55 + 0.45 * math.cos(math.pi * progress)
