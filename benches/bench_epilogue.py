"""Whether products gain if bias, GELU and residual run in their epilogues, by Inductor.

`autotuned` lets Inductor choose C++ templates of its own, which fuse epilogues, over the library's
products; `frozen` makes weights constants as well, as only inference can, and packs them. What is
left over the product alone is the most that any epilogue could gain. Writes `results/epilogue.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page
from timing import interleaved
from torch import Tensor, nn
from torch.nn import functional as F

SHAPES = ((2048, 384, 1536), (2048, 1536, 384), (1024, 256, 1024), (512, 512, 512))
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "autotuned": {"max_autotune": True},
    "frozen": {"max_autotune": True, "freezing": True},
}
COLUMNS = ("rows, in, out", "product alone", *OPTIONS, "product / default", "autotuned / default",
           "frozen / default")  # fmt: skip


class Layer(nn.Module):
    """A linear layer, GELU and a residual."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(n_in, n_out)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return F.gelu(self.linear(x)) + residual


def sides_of(rows: int, n_in: int, n_out: int, quick: bool) -> dict[str, Callable[[], object]]:
    x, residual = torch.randn(rows, n_in), torch.randn(rows, n_out)
    layer = Layer(n_in, n_out)
    sides: dict[str, Callable[[], object]] = {"product": lambda: layer.linear(x)}
    for name, options in OPTIONS.items():
        torch._dynamo.reset()
        compiled = layer if quick else torch.compile(layer, options=options)
        compiled(x, residual)
        sides[name] = partial(compiled, x, residual)
    return sides


def bench_epilogue(benchmark: BenchmarkFixture, quick: bool, results_dir: Path) -> None:
    rounds = 1 if quick else 30

    def measure() -> list[list[str]]:
        rows = []
        for shape in SHAPES[:1] if quick else SHAPES:
            with torch.no_grad():
                timings = interleaved(sides_of(*shape, quick), rounds, 5)
            seconds = [timings.spread(name).median_s for name in ("product", *OPTIONS)]
            compared = ("product", "autotuned", "frozen")
            ratios = [f"{timings.ratio(name, 'default'):.2f}×" for name in compared]
            rows.append([str(shape), *(f"{s * 1e3:.2f} ms" for s in seconds), *ratios])
        return rows

    rows = benchmark.pedantic(measure, rounds=1, iterations=1)
    (results_dir / "epilogue.md").write_text(
        page("GELU(linear(x)) + residual by Inductor, inference", COLUMNS, rows)
    )
