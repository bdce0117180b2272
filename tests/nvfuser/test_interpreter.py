"""The interpreter refuses what nvFuser refuses, so that a rule that relies on either fails here."""

import pytest
import torch

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.nvfuser import library
from lazy_tensor.kernels.nvfuser.definition import Definition, loaded
from tests.nvfuser.interpreter import Refused, run

INPUTS = {
    "Float": torch.rand(4, 6), "Int": torch.arange(24).view(4, 6), "Half": torch.rand(4, 6).half(),
    "Bool": torch.rand(4, 6) > 0.5,
}  # fmt: skip


def definition(kind, make, *, dense=True):
    made = Definition()
    x = made.add("input", [4, 6], [dense, True], [1, 0], False, kind=kind)
    made.output(make(made, x))
    return loaded(made.dumped())


def two(d, x):
    return d.add("constant", 2, kind="Int")


REFUSED = {
    "a reduction of no dimensions": ("Float", lambda d, x: d.add(
        "sum", x, kind="Float", dims=[], keepdim=False)),
    "bitwise_and of floats": ("Float", lambda d, x: d.add("bitwise_and", x, x, kind="Float")),
    "where by an integer": ("Int", lambda d, x: d.add("where", x, x, x, kind="Int")),
    "the variance of a half": ("Half", lambda d, x: d.add(
        "var_mean", x, kind="Half", n=2, dims=[1], correction=0, keepdim=True)[0]),
    "a variance less 1.5": ("Float", lambda d, x: d.add(
        "var", x, kind="Float", dims=[1], correction=1.5, keepdim=True)),
    "squeeze of six": ("Float", lambda d, x: d.add("squeeze", x, [1], kind="Float")),
    "expand of six": ("Float", lambda d, x: d.add("expand", x, [4, 12], kind="Float")),
    "broadcast to another rank": ("Float", lambda d, x: d.add(
        "broadcast", x, [True, False], kind="Float")),
    "select by a plain number": ("Float", lambda d, x: d.add("select", x, 1, 0, kind="Float")),
    "an output that is a number": ("Int", two),
    "floats from integers": ("Float", lambda d, x: d.add(
        "iota", 6, 0, 1, kind="Float", dtype="Float")),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_both_refuse(name):
    kind, make = REFUSED[name]
    lines = definition(kind, make)
    with pytest.raises((Refused, AssertionError)):
        run(lines, [INPUTS[kind]])
    if library.problem() is None:
        with pytest.raises((Declined, TypeError)):
            library.Fused(lines)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (torch.rand(6, 4).t(), "stride 4 where 1 was declared"),
        (torch.rand(4, 6, dtype=torch.float64), "float64 for an input of Float"),
        (torch.rand(4, 7), "size 7 for 6"),
        (torch.rand(4, 1).expand(4, 6), "contiguity True"),
    ],
    ids=["stride", "dtype", "size", "expanded"],
)
def test_an_input_is_what_was_declared(given, told):
    lines = definition("Float", lambda d, x: d.add("neg", x, kind="Float"))
    with pytest.raises(Refused, match=told):
        run(lines, [given])


def test_an_aliased_output_is_written_after_all_reads():
    made = Definition()
    x = made.add("input", [4], [True], [0], False, kind="Float")
    made.output(made.add("neg", x, kind="Float"), x)
    made.output(made.add("add", x, x, kind="Float"))
    given = torch.ones(4)
    (doubled,) = run(loaded(made.dumped()), [given])
    assert doubled.tolist() == [2.0] * 4
    assert given.tolist() == [-1.0] * 4
