"""Calls with `out=`, recorded as writes of `out`: the same results as eager's."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

import lazy_tensor
from lazy_tensor import lazy_mode, materialize, replay
from lazy_tensor.dispatch.ops.rules import Rule, rule_of
from lazy_tensor.dispatch.ops.schema import facts_of


def is_recorded(name: str) -> bool:
    """Whether a form of the aten op with `out=` is recorded."""
    packet = getattr(torch.ops.aten, name, None)
    forms = [getattr(packet, overload) for overload in packet.overloads()] if packet else []
    return any(facts_of(op).is_out and rule_of(op) is Rule.RECORD for op in forms)


RECORDED = [op for op in op_db if op.supports_out and is_recorded(op.aten_name)]
OUTS = {
    "alike": torch.zeros_like,
    "transposed": lambda t: torch.zeros_like(t.mT.contiguous()).mT if t.dim() > 1 else t.clone(),
    "with gaps": lambda t: t.new_zeros(*t.shape[:-1], 2 * t.shape[-1])[..., ::2] if t.dim() else t,
    "of doubles": lambda t: torch.zeros_like(t, dtype=torch.float64),
    "empty": lambda t: t.new_empty(0),
}


def result_of(op: Any, sample: Any, out: torch.Tensor) -> Any:
    """What the call leaves in `out`; the type of its error if it raises one."""
    try:
        returned = op(sample.input, *sample.args, out=out, **sample.kwargs)
    except Exception as error:
        return type(error)
    assert returned is out
    return out.clone()


@pytest.mark.recorded
@pytest.mark.parametrize("op", RECORDED, ids=lambda op: op.formatted_name)
def test_every_op_writes_what_eager_writes(op):
    dtype = torch.float32 if op.supports_dtype(torch.float32, "cpu") else torch.int64
    warnings.simplefilter("ignore")  # that `out` is resized
    for sample in itertools.islice(op.sample_inputs("cpu", dtype), 2):
        try:
            given = op(sample.input, *sample.args, **sample.kwargs)
        except RuntimeError:
            continue
        if not isinstance(given, torch.Tensor) or not given.numel() or given.is_sparse:
            continue
        for kind, make in OUTS.items():
            want = result_of(op, sample, make(given))
            for _ in range(2):
                with lazy_mode():
                    found = result_of(op, sample, make(given))
                if not isinstance(want, torch.Tensor):
                    assert found is want, kind
                    continue
                found = materialize(found)
                assert found.stride() == want.stride(), kind
                assert torch.equal(found.nan_to_num(), want.nan_to_num()), kind


def buffers() -> Any:
    a, b, c = torch.zeros(40, 30), torch.zeros(40, 30), torch.zeros(40)

    def step(x: torch.Tensor) -> torch.Tensor:
        torch.mul(x, 2, out=a)
        torch.add(a, x, out=a)  # reads what it writes
        torch.exp(a, out=b)
        torch.mm(b, x.T @ x, out=a)
        torch.sum(a, 1, out=c)
        torch.sub(b[1:], b[:-1], out=a[1:])
        return a + c[:, None]

    return step, (a, b, c)


@pytest.mark.recorded
@pytest.mark.parametrize("compiles", ["off", "blocking"])
def test_a_program_that_keeps_its_buffers_is_recorded_whole(compiles):
    (eager, theirs), (step, ours) = buffers(), buffers()
    backend = "inductor" if compiles == "blocking" else "aten"
    for i in range(4):
        x = torch.linspace(0, 0.1 + i, 1200).view(40, 30)
        want = eager(x)
        lazy_tensor.reset_stats()
        with lazy_mode(backend=backend, compile=compiles):
            found = step(x)
        torch.testing.assert_close(materialize(found), want)
        for buffer, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(buffer, other)
    stats = lazy_tensor.stats()
    assert not stats["fallbacks"]
    assert stats["flushes"] == 1
    assert stats["segments"] == (0 if compiles == "off" else 2)  # beside the two products


def test_it_is_replayed():
    (eager, theirs), (step, ours) = buffers(), buffers()
    step = replay(step)
    for i in range(6):
        x = torch.linspace(0, 0.1 + i, 1200).view(40, 30)
        assert torch.equal(step(x), eager(x))
        for buffer, other in zip(ours, theirs, strict=True):
            assert torch.equal(buffer, other)
    assert step.n_replayed > 2


@pytest.mark.recorded
def test_what_overlaps_raises_as_in_eager():
    x = torch.arange(6.0)
    with lazy_mode(), pytest.raises(RuntimeError, match="memory"):
        torch.add(x[1:], 1, out=x[:-1])
    assert torch.equal(x, torch.arange(6.0))
    with lazy_mode():
        torch.add(x, 1, out=x)
    assert torch.equal(x, torch.arange(1.0, 7.0))


@pytest.mark.recorded
def test_autograd_counts_the_write():
    x, out = torch.ones(3, requires_grad=True), torch.zeros(3)
    with lazy_mode():
        y = x * out
        torch.add(torch.ones(3), 1, out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        with pytest.raises(RuntimeError, match="requires grad"):
            torch.add(x, 1, out=out)
