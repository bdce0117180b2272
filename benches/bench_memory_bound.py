"""Chains of ops that are bound by memory: what fusion saves where no matrix product hides it.

Writes `results/memory_bound.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page
from timing import interleaved
from torch import Tensor
from torch.nn import functional as F

import lazy_tensor

Chain = Callable[[Tensor, Tensor], Tensor]


def norm_gelu_residual(x: Tensor, weight: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, (x.shape[1],), weight)) + x


def ten_pointwise(x: Tensor, weight: Tensor) -> Tensor:
    y = x * weight
    y = (y + 1) * 0.5
    y = y - x
    y = y.sigmoid() * x
    y = y.clamp(-2, 2).abs() + 0.25
    return y.mul(x) - 1


CHAINS: dict[str, tuple[Chain, int]] = {
    "layer norm, GELU, residual": (norm_gelu_residual, 2048),
    "ten pointwise ops": (ten_pointwise, 4096),
}


@pytest.fixture(scope="module")
def rows(results_dir: Path) -> Iterator[list[list[str]]]:
    collected: list[list[str]] = []
    yield collected
    if len(collected) == len(CHAINS):
        columns = ["", "size", "eager", "lazy", "replay", "torch.compile",
                   "lazy / eager", "lazy / compile", "replay / compile"]  # fmt: skip
        text = page("Memory-bound chains, float32, allocator as installed", columns, collected)
        (results_dir / "memory_bound.md").write_text(text)


@pytest.mark.parametrize("name", CHAINS)
def bench_chain(benchmark: BenchmarkFixture, quick: bool, rows: list[list[str]], name: str) -> None:
    chain, size = CHAINS[name]
    size = 32 if quick else size
    x, weight = torch.randn(size, size), torch.randn(size)

    def lazy() -> Tensor:
        with lazy_tensor.lazy_mode(compile="off" if quick else "blocking"):
            return chain(x, weight)

    replayed = lazy_tensor.replay(chain, compile="off" if quick else "blocking")
    sides: dict[str, Callable[[], object]] = {
        "eager": lambda: chain(x, weight),
        "lazy": lazy,
        "replay": lambda: replayed(x, weight),
    }
    if not quick:
        compiled = torch.compile(chain)
        sides["compile"] = lambda: compiled(x, weight)
    torch.testing.assert_close(lazy_tensor.materialize(lazy()), chain(x, weight))
    rounds = 4 if quick else 30
    timings = benchmark.pedantic(interleaved, args=(sides, rounds, 4), rounds=1, iterations=1)
    cells = [f"{timings.spread(side).median_s * 1e3:.1f} ms" for side in sides]
    pairs = [("lazy", "eager"), ("lazy", "compile"), ("replay", "compile")]
    ratios = [f"{timings.ratio(a, b):.2f}×" for a, b in pairs if b in sides]
    assert replayed.n_replayed
    rows.append([name, f"{size} x {size}", *cells, *ratios])
    benchmark.extra_info["ratios"] = ratios
