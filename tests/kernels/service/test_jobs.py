"""Work in the background: each fusion once, first what takes most time."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from lazy_tensor.kernels.counters import Counters
from lazy_tensor.kernels.service.fusion import Fusion
from lazy_tensor.kernels.service.jobs import MOST_TOGETHER, Jobs


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


def noted_in(together: list[Sequence[Fusion]]) -> Callable[..., AbstractContextManager[None]]:
    def note(fusions: Sequence[Fusion]) -> AbstractContextManager[None]:
        together.append(fusions)
        return nullcontext()

    return note


def test_a_thread_takes_its_share_of_what_takes_most_time_at_once(record, toy):
    gate = threading.Event()
    done: list[Fusion] = []
    together: list[Sequence[Fusion]] = []

    def work(fusion):
        gate.wait()
        done.append(fusion)

    jobs = Jobs(work, 1, noted_in(together))
    first, *waiting = fusions(record, toy, MOST_TOGETHER + 4)
    jobs.add(first)
    while not jobs._active:
        time.sleep(0.001)
    for seconds, fusion in enumerate(waiting):
        fusion.spent_s = seconds
        jobs.add(fusion)
    gate.set()
    assert jobs.wait(60)
    by_time = [first, *reversed(waiting)]
    assert done == by_time
    assert together == [[first], by_time[1 : MOST_TOGETHER + 1], by_time[MOST_TOGETHER + 1 :]]
    jobs.close()


def test_who_waits_for_one_takes_others_along(record, toy):
    gate = threading.Event()
    done: list[Fusion] = []

    def work(fusion):
        gate.wait()
        done.append(fusion)

    jobs = Jobs(work, 2, noted_in([]))
    busy, others = fusions(record, toy, 2), fusions(record, toy, 3)
    for fusion in busy:
        jobs.add(fusion)
    while len(jobs._active) < 2:
        time.sleep(0.001)
    for fusion in others:
        jobs.add(fusion)
    gate.set()
    for fusion in others:
        jobs.finish(fusion)
    assert jobs.wait(60)
    assert set(map(id, done)) == {*map(id, busy), *map(id, others)}
    jobs.close()


def test_what_is_added_at_once_is_taken_at_once(record, toy):
    together: list[Sequence[Fusion]] = []
    jobs = Jobs(lambda fusion: None, 1, noted_in(together))
    first, others = fusions(record, toy, 3), fusions(record, toy, 2)
    for at_once in (first, others):  # by a new thread, and by one that had ended its work
        for fusion in at_once:
            jobs.add(fusion)
        assert jobs.wait(60)
    assert together == [first, others]
    jobs.close()


@pytest.mark.parametrize("error", [OSError("no process left"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("fails_at", ["together", "work"])
def test_nobody_waits_for_ever_for_work_that_raised(error, fails_at, record, toy):
    def fail(_: object) -> Any:
        raise error

    jobs = Jobs(
        fail if fails_at == "work" else lambda fusion: None,
        n_threads=1,
        together=fail if fails_at == "together" else noted_in([]),
    )
    waiting = fusions(record, toy, 3)
    jobs._waiting += waiting  # no thread has begun: this one does the work
    for fusion in waiting:
        fusion.status = "compiling"
    with (
        pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else nullcontext()
    ):
        jobs.finish(waiting[0])
    assert jobs.wait(60)
    expected = "failed" if isinstance(error, OSError) else "aten"
    assert {fusion.status for fusion in waiting} == {expected}
    jobs.close()
