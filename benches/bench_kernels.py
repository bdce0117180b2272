"""What a call, a build and a load of one kernel cost, beside the same ops one by one.

"eager" is the op-by-op execution of the segment: the ops' C++ functions in a row, without recording
and without Python in between. So the kernel competes with the least that eager can cost. Writes
`results/kernels.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page
from timing import interleaved

from lazy_tensor.kernels import Call, Ref, ScalarRef, Segment, TensorSpec
from lazy_tensor.kernels.backends.inductor import InductorBackend
from lazy_tensor.kernels.service.compile import Compiler
from lazy_tensor.kernels.service.verify import difference

aten = torch.ops.aten


class Builder:
    """Builds a `Segment`: runs ops on example tensors, to know their specs, and notes the calls.

    Arguments name values by `Ref(index)`: inputs first, then results. `builder(op, ...)` returns
    the `Ref` of its first result.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], scalars: Sequence[float] = ()) -> None:
        self.inputs = list(inputs)
        self.scalars = list(scalars)
        self.values = [tensor.clone() for tensor in inputs]
        self.calls: list[Call] = []

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Ref:
        before = len(self.values)
        result = op(*map(self._real, args), **{k: self._real(v) for k, v in kwargs.items()})
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        # an op in place returns its argument, which is no new value
        new = [t for t in results if not any(t is value for value in self.values)]
        self.values += new
        specs = tuple(spec_of(t) for t in new)
        self.calls.append(Call(op, args, tuple(kwargs.items()), specs))
        return Ref(before)

    def _real(self, argument: Any) -> Any:
        match argument:
            case Ref(index):
                return self.values[index]
            case ScalarRef(index):
                return self.scalars[index]
        return argument

    def segment(self, *outputs: Ref) -> Segment:
        return Segment(
            tuple(map(spec_of, self.inputs)),
            tuple(map(type, self.scalars)),
            tuple(self.calls),
            tuple(ref.index for ref in outputs),
        )


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype, tensor.device)


Case = tuple[Segment, list[torch.Tensor], list[float]]
"""A segment, its inputs and its scalars."""


def add(n: int) -> Case:
    build = Builder([torch.randn(n, n), torch.randn(n, n)])
    return build.segment(build(aten.add.Tensor, Ref(0), Ref(1))), build.inputs, []


def ten_pointwise(n: int) -> Case:
    build = Builder([torch.randn(n, n), torch.randn(n, n)])
    value = Ref(0)
    for _ in range(5):
        value = build(aten.add.Tensor, build(aten.mul.Tensor, value, Ref(1)), Ref(0))
    return build.segment(value), build.inputs, []


def adam(n: int) -> Case:
    build = Builder([torch.rand(n, n) for _ in range(4)], [-1e-3, 0.9])
    parameter, grad, mean, square = map(Ref, range(4))
    build(aten.lerp_.Scalar, mean, grad, 0.1)
    build(aten.mul_.Tensor, square, 0.999)
    build(aten.addcmul_.default, square, grad, grad, value=0.001)
    root = build(aten.sqrt.default, square)
    build(aten.div_.Tensor, root, ScalarRef(1))
    build(aten.add_.Tensor, root, 1e-8)
    build(aten.addcdiv_.default, parameter, mean, root, value=ScalarRef(0))
    return build.segment(), build.inputs, build.scalars


def layer_norm_and_gelu(n: int) -> Case:
    build = Builder([torch.randn(n, n), torch.randn(n), torch.randn(n)])
    norm = build(aten.native_layer_norm.default, Ref(0), (n,), Ref(1), Ref(2), 1e-5)
    return build.segment(build(aten.gelu.default, norm)), build.inputs, []


CASES: dict[str, Callable[[int], Case]] = {
    "`add`": add,
    "ten pointwise ops": ten_pointwise,
    "an Adam step, 7 ops in place": adam,
    "layer norm and GELU": layer_norm_and_gelu,
}
SIZES = (4, 1024)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def compiler(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    """A compile service that has built one kernel, so that no case pays for starting its worker."""
    service = Compiler(cache_dir=tmp_path_factory.mktemp("kernels"), n_workers=1)
    service.fusion_of(add(3)[0], InductorBackend(), mode="blocking")
    yield service
    service.close()


@pytest.fixture(scope="module")
def rows(results_dir: Path) -> Iterator[list[list[str]]]:
    collected: list[list[str]] = []
    yield collected
    if len(collected) == len(CASES) * len(SIZES):
        columns = ["segment", "size", "eager, us", "kernel, us", "build, s", "load, ms"]
        (results_dir / "kernels.md").write_text(
            page("Cost of kernels, one thread", columns, collected)
        )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def bench_kernel(
    benchmark: BenchmarkFixture,
    quick: bool,
    compiler: Compiler,
    rows: list[list[str]],
    name: str,
    size: int,
) -> None:
    segment, inputs, scalars = CASES[name](size)
    start = perf_counter()
    fusion = compiler.fusion_of(segment, InductorBackend(), mode="blocking")
    build_s = perf_counter() - start
    assert fusion.status == "ready", fusion.reason
    check(fusion.run, fusion.aten, inputs, scalars)
    # small kernels are timed many at a time, against the clock's resolution
    n_calls = 1 if quick else max(1, 200_000 // size**2)
    functions = {"eager": repeated(fusion.aten, inputs, scalars, n_calls)}
    functions["kernel"] = repeated(fusion.run, inputs, scalars, n_calls)
    timings = benchmark.pedantic(
        interleaved, args=(functions, 3 if quick else 50, 2), rounds=1, iterations=1
    )
    cost = {k: timings.spread(k).median_s / n_calls * 1e6 for k in functions}
    rows.append([
        name, f"{size} x {size}", f"{cost['eager']:.2f}", f"{cost['kernel']:.2f}",
        f"{build_s:.2f}", f"{load_s(compiler, segment) * 1e3:.2f}",
    ])  # fmt: skip


def check(run: Any, aten_run: Any, inputs: list[torch.Tensor], scalars: list[float]) -> None:
    ours, reference = [t.clone() for t in inputs], [t.clone() for t in inputs]
    results, expected = run(ours, scalars), aten_run(reference, scalars)
    assert difference([*results, *ours], [*expected, *reference]) is None


def repeated(
    run: Any, inputs: list[torch.Tensor], scalars: list[float], n_calls: int
) -> Callable[[], None]:
    own = [t.clone() for t in inputs]

    def calls() -> None:
        for _ in range(n_calls):
            run(own, scalars)

    return calls


def load_s(compiler: Compiler, segment: Segment) -> float:
    """Seconds to load the kernel from disk, as another process would: by a new compile service."""
    assert compiler.disk is not None
    other = Compiler(cache_dir=compiler.disk.directory)
    start = perf_counter()
    fusion = other.fusion_of(segment, InductorBackend(), mode="blocking")
    seconds = perf_counter() - start
    other.close()
    assert fusion.reason == "from disk"
    return seconds
