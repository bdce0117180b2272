"""Work in the background: each fusion once, first what takes most time."""

import threading
import time
from contextlib import nullcontext

import pytest
import torch

from lazy_tensor.kernels.counters import Counters
from lazy_tensor.kernels.service.fusion import Fusion
from lazy_tensor.kernels.service.jobs import Jobs


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


def test_who_waits_for_one_works_on_it_itself(record, toy):
    threads = []
    jobs = Jobs(lambda fusion: threads.append(threading.current_thread()), n_threads=1)
    (fusion,) = fusions(record, toy, 1)
    jobs._waiting.append(fusion)  # no thread has begun
    jobs.finish(fusion)
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


def test_what_takes_most_time_comes_first(record, toy):
    gate = threading.Event()
    done: list[Fusion] = []

    def work(fusion):
        gate.wait()
        done.append(fusion)

    jobs = Jobs(work, 1)
    first, *waiting = fusions(record, toy, 5)
    jobs.add(first)
    while not jobs._active:
        time.sleep(0.001)
    for seconds, fusion in enumerate(waiting):
        fusion.spent_s = seconds
        jobs.add(fusion)
    gate.set()
    assert jobs.wait(60)
    assert done == [first, *reversed(waiting)]
    jobs.close()


@pytest.mark.parametrize("error", [OSError("no process left"), KeyboardInterrupt()], ids=repr)
def test_nobody_waits_for_ever_for_work_that_raised(error, record, toy):
    def fail(_: object) -> None:
        raise error

    jobs = Jobs(fail, n_threads=1)
    (fusion,) = fusions(record, toy, 1)
    jobs._waiting.append(fusion)  # no thread has begun: this one does the work
    fusion.status = "compiling"
    with (
        pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else nullcontext()
    ):
        jobs.finish(fusion)
    assert jobs.wait(60)
    assert fusion.status == ("failed" if isinstance(error, OSError) else "aten")
    jobs.close()
