"""A tensor looked at from a debugger, or shown by a notebook, disturbs nothing."""

from __future__ import annotations

import io
import pdb
import sys

import pytest
import torch

from lazy_tensor import is_pending, lazy_mode, materialize, stats, wrap
from lazy_tensor.dispatch.trie.trace import local


def looked_at(frame, *commands):
    """What pdb answers at a frame."""
    told = io.StringIO()
    debugger = pdb.Pdb(stdin=io.StringIO("\n".join(commands)), stdout=told, nosigint=True)
    debugger.reset()
    debugger.setup(frame, None)
    for command in commands:
        debugger.onecmd(command)
    debugger.forget()
    return told.getvalue()


def test_a_pending_value_is_shown_and_stays_pending():
    x = torch.arange(3.0)
    with lazy_mode():
        y = (x + 1) * 2
        before, flushes = local.trace.state, stats()["flushes"]
        assert looked_at(sys._getframe(), "p y") == "tensor([2., 4., 6.])\n"
        assert looked_at(sys._getframe(), "pp [y, 1]") == "[tensor([2., 4., 6.]), 1]\n"
        assert is_pending(y)
        assert (local.trace.state, stats()["flushes"]) == (before, flushes)
        z = y - 1
    assert materialize(z).tolist() == [1.0, 3.0, 5.0]


def test_pending_writes_are_seen_and_not_made():
    memory = torch.zeros(4)
    with lazy_mode():
        half = memory[:2]
        half.add_(1)
        total = memory.sum()
        half.add_(1)
        shown = looked_at(sys._getframe(), "p half", "p total", "p half", "p memory")
        assert shown.splitlines() == [
            "tensor([2., 2.])", "tensor(2.)", "tensor([2., 2.])", "tensor([2., 2., 0., 0.])"
        ]  # fmt: skip
        assert is_pending(total)
    assert memory.tolist() == [2.0, 2.0, 0.0, 0.0]
    assert total.item() == 2.0


def test_gradients_are_named_as_ever():
    x = wrap(torch.ones(2)).requires_grad_()
    y = x * 3
    assert looked_at(sys._getframe(), "p y") == "tensor([3., 3.], grad_fn=<MulBackward0>)\n"
    assert is_pending(y)


def test_what_raises_raises_in_the_debugger_and_later_in_the_program():
    a, index = torch.ones(2), torch.tensor([5])
    with lazy_mode():
        bad = a[index]
        assert "IndexError" in looked_at(sys._getframe(), "p bad")
        with pytest.raises(IndexError):
            print(bad)


def test_the_program_itself_prints_by_a_flush():
    with lazy_mode():
        y = torch.ones(2) + 1
        assert repr(y) == "tensor([2., 2.])"
        assert not is_pending(y)
