"""What every test gets: fixed seeds, and a skip for `gpu` tests where there is no CUDA device.

`--full` runs what is marked `full` too; without it a sample of each such suite is run.
"""

from __future__ import annotations

import os
import random
import shutil
import signal

import pytest
import torch
import torch._dynamo

import lazy_tensor
from lazy_tensor.dispatch import hits, pays, policy, rules, settings, trace
from lazy_tensor.dispatch.flush import compiler
from lazy_tensor.kernels import backend
from tests.conformance.summary import pytest_terminal_summary as pytest_terminal_summary
from tests.counting import Counting
from tests.models import summary as model_summary

# Until it is imported some ops run once before they are recorded: counts would depend on the order
# of tests. `tests/dispatch/test_start.py` has processes without it.
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
    if shutil.which("g++") and os.environ.get("LAZY_TENSOR_HITS") != "python":
        assert hits.EXTENSION.status == "in use"


CORE = {
    "conformance", "dispatch", "invariants", "lazy_tensor", "models", "nvfuser", "parity", "replay",
    "sharding", "world",
}  # fmt: skip


@pytest.fixture(autouse=True)
def op_by_op(request, monkeypatch):
    """Tests of the core start without caches and run op by op, bit-equal to eager.

    What tests do repeats too little to earn its recording: they may spend more on it than programs.
    """
    as_programs = request.config.getoption("--as-programs")
    if not as_programs:
        monkeypatch.setattr(policy, "START_S", 100.0)
        monkeypatch.setattr(pays, "TRIALS", 1 << 30)
    trace.local.trace.policy.reset()
    if request.path.parent.name not in CORE:
        yield
        return
    before = settings.current()
    # on a slow machine what one test does takes as long as a program is given to come twice
    lazy_tensor.configure(backend="aten", compile="off", warn=not as_programs)
    lazy_tensor.cache_clear()
    lazy_tensor.reset_stats()
    known_rules = dict(rules.RULES)
    yield
    lazy_tensor.flush()
    if known_rules != rules.RULES:  # an op whose meta function was wrong runs at once from then on
        rules.RULES.clear()
        rules.RULES.update(known_rules)
        rules.rule_of.cache_clear()
    settings.put(before)


@pytest.fixture
def counting(monkeypatch):
    """The backend in force: it counts what is compiled, and blocks until it is."""
    monkeypatch.setattr(backend, "_backends", dict(backend._backends))
    registered = Counting()
    backend.register_backend("counting", registered)
    lazy_tensor.configure(backend="counting", compile="blocking")
    return registered


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run whole suites, not samples of them")
    parser.addoption(
        "--as-programs", action="store_true", help="spend no more on recording than programs do"
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
