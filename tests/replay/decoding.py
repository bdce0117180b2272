"""A decoding step of a Llama with a static cache, eagerly and replayed: equal, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

import lazy_tensor

CONFIG = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


def decoder(model: Any) -> Callable[..., Any]:
    cache = transformers.StaticCache(config=CONFIG, max_cache_len=32)

    @torch.no_grad()
    def decode(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        out = model(token, past_key_values=cache, cache_position=position, use_cache=True)
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    return decode


def decoded(decode: Callable[..., Any]) -> list[list[float]]:
    """The logits of twelve steps, each on the token that the one before found."""
    token, found = torch.tensor([[1]]), []
    for i in range(12):
        logits = lazy_tensor.materialize(decode(token, torch.tensor([i])))
        token = logits.argmax(-1, keepdim=True)
        found.append(logits.flatten().tolist())
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(CONFIG).eval()
    step = lazy_tensor.replay(decoder(llama), backend="aten")
    assert decoded(step) == decoded(decoder(llama))
    assert step.n_replayed >= 6, step.obstacle
