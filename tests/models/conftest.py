"""What the tests of models share: one thread, and the comparison they report."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

# Read on import: Trainer and Fabric look nowhere, and nothing may wait for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.models.compare import Distance, distance
from tests.models.run import Outcome

Check = Callable[..., Distance]


@pytest.fixture(autouse=True)
def one_thread():
    """Ops this small are slower on two threads, a hundred times so when others need the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def agree(record_property) -> Check:
    """Compare two outcomes, note how far they are apart for the table, fail beyond `tolerance`."""

    def check(
        got: Outcome,
        expected: Outcome,
        *,
        model: str,
        variant: str,
        way: str,
        backend: str = "aten",
        tolerance: float = 0.0,
    ) -> Distance:
        found = distance(got, expected)
        record_property("model distance", [model, variant, way, backend, *found])
        assert found.relative <= tolerance, found
        return found

    return check
