"""Counts that must not grow: kernels, collectives, copies, recorded calls.

Counts are the same on every machine and in every run. So CI compares them, and not times, with
those in `results/counts.json`; `--update-counts` writes the present ones. A backend that runs
kernels op by op is enough to count them, so no compiler is needed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import bench_fully_shard
import pytest
import torch
from bench_optimizer import optimizer
from residual import loss_of, step_with
from torch.profiler import profile
from workloads import QUICK, step_of

import lazy_tensor
from lazy_tensor import sharding
from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.options import Options
from lazy_tensor.dispatch.stats import STATS
from lazy_tensor.dispatch.trie.trace import Node, local
from lazy_tensor.kernels import Kernel, Segment, register_backend
from lazy_tensor.kernels.backends.aten import compile_aten
from lazy_tensor.kernels.backends.inductor import InductorBackend

COUNTS = Path(__file__).parent / "results" / "counts.json"
N_WARM = 4
"""Steps after which a program has all its plans and kernels."""

Counts = dict[str, int]


class OpByOp(InductorBackend):
    """Accepts the segments that Inductor accepts, and runs them op by op."""

    name = "op by op"

    def can_build(self, segment: Segment) -> bool:
        return False

    def compile(self, segment: Segment) -> Kernel:
        return compile_aten(segment)


OPTIONS: Options = {"backend": "op by op", "compile": "blocking"}


def of_a_step(step: Callable[[], object]) -> Counts:
    """Counts of a settled step, and the kernels that were built until then."""
    in_mode = lazy_tensor.lazy_mode(**OPTIONS)(step)
    for _ in range(N_WARM):
        in_mode()
    n_built = lazy_tensor.stats()["compiled"]
    lazy_tensor.reset_stats()
    with profile() as profiled:
        in_mode()
    now = lazy_tensor.stats()
    names = Counter(event.name for event in profiled.events() if event.cpu_children)
    return {
        "kernels built": n_built,
        "kernels run": now["segments"],
        "flushes": now["flushes"],
        "plans built when settled": now["plans_built"],
        "copies": names["aten::copy_"] + names["aten::clone"],
    }


def of_training(name: str) -> Counts:
    return of_a_step(step_of(QUICK[name], "eager", {}))


def of_adam(*, foreach: bool) -> Counts:
    return of_a_step(optimizer(True, foreach=foreach).step)


def of_depth(depth: int) -> Counts:
    weights = [torch.randn(10, 10).div(10).requires_grad_() for _ in range(depth)]
    x = torch.randn(10, 10).requires_grad_()
    counts = of_a_step(lambda: step_with(loss_of, x, weights).item())
    return {"kernels built": counts["kernels built"]}


def of_replay(name: str) -> Counts:
    step: Any = step_of(QUICK[name], "replay", {"backend": "aten"})
    for _ in range(8):
        step()
    return {"recorded of 8 calls": step.func.n_recorded}


def of_parallel_mlp(mesh: Any) -> Counts:
    styles = {"0": sharding.ColwiseParallel(), "2": sharding.RowwiseParallel()}
    layers = torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)
    model = sharding.parallelize_module(torch.nn.Sequential(*layers), mesh, styles)
    x = lazy_tensor.wrap(torch.randn(4, 16))
    return _collectives(lambda: model(x).sum().backward())


def of_fully_shard(mesh: Any) -> Counts:
    return _collectives(
        bench_fully_shard.step_of("sharded", bench_fully_shard.tiny_gpt, mesh, runs=True)
    )


def _collectives(step: Callable[[], object]) -> Counts:
    """The collectives of the second step, by their names. The first one makes the states."""
    for _ in range(2):
        # without bound, so that calls are recorded though they are new
        local.trace.policy.calls_left = 1 << 60
        lazy_tensor.reset_stats()
        step()
        lazy_tensor.flush()
    states = (flush.state for flush in STATS.log if flush.state is not None)
    nodes = (node for state in states for node in state.steps() if isinstance(node, Node))
    issued = (node.facts.op for node in nodes if node.issues)
    return dict(Counter(op.overloadpacket.__name__ for op in issued))


PROGRAMS: dict[str, Callable[[], Counts]] = {
    **{f"training step, {name}": partial(of_training, name) for name in QUICK},
    "Adam, tensor by tensor": partial(of_adam, foreach=False),
    "Adam, foreach": partial(of_adam, foreach=True),
    "residual stack, 2 layers": partial(of_depth, 2),
    "residual stack, 128 layers": partial(of_depth, 128),
    "replayed, tiny GPT": partial(of_replay, "tiny GPT"),
    "replayed, ResNet": partial(of_replay, "ResNet"),
}
SHARDED: dict[str, Callable[[Any], Counts]] = {
    "tensor-parallel MLP, forward and backward": of_parallel_mlp,
    "fully sharded GPT, training step": of_fully_shard,
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    register_backend("op by op", OpByOp())
    before = settings.current()
    lazy_tensor.cache_clear()
    lazy_tensor.reset_stats()
    yield
    settings.put(before)


@pytest.mark.filterwarnings("ignore:.*[Pp]rofiler")
@pytest.mark.parametrize("name", PROGRAMS)
def bench_counts(request: pytest.FixtureRequest, name: str) -> None:
    compare(name, PROGRAMS[name](), update=request.config.getoption("--update-counts"))


@pytest.mark.filterwarnings("ignore:.*[Pp]rofiler")
@pytest.mark.parametrize("name", SHARDED)
def bench_collectives(request: pytest.FixtureRequest, mesh: Any, name: str) -> None:
    compare(name, SHARDED[name](mesh), update=request.config.getoption("--update-counts"))


def compare(name: str, found: Counts, *, update: bool) -> None:
    """Fail if a count is larger than the one in `counts.json`, or has none there."""
    kept: dict[str, Counts] = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    if update:
        kept[name] = found
        COUNTS.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
        return
    grown = {
        what: f"{kept.get(name, {}).get(what)} -> {count}"
        for what, count in found.items()
        if count > kept.get(name, {}).get(what, -1)
    }
    assert not grown, f"{name}: {grown}; if that is meant, run with --update-counts"
