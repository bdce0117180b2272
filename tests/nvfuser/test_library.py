"""What of nvFuser itself can be had without a GPU: definitions, refusals, other threads."""

import importlib
import importlib.util
import random
import threading
from typing import Any

import pytest
import torch

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.nvfuser import library
from lazy_tensor.kernels.nvfuser.definition import Definition, loaded
from lazy_tensor.kernels.nvfuser.translate import descriptor
from lazy_tensor.kernels.segment import TensorSpec
from tests.nvfuser.conftest import needs_nvfuser


@pytest.fixture
def asked_anew():
    library.problem.cache_clear()
    yield
    library.problem.cache_clear()


def chain(n):
    """A definition of `n` pairs of ops on a tensor made of nothing."""
    definition = Definition()
    one = definition.add("constant", 1.0, kind="Float")
    value = definition.add("full", [4], one, kind="Float", dtype="Float")
    for _ in range(n):
        value = definition.add("add", definition.add("sin", value, kind="Float"), one, kind="Float")
    definition.output(value)
    return loaded(definition.dumped())


def test_without_nvfuser_the_reason_says_what_to_install(asked_anew, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reason = str(library.problem())
    assert reason.startswith("nvFuser is not installed; ")
    assert "pip install torch==2.10.0 nvfuser-cu1" in reason


def test_a_wrong_pair_of_torch_and_nvfuser_gets_the_right_command(asked_anew, monkeypatch):
    def undefined(name):
        raise ImportError(f"{name}.so: undefined symbol: _ZN3c1013MessageLoggerC1E\nand more")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib, "import_module", undefined)
    reason = str(library.problem())
    assert f"can't be loaded with torch {torch.__version__} (nvfuser_direct.so: undef" in reason
    assert "pip install torch==2.10.0 nvfuser-cu1" in reason
    assert "\n" not in reason


@needs_nvfuser
def test_what_nvfuser_refuses_is_declined_in_one_line():
    definition = Definition()
    x = definition.add("input", [4], [True], [0], False, kind="Float")
    definition.output(definition.add("sum", x, kind="Float", dims=[], keepdim=False))
    with pytest.raises(Declined, match="nvFuser refuses it: .*axes") as raised:
        library.Fused(loaded(definition.dumped()))
    assert "frame #" not in str(raised.value)


def moving(contiguity, order):
    """The dimensions in memory that have steps; where the others stand between them is free."""
    by_place = sorted(range(len(order)), key=lambda dim: -order[dim])
    return [
        (dim, is_dense)
        for dim, is_dense in zip(by_place, contiguity, strict=True)
        if is_dense is not None
    ]


@needs_nvfuser
def test_layouts_are_described_as_nvfuser_describes_them():
    nvfuser = importlib.import_module(library.MODULE)
    chosen = random.Random(0)
    for _ in range(500):
        size = [chosen.choice([1, 2, 3, 5]) for _ in range(chosen.randint(1, 5))]
        tensor = torch.empty_permuted(size, chosen.sample(range(len(size)), len(size)))
        if chosen.random() < 0.3:
            dim = chosen.randrange(len(size))
            tensor = tensor.narrow(dim, 0, 1).expand(size)
        if chosen.random() < 0.3 and tensor.size(-1) > 2:
            tensor = tensor[..., ::2]
        spec = TensorSpec(tuple(tensor.size()), tensor.stride(), tensor.dtype, tensor.device)
        expected = nvfuser.compute_tensor_descriptor(list(spec.size), list(spec.stride))
        assert moving(*descriptor(spec)) == moving(*expected), spec


@needs_nvfuser
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would be compiled, and end well")
@pytest.mark.parametrize("lets_others_run", [False, True])
def test_other_threads_run_while_nvfuser_compiles(lets_others_run):
    # half a second of nvFuser's own work, at whose end it finds no GPU
    run: Any = library.Fused(chain(400)).run
    n_ticks, stop = 0, threading.Event()

    def tick():
        nonlocal n_ticks
        while not stop.wait(0.001):
            n_ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    with library.compiling():
        pass  # what it needs is there from now on
    n_released, n_ticks_before = library.n_released(), n_ticks
    with pytest.raises(RuntimeError, match="CUDA"):  # noqa: PT012
        if lets_others_run:
            with library.compiling():
                run([], device=0)
        else:
            run([], device=0)
    n_ticks_meanwhile = n_ticks - n_ticks_before
    stop.set()
    thread.join()
    assert library.n_released() - n_released == lets_others_run
    assert (n_ticks_meanwhile > 5) == lets_others_run
