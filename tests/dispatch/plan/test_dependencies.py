"""The order of units: effects and calls that may raise keep theirs."""

import torch

from lazy_tensor import lazy_mode
from lazy_tensor.dispatch.plan.graph import graph_of
from lazy_tensor.dispatch.plan.partition import Fusibility, units_of
from lazy_tensor.dispatch.trie.trace import local
from lazy_tensor.kernels.backend import backend_of


def units(program, *tensors):
    """The units that `program` is cut into for Inductor, each as the names of its ops."""
    with lazy_mode():
        kept = program(*tensors)
        live = tuple(t._value.slot.index for t in kept)
        graph = graph_of(local.trace.state.steps(), live)
        found = units_of(graph, Fusibility(graph, lambda _: backend_of("inductor")))
    return [[str(node.facts.op).removeprefix("aten.") for node in unit.nodes] for unit in found]


def test_no_write_that_lasts_passes_a_call_that_may_raise():
    def program(table, index, weight):
        weight.add_(1)
        rows = torch.embedding(table, index).sin()
        weight.mul_(2)
        return (rows,)

    found = units(program, torch.randn(4, 3), torch.tensor([1, 2]), torch.ones(3))
    assert found == [["add_.Tensor"], ["embedding.default", "sin.default"], ["mul_.Tensor"]]


def test_writes_to_what_dies_in_the_trace_may_pass():
    def program(table, index):
        scaled = (table * 2).add_(1)
        return (torch.embedding(scaled, index).mul_(3),)

    (only,) = units(program, torch.randn(4, 3), torch.tensor([1, 2]))
    assert only == ["mul.Tensor", "add_.Tensor", "embedding.default", "mul_.Tensor"]


def test_calls_that_may_raise_are_kept_though_nobody_uses_them():
    def program(table, index):
        table[index]
        table.sin()
        return (table * 2,)

    found = units(program, torch.randn(4), torch.tensor([1, 2]))
    assert found == [["index.Tensor"], ["mul.Tensor"]]


def test_a_view_that_no_kernel_makes_keeps_what_it_shows_outside():
    def program(x):
        return (torch.as_strided(x.sin().cos(), (2, 2), (1, 2)).sin().cos(),)

    pair = ["sin.default", "cos.default"]
    assert units(program, torch.randn(5, 5)) == [pair, pair]


def test_integers_are_divided_outside_kernels():
    def program(a, b):
        return ((a + 1).div(b, rounding_mode="trunc") + 1,)

    found = units(program, torch.arange(4), torch.arange(1, 5))
    assert found == [["add.Tensor"], ["div.Tensor_mode"], ["add.Tensor"]]
