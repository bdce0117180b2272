"""Run on each of two processes by `test_processes.py`: one rank looks at its loss, the other never.

What is pending differs then between the ranks, while DDP's reducer communicates below Python.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lazy_tensor.sharding import fully_shard, init_device_mesh


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    first, second = (
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        for _ in range(2)
    )
    second.load_state_dict(first.state_dict())
    replicated = DistributedDataParallel(first)
    sharded = fully_shard(second, mesh=init_device_mesh("cpu", (2,)))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    for step in range(6):
        x = torch.linspace(-1, 1, 12).view(3, 4) + rank + step
        losses = []
        for model, optimizer in zip((sharded, replicated), reversed(optimizers), strict=True):
            losses.append(model(x).square().mean())
            losses[-1].backward()
            if rank == 0:
                losses[-1].item()
            optimizer.step()
            optimizer.zero_grad()
    ours, theirs = (loss.item() for loss in losses)
    assert abs(ours - theirs) < 1e-5, (ours, theirs)
    print(f"rank {rank} done", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
