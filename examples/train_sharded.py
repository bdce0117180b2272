"""Train a GPT on several processes: parameters are sharded by `fully_shard`, blocks are split by
tensor parallelism, and a run with another number of processes goes on from a checkpoint.

    torchrun --nproc-per-node 4 examples/train_sharded.py --tensor-parallel 2 --steps 20
    torchrun --nproc-per-node 2 examples/train_sharded.py --steps 40

The second run goes on where the first one stopped. Its losses are those that 4 processes would have
had.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import functional as F

import lazy_tensor
from lazy_tensor.examples.gpt import GPT, GPTConfig, Rotary
from lazy_tensor.sharding import (
    ColwiseParallel,
    RowwiseParallel,
    fully_shard,
    init_device_mesh,
    parallelize_module,
)

CONFIG = GPTConfig(n_layers=2, n_heads=4, width=64, context=32, tied=False)
BATCH = 8
"""Rows of a batch, over all ranks."""


class SplitAttention(nn.Module):
    """The attention of `gpt.py` with a projection for each of q, k and v. If these are split by
    columns, each rank has some of the heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.n_heads
        self.rotary = Rotary(self.head_width, config.context)
        self.q, self.k, self.v, self.out = (
            nn.Linear(config.width, config.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return out


class SplitMLP(nn.Module):
    """The gated MLP of `gpt.py` with two first projections in place of one, which can be split."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def sharded_gpt(mesh: Any) -> Any:
    """The model on a mesh with the dimensions "data" and "tensor"."""
    # every rank begins with the same weights, and keeps its part of them
    torch.manual_seed(0)
    model: Any = GPT(CONFIG)
    for block in model.blocks:
        block.attention, block.mlp = SplitAttention(CONFIG), SplitMLP(CONFIG.width)
    # split by columns, then by rows: between the two a rank needs nothing of other ranks
    split, joined = ColwiseParallel(), RowwiseParallel()
    plan = {
        "attention.q": split, "attention.k": split, "attention.v": split, "attention.out": joined,
        "mlp.gate": split, "mlp.up": split, "mlp.down": joined,
    }  # fmt: skip
    for block in model.blocks:
        if mesh["tensor"].size() > 1:
            parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def batch(step: int, mesh: Any) -> Tensor:
    """This rank's rows of a step's batch, which is the same for any number of ranks."""
    # the text to learn is this file
    text = torch.tensor(list(Path(__file__).read_bytes()))
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - CONFIG.context - 1, (BATCH,), generator=draw)
    rows = torch.stack([text[i : i + CONFIG.context + 1] for i in starts.tolist()])
    part: Tensor = rows.chunk(mesh["data"].size())[mesh["data"].get_local_rank()]
    return part


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="ranks a block")
    parser.add_argument("--steps", type=int, default=20, help="steps in all, with earlier runs'")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint"), help="folder")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    n_data, rest = divmod(dist.get_world_size(), options.tensor_parallel)
    if rest:
        parser.error(f"--tensor-parallel must divide the {dist.get_world_size()} processes")
    mesh = init_device_mesh(
        "cpu", (n_data, options.tensor_parallel), mesh_dim_names=("data", "tensor")
    )
    model = sharded_gpt(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = 0
    # `load` writes into tensors that are there, with the placements of this run
    if (options.checkpoint / ".metadata").exists():
        states, optimizer_states = get_state_dict(model, optimizer)
        known: dict[str, Any] = {"model": states, "optimizer": optimizer_states, "step": 0}
        load(known, checkpoint_id=options.checkpoint)
        set_state_dict(
            model, optimizer, model_state_dict=known["model"], optim_state_dict=known["optimizer"]
        )
        first = known["step"]

    for step in range(first, options.steps):
        rows = batch(step, mesh)
        with lazy_tensor.lazy_mode():
            logits = model(rows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        # each rank has the mean loss of its rows, and as many rows as the others
        mean = lazy_tensor.materialize(loss.detach())
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item() / dist.get_world_size():.4f}", flush=True)
        if (step + 1) % options.every == 0:
            states, optimizer_states = get_state_dict(model, optimizer)
            saved = {"model": states, "optimizer": optimizer_states, "step": step + 1}
            save(saved, checkpoint_id=options.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
