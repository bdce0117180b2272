"""Work in the background: each fusion once, the most used first."""

import threading

import torch

from lazy_tensor.kernels.counters import Counters
from lazy_tensor.kernels.fusion import Fusion
from lazy_tensor.kernels.jobs import Jobs


def fusions(record, toy, n):
    segments = [record(lambda a, i=i: a + i, [torch.ones(1)]).segment for i in range(n)]
    return [Fusion(segment, toy, Counters()) for segment in segments]


def test_each_fusion_is_worked_on_once(record, toy):
    done: list[Fusion] = []
    jobs = Jobs(done.append, n_threads=2)
    waiting = fusions(record, toy, 5)
    for fusion in waiting:
        assert jobs.add(fusion)
    assert jobs.wait(60)
    assert sorted(map(id, done)) == sorted(map(id, waiting))
    jobs.close()


def test_what_is_waiting_can_be_taken_back(record, toy):
    gate, started, done = threading.Event(), threading.Event(), []

    def work(fusion):
        started.set()
        gate.wait()
        done.append(fusion)

    jobs = Jobs(work, n_threads=1)
    first, second = fusions(record, toy, 2)
    jobs.add(first)
    assert started.wait(60)
    jobs.add(second)
    assert not jobs.add(second)
    assert jobs.take_back(second)
    assert not jobs.take_back(first)
    gate.set()
    assert jobs.wait(60)
    assert done == [first]
    jobs.close()


def test_run_now_works_in_the_calling_thread(record, toy):
    threads = []
    jobs = Jobs(lambda fusion: threads.append(threading.current_thread()), n_threads=1)
    jobs.run_now(fusions(record, toy, 1)[0])
    assert threads == [threading.current_thread()]


def test_wait_gives_up_after_its_timeout(record, toy):
    gate = threading.Event()

    def work(fusion):
        gate.wait()

    jobs = Jobs(work, n_threads=1)
    jobs.add(fusions(record, toy, 1)[0])
    assert not jobs.wait(0.01)
    gate.set()
    assert jobs.wait(60)
    jobs.close()


def test_what_is_being_worked_on_is_waited_for_at_the_end(record, toy):
    started, done = threading.Event(), []

    def work(fusion):
        started.set()
        threading.Event().wait(0.05)
        done.append(fusion)

    jobs = Jobs(work, n_threads=1)
    (fusion,) = fusions(record, toy, 1)
    jobs.add(fusion)
    assert started.wait(60)
    jobs.close()
    jobs.join(60)
    assert done == [fusion]
