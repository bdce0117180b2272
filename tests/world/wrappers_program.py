"""Run on each of two processes by `test_wrappers.py`: a model is trained eagerly and lazily under
each kind of torch's own data parallelism (`fully_shard`: under torch's, then ours); parameters and
losses must be the same bits."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import lazy_tensor
import lazy_tensor.sharding


def ddp(model):
    return DistributedDataParallel(model), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def ddp_views(model):
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1)
    return wrapped, torch.optim.AdamW(model.parameters(), 0.01)


def ddp_hooked(model):
    """Its gradients are communicated by Python, as halves."""
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped, torch.optim.SGD(model.parameters(), 0.1)


def ddp_in_threads(model):
    """Its hook multiplies into buffers, and goes on in another thread."""
    wrapped = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped, torch.optim.SGD(model.parameters(), 0.1)


def ddp_replayed(model):
    """Its model and its optimizer's step are replayed; the code between them is DDP's own."""
    lazy_tensor.replay(model)
    wrapped, optimizer = ddp_views(model)
    optimizer.step = lazy_tensor.replay(optimizer.step)
    return wrapped, optimizer


def zero(model):
    wrapped = DistributedDataParallel(model)
    return wrapped, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)


def fsdp1(model):
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    return wrapped, torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9)


def fsdp2(shard):
    def wrap(model):
        for layers in (model[0], model[1], model[3], model):
            shard(layers, mesh=init_device_mesh("cpu", (2,)))
        return model, torch.optim.AdamW(model.parameters(), 0.01)

    return wrap


def tied(model):
    """Layers of different groups share a parameter."""
    model[1].weight = model[0].bias
    return fsdp2(lazy_tensor.sharding.fully_shard)(model)


def tied_for_torch(model):
    """The same in one group, as torch wants it."""
    model[1].weight = model[0].bias
    for layers in ([model[0], model[1]], model[3], model):
        fully_shard(layers, mesh=init_device_mesh("cpu", (2,)))
    return model, torch.optim.AdamW(model.parameters(), 0.01)


WRAPPERS = {f.__name__: (f, f) for f in (ddp, ddp_views, ddp_hooked, ddp_in_threads, zero, fsdp1)}
WRAPPERS["fsdp2"] = fsdp2(fully_shard), fsdp2(lazy_tensor.sharding.fully_shard)
WRAPPERS["fsdp2_tied"] = tied_for_torch, tied


def trained(wrap, mode, *, built_inside=False, n_steps=6):
    torch.manual_seed(0)
    with mode() if built_inside else nullcontext():
        inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        model, optimizer = wrap(inner)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for i in range(n_steps):
        with mode():
            optimizer.zero_grad()
            loss = model(x + i).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
    parameters = [p.detach() for p in model.parameters()]
    parameters = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    return lazy_tensor.materialize(losses + parameters)


def main():
    lazy_tensor.configure(backend="aten", compile="off", record="always")
    dist.init_process_group("gloo")
    for name, (theirs, ours) in WRAPPERS.items():
        expected = trained(theirs, nullcontext)
        for built_inside in (False, True):
            found = trained(ours, lazy_tensor.lazy_mode, built_inside=built_inside)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other), (name, built_inside, one, other)
        if name.startswith("ddp"):  # gradients go into buckets without a flush for each
            causes = lazy_tensor.stats()["flush_causes"]
            assert not causes.keys() & {"mul()", "copy_()", "div()"}, causes
        print(f"{name} is done", flush=True)
    expected = trained(ddp_views, nullcontext, n_steps=20)
    for one, other in zip(trained(ddp_replayed, nullcontext, n_steps=20), expected, strict=True):
        assert torch.equal(one, other), (one, other)
    assert lazy_tensor.stats()["replayed"] > 20, lazy_tensor.explain()
    print("ddp_replayed is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
