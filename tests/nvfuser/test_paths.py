"""Chains of diamonds: nvFuser takes exponential time for them, so they are cut."""

import pytest
import torch

import lazy_tensor
from lazy_tensor import lazy_mode, materialize
from lazy_tensor.kernels.nvfuser.definition import MAX_PATHS, Definition, TooManyPaths


def diamonds(x, n):
    for _ in range(n):
        x = x.cos() + x.sin()
    return x


def test_long_chains_are_cut_before_they_explode(interpreted):
    x = torch.randn(4, 5)
    with lazy_mode():
        result = materialize(diamonds(x, 40))
    assert interpreted.declined == []
    assert lazy_tensor.stats()["segments"] >= 3
    assert interpreted.n_definitions < lazy_tensor.stats()["segments"]  # equal parts share one
    torch.testing.assert_close(result, diamonds(x, 40))


def test_short_chains_stay_whole(interpreted):
    with lazy_mode():
        materialize(diamonds(torch.randn(4, 5), 10))
    assert interpreted.n_definitions == 1


def test_a_chain_without_diamonds_is_not_cut(interpreted):
    with lazy_mode():
        x = torch.randn(4, 5)
        for _ in range(50):
            x = x.sin() + 1
        materialize(x)
    assert interpreted.n_definitions == 1
    assert lazy_tensor.stats()["segments"] == 1


def test_a_definition_counts_exactly():
    definition = Definition()
    value = definition.add("input", [4], [True], [0], False, kind="Float", fresh=True)
    for _ in range(MAX_PATHS.bit_length() - 1):
        value = definition.add("add", value, value, kind="Float")
    with pytest.raises(TooManyPaths, match="paths lead to one value"):
        definition.add("add", value, value, kind="Float")
