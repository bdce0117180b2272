"""All pairs of placements: what is moved, where, and that nothing is lost."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor._utils import ExplicitRedistributionContext

import lazy_tensor
from lazy_tensor.sharding import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from tests.sharding.ranks import run_on_ranks

FROM = (Replicate(), Shard(0), Shard(1), Partial())
TO = FROM[:3]


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 3), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("size", [(12, 6), (5, 7), (1, 4)], ids=str)
def test_every_pair_keeps_the_tensor(shape, size):
    whole = torch.randn(size)

    def body():
        mesh = init_device_mesh("cpu", shape)
        pairs = list(itertools.product(itertools.product(FROM, repeat=len(shape)),
                                       itertools.product(TO, repeat=len(shape))))  # fmt: skip
        for before, after in pairs[:: max(1, len(pairs) // 40)]:
            known = [Replicate() if p.is_partial() else p for p in before]
            tensor = distribute_tensor(whole, mesh, known)
            n_sums = 1
            for dim, placement in enumerate(before):
                n_sums *= mesh.size(dim) if placement.is_partial() else 1
            tensor = DTensor.from_local(
                tensor.to_local(), mesh, before, shape=whole.shape, stride=whole.stride()
            )
            for _ in range(2):  # the second time it is a hit
                moved = tensor.redistribute(placements=after)
                assert moved.placements == after
                assert torch.equal(moved.full_tensor(), whole * n_sums), (before, after)

    run_on_ranks(math.prod(shape), body)


def test_second_time_nothing_is_asked():
    def body():
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        counts = []
        for _ in range(3):
            (tensor + tensor).relu().sum().full_tensor().item()
            counts.append(lazy_tensor.cache_info()["sharding"].misses)
        dist.barrier()  # the first rank to leave forgets decisions, for all threads
        return counts

    first, second, third = run_on_ranks(2, body)[0]
    assert second == third


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("lazily", [False, True])
def test_torchs_explicit_context_refuses_what_nobody_asked_for(strict, lazily):
    def body():
        mesh = init_device_mesh("cpu", (2,))
        rows, columns, whole = (
            distribute_tensor(torch.ones(4, 4), mesh, [placement])
            for placement in (Shard(0), Shard(1), Replicate())
        )
        sums = [rows.sum(), columns.sum()]

        def is_refused(function, inside):
            with lazy_tensor.lazy_mode() if lazily else nullcontext(), inside:
                try:
                    function()
                except RuntimeError as error:
                    return "Implicit redistribution occurred" in str(error)
            return False

        def refused(function):
            """Whether calls are refused in the block, after some that were made outside."""
            assert not any(is_refused(function, nullcontext()) for _ in range(3))
            block = ExplicitRedistributionContext(strict=strict)
            (answer,) = {is_refused(function, block) for _ in range(3)}
            return answer

        assert not refused(lambda: (rows + rows).relu().sum().item())
        assert not refused(lambda: rows.redistribute(placements=[Replicate()]).full_tensor())
        assert refused(lambda: rows + columns)
        assert refused(lambda: torch.mm(rows, columns))
        assert refused(lambda: torch.mm(columns, rows).relu())
        assert refused(lambda: rows.unfold(0, 2, 1))  # torch has no rule for it
        assert refused(lambda: torch._foreach_sqrt(sums[:1]))
        assert refused(lambda: torch._foreach_sqrt(sums))  # one all-reduce for both
        assert refused(lambda: torch.equal(rows, columns))
        assert refused(lambda: torch.equal(whole, rows)) is strict
        assert refused(lambda: rows + whole) is strict  # each rank keeps some of what it has

    run_on_ranks(2, body)


def test_an_explicit_context_that_is_switched_off_allows_all():
    def body():
        mesh = init_device_mesh("cpu", (2,))
        rows, columns = (distribute_tensor(torch.ones(4, 4), mesh, [Shard(d)]) for d in (0, 1))
        for _ in range(3):
            with lazy_tensor.lazy_mode(), ExplicitRedistributionContext():
                with ExplicitRedistributionContext(enable=False):
                    assert (rows + columns).full_tensor().tolist() == [[2.0] * 4] * 4
                with pytest.raises(RuntimeError, match="Implicit redistribution occurred"):
                    rows + columns

    run_on_ranks(2, body)


def test_an_explicit_context_raises_for_what_another_only_warned_of():
    def body():
        mesh = init_device_mesh("cpu", (2,))
        rows, columns = (distribute_tensor(torch.ones(4, 4), mesh, [Shard(d)]) for d in (0, 1))
        for _ in range(3):
            for mode in ("warn", "raise"):
                with (
                    lazy_tensor.lazy_mode(record="always"),
                    ExplicitRedistributionContext(mode=mode),
                    nullcontext()
                    if mode == "warn"
                    else pytest.raises(RuntimeError, match="Implicit"),
                ):
                    rows + columns

    run_on_ranks(2, body)
