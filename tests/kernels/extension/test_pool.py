"""Memory that plans use again: what is kept, for whom, and when it goes back."""

import gc
import os
import platform
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lazy_tensor import cache_clear, cache_info, lazy_mode, materialize
from lazy_tensor.dispatch.run import flush
from lazy_tensor.kernels.disk import Disk
from lazy_tensor.kernels.extension import pool, program

SIDE = 1024
N_BYTES = 4 * SIDE * SIDE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the pool is for Linux")


@pytest.fixture(autouse=True)
def empty_pool(tmp_path_factory):
    disk = Disk(tmp_path_factory.getbasetemp() / "pool")
    assert program.ask_for(disk, may_compile=True, wait=True)
    for _ in range(2):  # the first time there is no plan
        a_step(torch.zeros(SIDE, SIDE))
    gc.collect()
    pool.clear()


def a_step(x):
    with lazy_mode(backend="aten"):
        return (x + 1).relu() * 2


def kept_bytes():
    return cache_info()["memory"].currsize


def test_a_settled_step_maps_no_memory():
    x = torch.randn(SIDE, SIDE)
    for _ in range(4):
        a_step(x)
    before = cache_info()["memory"]
    for _ in range(10):
        a_step(x)
    after = cache_info()["memory"]
    assert after.misses == before.misses
    assert after.hits >= before.hits + 20


def test_a_settled_step_that_copies_an_array_maps_no_memory():
    array = np.ones((SIDE, SIDE), np.float32)

    def step():
        with lazy_mode(backend="aten", record="always"):
            return (torch.from_numpy(array) + 1) * 2

    for _ in range(4):
        step()
    before = cache_info()["memory"]
    for _ in range(10):
        step()
    after = cache_info()["memory"]
    assert after.misses == before.misses
    assert after.hits >= before.hits + 30


def test_a_settled_step_is_flushed_below_python(monkeypatch):
    x = torch.randn(SIDE, SIDE)
    for _ in range(4):
        a_step(x)
    monkeypatch.setattr(flush, "_flush", lambda *_: pytest.fail("flushed by Python"))
    a_step(x)


