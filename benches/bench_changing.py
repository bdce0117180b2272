"""A loop that never repeats itself: shapes, slices and scalars change at every step.

Nothing can be reused. The benchmark shows that laziness costs little then, that memory doesn't grow
and that every cache keeps its bound. Writes `results/changing.md`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page
from timing import interleaved
from torch import Tensor

import lazy_tensor

N_STEPS = 10_000
BLOCK = 250
WIDTHS = {"tiny": 16, "small": 64, "typical": 256}


@dataclass(slots=True)
class Loop:
    """The state of one side's loop; `run` does the next `n_steps`."""

    data: Tensor
    weight: Tensor
    cache: Tensor
    total: Tensor
    step: int = 0

    @classmethod
    def of_width(cls, width: int) -> Loop:
        torch.manual_seed(0)
        return cls(
            torch.randn(4 * width + 2000, width),
            torch.randn(width, width),
            torch.zeros(width, 64),
            torch.zeros(width),
        )

    def run(self, n_steps: int) -> None:
        for step in range(self.step, self.step + n_steps):
            self._advance(step)
        self.step += n_steps

    def _advance(self, step: int) -> None:
        width = self.weight.shape[0]
        n_rows = width // 2 + step * 7919 % (2 * width)
        first = step * 31 % 1900
        rows = self.data[first : first + n_rows]
        hidden = torch.relu(rows @ self.weight) * (1 + step / N_STEPS)
        self.cache[:, step % 64] = hidden.mean(0)
        self.total.add_(hidden[: n_rows // 2 + 1].sum(0), alpha=1 / (1 + step))
        if step % 10 == 0:
            self.total.sum().item()


@pytest.fixture(scope="module")
def rows(results_dir: Path) -> Iterator[list[list[str]]]:
    collected: list[list[str]] = []
    yield collected
    if len(collected) == len(WIDTHS):
        columns = ["width", "eager, us a step", "lazy / eager, whole run", "memory growth"]
        title = f"{N_STEPS:,} steps whose shapes, slices and scalars keep changing"
        (results_dir / "changing.md").write_text(page(title, columns, collected))


@pytest.mark.parametrize("name", WIDTHS)
def bench_changing_loop(
    benchmark: BenchmarkFixture, quick: bool, rows: list[list[str]], name: str
) -> None:
    lazy_tensor.cache_clear()
    eager, lazy = Loop.of_width(WIDTHS[name]), Loop.of_width(WIDTHS[name])
    block = 25 if quick else BLOCK
    n_blocks = 4 if quick else N_STEPS // BLOCK
    resident: list[int] = []

    def run_lazy() -> None:
        with lazy_tensor.lazy_mode():
            lazy.run(block)
        resident.append(resident_bytes())

    timings = benchmark.pedantic(
        interleaved,
        args=({"eager": lambda: eager.run(block), "lazy": run_lazy}, n_blocks, 0),
        rounds=1,
        iterations=1,
    )
    assert torch.equal(eager.total, lazy.total)
    assert torch.equal(eager.cache, lazy.cache)
    for cache in lazy_tensor.cache_info().values():
        assert cache.maxsize is not None
        assert cache.currsize <= cache.maxsize
    # memory is compared from the end of the first fifth on, which fills the bounded caches and the
    # allocator's pools
    growth = resident[-1] - resident[len(resident) // 5]
    seconds = {side: sum(times) for side, times in timings.seconds.items()}
    ratio = seconds["lazy"] / seconds["eager"]
    step_us = seconds["eager"] / (block * n_blocks) * 1e6
    rows.append([f"{WIDTHS[name]}", f"{step_us:.0f}", f"{ratio:.2f}×", f"{growth / 2**20:.1f} MiB"])
    benchmark.extra_info["ratio"] = rows[-1][2]


def resident_bytes() -> int:
    """The resident memory of the process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
