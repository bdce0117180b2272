"""Options and fixtures of all benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import lazy_tensor
from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.run.compile_service import compiler


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="tiny sizes and few rounds: shows that all run and what they count, measures nothing",
    )

    parser.addoption(
        "--update-counts",
        action="store_true",
        help="keep the counts of bench_counts.py as they are now, whether they grew or not",
    )


@pytest.fixture(scope="session")
def quick(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--quick"))


@pytest.fixture(scope="session", autouse=True)
def hits_below_python() -> None:
    """Hits are recorded in C++, as in a program that has run for a while. A program that begins may
    have to compile the C++ first."""
    hits.start(compiler().disk)


@pytest.fixture(scope="session", autouse=True)
def no_advice() -> None:
    """Silence the warning that little repeats itself, as is so in a process of benchmarks."""
    lazy_tensor.configure(warn=False)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch's own threads are one, for the benchmarks of a module that asks for it."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Four ranks of a fake process group, whose collectives do nothing, on one thread and without
    kernels. What is left is the host's work."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    torch.set_num_threads(1)
    before = settings.current()
    lazy_tensor.configure(backend="aten", compile="off")
    yield init_device_mesh("cpu", (4,))
    settings.put(before)
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def results_dir(quick: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where result pages go: the repository's own, or a temporary folder in a quick run."""
    return tmp_path_factory.mktemp("results") if quick else Path(__file__).parent / "results"
