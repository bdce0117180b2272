"""Run on each of two processes by `test_processes.py`: trains, saves, loads, and trains on.

It uses `torch.distributed.checkpoint` and gradient clipping as a program on torch's DTensor would.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from lazy_tensor.sharding import (
    ColwiseParallel,
    DTensor,
    RowwiseParallel,
    init_device_mesh,
    parallelize_module,
)


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def build(mesh):
    torch.manual_seed(0)
    return parallelize_module(Mlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.item(), norm


def main(folder):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.linspace(-1, 1, 24).view(3, 8)
    model = build(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer, x)
    state = get_model_state_dict(model)
    assert all(isinstance(value, DTensor) for value in state.values())
    dcp.save({"model": state}, checkpoint_id=folder)
    expected, norm = step(model, torch.optim.SGD(model.parameters(), lr=0.1), x)

    again = build(mesh)
    state = get_model_state_dict(again)
    dcp.load({"model": state}, checkpoint_id=folder)
    set_model_state_dict(again, state)
    loss, norm_again = step(again, torch.optim.SGD(again.parameters(), lr=0.1), x)
    assert loss == expected, (loss, expected)
    assert torch.equal(norm.full_tensor(), norm_again.full_tensor())
    if dist.get_rank() == 0:
        print(f"loss {loss:.6f} norm {norm.full_tensor().item():.6f}")
    else:
        norm.full_tensor()
    dist.barrier()
    dist.destroy_process_group()


main(sys.argv[1])
