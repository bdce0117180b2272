"""What every test gets: fixed seeds, and a skip for `gpu` tests where there is no CUDA device."""

from __future__ import annotations

import random

import pytest
import torch

import lazy_tensor
from lazy_tensor.dispatch import settings


@pytest.fixture(autouse=True)
def fixed_seeds():
    torch.manual_seed(0)
    random.seed(0)


CORE = {"dispatch", "lazy_tensor", "parity"}


@pytest.fixture(autouse=True)
def op_by_op(request):
    """Tests of the core start without caches and run op by op, bit-equal to eager."""
    if request.path.parent.name not in CORE:
        yield
        return
    before = settings.current()
    lazy_tensor.configure(backend="aten", compile="off")
    lazy_tensor.cache_clear()
    lazy_tensor.reset_stats()
    yield
    lazy_tensor.flush()
    settings.put(before)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
