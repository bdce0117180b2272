"""What a fusion runs as kernels arrive, lose, disagree and raise."""

import pytest
import torch

from lazy_tensor.kernels.counters import Counters
from lazy_tensor.kernels.service import fusion as fusion_module
from lazy_tensor.kernels.service.fusion import Fusion


@pytest.fixture
def recorded(record):
    return record(lambda a: a * 2, [torch.rand(3)])


@pytest.fixture
def fusion(recorded, toy):
    return Fusion(recorded.segment, toy, Counters())


def raising(tensors, scalars):
    raise RuntimeError("kernel: bad index")


def test_new_fusion_runs_op_by_op(fusion, recorded):
    assert torch.equal(fusion.run(recorded.inputs, [])[0], recorded.results[0])
    assert fusion.run is fusion.aten


def test_slower_kernel_is_left_aside_until_measured_again(fusion, recorded, monkeypatch):
    monkeypatch.setattr(fusion_module, "RECHECK_EVERY", 3)
    verdicts = iter([(2.0, 1.0), (1.0, 2.0)])

    class Settled:
        def __init__(self, kernel, aten, decide):
            self.kernel, self.decide = kernel, decide

        def __call__(self, tensors, scalars):
            self.decide(*next(verdicts))
            return self.kernel(tensors, scalars)

    monkeypatch.setattr(fusion_module, "Trial", Settled)
    fusion.measure = True
    fusion.adopt(fusion.backend.compile(fusion.segment), "compiled")
    statuses = []
    for _ in range(6):
        fusion.run(recorded.inputs, [])
        statuses.append(fusion.status)
    assert statuses == ["slower", "slower", "slower", "measuring", "ready", "ready"]
    assert fusion.backend.n_runs == 3


def test_error_of_a_kernel_becomes_the_error_of_eager_execution(record, toy):
    recorded = record(lambda a, i: a.index_select(0, i), [torch.rand(3), torch.tensor([1])])
    fusion = Fusion(recorded.segment, toy, Counters())
    fusion.adopt(raising, "compiled")
    with pytest.raises(IndexError, match="out of range"):
        fusion.run([torch.rand(3), torch.tensor([7])], [])
    assert fusion.status == "ready"


def test_kernel_that_raises_where_eager_does_not_is_dropped(fusion, recorded):
    fusion.adopt(raising, "compiled")
    with pytest.warns(UserWarning, match="was dropped: it raised RuntimeError"):
        outputs = fusion.run(recorded.inputs, [])
    assert torch.equal(outputs[0], recorded.results[0])
    assert fusion.status == "failed"
    assert fusion.run is fusion.aten


def test_error_after_a_write_is_not_followed_by_a_second_write(record, toy):
    recorded = record(lambda a: (a.mul_(2), a + 1)[1], [torch.ones(3)])
    fusion = Fusion(recorded.segment, toy, Counters())
    fusion.adopt(raising, "compiled")
    inputs = recorded.fresh()
    with pytest.raises(RuntimeError, match="bad index"):
        fusion.run(inputs, [])
    assert torch.equal(inputs[0], torch.ones(3))


def test_kernel_that_disagrees_is_dropped_with_one_warning(recorded, toy):
    fusion = Fusion(recorded.segment, toy, Counters(), verify_every=1)
    fusion.adopt(lambda tensors, scalars: (tensors[0] * 3,), "compiled")
    with pytest.warns(UserWarning, match="disagreed with op-by-op execution") as caught:
        results = [fusion.run(recorded.inputs, [])[0] for _ in range(3)]
    assert all(torch.equal(result, recorded.results[0]) for result in results)
    assert len(caught) == 1
    assert fusion.status == "failed"
