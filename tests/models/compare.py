"""How far two outcomes are apart."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tests.models.run import Outcome

LEAST_SCALE = 0.1
"""What is zero but for rounding has no relative error: 1e-4 of this is 1e-5, the `atol` that
`torch.testing.assert_close` has for float32."""


class Distance(NamedTuple):
    """The largest difference of any element, and relative to its tensor's largest element (or to
    `LEAST_SCALE`)."""

    absolute: float
    relative: float
    where: str


def distance(got: Outcome, expected: Outcome) -> Distance:
    """The largest differences. AssertionError where the outcomes differ in names or metadata."""
    assert list(got) == list(expected)
    furthest = Distance(0.0, 0.0, "nowhere")
    for name, mine in got.items():
        theirs = expected[name]
        assert type(mine) is torch.Tensor
        assert (mine.shape, mine.dtype, mine.stride()) == (
            theirs.shape, theirs.dtype, theirs.stride()
        ), name  # fmt: skip
        found = _distance(mine, theirs, name)
        furthest = max(furthest, found, key=lambda d: d.relative)
    return furthest


def _distance(mine: torch.Tensor, theirs: torch.Tensor, name: str) -> Distance:
    if torch.equal(mine, theirs) or mine.numel() == 0:
        return Distance(0.0, 0.0, name)
    mine, theirs = mine.double(), theirs.double()
    if not torch.equal(mine.isnan(), theirs.isnan()):
        return Distance(float("inf"), float("inf"), name)
    gap = (mine - theirs).nan_to_num().abs().max().item()
    scale = theirs.nan_to_num().abs().max().item()
    return Distance(gap, gap / max(scale, LEAST_SCALE), name)
