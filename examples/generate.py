"""Train a small byte-level GPT on Python's standard library, and have it write, a byte a step.

    python examples/generate.py

A step of generation runs a hundred small ops, the same in every step. So `replay` runs it, without
the function's Python and without PyTorch's dispatch. All steps must have the same sizes for that:
keys and values are in a cache with room for the longest text. The program prints

    step 40: loss 3.0695, 64.9 ms a step
    ...
    step 320: loss 2.3961, 53.8 ms a step
    text 1: 3.55 ms a byte
    ...
    text 12: 1.41 ms a byte

and then the last text. With `--eager` both steps run without `replay`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import lazy_tensor
from lazy_tensor.examples.gpt import GPT, GPTConfig, batches, library_text, train_step

CONFIG = GPTConfig(n_layers=2, n_heads=4, width=128, context=256)
PROMPT = b"def "
N_TEXTS = 12


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions as in `gpt.Rotary`, for one position, whose angles are given."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


def logits_of(model: GPT, cache: Tensor, byte: Tensor, position: Tensor) -> Tensor:
    """The logits `(256,)` of the byte after `byte`, `(1, 1)`, which is at `position`, `(1,)`.

    `cache` has the keys and values of earlier positions, `(n_layers, 2, 1, n_heads, context, head
    width)`. Those of `position` are written to it.
    """
    # `position` is a tensor, so that its value may change from call to call. It selects rows and
    # masks what comes after; a slice `[:position]` would have another size in each step.
    is_past = torch.arange(model.config.context)[None] <= position
    x: Tensor = model.token_embedding(byte)
    block: Any
    for block, (keys, values) in zip(model.blocks, cache, strict=True):
        attention = block.attention
        q, k, v = (
            t.unflatten(-1, (attention.n_heads, -1)).transpose(1, 2)
            for t in attention.qkv(block.attention_norm(x)).chunk(3, dim=-1)
        )
        cos, sin = attention.rotary.cos_TD[position], attention.rotary.sin_TD[position]
        keys.index_copy_(2, position, turn(k, cos, sin))
        values.index_copy_(2, position, v)
        y = F.scaled_dot_product_attention(turn(q, cos, sin), keys, values, attn_mask=is_past)
        x = x + attention.out(y.transpose(1, 2).flatten(-2))
        x = x + block.mlp(block.mlp_norm(x))
    logits: Tensor = model.head(model.norm(x))[0, 0]
    return logits


def decode_step(model: GPT, temperature: float = 0.7) -> Callable[[Tensor, Tensor], Tensor]:
    """A function from a byte and its position to the next byte, drawn at random. It has a cache."""
    c = model.config
    cache = torch.zeros(c.n_layers, 2, 1, c.n_heads, c.context, c.width // c.n_heads)

    @torch.no_grad()
    def step(byte: Tensor, position: Tensor) -> Tensor:
        chances = (logits_of(model, cache, byte, position) / temperature).softmax(0)
        return torch.multinomial(chances, 1).view(1, 1)

    return step


def write(step: Callable[[Tensor, Tensor], Tensor], n_bytes: int, prompt: bytes = PROMPT) -> bytes:
    """A text of `n_bytes` that begins with `prompt`."""
    text = [torch.tensor([[byte]]) for byte in prompt]
    for i in range(n_bytes - 1):
        # a byte of the prompt only fills the cache, and its prediction is dropped
        following = step(text[i], torch.tensor([i]))
        if i + 1 == len(text):
            text.append(following)
    return bytes(torch.cat(text).flatten().tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=320, help="of training")
    parser.add_argument("--bytes", type=int, default=CONFIG.context, help="of each text")
    parser.add_argument("--eager", action="store_true", help="without `replay`")
    options = parser.parse_args()

    torch.manual_seed(0)
    # one thread leaves a core to the compiler, which builds kernels in the background
    torch.set_num_threads(1)
    model = GPT(CONFIG)
    train = train_step(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    decode = decode_step(model)
    if not options.eager:
        train, decode = lazy_tensor.replay(train), lazy_tensor.replay(decode)

    every, began = max(1, options.steps // 8), time.perf_counter()
    stream = batches(library_text(), 2, CONFIG.context)
    for i, (tokens, targets) in enumerate(islice(stream, options.steps), start=1):
        loss = train(tokens, targets)
        if i % every == 0:
            took, began = time.perf_counter() - began, time.perf_counter()
            print(f"step {i}: loss {loss.item():.4f}, {took / every * 1e3:.1f} ms a step")
    for i in range(1, N_TEXTS + 1):
        began = time.perf_counter()
        text = write(decode, options.bytes)
        milliseconds = (time.perf_counter() - began) * 1e3 / options.bytes
        print(f"text {i}: {milliseconds:.2f} ms a byte")
    print(text.decode(errors="replace"))


if __name__ == "__main__":
    main()
