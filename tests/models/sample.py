"""Which cases a default run takes: each model once at most, its variants and ways in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def cases(
    variants_of: Mapping[str, Sequence[str]],
    ways: Sequence[str],
    one_in: int = 1,
    first: int = 0,
) -> list[Any]:
    """A parameter `(model, variant, way)` of each case; all but the sample are marked `full`.

    The sample has one model in so many, from `first` on.
    """
    params = []
    for i, (model, variants) in enumerate(variants_of.items()):
        chosen = (variants[i % len(variants)], ways[(i // len(variants) + i) % len(ways)])
        is_sampled = i % one_in == first
        for variant in variants:
            for way in ways:
                marks = [] if is_sampled and (variant, way) == chosen else [pytest.mark.full]
                name = f"{model}-{variant}-{way}"
                params.append(pytest.param(model, variant, way, marks=marks, id=name))
    return params
