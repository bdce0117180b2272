"""A backend from outside the project: what its author writes, and that programs run on it."""

from collections.abc import Sequence

import pytest
import torch

from lazy_tensor import configure, lazy_mode, materialize
from lazy_tensor.kernels import Call, Kernel, Segment, TensorSpec, backend, register_backend
from lazy_tensor.kernels.backends.aten import compile_aten


class Toy:
    """Takes elementwise calls; its kernels are op-by-op functions that count their runs."""

    name = "toy"

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.n_runs = 0

    def unavailable(self, device_type: str) -> str | None:
        return None if device_type == "cpu" else "it knows CPUs only"

    def refuses(self, call: Call, inputs: Sequence[TensorSpec] = ()) -> str | None:
        return None if torch.Tag.pointwise in call.op.tags else "it is not elementwise"

    def compile(self, segment: Segment) -> Kernel:
        self.segments.append(segment)
        run = compile_aten(segment)

        def kernel(tensors, scalars):
            self.n_runs += 1
            return run(tensors, scalars)

        return kernel


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(backend, "_backends", dict(backend._backends))
    registered = Toy()
    register_backend("toy", registered)
    return registered


def test_a_backend_that_can_run_nowhere_is_refused_with_its_reason(toy, monkeypatch):
    monkeypatch.setattr(Toy, "unavailable", lambda *_: "its library is missing")
    with pytest.raises(RuntimeError, match=r"configure\(\): backend 'toy' asked for, but its libr"):
        configure(backend="toy")


def test_programs_run_on_a_backend_from_outside(toy):
    x, w = torch.randn(5, 5), torch.randn(5, 5)

    def program():
        h = (x * 2 + 1).relu()
        return ((h @ w) * 2 + 1).relu()

    for _ in range(2):
        with lazy_mode(backend="toy", compile="blocking"):
            y = program()
        assert torch.equal(materialize(y), program())
    # the chain before the product and the one after it are one segment, compiled once
    assert len(toy.segments) == 1
    assert [str(call.op) for call in toy.segments[0].calls] == [
        "aten.mul.Tensor",
        "aten.add.Tensor",
        "aten.relu.default",
    ]
    assert toy.n_runs == 4
