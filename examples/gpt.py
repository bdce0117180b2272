"""A byte-level GPT in plain PyTorch, with its training step and its data. Nothing here is lazy.

Its blocks are those of today's language models: RMS norms, rotary positions, a gated MLP, no
biases. Suffixes of names are dimensions: B batch, T position, C width, H head, D head width,
V vocabulary. Other examples, the demo and benchmarks import this module.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

N_BYTES = 256
MAX_BYTES = 8 << 20
"""Most bytes of text to train on."""


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a model. `tied`: the output layer has the weights of the embedding."""

    n_layers: int
    n_heads: int
    width: int
    context: int
    dropout: float = 0.0
    tied: bool = True


SIZES = {
    "tiny": GPTConfig(n_layers=2, n_heads=2, width=32, context=32),
    "small": GPTConfig(n_layers=4, n_heads=4, width=256, context=128),
    "medium": GPTConfig(n_layers=6, n_heads=6, width=384, context=256),
}


class Rotary(nn.Module):
    """Rotates pairs of features by angles that grow with the position (arXiv:2104.09864)."""

    cos_TD: Tensor
    sin_TD: Tensor

    def __init__(self, head_width: int, context: int) -> None:
        super().__init__()
        rates = 10_000.0 ** (-torch.arange(0, head_width, 2) / head_width)
        # not persistent: the angles follow from the sizes
        angles_TD = torch.arange(context)[:, None] * rates
        self.register_buffer("cos_TD", angles_TD.cos(), persistent=False)
        self.register_buffer("sin_TD", angles_TD.sin(), persistent=False)

    def forward(self, x_BHTD: Tensor) -> Tensor:
        n_positions = x_BHTD.shape[-2]
        cos, sin = self.cos_TD[:n_positions], self.sin_TD[:n_positions]
        left, right = x_BHTD.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class SelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.dropout = config.dropout
        self.rotary = Rotary(config.width // config.n_heads, config.context)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (
            t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for t in self.qkv(x_BTC).chunk(3, dim=-1)
        )
        y_BHTD = F.scaled_dot_product_attention(
            self.rotary(q_BHTD),
            self.rotary(k_BHTD),
            v_BHTD,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        out: Tensor = self.out(y_BHTD.transpose(1, 2).flatten(-2))
        return out


class GatedMLP(nn.Module):
    """SwiGLU (arXiv:2002.05202), with as many weights as an MLP whose hidden width is 4x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # three matrices in place of two: 8/3 of the width, rounded down to a multiple of 8
        hidden = 8 * width // 3 // 8 * 8
        self.gate_and_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x_BTC).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = SelfAttention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = GatedMLP(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.dropout(self.attention(self.attention_norm(x_BTC)))
        out: Tensor = x_BTC + self.dropout(self.mlp(self.mlp_norm(x_BTC)))
        return out


class GPT(nn.Module):
    """From bytes `(batch, context)` to logits `(batch, context, 256)`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(N_BYTES, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, N_BYTES, bias=False)
        self.apply(init_weights)
        if config.tied:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.dropout(self.token_embedding(tokens_BT))
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV: Tensor = self.head(self.norm(x_BTC))
        return logits_BTV


def init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[Tensor, Tensor], Tensor]:
    """The body of a training loop: from tokens and targets to the loss before the update.

    Tokens and targets are int64 of shape `(batch, context)`. The loss is in nats per byte.
    """

    def step(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        logits_BTV = model(tokens_BT)
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def library_text() -> Tensor:
    """The sources of Python's standard library as uint8, at most `MAX_BYTES` of them."""
    # a text that every machine has, in the same order everywhere
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests"}
    files = sorted(f for f in root.rglob("*.py") if skipped.isdisjoint(f.relative_to(root).parts))
    data = bytearray()
    for file in files:
        if len(data) >= MAX_BYTES:
            break
        data += file.read_bytes()
    return torch.frombuffer(data[:MAX_BYTES], dtype=torch.uint8)


def batches(
    text: Tensor, batch: int, context: int, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless pairs `(tokens, targets)`, int64 of shape `(batch, context)`; targets are the tokens
    one byte later.

    Equal arguments give equal batches. PyTorch's global generator is not used.
    """
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
        sample = text[starts + offsets].long()
        yield sample[:, :-1].contiguous(), sample[:, 1:].contiguous()
