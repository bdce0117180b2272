"""Compile time by depth: a residual stack of 1 to 128 layers, forward and backward.

Each side and depth in a process with empty caches. Writes `results/depth.md`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page

DEPTHS = (1, 2, 4, 16, 64, 128)
SIDES = ("eager", "lazy", "lazy, blocking", "compile")
COLUMNS = (
    "layers", "kernels", *(f"first step, {side}" for side in SIDES),
    *(f"settled step, {side}" for side in SIDES), "largest difference of losses",
)  # fmt: skip


def run(side: str, depth: int, caches: Path) -> dict[str, Any]:
    env = {
        **os.environ,
        "LAZY_TENSOR_CACHE_DIR": str(caches / "lazy_tensor"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
    }
    command = [sys.executable, str(Path(__file__).with_name("residual.py")), side, str(depth)]
    answer = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def rows(results_dir: Path) -> Iterator[list[list[str]]]:
    collected: list[list[str]] = []
    yield collected
    if len(collected) == len(DEPTHS):
        title = "A residual stack of 10 x 10 products: compile time by depth, empty caches"
        (results_dir / "depth.md").write_text(page(title, COLUMNS, collected))


@pytest.mark.parametrize("depth", DEPTHS)
def bench_depth(
    benchmark: BenchmarkFixture, smoke: bool, rows: list[list[str]], depth: int, tmp_path: Path
) -> None:
    sides = SIDES[:2] if smoke else SIDES

    def measure() -> dict[str, dict[str, Any]]:
        return {side: run(side, depth, tmp_path / side.replace(", ", "_")) for side in sides}

    found = benchmark.pedantic(measure, rounds=1, iterations=1)
    if smoke:
        return
    losses = [of_side["loss"] for of_side in found.values()]
    rows.append([
        str(depth),
        str(found["lazy, blocking"]["compiled"]),
        *(f"{of_side['first_s']:.2f} s" for of_side in found.values()),
        *(f"{of_side['settled_s'] * 1e3:.2f} ms" for of_side in found.values()),
        f"{max(losses) - min(losses):.1e}",
    ])  # fmt: skip
