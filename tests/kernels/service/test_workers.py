"""Worker processes: they build, survive what they are asked, and leave when we do."""

import array
import fcntl
import os
import pickle
import signal
import subprocess
import sys
import termios
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from lazy_tensor.kernels import Call, Ref, Segment, TensorSpec
from lazy_tensor.kernels.backends.inductor import InductorBackend
from lazy_tensor.kernels.extension.extension import BEHIND
from lazy_tensor.kernels.service.workers import (
    BuildError,
    Workers,
    is_known_to_workers,
    pickled,
)

aten = torch.ops.aten
SPEC = TensorSpec((4,), (1,), torch.float32, torch.device("cpu"))
GOOD = Segment((SPEC,), (), (Call(aten.mul.Tensor, (Ref(0), Ref(0)), (), (SPEC,)),), (1,))
BAD = Segment((SPEC,), (), (Call(aten.mul.Tensor, (Ref(0), Ref(7)), (), (SPEC,)),), (1,))


@pytest.fixture
def workers(cache_dir):
    workers = Workers(1, lambda: str(cache_dir / "build"))
    yield workers
    workers.close()


def process_of(workers):
    (worker,) = workers._all
    return worker._process


def test_worker_survives_a_segment_that_cannot_be_built(workers):
    with pytest.raises(BuildError, match="IndexError: list index out of range"):
        workers.build(InductorBackend(), BAD)
    pid = process_of(workers).pid
    artifact = workers.build(InductorBackend(), GOOD)
    kernel = InductorBackend().load(GOOD, artifact)
    assert kernel([torch.full((4,), 3.0)], [])[0].tolist() == [9.0] * 4
    assert process_of(workers).pid == pid


def test_worker_that_dies_fails_one_segment_and_is_replaced(workers):
    with pytest.raises(BuildError):
        workers.build(InductorBackend(), BAD)
    process = process_of(workers)
    process.send_signal(signal.SIGSTOP)
    process.kill()
    with pytest.raises(BuildError, match="worker ended with exit code -9|list index"):
        workers.build(InductorBackend(), BAD)
    with pytest.raises(BuildError, match="list index"):
        workers.build(InductorBackend(), BAD)


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError, ValueError])
def test_the_answer_to_an_interrupted_request_is_not_that_to_the_next(workers, error, monkeypatch):
    monkeypatch.setattr("lazy_tensor.kernels.service.workers.ENDS_WITHIN_S", 0.1)
    with pytest.raises(BuildError):
        workers.build(InductorBackend(), BAD)
    process_of(workers).send_signal(signal.SIGSTOP)  # it answers too late

    def interrupt(*_):
        raise error

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(error):
            workers.build(InductorBackend(), GOOD)
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(BuildError, match="list index"):
        workers.build(InductorBackend(), BAD)


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_child_forked_in_the_middle_of_a_build_is_not_stuck(workers):
    with pytest.raises(BuildError):
        workers.build(InductorBackend(), BAD)
    process = process_of(workers)
    process.send_signal(signal.SIGSTOP)
    while set(states_of(process.pid)) != {"T"}:
        time.sleep(0.01)  # a thread that still runs would take the request
    building = threading.Thread(target=workers.build, args=(InductorBackend(), GOOD))
    building.start()
    while not n_unread(workers):
        time.sleep(0.01)  # the answer is waited for as soon as the request is in the pipe
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        workers.forget()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    process.send_signal(signal.SIGCONT)
    building.join()
    assert status == 0


def states_of(pid):
    """What the system says of each thread: T is stopped (proc_pid_stat(5))."""
    stats = Path(f"/proc/{pid}/task").glob("*/stat")
    return [stat.read_text().rpartition(")")[2].split()[0] for stat in stats]


def n_unread(workers):
    """Bytes that the worker has not read from its pipe (SIOCOUTQ in unix(7))."""
    (worker,) = workers._all
    answer = array.array("i", [0])
    fcntl.ioctl(worker._pipe.fileno(), termios.TIOCOUTQ, answer)
    return answer[0]


