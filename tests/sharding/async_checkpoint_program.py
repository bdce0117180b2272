"""Run on each of two processes by `test_processes.py`: saves sharded and lazy tensors in the
background while the program writes them, and loads what they were."""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import lazy_tensor
from lazy_tensor.sharding import Replicate, Shard, distribute_tensor, init_device_mesh


def main(folder):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(20.0).view(10, 2)

    def state_of(x):
        return {
            "rows": distribute_tensor(x, mesh, [Shard(0)]),
            "copies": distribute_tensor(x, mesh, [Replicate()]),
            "plain": x.clone(),
            "parameter": torch.nn.Parameter(distribute_tensor(x, mesh, [Shard(1)])),
        }

    blocks: list[AbstractContextManager[Any]] = [
        nullcontext(), lazy_tensor.lazy_mode(record="always"),
    ]  # fmt: skip
    for i, block in enumerate(blocks):
        with block, torch.no_grad():
            state = {name: tensor * 2 for name, tensor in state_of(whole).items()}
            state["part"] = state["plain"][1:3]
            saved = dcp.async_save(state, checkpoint_id=f"{folder}/{i}")
            for tensor in state.values():
                tensor.add_(100)
            saved.result()
            again = state_of(torch.zeros(10, 2))
            again["part"] = torch.zeros(2, 2)
            dcp.load(again, checkpoint_id=f"{folder}/{i}")
        for name, tensor in lazy_tensor.materialize(again).items():
            assert torch.equal(tensor, 2 * (whole[1:3] if name == "part" else whole)), (i, name)
    print(f"rank {dist.get_rank()} done", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main(sys.argv[1])
