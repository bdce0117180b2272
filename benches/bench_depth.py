"""Compile time by depth: a residual stack of 1 to 128 layers, forward and backward.

Each side and depth runs in a process of its own with empty caches (`residual.py`). Equal layers
share kernels, so their number should not grow with the depth. Writes `results/depth.md` and a plot.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peers
import plots
import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page
from workloads import in_caches

DEPTHS = (1, 2, 4, 16, 64, 128)
SIDES = ("eager", "lazy", "lazy, blocking", *peers.PEERS)


def run(side: str, depth: int, caches: Path | None) -> dict[str, Any]:
    """What a side measures in a process of its own, with its kernel caches under `caches` (None:
    the usual ones)."""
    command = [sys.executable, str(Path(__file__).with_name("residual.py")), side, str(depth)]
    answer = subprocess.run(
        command, env=in_caches(caches), capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


@dataclass(slots=True)
class Results:
    rows: list[list[str]] = field(default_factory=list)
    first_s: dict[str, dict[str, float]] = field(default_factory=dict)
    settled_ms: dict[str, dict[str, float]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def sides(quick: bool) -> tuple[str, ...]:
    return SIDES[:2] if quick else peers.present(SIDES)


@pytest.fixture(scope="module")
def results(results_dir: Path, sides: tuple[str, ...]) -> Iterator[Results]:
    found = Results()
    yield found
    if len(found.rows) == len(DEPTHS):
        title = "A residual stack of 10 x 10 products: compile time by depth, empty caches"
        columns = (
            "layers", "kernels", *(f"first step, {side}" for side in sides),
            *(f"settled step, {side}" for side in sides), "largest difference of losses",
        )  # fmt: skip
        text = page(title, columns, found.rows, peers.notes(SIDES))
        (results_dir / "depth.md").write_text(text)
        panels = {"first step, seconds": found.first_s, "settled step, ms": found.settled_ms}
        plots.lines(results_dir / "depth.png", title, "layers", panels)


@pytest.mark.parametrize("depth", DEPTHS)
def bench_depth(
    benchmark: BenchmarkFixture,
    quick: bool,
    sides: tuple[str, ...],
    results: Results,
    depth: int,
    tmp_path: Path,
) -> None:
    def measure() -> dict[str, dict[str, Any]]:
        return {
            side: run(side, depth, None if quick else tmp_path / str(i))
            for i, side in enumerate(sides)
        }

    if quick and depth not in DEPTHS[1::4]:
        pytest.skip("a quick run takes two depths")
    found = benchmark.pedantic(measure, rounds=1, iterations=1)
    if quick:
        return
    losses = [of_side["loss"] for of_side in found.values()]
    results.first_s[str(depth)] = {side: found[side]["first_s"] for side in sides}
    results.settled_ms[str(depth)] = {side: found[side]["settled_s"] * 1e3 for side in sides}
    results.rows.append([
        str(depth),
        str(found["lazy, blocking"]["compiled"]),
        *(f"{seconds:.2f} s" for seconds in results.first_s[str(depth)].values()),
        *(f"{ms:.2f} ms" for ms in results.settled_ms[str(depth)].values()),
        f"{max(losses) - min(losses):.1e}",
    ])  # fmt: skip
