"""Forward and backward of a convolution with bias: its time, and how often it is computed.

A compiler that decomposes the backward pass may compute the convolution again. torch's profiler
counts the convolutions. Writes `results/convolution.md`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import peers
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page
from timing import interleaved
from torch import Tensor, nn
from torch.profiler import profile

import lazy_tensor
from lazy_tensor import materialize
from lazy_tensor.dispatch import settings

Step = Callable[[], Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = ("computed in", "side", "settled step", "/ eager", "convolutions", "backward")


def step_of(side: str, dtype: torch.dtype, *, quick: bool) -> Step:
    """Forward and backward of a convolution, under autocast unless it is computed in float32.

    A step returns the weight's gradient, which is pending on the lazy side.
    """
    torch.manual_seed(0)
    channels, size = (4, 8) if quick else (32, 56)
    layer = nn.Conv2d(channels, channels, 3, padding=1)
    x = torch.randn(8, channels, size, size)
    if side == "lazy":
        layer, x = lazy_tensor.wrap(layer), lazy_tensor.wrap(x)
    x.requires_grad_()
    forward = peers.compiled(side, layer) if side in peers.PEERS else layer

    def step() -> Tensor:
        layer.zero_grad()
        x.grad = None
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            y = torch.relu(forward(x))
        y.float().square().mean().backward()
        grad = layer.weight.grad
        assert grad is not None
        return grad

    return step


def convolutions(side: str, step: Step) -> tuple[int, int]:
    """The numbers of convolutions and of backward convolutions that a settled step computes.

    The profiler counts a recorded convolution as well. So the lazy side records outside of it, and
    is profiled only while it runs what it recorded.
    """
    recorded = step() if side == "lazy" else None
    with profile() as profiled:
        materialize(step() if recorded is None else recorded)
    seen = Counter(event.name for event in profiled.events())
    return seen["aten::convolution"], seen["aten::convolution_backward"]


def _run(step: Step) -> None:
    materialize(step())


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = settings.current()
    # it also clears what the policy has learned from the benchmark before
    lazy_tensor.cache_clear()
    yield
    settings.put(before)


@pytest.fixture(scope="module")
def rows(results_dir: Path) -> Iterator[list[list[str]]]:
    collected: list[list[str]] = []
    yield collected
    if len({row[0] for row in collected if row[0]}) == len(DTYPES):
        title = "Forward and backward of a 3 x 3 convolution with bias, 8 x 32 x 56 x 56"
        text = page(title, COLUMNS, collected, peers.notes(peers.PEERS))
        (results_dir / "convolution.md").write_text(text)


@pytest.mark.filterwarnings("ignore:.*[Pp]rofiler")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def bench_convolution(
    benchmark: BenchmarkFixture, quick: bool, rows: list[list[str]], dtype: torch.dtype
) -> None:
    sides = ("eager", "lazy", *(() if quick else peers.present(peers.PEERS)))
    lazy_tensor.configure(compile="off" if quick else "blocking")
    steps = {side: step_of(side, dtype, quick=quick) for side in sides}
    grads = {side: [materialize(step()) for _ in range(3)][-1] for side, step in steps.items()}
    for grad in grads.values():
        torch.testing.assert_close(grad, grads["eager"], rtol=0.05, atol=1e-3)
    rounds, warmup = (2, 1) if quick else (40, 5)
    runs = {side: partial(_run, step) for side, step in steps.items()}
    timings = benchmark.pedantic(interleaved, args=(runs, rounds, warmup), rounds=1, iterations=1)
    # the default may have found recording slower, and would have nothing to count
    lazy_tensor.configure(record="always")
    counts = {side: convolutions(side, step) for side, step in steps.items()}
    assert counts["lazy"] == (1, 1)
    for side in sides:
        rows.append([
            str(dtype).removeprefix("torch.") if side == "eager" else "",
            side,
            f"{timings.spread(side).median_s * 1e3:.2f} ms",
            f"{timings.ratio(side, 'eager'):.2f}×",
            *map(str, counts[side]),
        ])  # fmt: skip
    benchmark.extra_info.update({side: timings.ratio(side, "eager") for side in sides})
