"""Host cost of sharded tensors: single ops, an MLP and a transformer block, split over 4 ranks.

The process group is a fake one of 4 ranks on the CPU, whose collectives do nothing. What is left is
the time of Python and the dispatcher. Each program runs on lazy tensors that aren't sharded
("plain"), on our `DTensor`, and on torch's. Writes `results/sharding.md`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor as torchs
import torch.distributed.tensor.parallel as torchs_parallel
from bench_record import forget_recording
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page
from timing import Timings, interleaved
from torch.nn import Linear, Module, functional

import lazy_tensor
import lazy_tensor.sharding as ours
from lazy_tensor.dispatch import settings

N_ROWS = 12
N_OPS = 100
WIDTH, HEADS = 16, 4


@pytest.fixture(scope="module")
def rows(results_dir: Path) -> Iterator[list[list[str]]]:
    found: list[list[str]] = []
    yield found
    if len(found) == N_ROWS:
        title = "Host cost of sharded tensors on 4 ranks, microseconds"
        columns = ["", "plain lazy", "sharded", "torch's DTensor", "sharded / plain", "/ torch's"]
        (results_dir / "sharding.md").write_text(page(title, columns, found))


@pytest.fixture
def records_all() -> Iterator[None]:
    """Everything is recorded from the first call on. Where recording alone is timed, no value is
    read, and the policy would wait for a sync point."""
    before = settings.current()
    lazy_tensor.configure(record="always")
    yield
    settings.put(before)


def timed(
    benchmark: BenchmarkFixture,
    functions: dict[str, Callable[[], object]],
    between: Callable[[], object],
    *,
    quick: bool,
) -> Timings:
    timings: Timings = benchmark.pedantic(
        interleaved, args=(functions, 3 if quick else 100, 5, between), rounds=1, iterations=1
    )
    return timings


IN_A_ROW = 5
"""Calls in a sample. The first one finds the processor's caches full of another side's code."""


def repeated(call: Callable[[], object]) -> None:
    for _ in range(IN_A_ROW):
        call()


def row(name: str, timings: Timings, n: int = 1) -> list[str]:
    medians = [timings.spread(side).median_s / n * 1e6 for side in ("plain", "ours", "torch")]
    return [
        name,
        *(f"{median:.2f}" if median < 10 else f"{median:.0f}" for median in medians),
        f"{timings.ratio('ours', 'plain'):.2f}×",
        f"{timings.ratio('ours', 'torch'):.2f}×",
    ]


OPS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda x, weight, bias: torch.add(x, x),
    "addmm": lambda x, weight, bias: torch.addmm(bias, x, weight),
    "relu": lambda x, weight, bias: torch.relu(x),
    "view": lambda x, weight, bias: x.view(-1, 4, 4),
}


@pytest.mark.usefixtures("records_all")
@pytest.mark.parametrize("name", OPS)
def bench_op(
    benchmark: BenchmarkFixture, quick: bool, rows: list[list[str]], mesh: Any, name: str
) -> None:
    x, weight, bias = torch.randn(8, WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)
    placed = ((x, [ours.Shard(0)]), (weight, [ours.Replicate()]), (bias, [ours.Replicate()]))
    sides: dict[str, list[Any]] = {
        "plain": [lazy_tensor.wrap(t.clone()) for t in (x[:2], weight, bias)],
        "ours": [ours.distribute_tensor(t, mesh, where) for t, where in placed],
        "torch": [torchs.distribute_tensor(t, mesh, where) for t, where in placed],
    }
    op = OPS[name]

    def calls(tensors: list[Any]) -> Callable[[], None]:
        def call() -> None:
            with torch.no_grad():
                for _ in range(N_OPS):
                    op(*tensors)

        return call

    functions: dict[str, Callable[[], object]] = {k: calls(v) for k, v in sides.items()}
    timings = timed(benchmark, functions, forget_recording, quick=quick)
    rows.append(row(f"`{name}`, recording a hit", timings, N_OPS))


class Mlp(Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Linear(WIDTH, 4 * WIDTH), Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x)))


class Block(Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm1, self.norm2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def attention(self, x: Any) -> Any:
        batch, length, _ = x.shape

        def heads(y: Any) -> Any:
            return y.view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


def mlp_plan(library: Any) -> dict[str, Any]:
    return {"up": library.ColwiseParallel(), "down": library.RowwiseParallel()}


def block_plan(library: Any) -> dict[str, Any]:
    split, joined = library.ColwiseParallel, library.RowwiseParallel
    return {"q": split(), "k": split(), "v": split(), "out": joined(),
            "mlp.up": split(), "mlp.down": joined()}  # fmt: skip


def sequence_plan(library: Any) -> dict[str, Any]:
    """As `block_plan`; outside of matrix products each rank has a part of the sequence."""
    whole, part = ours.Replicate(), ours.Shard(1)

    def split() -> Any:
        return library.ColwiseParallel(input_layouts=part)

    def joined() -> Any:
        return library.RowwiseParallel(output_layouts=part, use_local_output=False)

    return {
        "": library.PrepareModuleInputOutput(
            input_layouts=(whole,), desired_input_layouts=(part,),
            use_local_input=False, output_layouts=(part,), desired_output_layouts=(whole,),
        ),
        "norm1": library.SequenceParallel(), "norm2": library.SequenceParallel(),
        "q": split(), "k": split(), "v": split(), "out": joined(),
        "mlp.up": split(), "mlp.down": joined(),
    }  # fmt: skip


def forward(model: Module, x: Any) -> None:
    with torch.no_grad():
        model(x)


def forward_and_backward(model: Module, x: Any) -> None:
    model(x).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None


PROGRAMS: dict[str, tuple[Any, Any, Any, tuple[int, ...]]] = {
    "MLP, forward": (Mlp, mlp_plan, forward, (8, WIDTH)),
    "MLP, forward and backward": (Mlp, mlp_plan, forward_and_backward, (8, WIDTH)),
    "block, forward and backward": (Block, block_plan, forward_and_backward, (2, 8, WIDTH)),
    "block with the sequence split": (Block, sequence_plan, forward_and_backward, (2, 8, WIDTH)),
}


@pytest.mark.usefixtures("records_all")
@pytest.mark.parametrize("name", PROGRAMS)
def bench_program(
    benchmark: BenchmarkFixture, quick: bool, rows: list[list[str]], mesh: Any, name: str
) -> None:
    build, plan_of, run, size = PROGRAMS[name]
    model = build()

    def parallel(library: Any) -> Module:
        made: Module = copy.deepcopy(model)
        for path, style in plan_of(library).items():
            library.parallelize_module(made, mesh, style if not path else {path: style})
        return made

    plain = lazy_tensor.wrap(copy.deepcopy(model))
    x = torch.randn(size)
    lazy_x = lazy_tensor.wrap(x.clone())
    sharded, torchs_own = parallel(ours), parallel(torchs_parallel)
    functions: dict[str, Callable[[], object]] = {
        "plain": lambda: repeated(lambda: run(plain, lazy_x)),
        "ours": lambda: repeated(lambda: run(sharded, lazy_x)),
        "torch": lambda: repeated(lambda: run(torchs_own, x)),
    }
    timings = timed(benchmark, functions, forget_recording, quick=quick)
    rows.append(row(f"{name}, recording", timings, IN_A_ROW))


def adds(x: Any, n: int) -> Any:
    with torch.no_grad():
        for _ in range(n):
            x = x + x
    return x


WHOLE = ("one `add`", "100 `add`s", "MLP, forward and backward")


@pytest.mark.parametrize("name", WHOLE)
def bench_whole(
    benchmark: BenchmarkFixture, quick: bool, rows: list[list[str]], mesh: Any, name: str
) -> None:
    """A block of `lazy_mode` with its flush under the default policy: the time that a user sees."""
    x, model = torch.randn(8, WIDTH), Mlp()

    def program(library: Any) -> Callable[[], object]:
        if name.startswith("MLP"):
            made: Module = copy.deepcopy(model)
            if library is not None:
                library.parallelize_module(made, mesh, mlp_plan(library))
            return lambda: forward_and_backward(made, x)
        if library is None:
            placed = x[:2]
        else:
            tensors = ours if library is ours else torchs
            placed = tensors.distribute_tensor(x, mesh, [ours.Shard(0)])
        return lambda: adds(placed, 1 if name.startswith("one") else N_OPS)

    def in_a_block(run: Callable[[], object]) -> Callable[[], object]:
        def block() -> object:
            with lazy_tensor.lazy_mode():
                return run()

        return lambda: repeated(block)

    eager = program(torchs_parallel)
    functions = {
        "plain": in_a_block(program(None)),
        "ours": in_a_block(program(ours)),
        "torch": lambda: repeated(eager),
    }
    timings = timed(benchmark, functions, lambda: None, quick=quick)
    rows.append(row(f"{name}, a block with its flush", timings, IN_A_ROW))


@pytest.mark.usefixtures("records_all")
def bench_new_shapes(
    benchmark: BenchmarkFixture, quick: bool, rows: list[list[str]], mesh: Any
) -> None:
    """Four ops at a length that neither library has seen, another one in each round."""
    # narrow, because page faults of fresh memory would weigh as much as an op
    width = 4
    weight = torch.randn(width, width)
    sides: dict[str, tuple[Any, Any]] = {
        "plain": (lambda t, _: lazy_tensor.wrap(t), lazy_tensor.wrap(weight.clone())),
        "ours": (
            lambda t, where: ours.DTensor.from_local(lazy_tensor.wrap(t), mesh, where),
            ours.distribute_tensor(weight, mesh, [ours.Replicate()]),
        ),
        "torch": (
            lambda t, where: torchs.DTensor.from_local(t, mesh, where),
            torchs.distribute_tensor(weight, mesh, [torchs.Replicate()]),
        ),
    }

    def at_a_new_length(make: Any, known: Any) -> Callable[[], None]:
        lengths = itertools.count(8, 4)

        def call() -> None:
            with torch.no_grad():
                x = make(torch.ones(next(lengths), width), [ours.Shard(0)])
                torch.mm(torch.relu(x) + x, known).sum()

        return lambda: repeated(call)

    functions: dict[str, Callable[[], object]] = {
        side: at_a_new_length(make, known) for side, (make, known) in sides.items()
    }
    timings = timed(benchmark, functions, forget_recording, quick=quick)
    rows.append(row("an op of a shape not seen before", timings, 4 * IN_A_ROW))
