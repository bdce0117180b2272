"""Training text as bytes, and batches drawn from it. In: a path or nothing. Out: token tensors."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lazy_tensor.cli.errors import CommandError

MAX_BYTES = 8 << 20


def load_text(path: str | None, context: int) -> Tensor:
    """The text's bytes as a 1-dim uint8 tensor, at most `MAX_BYTES` of them.

    `path` None means the sources of the running Python's standard library. Raises CommandError if
    the file can't be read or holds less than one sample of `context` tokens and its next byte.
    """
    name = path or "the standard library"
    data = stdlib_sources() if path is None else read_file(path)
    if len(data) < context + 1:
        raise CommandError(
            f"{name} has {len(data)} bytes; a sample takes {context + 1}: give a longer --text"
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def read_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES)
    except OSError as error:
        raise CommandError(f"can't read {path}: {error.strerror}") from None


def stdlib_sources() -> bytes:
    """Sources of the standard library without its tests, in path order, cut at `MAX_BYTES`."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests"}
    files = sorted(f for f in root.rglob("*.py") if skipped.isdisjoint(f.relative_to(root).parts))
    data = bytearray()
    for file in files:
        if len(data) >= MAX_BYTES:
            break
        data += file.read_bytes()
    return bytes(data[:MAX_BYTES])


def batches(text: Tensor, batch: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless `(tokens, targets)`, each int64 of shape `(batch, context)`, targets one byte ahead.

    Equal arguments give equal batches; PyTorch's global generator is left alone.
    """
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
        sample = text[starts + offsets].long()
        yield sample[:, :-1].contiguous(), sample[:, 1:].contiguous()
