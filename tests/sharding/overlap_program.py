"""Run on each of two processes by `test_processes.py`: which of a trained model's collectives are
under way while the rank computes, by torch's profiler.
"""

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import lazy_tensor
from lazy_tensor.sharding import fully_shard, init_device_mesh

WIDTH, N_LAYERS = 512, 6


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(N_LAYERS)])
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(1024, WIDTH)

    def step():
        with lazy_tensor.lazy_mode(record="always"):
            model(x).square().mean().backward()
            for parameter in model.parameters():
                parameter.grad = None

    for _ in range(4):
        step()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    events = [(e.time_range.start, e.time_range.end, e.name) for e in profiler.events()]
    computes = [e for e in events if e[2] in ("aten::mm", "aten::addmm")]
    for kind in ("all_gather", "all_reduce"):  # gloo reduces all to scatter
        sent = [e for e in events if e[2] == f"gloo:{kind}"]
        n = sum(any(e[0] < s[1] and s[0] < e[1] for e in computes) for s in sent)
        print(f"{kind}: {n} of {len(sent)} beside products of matrices", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
