"""Llama in plain `torch.nn` (arXiv:2307.09288): grouped queries, no biases.

Only its shapes matter: `bench_scale.py` records its training step and never runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lazy_tensor.examples.gpt import Rotary


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    n_layers: int
    width: int
    n_heads: int
    n_kv_heads: int
    hidden: int
    vocabulary: int = 32_000
    context: int = 4096

    @property
    def block_parameters(self) -> int:
        """Parameters of a block: queries and output, keys and values, the gated MLP, two norms."""
        kv = self.width * self.n_kv_heads // self.n_heads
        return self.width * (2 * self.width + 2 * kv + 3 * self.hidden + 2)

    @property
    def root_parameters(self) -> int:
        """Parameters of the rest: embedding, head, the last norm."""
        return self.width * (2 * self.vocabulary + 1)


SIZES = {
    "7B": LlamaConfig(n_layers=32, width=4096, n_heads=32, n_kv_heads=32, hidden=11_008),
    "70B": LlamaConfig(n_layers=80, width=8192, n_heads=64, n_kv_heads=8, hidden=28_672),
    "tiny": LlamaConfig(4, 64, n_heads=8, n_kv_heads=8, hidden=128, vocabulary=256, context=16),
}


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.n_heads
        kv = self.head_width * config.n_kv_heads
        self.rotary = Rotary(self.head_width, config.context)
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k, self.v = (nn.Linear(config.width, kv, bias=False) for _ in range(2))
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Any) -> Any:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q, k = self.rotary(q), self.rotary(k)
        # grouped queries: a head of keys and values serves `n` heads of queries
        n = q.shape[1] // k.shape[1]
        if n > 1:
            k, v = k.repeat_interleave(n, dim=1), v.repeat_interleave(n, dim=1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(config.width, config.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(config), nn.RMSNorm(config.width)
        self.mlp, self.mlp_norm = MLP(config), nn.RMSNorm(config.width)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
