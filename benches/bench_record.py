"""What recording costs: one `add`, and the mix of ops of a GPT's training step.

The floor is a tensor subclass whose `__torch_dispatch__` only makes the output wrapper, which every
recorder in Python has to do. Recording is timed on hits. What was recorded is forgotten, so that
running it is not timed. Writes `results/record.md`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from op_mix import Program, captured
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page
from timing import Timings, interleaved

import lazy_tensor
from lazy_tensor.dispatch import settings, torch_private
from lazy_tensor.dispatch.trie.trace import local
from lazy_tensor.examples.gpt import GPT, SIZES, train_step

make_wrapper = torch_private.make_wrapper
CPU = torch.device("cpu")
N_ROWS = 3


class Floor(torch.Tensor):
    """The floor for `add`: each op makes one wrapper of size 4 x 4."""

    __torch_function__ = torch_private.disabled_torch_function  # type: ignore[assignment]
    outputs: Iterator[Any]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return make_wrapper(
            cls, (4, 4), (4, 1), 0, None, torch.float32, torch.strided, CPU, False, False
        )


class FloorOfMix(Floor):
    """The floor for a mix of ops: each one makes the wrappers that `outputs` has next."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        metas = next(cls.outputs)
        if metas is None:
            return args[0] if func._schema.returns else None
        container, described = metas
        if container is None:
            return make_wrapper(cls, *described)
        return container(None if meta is None else make_wrapper(cls, *meta) for meta in described)


@pytest.fixture(scope="module")
def rows(results_dir: Path) -> Iterator[list[list[str]]]:
    collected: list[list[str]] = []
    yield collected
    if len(collected) == N_ROWS:
        columns = ["", "floor", "recording a hit", "against the floor", "eager"]
        text = page("Cost of recording, microseconds an op, one thread", columns, collected)
        (results_dir / "record.md").write_text(text)


@pytest.fixture(autouse=True)
def one_quiet_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # a collection would be on the account of the side in whose round it comes
    gc.disable()
    yield
    gc.enable()
    torch.set_num_threads(n_threads)


@pytest.fixture(autouse=True)
def recorded_whatever_it_costs() -> Iterator[None]:
    before = settings.current()
    lazy_tensor.configure(record="always")
    yield
    settings.put(before)


def meta_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.stride(), tensor.storage_offset(), None, tensor.dtype,
            torch.strided, tensor.device, False, False)  # fmt: skip


def forget_recording() -> None:
    """Drop the pending ops without running them. So recording alone is timed."""
    pending = local.trace.pending()
    local.trace.reset()
    # leaves have their data, and must not point into the trace any more
    for value in pending.leaf_values:
        value.slot = None
    # without a sync point, what repeats would count as turns of a loop, and each would be flushed
    local.trace.policy.past.at_sync_point()


