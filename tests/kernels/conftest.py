"""What the kernel tests share: recording a segment, kernels compiled once a session."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lazy_tensor.kernels import Call, Kernel, Ref, ScalarRef, Segment, TensorSpec
from lazy_tensor.kernels.backends.aten import compile_aten
from lazy_tensor.kernels.service.compile import Compiler


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype, tensor.device)


class Recorder(TorchDispatchMode):
    """Runs ops and writes down the calls; numbers equal to a run-time scalar become that."""

    def __init__(self, inputs: Sequence[torch.Tensor], scalars: Sequence[float]) -> None:
        super().__init__()
        self.values: list[Any] = list(inputs)
        self.scalars = list(scalars)
        self.calls: list[Call] = []

    def number(self, tensor: torch.Tensor) -> int | None:
        return next((i for i, v in enumerate(self.values) if v is tensor), None)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            number = self.number(value)
            assert number is not None, "a tensor that is neither an input nor recorded"
            return Ref(number)
        if isinstance(value, (list, tuple)):
            return tuple(self._argument(v) for v in value)
        if type(value) in (int, float) and value in self.scalars:
            return ScalarRef(self.scalars.index(value))
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorded = tuple(self._argument(a) for a in args)
        recorded_kwargs = tuple((k, self._argument(v)) for k, v in kwargs.items())
        result = func(*args, **kwargs)
        returned = result if isinstance(result, (list, tuple)) else [result]
        new = [t for t in returned if t is None or self.number(t) is None]
        specs = tuple(None if t is None else spec_of(t) for t in new)
        self.calls.append(Call(func, recorded, recorded_kwargs, specs))
        self.values += new
        return result


@dataclass
class Recorded:
    """A segment, fresh copies of its inputs on demand, and what eager execution made of them."""

    segment: Segment
    inputs: list[torch.Tensor]
    scalars: list[float]
    results: list[torch.Tensor]
    written: list[torch.Tensor]

    def fresh(self) -> list[torch.Tensor]:
        return [copy_of(t) for t in self.inputs]


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in memory of its own, laid out the same way, repeated elements included."""
    n_elements = tensor.untyped_storage().nbytes() // tensor.itemsize
    storage = tensor.as_strided((n_elements,), (1,), 0).clone()
    return storage.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def record(
    fn: Callable[..., Any], inputs: Sequence[torch.Tensor], scalars: Sequence[float] = ()
) -> Recorded:
    """Run `fn(*inputs, *scalars)` eagerly, and the segment that does the same."""
    live = [copy_of(t) for t in inputs]
    with torch.no_grad(), Recorder(live, scalars) as recorder:
        returned = fn(*live, *scalars)
    results = list(returned) if isinstance(returned, (list, tuple)) else [returned]
    numbers = [recorder.number(t) for t in results]
    assert all(n is not None for n in numbers)
    segment = Segment(
        tuple(spec_of(t) for t in inputs),
        tuple(type(s) for s in scalars),
        tuple(recorder.calls),
        tuple(n for n in numbers if n is not None),
    )
    return Recorded(segment, list(inputs), list(scalars), results, live)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels compiled by any test of the session."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def compiler(cache_dir: Path) -> Iterator[Compiler]:
    """A compile service with one worker, for tests that don't count what it does."""
    service = Compiler(cache_dir=cache_dir, n_workers=1)
    yield service
    service.close()


class Toy:
    """A backend from outside: its kernels are replay, counted; it compiles when `gate` is open."""

    name = "toy"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()
        self.compiled: list[Segment] = []
        self.n_runs = 0
        self.failure: Exception | None = None

    def unavailable(self, device_type: str) -> str | None:
        return None

    def refuses(self, call: Call, inputs: Sequence[TensorSpec] = ()) -> str | None:
        return None

    def compile(self, segment: Segment) -> Kernel:
        self.started.set()
        self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.compiled.append(segment)
        return self.kernel(segment)

    def kernel(self, segment: Segment) -> Kernel:
        replay = compile_aten(segment)

        def run(
            tensors: Sequence[torch.Tensor], scalars: Sequence[float]
        ) -> Sequence[torch.Tensor]:
            self.n_runs += 1
            return replay(tensors, scalars)

        return run


class PortableToy(Toy):
    """The same with artifacts: the segment's text."""

    def can_build(self, segment: Segment) -> bool:
        return True

    def fingerprint(self) -> str:
        return "toy 1"

    def build(self, segment: Segment) -> bytes:
        self.compile(segment)
        return segment.text().encode()

    def load(self, segment: Segment, artifact: bytes) -> Kernel:
        assert artifact == segment.text().encode()
        return self.kernel(segment)


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture
def portable_toy() -> PortableToy:
    return PortableToy()


@pytest.fixture
def new_compiler() -> Iterator[Callable[..., Compiler]]:
    """Makes compile services, closed after the test."""
    made: list[Compiler] = []

    def make(**options: Any) -> Compiler:
        made.append(Compiler(**options))
        return made[-1]

    yield make
    for service in made:
        service.close()


class HeldCompiler(NamedTuple):
    """A C++ compiler that waits until `go` is there; each start is a line of `log`."""

    path: Path
    go: Path
    log: Path


@pytest.fixture
def held_compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeldCompiler]:
    """To be given to a process as `CXX`; after the test it waits no longer."""
    folder = tmp_path_factory.mktemp("compiler")
    held = HeldCompiler(folder / "held", folder / "go", folder / "log")
    wait = f"until [ -e {held.go} ]; do sleep 0.1; done"
    held.path.write_text(f'#!/bin/sh\necho started >> {held.log}\n{wait}\nexec g++ "$@"\n')
    held.path.chmod(0o700)
    yield held
    held.go.touch()


@pytest.fixture(name="record")
def _record() -> Callable[..., Recorded]:
    return record
