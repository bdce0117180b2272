"""The fixed costs of a block, a flush and a read of a value, measured on eight floats beside eager.

All is recorded and planned before it is timed, and runs op by op. Writes `results/fixed.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page
from timing import interleaved

import lazy_tensor
from lazy_tensor import lazy_mode
from lazy_tensor.dispatch import settings


@pytest.fixture(autouse=True)
def one_thread_without_kernels() -> Iterator[None]:
    n_threads, before = torch.get_num_threads(), settings.current()
    torch.set_num_threads(1)
    lazy_tensor.configure(compile="off", warn=False)
    yield
    settings.put(before)
    torch.set_num_threads(n_threads)


def bench_fixed(benchmark: BenchmarkFixture, quick: bool, results_dir: Path) -> None:
    n, rounds = (20, 3) if quick else (500, 60)
    x = torch.randn(8)

    def repeated(once: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(n):
                once()

        return run

    def in_block(once: Callable[[], object]) -> Callable[[], None]:
        return lazy_mode(record="always")(repeated(once))

    def block(record: bool, once: Callable[[], object]) -> Callable[[], None]:
        """`n` blocks with `once` in each. `record`: everything is recorded, by a setting around all
        of them, so that blocks don't pay for an option."""

        def blocks() -> None:
            for _ in range(n):
                with lazy_mode():
                    once()

        # The policy knows a block by its code object. A copy gives each case a place of its own.
        code = blocks.__code__.replace()
        own: Callable[[], None] = FunctionType(code, globals(), closure=blocks.__closure__)

        def recorded() -> None:
            lazy_tensor.configure(record="always")
            own()
            lazy_tensor.configure(record="auto")

        return recorded if record else own

    def nothing() -> None:
        """The cost of a function call, on both sides."""

    def add() -> torch.Tensor:
        return x + x

    def add_and_flush() -> None:
        _ = x + x
        lazy_tensor.flush()

    def read() -> float:
        return float((x + x).sum())

    rows = {
        "an empty block, recorded": (block(True, nothing), repeated(nothing)),
        "an empty block, bypassed": (block(False, nothing), repeated(nothing)),
        "a block of one op, recorded": (block(True, add), repeated(add)),
        "a block of one op, bypassed": (block(False, add), repeated(add)),
        "an op and its flush": (in_block(add_and_flush), repeated(add)),
        "`float((x + x).sum())`": (in_block(read), repeated(read)),
    }
    functions = {f"{name}, {side}": function
                 for name, sides in rows.items()
                 for side, function in zip(("lazily", "eager"), sides, strict=True)}  # fmt: skip
    timings = benchmark.pedantic(
        interleaved, args=(functions, rounds, max(3, rounds // 10)), rounds=1, iterations=1
    )
    told = []
    for name in rows:
        lazily, eager = (timings.spread(f"{name}, {side}").median_s for side in ("lazily", "eager"))
        told.append([name, f"{lazily / n * 1e6:.1f}", f"{eager / n * 1e6:.1f}"])
        benchmark.extra_info[name] = told[-1][1]
    title = "What a block, a flush and a read cost, microseconds, one thread"
    (results_dir / "fixed.md").write_text(page(title, ["", "lazily", "eager"], told))
