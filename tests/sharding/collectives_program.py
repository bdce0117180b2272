"""Run on each of two processes by `test_processes.py`: collectives of `torch.distributed` beside
lazy tensors, outside of blocks.

With `in_use`, lazy code copies memory that a collective uses. With `lists`, lists hold lazy
tensors. With `after_one_block`, these come from the first block of the process.
"""

import sys
import warnings

import torch
import torch.distributed as dist

import lazy_tensor

N = 1000


def in_use():
    """Each collective writes the first N elements of `x`, and the program the rest."""
    rank = dist.get_rank()
    lazy = lazy_tensor.wrap(torch.ones(N))
    nine, nines = torch.full((N // 2,), 9.0), torch.full((2 * N,), 9.0)

    def broadcast(x):
        x += 6 if rank == 0 else 0
        return dist.broadcast(x, 0, async_op=True)

    def message(x):
        x += 6
        return dist.irecv(x, 0) if rank == 1 else dist.isend(x, 1)

    begins = {
        "all_reduce": (lambda x: dist.all_reduce(x, async_op=True), 2),
        "broadcast": (broadcast, 7),
        "irecv": (message, 7),
        "all_gather": (lambda x: dist.all_gather(list(x.chunk(2)), nine, async_op=True), 9),
        "all_gather_into_tensor": (
            lambda x: dist.all_gather_into_tensor(x, nine, async_op=True), 9,
        ),
        "reduce_scatter_tensor": (
            lambda x: dist.reduce_scatter_tensor(x, nines, async_op=True), 18,
        ),
        "all_to_all_single": (
            lambda x: dist.all_to_all_single(x, nines[:N], async_op=True), 9,
        ),
    }  # fmt: skip
    for name, (begin, expected) in begins.items():
        for copied_before in (False, True) * 3:
            x = torch.ones(2 * N)
            first = lazy + x[N:] if copied_before else None
            work = begin(x[:N])
            second = lazy + x[N:]
            x[N:] += 1
            work.wait()
            assert (x[:N] == expected).all(), (name, copied_before, x[:N])
            assert (x[N:] == 2).all(), (name, copied_before, x[N:])
            assert first is None or (lazy_tensor.materialize(first) == 2).all(), name
            assert (lazy_tensor.materialize(second) == 2).all(), name
            dist.barrier()


def lists(lazy=lazy_tensor.wrap):
    rank = dist.get_rank()

    def full(number):
        return lazy(torch.full((2,), float(number)))

    for is_async in (False, True):
        for is_lazy in ((True, True), (True, False), (False, True)):
            out, part = (full(0) if yes else torch.zeros(2) for yes in is_lazy)
            given = [full(1) if is_lazy[1] else torch.ones(2), torch.full((2,), 2.0)]
            pending = out * 3
            work = dist.scatter(out, given if rank == 0 else None, async_op=is_async)
            assert not is_async or work.wait()
            assert (out + 1).tolist() == [2.0 + rank] * 2
            assert pending.tolist() == [0.0] * 2
            work = dist.reduce_scatter(out, given, async_op=is_async)
            assert not is_async or work.wait()
            assert (out + 1).tolist() == [3.0 + 2 * rank] * 2
            outs = [out, torch.zeros(2)]
            part += rank + 1
            work = dist.all_gather(outs, part, async_op=is_async)
            assert not is_async or work.wait()
            assert [(one + 1).tolist() for one in outs] == [[2.0] * 2, [3.0] * 2]
            work = dist.gather(part, outs[::-1] if rank == 0 else None, async_op=is_async)
            assert not is_async or work.wait()
            expected = [[2.0] * 2, [1.0] * 2] if rank == 0 else [[1.0] * 2, [2.0] * 2]
            assert [one.tolist() for one in outs] == expected


def after_one_block():
    with lazy_tensor.lazy_mode():
        made = [torch.zeros(2), torch.ones(2)]
    assert all(map(lazy_tensor.is_lazy, made))
    out, rank = torch.full((2,), 5.0), dist.get_rank()
    dist.scatter(out, made if rank == 0 else None)
    assert out.tolist() == [float(rank)] * 2


def main():
    # newer names of the same functions aren't in all versions of torch
    warnings.filterwarnings("ignore", category=FutureWarning)
    dist.init_process_group("gloo")
    lazy_tensor.configure(record="always")
    {"in_use": in_use, "lists": lists, "after_one_block": after_one_block}[sys.argv[1]]()
    print(f"rank {dist.get_rank()} done", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
