"""What the tests of the nvFuser backend share: the backend without nvFuser."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from torch._subclasses import FakeTensorMode

import lazy_tensor
from lazy_tensor.kernels import backend
from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.nvfuser import library
from lazy_tensor.kernels.nvfuser.backend import FusedKernel, NvfuserBackend, Run
from lazy_tensor.kernels.nvfuser.definition import Line, loaded
from lazy_tensor.kernels.segment import Segment
from tests.nvfuser.interpreter import run

needs_nvfuser = pytest.mark.skipif(
    library.problem() is not None, reason=f"needs nvFuser: {library.problem()}"
)


def check_build_if_there(lines: Sequence[Line]) -> None:
    """Where nvFuser is, it takes the lines, and gives their values the dtypes that they say."""
    if library.problem() is not None:
        return
    said = [kind for line in lines for kind in line.kinds]
    for built, kind in zip(library.Fused(lines).kinds, said, strict=True):
        assert built in ("", kind) or not kind, f"a value of {built}, said to be of {kind}"


class ByTorch:
    """A definition that the interpreter runs."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.run: Run = functools.partial(run, lines)

    def prepare(self, inputs: Sequence[Any]) -> None:
        self.run(inputs)


class Interpreted(NvfuserBackend):
    """nvFuser's definitions, run by torch on the CPU; where nvFuser is, it builds them too."""

    name = "interpreted"

    def __init__(self) -> None:
        self.n_definitions = 0
        self.declined: list[str] = []

    def unavailable(self, device_type: str) -> str | None:
        return None

    def build(self, segment: Segment) -> bytes:
        try:
            return super().build(segment)
        except Declined as reason:
            self.declined.append(str(reason))
            raise

    def load(self, segment: Segment, artifact: bytes) -> FusedKernel:
        self.n_definitions += 1
        lines = loaded(json.loads(artifact)["lines"])
        check_build_if_there(lines)
        return FusedKernel(segment, artifact, ByTorch(lines))


@pytest.fixture(autouse=True, scope="session")
def fake_tensors_known_to_main_thread():
    """A build of torch for CUDA crashes, without a GPU, if another thread is the first."""
    with FakeTensorMode():
        pass


@pytest.fixture(scope="session")
def definitions(tmp_path_factory):
    """Where the session's definitions are kept."""
    return str(tmp_path_factory.mktemp("definitions"))


@pytest.fixture
def interpreted(monkeypatch, definitions):
    """The backend in force, blocking; programs this small are recorded all the same."""
    monkeypatch.setattr(backend, "_backends", dict(backend._backends))
    registered = Interpreted()
    backend.register_backend("interpreted", registered)
    lazy_tensor.configure(backend="interpreted", compile="blocking", cache_dir=definitions)
    return registered
