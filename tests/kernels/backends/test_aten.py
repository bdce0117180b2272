"""The reference backend leaves exactly what eager execution leaves."""

import weakref

import pytest
import torch
from torch import Tensor

from lazy_tensor.kernels import Call, Ref, Segment, TensorSpec
from lazy_tensor.kernels.backends.aten import AtenBackend, compile_aten

aten = torch.ops.aten


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float) -> tuple[Tensor, ...]:
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.addcdiv_(m, v.sqrt().add_(1e-8), value=lr)
    return (m * 1,)


def norm_backward(g, x, w):
    _, mean, rstd = aten.native_layer_norm(x, [5], w, None, 1e-5)
    return aten.native_layer_norm_backward(g, x, [5], mean, rstd, w, None, [True, True, False])[:2]


CASES = {
    "writes and scalars": (adam, [torch.rand(4, 5) for _ in range(4)], [-0.01]),
    "views": (lambda a: (a[1:].mul_(2), a.t() @ a)[1], [torch.rand(3, 3)], []),
    "list arguments and results": (
        lambda a, b: torch.cat([*a.split(2), b]), [torch.rand(5, 2), torch.rand(1, 2)], []),
    "one-element list result": (lambda a: a.split(9)[0] + 1, [torch.rand(5)], []),
    "an undefined output": (norm_backward, [torch.rand(3, 5), torch.rand(3, 5), torch.rand(5)], []),
    "infinite constants": (lambda a: a.masked_fill(a > 0.5, float("-inf")), [torch.rand(4)], []),
    "keyword arguments": (lambda a: a.to(torch.float64), [torch.rand(4)], []),
    "no inputs": (lambda: torch.arange(4) * 2, [], []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_replay_is_bit_equal_to_eager(record, case):
    recorded = record(*CASES[case])
    inputs = recorded.fresh()
    outputs = compile_aten(recorded.segment)(inputs, recorded.scalars)
    for ours, eager in zip(
        [*outputs, *inputs], [*recorded.results, *recorded.written], strict=True
    ):
        assert torch.equal(ours, eager)
        assert ours.stride() == eager.stride()


def test_scalars_are_read_at_every_call(record):
    recorded = record(lambda a, s: a * s, [torch.ones(2)], [3.0])
    kernel = compile_aten(recorded.segment)
    assert kernel(recorded.inputs, [3.0])[0].tolist() == [3.0, 3.0]
    assert kernel(recorded.inputs, [0.5])[0].tolist() == [0.5, 0.5]


def test_kernel_keeps_no_tensor_alive(record):
    recorded = record(lambda a: a + 1, [torch.ones(2)])
    inputs = recorded.fresh()
    output = compile_aten(recorded.segment)(inputs, [])[0]
    alive = weakref.ref(output)
    del output
    assert alive() is None


def test_aten_refuses_to_fuse_but_compiles_everything():
    spec = TensorSpec((2, 2), (2, 1), torch.float32, torch.device("cpu"))
    call = Call(aten.mm.default, (Ref(0), Ref(0)), (), (spec,))
    assert AtenBackend().refuses(call) == "aten runs op by op"
    kernel = AtenBackend().compile(Segment((spec,), (), (call,), (1,)))
    assert torch.equal(kernel([torch.eye(2)], [])[0], torch.eye(2))
