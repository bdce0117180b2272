"""One rank of two that communicate with nobody, and what its sharded calls ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lazy_tensor import sharding
from lazy_tensor.sharding.ops import calls


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield sharding.init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ops of sharded calls that nothing knew."""
    found: list[Any] = []

    def noted(request: Any, run: Any = calls.compute.run) -> Any:
        found.append(request.op)
        return run(request)

    monkeypatch.setattr(calls.compute, "run", noted)
    return found