def row(name: str, timings: Timings, n_ops: int, driver_s: float = 0.0) -> list[str]:
    """A row of the table. `driver_s` is the time of the loop that makes the calls, which is taken
    off each side."""
    cost = {k: (timings.spread(k).median_s - driver_s) / n_ops * 1e6 for k in timings.seconds}
    pairs = zip(timings.seconds["record"], timings.seconds["floor"], strict=True)
    ratios = sorted((record - driver_s) / (floor - driver_s) for record, floor in pairs)
    ratio = ratios[len(ratios) // 2]
    eager = f"{cost['eager']:.2f}" if "eager" in cost else ""
    return [name, f"{cost['floor']:.2f}", f"{cost['record']:.2f}", f"{ratio:.2f}×", eager]


def bench_add(benchmark: BenchmarkFixture, quick: bool, rows: list[list[str]]) -> None:
    plain = torch.randn(4, 4)
    floor = make_wrapper(Floor, *meta_of(plain))
    lazy = lazy_tensor.wrap(plain.clone())
    n_ops = 50 if quick else 2000

    def adds(tensor: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            for _ in range(n_ops):
                tensor + tensor

        return run

    functions = {"floor": adds(floor), "record": adds(lazy), "eager": adds(plain)}
    timings = _timed(benchmark, functions, 3 if quick else 100)
    rows.append(row("`add`, lazy tensors", timings, n_ops))
    benchmark.extra_info["ratio"] = rows[-1][3]


def bench_add_in_mode(benchmark: BenchmarkFixture, quick: bool, rows: list[list[str]]) -> None:
    plain = torch.randn(4, 4)
    n_ops = 50 if quick else 2000

    class FloorMode(torch_private.TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            return make_wrapper(
                Floor, (4, 4), (4, 1), 0, None, torch.float32, torch.strided, CPU, False, False
            )

    def adds() -> None:
        for _ in range(n_ops):
            plain + plain

    def in_floor() -> None:
        with FloorMode():  # type: ignore[no-untyped-call]
            adds()

    def in_lazy() -> None:
        with lazy_tensor.lazy_mode():
            adds()
            forget_recording()

    timings = _timed(
        benchmark, {"floor": in_floor, "record": in_lazy, "eager": adds}, 3 if quick else 100
    )
    rows.append(row("`add`, plain tensors in the mode", timings, n_ops))


def bench_mix(benchmark: BenchmarkFixture, quick: bool, rows: list[list[str]]) -> None:
    program = training_step()
    n_varying = sum(bool(entry.varying) for entry in program.entries)
    metas = output_metas(program)
    floor_leaves = [make_wrapper(FloorOfMix, *meta_of(leaf)) for leaf in program.leaves]
    lazy_leaves = [lazy_tensor.wrap(leaf.detach().clone()) for leaf in program.leaves]
    canned = stored_results(program)

    def floor() -> None:
        FloorOfMix.outputs = iter(metas)
        program.drive(floor_leaves)

    def record() -> None:
        program.drive(lazy_leaves)

    def driver() -> None:
        results = iter(canned)
        program.drive(program.leaves, lambda entry, args, kwargs: next(results))

    def vary_and_forget() -> None:
        forget_recording()
        program.vary(1.0001)

    functions = {"floor": floor, "record": record, "driver": driver}
    rounds = 3 if quick else 60
    timings = benchmark.pedantic(
        interleaved,
        args=(functions, rounds, max(4, rounds // 10), vary_and_forget),
        rounds=1,
        iterations=1,
    )
    name = f"training step of a GPT, {len(program.entries)} ops, {n_varying} with changing numbers"
    rows.append(row(name, timings, len(program.entries), timings.spread("driver").median_s))
    benchmark.extra_info["ratio"] = rows[-1][3]


def _timed(
    benchmark: BenchmarkFixture, functions: dict[str, Callable[[], None]], rounds: int
) -> Timings:
    """Timings of all functions; what they record is forgotten between rounds, off the clock."""

    timings: Timings = benchmark.pedantic(
        interleaved,
        args=(functions, rounds, max(2, rounds // 10), forget_recording),
        rounds=1,
        iterations=1,
    )
    return timings


def training_step() -> Program:
    """The recorded calls of a settled training step of a tiny GPT.

    Left out are arithmetic on 0-dim CPU tensors (the optimizer's step counts), which runs at once,
    `.item()`, and factories, which a tensor subclass never sees.
    """
    model = GPT(SIZES["tiny"])
    train = train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))
    tokens = torch.randint(0, 256, (2, SIZES["tiny"].context))
    for _ in range(2):
        train(tokens, tokens)

    def is_recorded(op: Any, tensors: list[Any]) -> bool:
        is_sync = op is torch.ops.aten._local_scalar_dense.default
        is_tiny = all(t.dim() == 0 for t in tensors)
        return op.namespace == "aten" and not is_sync and not is_tiny

    def step() -> None:
        train(tokens, tokens)

    # numbers that differ between two captures, such as bias corrections, are varied in each round
    program = captured(step, is_recorded)
    program.note_varying(captured(step, is_recorded))
    return program


def stored_results(program: Program) -> list[Any]:
    """The results of the program's calls, run once in eager."""
    results: list[Any] = []

    def call(entry: Any, args: Any, kwargs: Any) -> Any:
        results.append(entry.op(*args, **kwargs))
        return results[-1]

    with torch.no_grad():
        program.drive([leaf.detach().clone() for leaf in program.leaves], call)
    return results


def output_metas(program: Program) -> list[Any]:
    """For each call, `(container, metadata)` of the wrappers that the floor makes.

    None for a call without new results; a container of None for a single one.
    """
    metas: list[Any] = []
    for entry, result in zip(program.entries, stored_results(program), strict=True):
        if not entry.n_results:
            metas.append(None)
        elif entry.is_single:
            metas.append((None, meta_of(result)))
        else:
            metas.append((type(result), [None if r is None else meta_of(r) for r in result]))
    return metas
