"""Programs as people write them, to show what each form of laziness gains.

In: `run`, which makes a program's step eager, lazy, replayed or compiled. Out: a function that does
one step, and returns a value that must be equal in all forms. Docstrings of programs are their
titles in tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazy_tensor.examples.race.scenes import SCENES, Begin, Run, Step

WIDTH = 1000


def wave(run: Run) -> Step:
    """a wave, by in-place slices of 1000 x 1000"""
    place = torch.arange(WIDTH) / WIDTH
    now = torch.exp(-400 * ((place[:, None] - 0.3) ** 2 + (place - 0.5) ** 2))
    before = now.clone()

    def step(now: Tensor, before: Tensor) -> None:
        middle = now[1:-1, 1:-1]
        around = now[2:, 1:-1] + now[:-2, 1:-1] + now[1:-1, 2:] + now[1:-1, :-2]
        before[1:-1, 1:-1] = 2 * middle - before[1:-1, 1:-1] + 0.2 * (around - 4 * middle)

    advance = run(step)

    def both() -> Tensor:
        nonlocal now, before
        advance(now, before)
        now, before = before, now
        return now[300, 500].clone()

    return both


def training_step(
    model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer
) -> Callable[[Tensor, Tensor], Tensor]:
    """From inputs and labels to the loss before the update."""

    def step(x: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def trained(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, labels: Tensor
) -> Step:
    """Training steps on one batch."""
    train = run(training_step(model, optimizer))
    return lambda: torch.tensor(train(x, labels).item())


def gpt2(run: Run) -> Step:
    """transformers' GPT-2, 4 layers, 128 wide, AdamW"""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=256, n_positions=64, n_embd=128, n_layer=4, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model: Any = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    train, tokens = run(step), torch.randint(256, (4, 64))
    return lambda: torch.tensor(train(tokens).item())


class Unrolled(nn.Module):
    """A GRU written as a loop over time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(width, width), nn.Linear(width, 10)

    def forward(self, x_TBC: Tensor) -> Tensor:
        h_BC = torch.zeros_like(x_TBC[0])
        for x_BC in x_TBC:
            h_BC = self.cell(x_BC, h_BC)
        out: Tensor = self.head(h_BC)
        return out


def gru(run: Run) -> Step:
    """a GRU over 32 steps, 128 wide, Adam"""
    model = Unrolled(128)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return trained(run, model, optimizer, torch.randn(32, 16, 128), torch.randint(10, (16,)))


def mlp(run: Run) -> Step:
    """an MLP, 512 wide, with layer norms and dropout, Adam"""
    layers: list[nn.Module] = [nn.Linear(64, 512)]
    for _ in range(3):
        layers += [nn.LayerNorm(512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 512)]
    model = nn.Sequential(*layers, nn.Linear(512, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return trained(run, model, optimizer, torch.randn(64, 64), torch.randint(10, (64,)))


def cnn(run: Run) -> Step:
    """a small CNN with batch norms on 32 x 32 images, SGD"""
    layers: list[nn.Module] = []
    for n_in, n_out in (3, 16), (16, 32), (32, 64):
        layers += [nn.Conv2d(n_in, n_out, 3, padding=1), nn.BatchNorm2d(n_out), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return trained(run, model, optimizer, torch.randn(16, 3, 32, 32), torch.randint(10, (16,)))


def adam(run: Run) -> Step:
    """Adam.step alone, 146 parameters, 12 layers 256 wide"""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, nn.LayerNorm(256), enable_nested_tensor=False)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer = torch.optim.Adam(parameters, lr=1e-4)

    def step() -> None:
        optimizer.step()

    advance = run(step)

    def both() -> Tensor:
        advance()
        return parameters[-1][0].detach().clone()

    return both


def by_title(*programs: Begin) -> dict[str, Begin]:
    """The programs by their docstrings."""
    return {begin.__doc__ or "": begin for begin in programs}


ARRAYS: dict[str, Begin] = {
    SCENES["gray_scott"].title: SCENES["gray_scott"].begin,
    SCENES["monte_carlo"].title: SCENES["monte_carlo"].begin,
    **by_title(wave),
}
TRAINING: dict[str, Begin] = by_title(gpt2, gru, mlp, cnn, adam)
"""Programs with many kernels, which take minutes to build."""
PROGRAMS = ARRAYS | TRAINING
