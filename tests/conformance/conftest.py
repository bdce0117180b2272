"""What the conformance tests share: a judge for each test, warnings as eager gives them."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.judge import Judge


@pytest.fixture
def judge(record_property):
    return Judge(record_property)


@pytest.fixture(autouse=True)
def every_warning():
    """Warnings that torch gives once a process, given each time, so that runs compare."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)
