"""Tries are bounded, and belong to threads that end and processes that fork."""

import gc
import os
import threading
from typing import Any

import pytest
import torch

from lazy_tensor import lazy_mode, reset_stats, wrap
from lazy_tensor.dispatch.plan.interpret import MISJUDGED
from lazy_tensor.dispatch.run import flush
from lazy_tensor.dispatch.trie import trace as traces
from lazy_tensor.dispatch.trie.trace import MOST_SPARE, local
from tests.processes import run_python


def n_states_here() -> int:
    """The calls that follow the roots of this thread's trie."""
    return sum(map(len, local.trace.roots.values()))


BOUNDED = """
import torch
from lazy_tensor import configure, lazy_mode
from lazy_tensor.dispatch.trie.trace import local

configure(record="always", segment_cache_size=16, compile="off")


def n_states():
    found, left = 0, list(local.trace.roots.values())
    while left:
        state = left.pop()
        found += 1
        left += [*state.values(), *(state.generic or {}).values()]
    return found


sizes = []
for n in range(120):
    x = torch.ones(n + 1)
    with lazy_mode():
        y = ((x * 2).detach() + 1).detach()
        y.sum().item()
    sizes.append(n_states())
print(max(sizes[:60]), max(sizes[60:]))
"""


@pytest.mark.parametrize("hits", ["python", ""], ids=["in Python", "below Python"])
def test_a_trie_is_bounded_whatever_its_programs(hits):
    first, later = map(int, run_python("-c", BOUNDED, LAZY_TENSOR_HITS=hits).split())
    assert later <= first


def test_tries_of_threads_that_ended_are_freed():
    def work(start: threading.Barrier) -> None:
        start.wait()
        for _ in range(3):  # C++ learns it
            with lazy_mode(record="always"):
                (torch.ones(3) * 2).sum().item()
        found.append(threading.current_thread().name)
        start.wait()

    found: list[str] = []
    start = threading.Barrier(12)
    threads = [threading.Thread(target=work, args=(start,)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    with lazy_mode(record="always"):
        (torch.ones(5) * 3).sum().item()
    assert len([t for t in traces._all.values() if not t.is_alive()]) <= MOST_SPARE
    reset_stats()  # the log of flushes
    gc.collect()
    assert sum(type(one) is traces.Trace for one in gc.get_objects()) <= len(traces._all)


def test_a_trace_that_is_being_flushed_is_not_given_to_a_thread_that_begins(monkeypatch):
    def in_thread(function):
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    def beside_the_flush(values):
        monkeypatch.undo()  # the trace is empty by now, and its values have no data yet
        in_thread(lambda: given.append(local.trace))
        return live_values(values)

    left: list[Any] = []
    given: list[Any] = []
    live_values = traces.live_values
    in_thread(lambda: left.append((local.trace, wrap(torch.ones(3)) * 2)))
    monkeypatch.setattr(flush, "live_values", beside_the_flush)
    in_thread(lambda: local.trace)  # runs what the other left
    (trace, pending), (other,) = left[0], given
    assert other is not trace
    assert pending.tolist() == [2.0, 2.0, 2.0]


def test_what_is_misjudged_is_forgotten_by_all_threads():
    ready, go, sizes = threading.Event(), threading.Event(), []

    def work() -> None:
        with lazy_mode(record="always"):
            (torch.ones(3) * 2).sum().item()
        sizes.append(n_states_here())
        ready.set()
        go.wait()
        with lazy_mode(record="always"):
            pass
        sizes.append(n_states_here())

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    MISJUDGED.add(torch.ops.aten.multinomial.default)  # it runs at once anyway
    with lazy_mode(record="always"):
        (torch.ones(4) * 2).sum().item()
    assert not MISJUDGED
    go.set()
    thread.join()
    assert sizes == [1, 0]


FORKS = """
import os, sys, threading, torch, lazy_tensor
from lazy_tensor.dispatch.run import flush
from lazy_tensor.dispatch.trie import trace as traces
from lazy_tensor.dispatch.trie.trace import local
held, go = threading.Event(), threading.Event()
own = local.trace

def hold():
    with traces._lock, own.lock:
        held.set()
        go.wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    with lazy_tensor.lazy_mode(record="always", compile="off"):
        print(float((torch.ones(3) * 2).sum()), flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1])
go.set()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes don't fork here")
def test_a_child_forked_while_a_thread_held_a_traces_locks_goes_on():
    assert run_python("-W", "ignore", "-c", FORKS).split() == ["6.0", "0"]
