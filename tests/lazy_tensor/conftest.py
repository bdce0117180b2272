"""Core tests run op by op unless they say otherwise: bit-equal to eager, and no compiler."""

import pytest

import lazy_tensor
from lazy_tensor.dispatch import settings


@pytest.fixture(autouse=True)
def op_by_op():
    before = settings.current()
    lazy_tensor.configure(backend="aten", compile="off")
    lazy_tensor.cache_clear()
    lazy_tensor.reset_stats()
    yield
    lazy_tensor.flush()
    settings.put(before)
