"""What every test gets: fixed seeds, and a skip for `gpu` tests where there is no CUDA device.

`--full` runs what is marked `full` too; without it a sample of each such suite is run.
"""

from __future__ import annotations

import gc
import math
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.testing._internal import common_utils
from torch.testing._internal.opinfo import core

import lazy_tensor
from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.ops import rules
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.run.compile_service import compiler
from lazy_tensor.dispatch.tiering import policy, sites
from lazy_tensor.dispatch.trie import trace
from lazy_tensor.kernels import backend
from lazy_tensor.kernels.extension import program
from tests.conformance.summary import pytest_terminal_summary as pytest_terminal_summary
from tests.counting import Counting
from tests.models import summary as model_summary

# `torch.manual_seed` formats a traceback for each kind of device that isn't there, to tell later
# where it was called: a third of the time of PyTorch's databases, which seed before each program.
devices: list[Any] = [torch.cuda, torch.xpu, torch.mtia]
for device in devices:
    if not device.is_available():
        device.manual_seed_all = lambda seed: None

# For each sample PyTorch's databases look through the stack for the `TestCase` that runs, to learn
# which samples it skips: a tenth of their time, and here there is none.
for module in common_utils, core:
    module.extract_test_fn = lambda: None  # type: ignore[attr-defined]

# Until it is imported some ops run once before they are recorded: counts would depend on the order
# of tests. `tests/dispatch/tiering/test_start.py` has processes without it.
assert torch._dynamo


@pytest.fixture(autouse=True)
def fixed_seeds():
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture(autouse=True, scope="session")
def interruptible():
    """Ctrl-C means what it means in a terminal, to child processes too: a shell's background jobs
    ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def hits_below_python():
    """Hits go the way they go in a program that has run for a while.

    With `LAZY_TENSOR_HITS=python` in the environment they go the way of one that has just begun, or
    that finds no C++ compiler.
    """
    hits.start(compiler().disk)
    program.ask_for(compiler().disk, may_compile=True, wait=True)
    if shutil.which("g++") and os.environ.get("LAZY_TENSOR_HITS") != "python":
        assert hits.EXTENSION.status == "in use"


class Interrupted(BaseException):
    pass


@pytest.fixture
def interrupted_after():
    """A function that runs another with a signal after so many microseconds, whose handler raises
    as Ctrl-C's does; whether it came while that ran."""

    def handle(*_: object) -> None:
        raise Interrupted

    def run(delay_us: float, function: Callable[[], object]) -> bool:
        gc.disable()  # from whose callbacks nothing can be raised
        try:
            signal.setitimer(signal.ITIMER_REAL, delay_us * 1e-6)
            function()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupted:
            return True
        finally:
            gc.enable()
        return False

    before = signal.signal(signal.SIGALRM, handle)
    yield run
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


TESTS = Path(__file__).parent
CORE = {
    "conformance", "dispatch", "invariants", "lazy_tensor", "models", "nvfuser", "parity", "replay",
    "sharding", "world",
}  # fmt: skip


def choose_by_chance(monkeypatch: pytest.MonkeyPatch, chance: random.Random) -> None:
    """Record what programs do, in blocks that chance says are quicker so, and bypass the others."""
    for name, n_blocks in {"TRIALS": 0, "COMPARED": 4, "GOES_ON": 1, "AT_MOST": 2}.items():
        monkeypatch.setattr(sites, name, n_blocks)
    monkeypatch.setattr(sites, "perf_counter", chance.random)
    monkeypatch.setattr(sites, "thread_time", chance.random)
    monkeypatch.setattr(sites, "_COIN", chance)


@pytest.fixture
def by_chance(monkeypatch, op_by_op):
    """The test's blocks are recorded or bypassed by chance, always the same."""
    choose_by_chance(monkeypatch, random.Random(0))


@pytest.fixture(autouse=True)
def op_by_op(request, monkeypatch):
    """Tests of the core start without caches and run op by op, bit-equal to eager.

    What tests do repeats too little to earn its recording: all of it is recorded. With
    `--by-chance` it is what programs record, and chance says which way is quicker.
    """
    seed = request.config.getoption("--by-chance")
    if seed is not None:
        choose_by_chance(monkeypatch, random.Random(f"{seed} {request.node.nodeid}"))
    else:
        monkeypatch.setattr(policy, "FIRST_CALLS", 1 << 60)
        monkeypatch.setattr(sites, "TRIALS", 1 << 30)
    # times of tests decide nothing
    monkeypatch.setattr(sites, "TRACED", 1 << 30)
    monkeypatch.setattr(policy, "ROUND_S", math.inf)
    trace.local.trace.policy.reset()
    if request.path.relative_to(TESTS).parts[0] not in CORE:
        yield
        return
    before = settings.current()
    # on a slow machine what one test does takes as long as a program is given to come twice
    lazy_tensor.configure(backend="aten", compile="off", warn=seed is None)
    if request.node.get_closest_marker("recorded") is not None:
        lazy_tensor.configure(record="always")
    lazy_tensor.cache_clear()
    lazy_tensor.reset_stats()
    tables: tuple[dict[Any, Any], ...] = (rules.RULES, rules.EAGER_BECAUSE)
    known = [dict(table) for table in tables]
    yield
    lazy_tensor.flush()
    assert settings.current() is settings.of_process(), "a block's options are in force after it"
    if known[0] != rules.RULES:  # an op whose meta function was wrong runs at once from then on
        for table, before_test in zip(tables, known, strict=True):
            table.clear()
            table.update(before_test)
        for answer in (rules.rule_of, rules.reads_values, rules.why_eager):
            answer.cache_clear()
    settings.put(before)


@pytest.fixture
def counting(monkeypatch):
    """The backend in force: it counts what is compiled, and blocks until it is."""
    monkeypatch.setattr(backend, "_backends", dict(backend._backends))
    registered = Counting()
    backend.register_backend("counting", registered)
    lazy_tensor.configure(backend="counting", compile="blocking")
    return registered


@pytest.fixture(scope="session")
def newcomer(tmp_path_factory):
    """One who did in a clean environment what the README says of installing: see `tests.newcomer`.

    The blocks of shell commands that are left out: those of `make`, which makes environments of its
    own from the network, and nvFuser's, which takes 7 GB.
    """
    from tests import newcomer

    base = tmp_path_factory.getbasetemp()
    home = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "newcomer"
    readme = (newcomer.ROOT / "README.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", readme, flags=re.DOTALL)
    left_out = re.compile("^make |nvfuser", flags=re.MULTILINE)
    commands = [block for block in blocks if not left_out.search(block)]
    return newcomer.newcomer_in(home, "".join(commands))


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run whole suites, not samples of them")
    parser.addoption(
        "--by-chance",
        metavar="SEED",
        help="record what programs do, and let chance say which way is quicker",
    )
    parser.addoption("--results", metavar="PATH", help="write the conformance table to PATH")


def pytest_configure(config):
    config.addinivalue_line("markers", "full: runs with --full only")
    config.pluginmanager.register(model_summary)


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        left_out = [item for item in items if item.get_closest_marker("full") is not None]
        items[:] = [item for item in items if item.get_closest_marker("full") is None]
        config.hook.pytest_deselected(items=left_out)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
