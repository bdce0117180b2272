"""An entry of the zoo, and the batches that entries share.

Every model is called with keywords and returns an object whose `loss` is a scalar.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

UNCHECKPOINTED = frozenset({"checkpointing"})
VOCAB = 64
WIDTH = 32
N_TOKENS = 10
Batch = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """A model: how it is made, what it is trained on, what it generates from if it does.

    `lacks` names the variants of training that it can't do eagerly.
    """

    name: str
    make: Callable[[], torch.nn.Module]
    batch: Callable[[], Batch]
    prompt: Callable[[], Batch] | None = None
    lacks: frozenset[str] = frozenset()

    def build(self) -> torch.nn.Module:
        """The model with the weights that seed 0 gives, in training mode."""
        torch.manual_seed(0)
        return self.make().train()


def noise(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(end: int, *shape: int, start: int = 0, seed: int = 1) -> torch.Tensor:
    return torch.randint(start, end, shape, generator=torch.Generator().manual_seed(seed))


def tokens(n_rows: int = 2, n_tokens: int = N_TOKENS, end: int = VOCAB) -> torch.Tensor:
    """Tokens that aren't special: 0 to 2 are padding, begin and end."""
    return integers(end, n_rows, n_tokens, start=3)


def padded(side: str) -> Batch:
    """Tokens and a mask: the second row is three shorter."""
    ids, mask = tokens(), torch.ones(2, N_TOKENS, dtype=torch.long)
    hidden = slice(None, 3) if side == "left" else slice(-3, None)
    ids[1, hidden] = 0
    mask[1, hidden] = 0
    return {"input_ids": ids, "attention_mask": mask}


def prompt() -> Batch:
    return padded("left")


def language_batch() -> Batch:
    batch = padded("right")
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def long_batch(n_tokens: int) -> Batch:
    return {"input_ids": tokens(2, n_tokens), "labels": tokens(2, n_tokens)}


def classes_batch() -> Batch:
    return padded("right") | {"labels": torch.tensor([0, 1])}


def seq2seq_batch() -> Batch:
    return padded("right") | {"labels": tokens(2, 6)}


def images(size: int = 32) -> torch.Tensor:
    return noise(2, 3, size, size)


def image_batch() -> Batch:
    return {"pixel_values": images(), "labels": torch.tensor([0, 1])}
