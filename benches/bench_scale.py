"""Large meshes on paper: fake process groups of 8 to 16384 ranks, of which this process is one.

A training step of Llama's shapes is recorded and never run, so that nothing is allocated. The bytes
of each kind of collective must equal closed formulas. The host's time for a step must not grow with
the mesh. Writes `results/scale.md`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bench_record import forget_recording
from llama import SIZES, Llama, LlamaConfig
from pytest_benchmark.fixture import BenchmarkFixture
from results_table import page
from timing import Timings, interleaved
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

import lazy_tensor
from lazy_tensor import sharding
from lazy_tensor.dispatch.trie.trace import Node, local

WORLDS = (8, 64, 1024, 16_384)
TENSOR_PARALLEL = 8
BATCH, LENGTH = 1, 4096
ITEM = 2  # bytes of a bfloat16
MOST_SPLIT = 32
"""Layers up to which a model is built for tensor parallelism, which copies each rank's parts."""
KINDS = {"fully_shard": 1, "tensor parallel": None, "both": TENSOR_PARALLEL}
"""The ranks over which a block is split, by the name of the way; None: all of them."""


@pytest.fixture(scope="module")
def tables(results_dir: Path) -> Iterator[dict[str, list[list[str]]]]:
    found: dict[str, list[list[str]]] = {"bytes": [], "cost": []}
    yield found
    if len(found["bytes"]) == 6 and len(found["cost"]) == len(WORLDS):
        columns = ["", "ranks", "all-gather", "reduce-scatter", "all-reduce", "collectives"]
        title = "Collectives of one training step on one rank, GB (1 x 4096 tokens, bfloat16)"
        text = page(title, columns, found["bytes"])
        columns = ["ranks", "a sharded `add`, us", "a step, ms", "compared with 8 ranks"]
        cost = page("Host cost of recording by the number of ranks", columns, found["cost"])
        (results_dir / "scale.md").write_text(f"{text}\n{cost}")


@contextmanager
def ranks(n: int) -> Iterator[None]:
    """A fake process group of `n` ranks. No bound ends a trace: all of a step must be in one."""
    dist.init_process_group("fake", rank=0, world_size=n, store=FakeStore())
    before = lazy_tensor.dispatch.settings.current()
    lazy_tensor.configure(
        backend="aten", compile="off", max_pending_bytes=1 << 60, max_segment_ops=1 << 30
    )
    # the trace of the benchmark before must not go on in this one
    forget_recording()
    try:
        yield
    finally:
        forget_recording()
        lazy_tensor.dispatch.settings.put(before)
        dist.destroy_process_group()


