"""Options and fixtures of all benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazy_tensor.dispatch import hits
from lazy_tensor.dispatch.flush import compiler


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--smoke",
        action="store_true",
        help="tiny sizes and few rounds: shows that the benchmarks run, measures nothing",
    )


@pytest.fixture(scope="session")
def smoke(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--smoke"))


@pytest.fixture(scope="session", autouse=True)
def hits_below_python() -> None:
    """Hits go the way they go in a program that has run for a while."""
    hits.start(compiler().disk)


@pytest.fixture(scope="session")
def results_dir(smoke: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where result pages go: the repository's own, or a temporary folder in a smoke run."""
    return tmp_path_factory.mktemp("results") if smoke else Path(__file__).parent / "results"
