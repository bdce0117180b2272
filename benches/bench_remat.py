"""Peak memory and time of 32 transformer blocks whose values are kept for backward, or recomputed.

`torch.utils.checkpoint` repeats a block's whole forward; `remat_interval` repeats fusible calls
only. Each side runs in processes of its own, and the sides take turns. Writes `results/remat.md`.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

from block_stack import Order, Report, run_apart
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import bytes_text, page, seconds_text

FUSED = {"backend": "inductor", "compile": "blocking"}
SIDES = {
    "eager": Order("eager"),
    "eager, checkpoint": Order("eager", checkpoints=True),
    "aten": Order("lazy", options={"backend": "aten"}),
    "aten, remat_interval=1": Order("lazy", options={"backend": "aten", "remat_interval": 1}),
    "aten, remat_interval=4": Order("lazy", options={"backend": "aten", "remat_interval": 4}),
    "aten, checkpoint": Order("lazy", checkpoints=True, options={"backend": "aten"}),
    "inductor": Order("lazy", options=FUSED),
    "inductor, remat_interval=1": Order("lazy", options=FUSED | {"remat_interval": 1}),
    "inductor, remat_interval=4": Order("lazy", options=FUSED | {"remat_interval": 4}),
}
COLUMNS = ("side", "step", "/ eager", "peak memory", "/ eager", "loss and gradients")


def bench_remat(benchmark: BenchmarkFixture, quick: bool, results_dir: Path) -> None:
    sides = dict(list(SIDES.items())[:4]) if quick else SIDES
    orders = {k: tiny(order) if quick else order for k, order in sides.items()}
    rounds = 1 if quick else 3

    def measure() -> list[dict[str, Report]]:
        return [{k: run_apart(order) for k, order in orders.items()} for _ in range(rounds)]

    taken = benchmark.pedantic(measure, rounds=1, iterations=1)
    rows = []
    for name, order in orders.items():
        reports = [reports_of[name] for reports_of in taken]
        # the backend aten runs eager's kernels, so its results must be eager's bit for bit
        is_equal = all(one[name].digest == one["eager"].digest for one in taken)
        if order.options.get("backend") != "inductor":
            assert is_equal, f"{name} differs from eager"
        seconds = [one[name].seconds / one["eager"].seconds for one in taken]
        peak = [one[name].peak_bytes / one["eager"].peak_bytes for one in taken]
        rows.append([
            name,
            seconds_text(statistics.median(r.seconds for r in reports)),
            f"{statistics.median(seconds):.2f}×",
            bytes_text(statistics.median_low(r.peak_bytes for r in reports)),
            f"{statistics.median(peak):.2f}×",
            "equal bit for bit" if is_equal else "close",
        ])  # fmt: skip
    if not quick:
        title = "32 transformer blocks, 256 wide, batch 4 of 256 tokens, forward and backward"
        (results_dir / "remat.md").write_text(page(title, COLUMNS, rows))


def tiny(order: Order) -> Order:
    return replace(order, layers=2, width=16, tokens=8, batch=1)