def sharded_llama(config: LlamaConfig, n: int, n_tensor: int | None) -> Any:
    """Llama on `n` ranks, of which `n_tensor` share a block's matrices (None: all of them do, and
    nothing else is sharded)."""
    n_tensor = n_tensor or n
    names = ("data", "tensor")
    mesh: Any = sharding.init_device_mesh("cpu", (n // n_tensor, n_tensor), mesh_dim_names=names)
    with torch.device("meta"):
        model: Any = Llama(config).to(torch.bfloat16)
    split, joined = sharding.ColwiseParallel(), sharding.RowwiseParallel()
    whole = (sharding.Replicate(),)
    entered = sharding.PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)
    plan = {
        "attention.q": split, "attention.k": split, "attention.v": split, "attention.out": joined,
        "mlp.gate": split, "mlp.up": split, "mlp.down": joined,
        "attention": entered, "mlp": entered,  # so that gradients of inputs are summed once
    }  # fmt: skip
    for block in model.blocks:
        # empty memory that is never touched has no pages; a block at a time, as parts are copied
        block.to_empty(device="cpu")
        if n_tensor > 1:
            sharding.parallelize_module(block, mesh["tensor"], plan, src_data_rank=None)
        if n_tensor < n:
            sharding.fully_shard(block, mesh=mesh["data"])
    for part in (model.embedding, model.norm, model.head):
        part.to_empty(device="cpu")
    return model if n_tensor == n else sharding.fully_shard(model, mesh=mesh["data"])


def loss_of(model: Any, tokens: torch.Tensor) -> Any:
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def communicated() -> tuple[Counter[str], int]:
    """Bytes of each kind of collective in the trace, and how many there are. Of a collective the
    larger one of input and output counts."""
    found: Counter[str] = Counter()
    n = 0
    specs: dict[int, Any] = {}
    for step in local.trace.state.steps():
        if not isinstance(step, Node):
            specs[step.slot] = step.spec
            continue
        specs.update(
            {s: spec for s, spec in zip(step.outs, step.specs, strict=True) if s is not None}
        )
        # waiting for a collective is a node of its own, which moves nothing
        if step.issues:
            sizes = [specs[slot] for slot in (*step.reads, *filter(None, step.outs))]
            elements = max(torch.Size(spec.size).numel() for spec in sizes)
            found[step.facts.op._schema.name.split("::")[1]] += elements * ITEM
            n += 1
    return found, n


def formula(config: LlamaConfig, n: int, n_tensor: int | None) -> dict[str, int]:
    """The bytes of each kind of collective in one step, in closed form.

    `fully_shard` gathers blocks in forward and again in backward, the rest of the model once. It
    reduces all gradients once. A tensor-parallel rank has its part of a block's matrices, and norms
    whole. Tensor parallelism sums activations after attention and after the MLP, in forward and in
    backward.
    """
    ways = n_tensor or n
    norms = 2 * config.width
    block = (config.block_parameters - norms) // ways + norms
    activations = 4 * config.n_layers * BATCH * LENGTH * config.width if ways > 1 else 0
    found = {"all_reduce": activations * ITEM}
    if ways < n:
        blocks = config.n_layers * block
        found["all_gather_into_tensor"] = (2 * blocks + config.root_parameters) * ITEM
        found["reduce_scatter_tensor"] = (blocks + config.root_parameters) * ITEM
    return {name: count for name, count in found.items() if count}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", ["7B", "70B"])
def bench_bytes(
    benchmark: BenchmarkFixture, quick: bool, tables: Any, size: str, kind: str
) -> None:
    config, n_tensor = SIZES[size], KINDS[kind]
    if quick:
        config = SIZES["tiny"]
    elif kind != "fully_shard" and config.n_layers > MOST_SPLIT:
        config = replace(config, n_layers=MOST_SPLIT)
    n = TENSOR_PARALLEL if n_tensor is None else WORLDS[1]
    length = config.context if quick else LENGTH
    with ranks(n):
        model = sharded_llama(config, n, n_tensor)
        tokens = torch.zeros(BATCH, length, dtype=torch.int64)

        def step() -> tuple[Counter[str], int]:
            with lazy_tensor.lazy_mode():
                loss_of(model, tokens).backward()
                found = communicated()
                forget_recording()
            return found

        found, n_collectives = benchmark.pedantic(step, rounds=1, iterations=1)
    if quick:
        return
    expected = formula(config, n, n_tensor)
    assert dict(found) == expected
    names = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
    sizes = [f"{found[name] / 1e9:.2f}" for name in names]
    layers = f"{config.n_layers} of {SIZES[size].n_layers} layers"
    tables["bytes"].append([f"{size}, {layers}, {kind}", str(n), *sizes, str(n_collectives)])


def bench_host_cost(benchmark: BenchmarkFixture, quick: bool, tables: Any) -> None:
    """The host's time for recording, on meshes of different size. The model is the same, and this
    rank's parts are too."""
    medians: dict[int, tuple[float, float]] = {}

    def measure() -> None:
        for n in WORLDS[:1] if quick else WORLDS:
            with ranks(n):
                medians[n] = cost_on(n, quick=quick)

    benchmark.pedantic(measure, rounds=1, iterations=1)
    if not quick:
        for n, (add, step) in medians.items():
            ratio = f"{step / medians[WORLDS[0]][1]:.2f}×"
            tables["cost"].append([str(n), f"{add * 1e6:.2f}", f"{step * 1e3:.2f}", ratio])


def cost_on(n: int, *, quick: bool) -> tuple[float, float]:
    """Seconds of recording a sharded `add`, and a step of a tiny Llama under `fully_shard`."""
    mesh = sharding.init_device_mesh("cpu", (n,))
    x = sharding.DTensor.from_local(torch.ones(2, 8), mesh, [sharding.Shard(0)])
    model: Any = Llama(SIZES["tiny"])
    for part in (*model.blocks, model):
        sharding.fully_shard(part, mesh=mesh)
    tokens = torch.zeros(1, 16, dtype=torch.int64)

    def adds() -> None:
        for _ in range(100):
            torch.add(x, x)

    def step() -> None:
        with lazy_tensor.lazy_mode():
            loss_of(model, tokens).backward()
            forget_recording()
        for parameter in model.parameters():
            parameter.grad = None

    rounds, warmup = (2, 2) if quick else (60, 20)
    timings: Timings = interleaved({"add": adds, "step": step}, rounds, warmup, forget_recording)
    return timings.spread("add").median_s / 100, timings.spread("step").median_s
