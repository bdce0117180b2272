"""Run by `test_processes.py`: workers of every kind read tensors that are written in lazy_mode."""

import sys
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, TensorDataset

import lazy_tensor


def doubled(x):
    return x * 2


def filled(rank, shared):
    shared[rank] += rank + 1


def main():
    lazy_tensor.configure(backend="aten", compile="off", record="always")
    context: Any = mp.get_context(sys.argv[1])
    x = torch.arange(8.0)
    with lazy_tensor.lazy_mode():
        x.add_(1)
        y = x * 10
        loader = DataLoader(
            TensorDataset(x, y), batch_size=4, num_workers=1, multiprocessing_context=context
        )
        for _ in range(2):
            batches = list(loader)
            found = [torch.cat(parts) * 1 for parts in zip(*batches, strict=True)]
            assert found[0].tolist() == [i + 1.0 for i in range(8)], found
            assert found[1].tolist() == [10.0 * (i + 1) for i in range(8)], found
        queue = context.SimpleQueue()
        x.add_(1)
        for sent in (x, y, x[2:4]):
            queue.put(sent)
            assert torch.equal(queue.get(), lazy_tensor.materialize(sent)), sent
        x.add_(1)
        with context.Pool(1) as pool:
            assert pool.map(doubled, [x])[0].tolist() == [2 * (i + 3.0) for i in range(8)]
            assert pool.apply(doubled, (y,)).tolist() == [20.0 * (i + 1) for i in range(8)]
        shared = (torch.zeros(2) + 1).share_memory_()
        workers = [context.Process(target=filled, args=(rank, shared)) for rank in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert shared.tolist() == [2.0, 3.0], shared
    assert x.tolist() == [i + 3.0 for i in range(8)]
    print("done")


if __name__ == "__main__":
    main()
