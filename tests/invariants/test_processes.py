"""Threads that record at once and share values, loader workers, forked children."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lazy_tensor import is_lazy, lazy_mode, materialize, reset_stats, stats, wrap

N_THREADS = 4


def in_threads(work, n=N_THREADS):
    """`work(i)` in `n` threads that start together; their results, or the first exception."""
    barrier = threading.Barrier(n)

    def start(i):
        barrier.wait(timeout=30)
        return work(i)

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(start, range(n)))


def chain(x, i):
    for k in range(20):
        x = (x * (1 + i / 8) + k).sin()
    return x


@pytest.mark.parametrize("n_passes", [1, 4])
def test_threads_record_the_same_program_with_their_own_numbers(n_passes):
    x = torch.rand(16)

    def work(i):
        with lazy_mode():
            for _ in range(n_passes):
                y = chain(x, i)
        return materialize(y)

    for i, got in enumerate(in_threads(work)):
        assert torch.equal(got, chain(x, i))


def test_threads_read_one_pending_value_that_none_of_them_recorded():
    x = torch.rand(16)
    shared = chain(wrap(x), 1)
    results = in_threads(lambda i: (shared * i).tolist())
    for i, got in enumerate(results):
        assert got == (chain(x, 1) * i).tolist()


def test_threads_pass_pending_values_on():
    x = torch.rand(16)
    made = [chain(wrap(x), i) for i in range(N_THREADS)]
    results = in_threads(lambda i: materialize(made[i] + made[(i + 1) % N_THREADS]))
    for i, got in enumerate(results):
        assert torch.equal(got, chain(x, i) + chain(x, (i + 1) % N_THREADS))


def test_threads_want_each_others_values_all_at_once():
    """A thread that waits for another one's value may have its own trace flushed meanwhile."""
    x = torch.rand(16)
    expected = [chain(x, i) for i in range(N_THREADS)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(100):
            made = [chain(wrap(x), i) for i in range(N_THREADS)]
            results = in_threads(
                lambda i, made=made: materialize(made[i] + made[i - 1] * made[i - 2])
            )
            for i, got in enumerate(results):
                assert torch.equal(got, expected[i] + expected[i - 1] * expected[i - 2])
    finally:
        sys.setswitchinterval(interval)


def test_writes_in_other_threads_are_seen_after_they_end():
    buffers = torch.zeros(N_THREADS, 8)

    def work(i):
        with lazy_mode():
            for _ in range(10):
                buffers[i] += i

    with lazy_mode():
        in_threads(work)
        total = buffers.sum(1)
    assert total.tolist() == [10.0 * i * 8 for i in range(N_THREADS)]


def test_threads_train_their_own_models():
    def losses(i):
        generator = torch.Generator().manual_seed(i)
        weight = torch.randn(4, 4, generator=generator).requires_grad_()
        optimizer = torch.optim.Adam([weight], 0.1)
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = (weight @ weight).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss)
        return [loss.item() for loss in found]

    expected = [losses(i) for i in range(N_THREADS)]

    def work(i):
        with lazy_mode():
            return losses(i)

    assert in_threads(work) == expected


def test_the_mode_of_one_thread_is_not_another_ones():
    with lazy_mode():
        kinds = in_threads(lambda i: type(torch.ones(2) + 1), 2)
    assert kinds == [torch.Tensor] * 2


class Squares(Dataset[tuple[torch.Tensor, bool]]):
    """Items made by tensor ops, plain in the worker whatever the parent does."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.full((3,), float(i)).square(), is_lazy(torch.ones(1) + 1)


@pytest.mark.parametrize("n_workers", [0, 2])
def test_a_loader_works_in_the_mode(n_workers):
    with lazy_mode():
        loader = DataLoader(Squares(), batch_size=4, num_workers=n_workers)
        sums = [(batch * 2).sum(1) for batch, _ in loader]
    assert torch.cat(materialize(sums)).tolist() == [6.0 * i * i for i in range(8)]


def test_a_loader_started_before_the_mode_works_in_it():
    loader = iter(DataLoader(Squares(), batch_size=4, num_workers=2))
    first, _ = next(loader)
    with lazy_mode():
        second, _ = next(loader)
        total = (first + second).sum()
    assert total.item() == 3 * sum(i * i for i in range(8))


def exit_code_of_child(work):
    """What a forked child, which runs `work()`, tells: 0 where it returned True."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


# CPython 3.12 and later warn that other threads (torch's) might hold locks.
ignore_fork_warning = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@ignore_fork_warning
def test_a_forked_child_records_and_computes():
    def work():
        with lazy_mode():
            y = (torch.ones(4) + 1).sum()
        return y.item() == 8.0

    assert exit_code_of_child(work) == 0


@ignore_fork_warning
def test_a_forked_child_computes_what_its_parent_recorded():
    y = wrap(torch.ones(4)) + 1
    assert exit_code_of_child(lambda: y.tolist() == [2.0] * 4) == 0
    assert y.tolist() == [2.0] * 4


@pytest.mark.recorded
@ignore_fork_warning
def test_a_child_forked_inside_the_mode_goes_on_recording():
    x = torch.zeros(4)
    with lazy_mode():
        x.add_(1)

        def work():
            y = x * 2
            return is_lazy(y) and y.tolist() == [2.0] * 4

        assert exit_code_of_child(work) == 0
        x.add_(1)
    assert x.tolist() == [2.0] * 4


@ignore_fork_warning
def test_a_child_forked_while_another_thread_flushes_is_not_stuck():
    x = torch.rand(300, 300)
    stop = threading.Event()

    def work():
        while not stop.is_set():
            with lazy_mode():
                (x @ x).sum().item()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        codes = {exit_code_of_child(lambda: (wrap(torch.ones(2)) + 1).tolist() == [2.0] * 2)
                 for _ in range(5)}  # fmt: skip
    finally:
        stop.set()
        thread.join()
    assert codes == {0}


def test_threads_that_ask_for_metadata_at_the_same_time():
    """A fake tensor says that it is on "meta" while another thread asks one of the same mode."""

    def work(_):
        for i in range(1, 200):
            with lazy_mode():
                torch._chunk_cat([torch.ones(i, 3), torch.ones(i + 1, 3)], 0, 2)

    reset_stats()
    in_threads(work)
    assert not [reason for reason in map(str, stats()["fallbacks"]) if "dense" in reason]
