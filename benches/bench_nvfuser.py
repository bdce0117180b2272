"""nvFuser on a GPU: host time of a call, bandwidth of kernels, Adam's step, a training step.

Beside eager and `torch.compile`, interleaved; bandwidth as a share of a copy on the device. Writes
`results/nvfuser_gpu.md`. Skipped where there is no GPU or no nvFuser: no figure of it exists yet.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page
from timing import interleaved
from torch.nn import functional as F

import lazy_tensor
from lazy_tensor.dispatch import settings
from lazy_tensor.kernels.nvfuser import library

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(library.problem() is not None, reason=str(library.problem())),
]
Rows = list[list[str]]


@pytest.fixture(scope="module")
def rows(results_dir: Path) -> object:
    found: Rows = []
    yield found
    header = ["what", "eager", "lazy, nvfuser", "torch.compile", "lazy, share of copy's bandwidth"]
    if found:
        text = page(f"nvFuser on a GPU: {library.installed()}", header, found)
        (results_dir / "nvfuser_gpu.md").write_text(text)


@pytest.fixture(autouse=True)
def blocking(tmp_path: Path) -> object:
    before = settings.current()
    lazy_tensor.configure(backend="nvfuser", compile="blocking", cache_dir=str(tmp_path))
    yield
    settings.put(before)


def copy_bytes_per_s(n_bytes: int = 1 << 28) -> float:
    """Bytes read and written in a second by a copy on the device."""
    source = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    timings = interleaved({"copy": lambda: target.copy_(source)}, 20, 3, torch.cuda.synchronize)
    seconds: float = timings.spread("copy").median_s
    return 2 * n_bytes / seconds


Step = Callable[[], object]
Wrapper = Callable[[Step], Step]


def lazily(function: Step) -> Step:
    def run() -> object:
        with lazy_tensor.lazy_mode():
            return function()

    return run


def compiled_of(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    found: Callable[..., torch.Tensor] = torch.compile(function)
    return found


def norm_gelu(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.layer_norm(x, w.shape, w, w)) + y


def softmax(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * 0.125 + y).softmax(-1)


def pointwise(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((x * 2 + y).sin().exp() * w - 1).tanh()


@pytest.mark.parametrize("function", [norm_gelu, softmax, pointwise])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def bench_chain(
    benchmark: BenchmarkFixture,
    rows: Rows,
    quick: bool,
    function: Callable[..., torch.Tensor],
    dtype: torch.dtype,
) -> None:
    n, width = (64, 128) if quick else (16384, 4096)
    x, y = (torch.randn(n, width, device="cuda", dtype=dtype) for _ in range(2))
    w = torch.randn(width, device="cuda", dtype=dtype)
    compiled = compiled_of(function)
    sides: dict[str, Step] = {
        "eager": lambda: function(x, y, w),
        "lazy": lazily(lambda: function(x, y, w)),
        "compile": lambda: compiled(x, y, w),
    }
    timings = interleaved(sides, 3 if quick else 30, 5, torch.cuda.synchronize)
    benchmark.pedantic(sides["lazy"])
    moved = 3 * x.numel() * x.itemsize
    share = moved / timings.spread("lazy").median_s / copy_bytes_per_s()
    times = [f"{timings.spread(name).median_s * 1e3:.3f} ms" for name in sides]
    rows.append([f"{function.__name__}, {n} x {width}, {dtype}", *times, f"{share:.0%}"])


def bench_host_time_of_a_call(benchmark: BenchmarkFixture, rows: Rows, quick: bool) -> None:
    """A kernel so small that only the host's time shows; calls are not waited for."""
    x = torch.randn(64, 64, device="cuda")
    y, w = x.clone(), torch.randn(64, device="cuda")
    compiled = compiled_of(pointwise)
    sides: dict[str, Step] = {
        "eager": lambda: pointwise(x, y, w),
        "lazy": lazily(lambda: pointwise(x, y, w)),
        "compile": lambda: compiled(x, y, w),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(3 if quick else 30):
        for name, side in sides.items():
            torch.cuda.synchronize()
            start = perf_counter()
            for _ in range(20):
                side()
            seconds[name].append((perf_counter() - start) / 20)
    benchmark.pedantic(sides["lazy"])
    times = [f"{statistics.median(seconds[name]) * 1e6:.1f} us" for name in sides]
    rows.append(["host time, 7 ops on 64 x 64", *times, ""])


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
def bench_adam(benchmark: BenchmarkFixture, rows: Rows, quick: bool, foreach: bool) -> None:
    def stepper(wrapper: Wrapper) -> Step:
        parameters = [torch.randn(256, 256, device="cuda") for _ in range(4 if quick else 144)]
        for p in parameters:
            p.requires_grad_()
            p.grad = torch.randn_like(p)
        optimizer = torch.optim.Adam(parameters, foreach=foreach)
        return wrapper(optimizer.step)

    sides: dict[str, Step] = {
        "eager": stepper(lambda step: step),
        "lazy": stepper(lazily),
        "compile": stepper(lambda step: torch.compile(step)),
    }
    timings = interleaved(sides, 3 if quick else 20, 5, torch.cuda.synchronize)
    benchmark.pedantic(sides["lazy"])
    times = [f"{timings.spread(name).median_s * 1e3:.3f} ms" for name in sides]
    rows.append([f"Adam, 144 of 256 x 256, {'foreach' if foreach else 'loop'}", *times, ""])
