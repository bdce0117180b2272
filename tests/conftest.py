"""What every test gets: fixed seeds, and a skip for `gpu` tests where there is no CUDA device."""

from __future__ import annotations

import random

import pytest
import torch


@pytest.fixture(autouse=True)
def fixed_seeds():
    torch.manual_seed(0)
    random.seed(0)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
