"""Replayed calls on sharded tensors, against the same calls recorded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor._utils import ExplicitRedistributionContext

import lazy_tensor
from lazy_tensor import sharding
from lazy_tensor.sharding import DTensor, Partial, Replicate, Shard, distribute_tensor
from tests.sharding.ranks import run_on_ranks
from tests.sharding.test_fully_shard import TOKENS, by_blocks, loss_of, made
from tests.sharding.test_parallel import Mlp, Tied, tied_on

N_CALLS = 8


def whole(tensor: Any) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    found: torch.Tensor = lazy_tensor.materialize(tensor.detach())
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.01),  # its numbers change with each step
    ],
)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_tensor_parallel_step(make: Any, set_to_none: bool) -> None:
    torch.manual_seed(0)
    model = Mlp()
    batches = torch.randn(N_CALLS + 4, 3, 8)

    def losses(model: nn.Module, *, replays: bool) -> tuple[list[torch.Tensor], int]:
        optimizer = make(model.parameters())

        def step(x: torch.Tensor) -> Any:
            loss = model(x).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            return loss

        run: Any = lazy_tensor.replay(step) if replays else step
        found = [whole(run(x)) for x in batches]
        return [*found, *map(whole, model.parameters())], getattr(run, "n_replayed", 0)

    expected, _ = losses(copy.deepcopy(model), replays=False)

    def body() -> Any:
        mesh = sharding.init_device_mesh("cpu", (2,))
        plan = {"up": sharding.ColwiseParallel(), "down": sharding.RowwiseParallel()}
        sharded = sharding.parallelize_module(copy.deepcopy(model), mesh, plan)
        return losses(sharded, replays=True)

    for found, n_replayed in run_on_ranks(2, body):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert n_replayed >= 2


@pytest.mark.filterwarnings("ignore:replay")  # ranks that are threads may settle late
@pytest.mark.parametrize("lazily", [True, False])
def test_a_fully_sharded_step(lazily: bool) -> None:
    def losses(model: nn.Module, tokens: torch.Tensor, *, replays: bool) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

        def step(tokens: torch.Tensor) -> Any:
            loss = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run: Any = lazy_tensor.replay(step) if replays else step
        for _ in range(N_CALLS):
            if lazily:
                with lazy_tensor.lazy_mode():
                    run(tokens)
            else:
                run(tokens)
        return list(map(whole, model.parameters()))

    expected = losses(made(), TOKENS.flatten(0, 1), replays=False)

    def body() -> Any:
        model = by_blocks(made(), sharding.init_device_mesh("cpu", (4,)))
        return losses(model, TOKENS[dist.get_rank()], replays=True)

    for found in run_on_ranks(4, body):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_parameter_that_two_layers_gather() -> None:
    torch.manual_seed(0)
    model = Tied()
    batches = torch.randn(N_CALLS, 3, 8)

    def losses(model: nn.Module, *, replays: bool) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> Any:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run: Any = lazy_tensor.replay(step) if replays else step
        return [whole(run(x)) for x in batches], getattr(run, "n_replayed", 0)

    expected, _ = losses(copy.deepcopy(model), replays=False)

    def body() -> Any:
        return losses(tied_on(sharding.init_device_mesh("cpu", (2,)), model), replays=True)

    for found, n_replayed in run_on_ranks(2, body):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert n_replayed >= 2


@pytest.mark.filterwarnings("ignore:replay")  # gradients that wait are no tensors it can leave
def test_flags_of_fully_sharded_modules_are_watched() -> None:
    """`set_requires_gradient_sync` changes what a call does; no place that its code names does."""

    def gradients(model: Any, tokens: torch.Tensor, switch: Any) -> Any:
        @lazy_tensor.replay
        def step(tokens: torch.Tensor) -> None:
            loss_of(model, tokens).backward()

        found = []
        for i in range(12):
            switch(i % 2 == 1)
            step(tokens)
            if i % 2:
                found.append([whole(p.grad) for p in model.parameters()])
                model.zero_grad()
        return found

    expected = gradients(made(), TOKENS.flatten(0, 1), lambda _: None)

    def body() -> Any:
        model = by_blocks(made(), sharding.init_device_mesh("cpu", (4,)))
        return gradients(model, TOKENS[dist.get_rank()], model.set_requires_gradient_sync)

    for found in run_on_ranks(4, body):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_sharded_arguments_and_results() -> None:
    def body() -> None:
        mesh = sharding.init_device_mesh("cpu", (2,))
        weight = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(1)])
        kept: dict[str, Any] = {"sum": distribute_tensor(torch.zeros(3, 4), mesh, [Shard(1)])}

        @lazy_tensor.replay
        def call(x: Any) -> Any:
            y = x @ weight
            kept["sum"] = kept["sum"] + y
            return {"y": y, "partial": y.sum(), "local": y.to_local(), "x": x}

        total = torch.zeros(3, 4)
        for i in range(N_CALLS):
            plain = torch.full((3, 4), float(i))
            x = distribute_tensor(plain, mesh, [Replicate()])
            found = call(x)
            expected = plain @ torch.arange(16.0).view(4, 4)
            total += expected
            assert found["x"] is x
            assert found["y"].placements == (Shard(1),)
            assert found["partial"].placements == (Partial("sum"),)
            assert torch.equal(whole(found["y"]), expected)
            assert torch.equal(whole(found["partial"]), expected.sum())
            rank = dist.get_rank()
            assert torch.equal(whole(found["local"]), expected.chunk(2, 1)[rank])
            assert torch.equal(whole(kept["sum"]), total)
        assert call.n_replayed >= 4, call.obstacle

    run_on_ranks(2, body)


def test_other_placements_are_other_calls() -> None:
    """Sizes are equal, of the whole and of the part: the layout tells them apart."""

    def body() -> None:
        mesh = sharding.init_device_mesh("cpu", (2,))

        @lazy_tensor.replay
        def call(x: Any) -> Any:
            return (x * 2).redistribute(placements=[Replicate()])

        for _ in range(N_CALLS):
            for placement, factor in ((Replicate(), 2), (Partial("sum"), 4)):
                x = DTensor.from_local(torch.ones(3), mesh, [placement])
                assert torch.equal(whole(call(x)), torch.full((3,), float(factor)))
        assert call.n_replayed >= N_CALLS, call.obstacle

    run_on_ranks(2, body)


def test_one_rank_may_replay_while_another_records() -> None:
    def body() -> Any:
        mesh = sharding.init_device_mesh("cpu", (2,))
        weight = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0)])
        scale = [1.0]

        def call(x: Any) -> Any:
            y = (x @ weight).redistribute(placements=[Replicate()])
            return (y * scale[0]).sum().redistribute(placements=[Replicate()])

        run: Any = lazy_tensor.replay(call) if dist.get_rank() == 0 else call
        x = distribute_tensor(torch.ones(3, 4), mesh, [Replicate()])
        found = []
        for i in range(N_CALLS):
            if i == N_CALLS - 2:
                scale[0] = 2.0
            found.append(whole(run(x)).item())
        return found

    first, second = run_on_ranks(2, body)
    assert first == second
    assert first[-1] == 2 * first[0]


def test_an_argument_that_lies_otherwise() -> None:
    def body() -> None:
        mesh = sharding.init_device_mesh("cpu", (2,))
        run = lazy_tensor.replay(lambda x: (x * 2).sum(0))
        for placement in (Shard(0), Shard(1), Replicate(), Shard(0), Shard(1)):
            for i in range(4):
                plain = torch.arange(8.0).view(2, 4) + i
                x = distribute_tensor(plain, mesh, [Replicate()]).redistribute(mesh, [placement])
                torch.testing.assert_close(whole(run(x)), (plain * 2).sum(0))
        assert run.n_replayed >= 8

    run_on_ranks(2, body)


def test_blocks_that_change_what_ops_mean_have_captured_calls_of_their_own() -> None:
    def captured(function: Any, *args: Any) -> Any:
        """The replayed function, once such calls of it are replayed here."""
        run = lazy_tensor.replay(function)
        for _ in range(N_CALLS):
            run(*args)
        assert run.n_replayed
        return run

    def body() -> None:
        mesh = sharding.init_device_mesh("cpu", (2,))
        plain = torch.rand(4, 4)
        rows, columns = (distribute_tensor(plain, mesh, [Shard(dim)]) for dim in (0, 1))

        added = captured(lambda x, y: ((x + y) * 2).relu(), rows, columns)
        with ExplicitRedistributionContext(), pytest.raises(RuntimeError, match="Implicit"):
            added(rows, columns)

        with sharding.implicit_replication():
            added = captured(lambda x, y: ((x + y) * 2).relu(), rows, plain)
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
            added(rows, plain)

        normalized = captured(lambda x: torch.log_softmax(x * 2, 1), columns)
        assert normalized(columns).placements == (Replicate(),)
        dist.barrier()  # the ranks are threads here, and the block holds for all
        with sharding.loss_parallel():
            assert normalized(columns).placements == (Shard(1),)
            dist.barrier()

    run_on_ranks(2, body)
