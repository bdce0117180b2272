"""Threads that were told to go on see all that was written before, with and without a mode."""

import dataclasses
import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import pytest
import torch

import lazy_tensor
from lazy_tensor import lazy_mode, materialize, wrap
from lazy_tensor.dispatch import settings, torch_private
from lazy_tensor.dispatch.run.tape import Tape
from lazy_tensor.dispatch.trie.trace import all_traces, local


@pytest.fixture
def y():
    return torch.zeros(3)


def started(work, *args):
    thread = threading.Thread(target=work, args=args)
    thread.start()
    return thread


def test_a_pool_sees_writes(y):
    with ThreadPoolExecutor(1) as pool, lazy_mode():
        pool.submit(int).result()
        for i in range(1, 4):
            y.add_(1)
            assert pool.submit(y.tolist).result() == [float(i)] * 3


def test_a_pool_of_multiprocessing_sees_writes(y):
    with ThreadPool(1) as pool, lazy_mode():
        y.add_(1)
        assert pool.apply(y.tolist) == [1.0, 1.0, 1.0]
        y.add_(1)
        assert pool.map(torch.Tensor.tolist, [y]) == [[2.0, 2.0, 2.0]]


def test_a_thread_sees_writes_and_overtakes_no_read(y):
    found = []
    with lazy_mode():
        y.add_(1)
        doubled = y * 2
        started(lambda: found.append(y.add_(5).tolist())).join()
        assert found == [[6.0, 6.0, 6.0]]
        assert doubled.tolist() == [2.0, 2.0, 2.0]


def test_what_goes_through_a_queue_is_written(y):
    tasks: queue.Queue[torch.Tensor | None] = queue.Queue()
    found = []

    def work():
        while (task := tasks.get()) is not None:
            found.append(task.tolist())
            tasks.task_done()

    thread = started(work)
    with lazy_mode():
        for _ in range(3):
            y.add_(1)
            tasks.put(y)
            tasks.join()
    tasks.put(None)
    thread.join()
    assert found == [[1.0] * 3, [2.0] * 3, [3.0] * 3]


def test_an_event_lets_another_thread_see_writes(y):
    event, found = threading.Event(), []

    def work():
        event.wait()
        found.append(y.tolist())

    thread = started(work)
    with lazy_mode():
        y.add_(1)
        event.set()
        thread.join()
    assert found == [[1.0, 1.0, 1.0]]


def test_a_checkpoint_written_by_a_thread_is_current(tmp_path):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "checkpoint"
    with lazy_mode():
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            started(torch.save, model.state_dict(), path).join()
            for name, value in torch.load(path).items():
                assert torch.equal(value, model.state_dict()[name])


def test_options_of_a_block_are_those_of_its_thread():
    inside, done = threading.Event(), threading.Event()

    def work():
        with lazy_mode(max_segment_ops=7):
            inside.set()
            done.wait()

    before = settings.current()
    thread = started(work)
    inside.wait()
    assert settings.current() == before
    with lazy_mode(max_segment_ops=5):
        done.set()
        thread.join()
        assert settings.current().max_segment_ops == 5
    assert settings.current() == before


def test_configure_in_a_block_holds_after_it():
    before = settings.current()
    with lazy_mode(max_segment_ops=5):
        lazy_tensor.configure(verify_every=3)
        assert settings.current().verify_every == 3
        assert settings.current().max_segment_ops == 5
    assert settings.current() == dataclasses.replace(before, verify_every=3)


def test_ctrl_c_while_a_block_puts_its_options_in_force(monkeypatch):
    before = settings.current()

    def interrupt(now: settings.Settings) -> None:
        if now is not before:
            raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(settings, "_listeners", [*settings._listeners, interrupt])
        with pytest.raises(KeyboardInterrupt), lazy_mode(max_segment_ops=5):
            pass
    assert settings.current() is before


def test_a_block_leaves_the_hits_of_other_threads_alone():
    inside, done, found = threading.Event(), threading.Event(), []

    def work():
        with lazy_mode():
            y = torch.ones(3) * 2
            inside.set()
            done.wait()
            found.append(local.trace.is_outdated)
            y.tolist()

    thread = started(work)
    inside.wait()
    with lazy_mode(max_segment_ops=5):
        pass
    done.set()
    thread.join()
    assert found == [False]


def test_what_an_ended_thread_left_pending_is_run_by_the_next():
    left = []
    for i in range(4):
        started(lambda i=i: left.append(wrap(torch.ones(3)) * i)).join()
    waiting = [trace for trace in all_traces() if trace.state is not trace.root]
    assert len(waiting) <= 1
    assert [y.tolist() for y in left] == [[float(i)] * 3 for i in range(4)]


def test_caches_are_cleared_while_another_thread_records():
    end, failures = threading.Event(), []

    def work():
        x = torch.ones(3)
        while not end.is_set():
            with lazy_mode():
                if (x * 2 + 1).tolist() != [3.0] * 3:
                    failures.append(1)

    thread = started(work)
    for _ in range(50):
        lazy_tensor.cache_clear()
    end.set()
    thread.join()
    assert not failures


def test_two_threads_take_one_plain_tensor_at_once(y, monkeypatch):
    """The memory becomes copy-on-write, which torch can't do twice at once."""
    inside, met = threading.Barrier(2), list[torch.Tensor]()

    def meeting(tensor):
        try:
            inside.wait(timeout=0.5)
        except threading.BrokenBarrierError:
            return clone(tensor)
        met.append(tensor)
        return clone(tensor)

    clone = torch_private.lazy_clone
    monkeypatch.setattr(torch_private.memory, "lazy_clone", meeting)
    wrapped = wrap(y)
    with ThreadPoolExecutor(2) as pool:
        copies = [pool.submit(materialize, wrapped) for _ in range(2)]
    assert [copy.result().tolist() for copy in copies] == [[0.0] * 3] * 2
    assert not met


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_child_waits_for_no_thread_of_its_parent(y):
    with torch_private.CLONES:
        letting_go = threading.Timer(0.2, torch_private.CLONES.release)
        letting_go.start()
        pid = os.fork()
        if pid == 0:
            os._exit(int(materialize(wrap(y)).tolist() != [0.0] * 3))
        letting_go.join()
        torch_private.CLONES.acquire()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_seed_set_in_another_thread_stops_no_tape():
    with lazy_mode():
        tape = Tape(local.trace)
        started(torch.seed).join()
        assert "is set at" not in str(tape.obstacle)
        tape.take_off()