def test_closing_ends_the_workers(workers):
    with pytest.raises(BuildError):
        workers.build(InductorBackend(), BAD)
    process = process_of(workers)
    workers.close()
    assert process.poll() is not None
    with pytest.raises(BuildError, match="closed"):
        workers.build(InductorBackend(), GOOD)


def test_backends_registered_from_outside_are_not_known_to_workers(toy):
    assert is_known_to_workers(InductorBackend())
    assert not is_known_to_workers(toy)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("ending", ["pass", "os.kill(os.getpid(), 9)"])
def test_worker_ends_with_its_parent(ending):
    code = f"""
import os, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_workers import *
workers = Workers(1)
try:
    workers.build(InductorBackend(), BAD)
except BuildError:
    print(process_of(workers).pid, flush=True)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=120)
    pid = int(done.stdout)
    for _ in range(200):
        if not is_running(pid):
            return
        time.sleep(0.05)  # the worker reads the end of its parent, there is no event to wait for
    raise AssertionError(f"worker {pid} is still running")


@pytest.mark.parametrize("niceness", [0, BEHIND])
def test_worker_runs_behind_a_program_that_does_not_wait(workers, niceness):
    workers.niceness, workers.head_start_s = niceness, 0.01
    with pytest.raises(BuildError):
        workers.build(InductorBackend(), BAD)
    pid = process_of(workers).pid
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(own + niceness, 19)
    assert os.getsid(pid) == os.getsid(0)  # sessions are scheduled as equals, nice or not


def test_worker_has_a_head_start(workers):
    workers.head_start_s = 600.0
    with pytest.raises(BuildError):
        workers.build(InductorBackend(), BAD)
    assert workers.niceness == BEHIND
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, process_of(workers).pid) == own


@pytest.fixture
def two_ranks():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
def test_worker_has_no_head_start_beside_ranks(workers):
    workers.head_start_s = 600.0
    with pytest.raises(BuildError):
        workers.build(InductorBackend(), BAD)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, process_of(workers).pid) == min(own + BEHIND, 19)


@pytest.mark.parametrize("name", ["nt", "cProfile"])
def test_worker_does_not_take_modules_from_beside_the_program(tmp_path, name):
    tests = Path(__file__).parent
    (tmp_path / f"{name}.py").write_text("raise ImportError('a file of the user')")
    (tmp_path / "program.py").write_text(
        f"import sys; here = sys.path.pop(0); sys.path[:0] = [{str(tests)!r}]\n"
        "from test_workers import *\n"
        "sys.path.insert(0, here)\n"
        "workers = Workers(1)\n"
        "print(len(workers.build(InductorBackend(), GOOD)) > 0)\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "True\n", done.stderr


def test_worker_has_the_package_of_its_parent(tmp_path):
    """Not another version: in a checkout's root Python finds the checkout first, a worker last."""
    (tmp_path / "lazy_tensor").mkdir()
    (tmp_path / "lazy_tensor" / "__init__.py").write_text("raise ImportError('another version')")
    tests = Path(__file__).parent
    code = (
        f"import sys, lazy_tensor; sys.path.append({str(tests)!r})\n"
        "from test_workers import *\n"
        "try:\n"
        "    Workers(1).build(InductorBackend(), BAD)\n"
        "except BuildError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tests.parents[2],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, timeout=120,
        text=True,
    )  # fmt: skip
    assert "IndexError: list index out of range" in done.stdout, done


def test_torch_constants_are_not_named_by_a_module_of_the_user(monkeypatch):
    users = types.ModuleType("a_module_that_no_worker_has")
    monkeypatch.setattr(users, "torch", torch, raising=False)
    monkeypatch.setattr(sys, "modules", {users.__name__: users, **sys.modules})
    constants = (torch.contiguous_format, torch.strided, torch.bfloat16)
    sent = pickled(constants)
    assert b"a_module_that_no_worker_has" not in sent
    assert pickle.loads(sent) == constants


def test_a_worker_that_can_not_be_started_is_a_build_error(workers, monkeypatch):
    def no_process(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    with pytest.raises(BuildError, match="can't be started: .*Resource temporarily unavailable"):
        workers.build(InductorBackend(), GOOD)
    monkeypatch.undo()
    assert workers.build(InductorBackend(), GOOD)