def test_a_settled_step_has_no_page_faults():
    x = torch.randn(2 * SIDE, 2 * SIDE)
    for _ in range(4):
        a_step(x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        a_step(x)
    # 3 results of 4,096 pages a step; a few pages are Python's own
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 200


A_STEP_OF_SMALL_TENSORS = """
import resource, statistics, sys
import torch
from lazy_tensor import lazy_mode
from lazy_tensor.kernels.disk import Disk
from lazy_tensor.kernels.extension import program
from pathlib import Path

torch.set_num_threads(1)
program.ask_for(Disk(Path(sys.argv[1])), may_compile=True, wait=True)
x = torch.ones(512, 512)

def step():
    with lazy_mode(backend="aten"):
        kept = [x + i for i in range(12)]
        return sum(kept).sum().item()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

# now and then the heap's layout changes
print(statistics.median([faults() for _ in range(50)][20:]))
"""


def test_a_step_of_small_tensors_has_no_page_faults_either(tmp_path_factory):
    """The C library gives the end of its heap back where no large tensor was ever freed."""
    disk = tmp_path_factory.getbasetemp() / "pool"
    command = [sys.executable, "-c", A_STEP_OF_SMALL_TENSORS, str(disk)]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    # 12 results of 256 pages a step
    assert float(child.stdout) < 6 * 256


def test_results_that_are_held_are_never_used_again():
    x = torch.randn(SIDE, SIDE)
    held = [materialize(a_step(x + i)) for i in range(6)]
    views = [t[5:10] for t in held[3:]]
    del held[3:]
    for i in range(20):
        a_step(x * i)
    for i, t in enumerate(held):
        assert torch.equal(t, ((x + i) + 1).relu() * 2)
    for i, t in enumerate(views, start=3):
        assert torch.equal(t, (((x + i) + 1).relu() * 2)[5:10])


def test_no_more_is_kept_than_was_in_use():
    x = torch.randn(SIDE, SIDE)
    outs = [a_step(x) for _ in range(8)]
    most = cache_info()["memory"].maxsize or 0
    assert most <= (8 + 3) * N_BYTES
    del outs
    assert 8 * N_BYTES <= kept_bytes() <= most


def test_what_is_no_longer_needed_goes_back():
    big, small = torch.randn(4 * SIDE, SIDE), torch.randn(SIDE, SIDE)
    for _ in range(3):
        a_step(big)
    assert kept_bytes() >= 2 * 4 * N_BYTES
    for _ in range(200):
        a_step(small)
    assert kept_bytes() <= 3 * N_BYTES


def test_cache_clear_gives_it_back():
    a_step(torch.randn(SIDE, SIDE))
    a_step(torch.randn(SIDE, SIDE))
    cache_clear()
    assert kept_bytes() == 0


def test_small_and_eager_tensors_are_not_pooled():
    x, before = torch.randn(64, 64), cache_info()["memory"]
    for _ in range(3):
        a_step(x)
    torch.randn(SIDE, SIDE).add(1)
    assert cache_info()["memory"] == before


def test_a_result_freed_in_another_thread_goes_back():
    results = [a_step(torch.randn(SIDE, SIDE)) for _ in range(3)]
    gc.collect()
    before = kept_bytes()
    thread = threading.Thread(target=results.clear)
    thread.start()
    thread.join()
    assert kept_bytes() == before + 3 * N_BYTES


def test_storages_can_grow_shrink_and_be_shared():
    y = materialize(a_step(torch.ones(SIDE, SIDE)))
    y.untyped_storage().resize_(2 * N_BYTES)
    assert y[3, 3] == 4
    y.untyped_storage().resize_(0)
    z = materialize(a_step(torch.ones(SIDE, SIDE)))
    z.share_memory_()
    assert z.is_shared()
    assert z.sum() == 4 * SIDE * SIDE


def test_a_forked_child_can_use_and_free_it():
    held = a_step(torch.ones(SIDE, SIDE))
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # OpenMP's threads are the parent's
            assert held.sum() == 4 * SIDE * SIDE
            del held
            assert a_step(torch.ones(SIDE, SIDE)).sum() == 4 * SIDE * SIDE
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert held.sum() == 4 * SIDE * SIDE


def test_the_profiler_sees_its_memory():
    x = torch.randn(SIDE, SIDE)
    a_step(x)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        y = a_step(x)
        del y
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    assert allocated >= N_BYTES


def offered_kib():
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("LazyFree:"))
    except (OSError, StopIteration):
        pytest.skip("/proc doesn't count the pages that were offered")


def test_what_was_offered_to_the_system_can_be_used():
    x = torch.randn(SIDE, SIDE)
    for _ in range(3):
        a_step(x)
    assert kept_bytes() > 0
    for _ in range(100):  # a second or two without a run
        if offered_kib() > 0:
            break
        time.sleep(0.1)
    assert offered_kib() > 0
    assert torch.equal(materialize(a_step(x)), (x + 1).relu() * 2)


def test_without_the_C_plus_plus_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(program, "native", None)
    x = torch.randn(SIDE, SIDE).t()
    assert pool.empty_like(x).stride() == x.stride()
    del x
    cache_clear()
    assert kept_bytes() == 0


FRESH_PAGES = """
from resource import RUSAGE_SELF, getrusage
import torch
from lazy_tensor import lazy_mode
def touch():
    return [torch.zeros(1 << 18, dtype=torch.double) for _ in range(4)]
with lazy_mode(compile="off"):
    torch.ones(3) + 1
for _ in range(4):
    touch()
before = getrusage(RUSAGE_SELF).ru_minflt
for _ in range(10):
    touch()
print(getrusage(RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep the heap")
def test_smaller_blocks_are_not_touched_afresh_each_time_even_without_the_pool():
    done = subprocess.run([sys.executable, "-c", FRESH_PAGES], capture_output=True, text=True)
    assert int(done.stdout) < 1000, done.stderr  # of 20,000
