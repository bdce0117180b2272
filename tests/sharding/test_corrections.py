"""Calls that torch's sharding rules misjudge: each gives what one process gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import lazy_tensor
import lazy_tensor.sharding as sharding
from lazy_tensor.sharding import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from tests.sharding.ranks import on_ranks

aten = torch.ops.aten
Placed = Callable[..., torch.Tensor]
_numbers = torch.Generator().manual_seed(0)
X, Y = torch.randn(4, 6, generator=_numbers), torch.randn(4, 6, generator=_numbers)
ROWS = torch.tensor([[0, 1, 2, 3, 0, 1], [1] * 6, [3, 2, 1, 0, 3, 2], [0] * 6])


def gradient(of: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(of(x.requires_grad_()), x)[0]


def loss_gradient(loss: Callable[..., torch.Tensor]) -> Callable[[Placed], torch.Tensor]:
    return lambda on: gradient(lambda x: loss(x.sigmoid(), on(Y.sigmoid(), 0)), on(X, 0))


def scattered(on: Placed, placement: int | None, dim: int, index_placement: int | None) -> Any:
    x = on(torch.zeros(4, 6), placement)
    x.scatter_add_(dim, on(ROWS, index_placement), on(Y, index_placement))
    return x * 1


def running_mean(on: Placed) -> torch.Tensor:
    mean, var = on(torch.zeros(6), None), on(torch.ones(6), None)
    F.batch_norm(on(X, 1), mean, var, training=True)
    return mean * 1


def at_sizes(call: Callable[..., Any]) -> Callable[[Placed], torch.Tensor]:
    """The results for an index that is as long as the tensor, and then for a shorter one."""

    def program(on: Placed) -> torch.Tensor:
        made = []
        for n in (8, 4):
            x, index = torch.arange(48.0).view(8, 6), torch.arange(n * 6).view(n, 6) % 6
            made.append(call(on(x, 0), on(index, 0), on(index * 2.0, 0)))
        return torch.cat(made)

    return program


def filled(reduce: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Placed], torch.Tensor]:
    """A reduced tensor, and what was taken from it before, once some of it is filled."""

    def program(on: Placed) -> torch.Tensor:
        x = reduce(on(X, 0))
        view, alias = x[1:4], x.detach()
        x[2:4] = 5.0
        view[1:2].fill_(-7)
        return torch.cat([x, view, alias])

    return program


PROGRAMS: dict[str, Callable[[Placed], Any]] = {
    "mse_loss": loss_gradient(F.mse_loss),
    "smooth_l1_loss": loss_gradient(F.smooth_l1_loss),
    "huber_loss": loss_gradient(F.huber_loss),
    "binary_cross_entropy": loss_gradient(F.binary_cross_entropy),
    "soft_margin_loss": loss_gradient(F.soft_margin_loss),
    "a sum of losses": loss_gradient(lambda x, y: F.mse_loss(x, y, reduction="sum")),
    "cumsum": lambda on: on(X, 1).cumsum(-1),
    "cumprod": lambda on: on(X, 1).cumprod(-1),
    "logcumsumexp": lambda on: on(X, 0).logcumsumexp(-2),
    "narrow": lambda on: gradient(lambda x: (x.narrow(-2, 1, 2) * 2).sum(), on(X, 0)),
    "select": lambda on: gradient(lambda x: (x.select(-2, 1) * 2).sum(), on(X.view(4, 3, 2), 0)),
    "any": lambda on: on(X, 0) * (on(X, 0) > 0).any(),
    "any in a dimension": lambda on: (on(X, 0) > 0).any(0).float(),
    "any that is kept": lambda on: (on(X, 1) > 0).any(1, keepdim=True).sum(),
    "any in no dimension": lambda on: torch.any(on(X, 0) > 1, dim=[]).float(),
    "any of bytes": lambda on: on(X > 0, 0).byte().any() * 1,
    "any of bytes in a dimension": lambda on: on(X > 0, 1).byte().any(1) * 1,
    "integers and a number": lambda on: (on(X, 0) > 0).sum(0) + 1,
    "large integers and a number": lambda on: (on(X, 0) * 1e8).long().sum(0) - 2,
    "norms": lambda on: on(X, 1).norm(dim=1).sum(),
    "amax": lambda on: gradient(torch.Tensor.amax, on(X, 1)),
    "no dimensions": lambda on: on(X, 0).sum(dim=[]),
    "a variance of no dimensions": lambda on: on(X, 0).var(dim=[]),
    "a norm of no dimensions": lambda on: torch.linalg.vector_norm(on(X, 0), dim=[]),
    "nansum of sums": lambda on: (
        on(torch.tensor([[1.0, torch.nan], [2.0, 3.0]]), 0).sum(0).nansum()
    ),
    "a norm of maxima": lambda on: torch.linalg.vector_norm(on(-X.abs(), 0).amax(0), torch.inf),
    "a norm of minima": lambda on: torch.linalg.vector_norm(on(X, 0).amin(0), -torch.inf),
    "norms of maxima": lambda on: torch._foreach_norm([on(-X.abs(), 0).amax(0)], torch.inf)[0],
    "powers of sums": lambda on: torch.linalg._powsum(on(X, 0).sum(0), 2),
    "lists of powers of sums": lambda on: torch._foreach_powsum([on(X, 0).sum(0)], 2)[0],
    "the first of equal maxima": lambda on: on((X > 0).int(), 1).argmax(),
    "the first of equal minima": lambda on: on((X <= 0).int(), 1).argmin(),
    "a scan of a number": lambda on: on(X, 0).sum().cumsum(-1),
    "a number without dimensions": lambda on: on(X, 0).sum().sum(dim=[]),
    "gather": lambda on: on(torch.cat([X, Y]), 0).gather(1, on(ROWS[:, :1], 0)),
    "scatter_add": lambda on: on(X, 0).scatter_add(1, on(ROWS[:, :2], 0), on(torch.ones(6, 2), 0)),
    "scatter_add_ of rows": lambda on: scattered(on, 0, 0, None),
    "scatter_add_ by columns": lambda on: scattered(on, None, 0, 1),
    "index_add_": lambda on: on(X, 0).index_add_(0, on(ROWS[0, :4], None), on(Y, None)),
    "index_copy_": lambda on: on(X, 0).index_copy_(0, on(ROWS[0, 2:4], None), on(Y[:2], None)),
    "batch_norm": running_mean,
    "embedding": lambda on: gradient(
        lambda w: F.embedding(on(ROWS[0], 0), w, scale_grad_by_freq=True).sum(), on(X, None)
    ),
    "bits": lambda on: on(X.round(), 0).sum(0).view(torch.int32),
    "gather by shorter indices": at_sizes(lambda x, index, _: x.gather(1, index)),
    "gather of a sum by shorter indices": lambda on: (
        on(torch.arange(96.0).view(2, 8, 6), 0).sum(0).gather(1, on(ROWS, None))
    ),
    "gather of a number": lambda on: on(X, 0).sum().gather(0, on(ROWS[3, :4], 0)),
    "scatter by shorter indices": at_sizes(lambda x, index, src: x.scatter(1, index, src)),
    "scatter_ by shorter indices": at_sizes(lambda x, index, _: x.scatter_(1, index, 7.0)),
    "scatter_add by shorter indices": at_sizes(lambda x, index, src: x.scatter_add(1, index, src)),
    "unbind_copy of more columns": lambda on: torch.cat(
        [*aten.unbind_copy.int(on(X[:, :4], 0), 1), *aten.unbind_copy.int(on(X, 0), 1)]
    ),
    "a sum that is filled": filled(lambda x: x.sum(0)),
    "a mean that is filled": filled(lambda x: x.mean(0)),
    "a maximum that is filled": filled(lambda x: x.amax(0)),
    "a product that is filled": filled(lambda x: x.prod(0)),
    "bytes of parts of rows": lambda on: on(X[:, :3], 1).view(torch.uint8) * 1,
    "a product of complex numbers": lambda on: on(X + 1j * Y, 0).prod().abs(),
    "pairs of numbers in parts": lambda on: on(X, 1).view(torch.int64) * 1,
    "integers that wrap around": lambda on: on(ROWS * 100, 0).amax(0).to(torch.int8) * 1,
    "threshold": lambda on: F.threshold(on(X, 0).amax(0), 0.9, 2.0),
    "histograms": lambda on: torch.stack(
        [torch.histc(on(X, 0), 4, *limits) for limits in ((-1.0, 1.0), (0.0, 2.0), (2.0, 2.0))]
    ),
    "fft": lambda on: torch.fft.fft(on(X, 0).amax(0)).real,
}


def alone(x: torch.Tensor, _: int | None) -> torch.Tensor:
    return x.clone()


@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks(2)
def test_ranks_give_what_one_process_gives(name: str) -> None:
    mesh, program = init_device_mesh("cpu", (2,)), PROGRAMS[name]

    def placed(x: torch.Tensor, dim: int | None) -> torch.Tensor:
        return distribute_tensor(x.clone(), mesh, [Replicate() if dim is None else Shard(dim)])

    expected = program(alone)
    for _ in range(3):
        found = program(placed)
        assert isinstance(found, DTensor)
        whole = lazy_tensor.materialize(found.full_tensor())
        assert whole.dtype is expected.dtype
        torch.testing.assert_close(whole, expected)


@on_ranks(4)
def test_new_tensors_of_partial_ones_hold_the_number_once() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for reduction, dtype in (("sum", torch.int64), ("avg", torch.float32)):
        placements = [Shard(0), Partial(reduction)]
        made: list[torch.Tensor] = [
            sharding.ones(4, 6, dtype=dtype, device_mesh=mesh, placements=placements),
            sharding.full((4, 6), 3.0, device_mesh=mesh, placements=placements),
        ]
        made += [made[0].new_ones(4, 6), made[0].new_full((4, 6), 3.0)]
        found = [int(lazy_tensor.materialize(x.full_tensor()).sum()) for x in made]
        assert found == [24, 72, 24, 72]


@on_ranks(2)
def test_a_dimension_that_isnt_there_is_an_error() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(IndexError, match="Dimension out of range"):
        distribute_tensor(X, mesh, [Shard(0)]).cumsum(-3)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("draw", ["cauchy_", "exponential_", "geometric_", "log_normal_"])
def test_ranks_draw_what_one_process_draws(draw: str, rank: int) -> None:
    numbers = (0.5,) if draw == "geometric_" else ()
    torch.manual_seed(0)
    expected = getattr(torch.empty(5, 2), draw)(*numbers).chunk(2)[rank]
    behind = torch.rand(3)
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        local = torch.empty(expected.shape)
        sharded = DTensor.from_local(local, mesh, [Shard(0)], shape=(5, 2), stride=(2, 1))
        getattr(sharded, draw)(*numbers)
        assert lazy_tensor.materialize(sharded.to_local()).equal(expected)
        assert torch.rand(3).equal(behind)
    finally:
        dist.destroy_process_group()


@on_ranks(2)
def test_a_write_reaches_an_array_on_the_local_part() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with lazy_tensor.lazy_mode(record="always"):
        for _ in range(3):
            local = torch.arange(4.0) * 1
            array = local.numpy()
            sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            sharded.add_(1)
            assert sharded.to_local().tolist() == [1.0, 2.0, 3.0, 4.0]
            assert array.tolist() == [1.0, 2.0, 3.0, 4.0]
