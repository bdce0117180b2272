"""Which calls of a trace become segments."""

import pytest
import torch

import lazy_tensor
from lazy_tensor import lazy_mode, materialize
from lazy_tensor.kernels.fusible import FUSIBLE, SLOW_ALONE

X = torch.randn(64, 48)
MASK = X > 0


def test_ops_that_are_slow_alone_can_be_fused():
    assert SLOW_ALONE <= FUSIBLE


@pytest.mark.parametrize(
    ("n_segments", "call"),
    [
        (1, lambda: X.masked_fill(MASK, 0)),
        (1, lambda: X.clone().masked_fill_(MASK, 0)),
        (1, lambda: X.std(1)),
        (0, lambda: X.exp()),
        (0, lambda: X @ X.t()),
    ],
)
def test_a_call_alone_is_a_segment_where_eager_is_slow(n_segments, call):
    with lazy_mode(record="always", backend="inductor", compile="blocking"):
        before = lazy_tensor.stats()["segments"]
        found = materialize(call())
        assert lazy_tensor.stats()["segments"] == before + n_segments
    torch.testing.assert_close(found, call())
