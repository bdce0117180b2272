"""Compiled segments against eager execution: values, writes, strides and memory."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lazy_tensor.kernels.backend import Declined
from lazy_tensor.kernels.backends.inductor import InductorBackend
from lazy_tensor.kernels.segment import Call, Ref, Segment, TensorSpec
from lazy_tensor.kernels.service.verify import difference

aten = torch.ops.aten
INDUCTOR = InductorBackend()


def seeded(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


X, Y = seeded(33, 65), seeded(33, 65, seed=1)
WEIGHT, BIAS = seeded(65, seed=2), seeded(65, seed=3)


def pointwise(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    return (
        torch.sigmoid(x * g) + g,
        F.gelu(x), aten.gelu_backward(g, x), F.silu(x), aten.silu_backward(g, x),
        aten.threshold_backward(g, x, 0), F.leaky_relu(x), torch.where(x > g, x, 0.5),
        x.bfloat16(), x.double(), (x * 10).to(torch.int32), x.masked_fill(g > 0, float("-inf")),
    )  # fmt: skip


def reductions(x: Tensor) -> tuple[Tensor, ...]:
    return (
        x.sum(), x.mean(0), x.amax(1), x.argmax(1), x.var(1), *x.max(0), x.std(), (x > 2).any(),
        x.norm(), x.softmax(-1), x.log_softmax(0), x.logsumexp(1),
    )  # fmt: skip


def norms(g: Tensor, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    y, mean, rstd = aten.native_layer_norm(x, [65], w, b, 1e-5)
    grads = aten.native_layer_norm_backward(g, x, [65], mean, rstd, w, b, [True, True, True])
    return (y, mean, rstd, *grads, x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w)


def batch_norm(g: Tensor, x: Tensor, w: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
    y, m, r = aten.native_batch_norm(x, w, w, mean, var, True, 0.1, 1e-5)
    grads = aten.native_batch_norm_backward(g, x, w, mean, var, m, r, True, 1e-5, [True] * 3)
    return (y, *grads)


def mixed_norms(
    g: Tensor, x: Tensor, w: Tensor, image: Tensor, c: Tensor, mean: Tensor, var: Tensor
) -> tuple[Tensor, ...]:
    """All but `w`, `c` and the running statistics in bfloat16, as under autocast.

    The gradients of a layer norm's parameters are left out: eager's kernel sums them in bfloat16.
    """
    mask, shape = [True, True, True], image.shape
    of_image = aten.native_batch_norm(image, c, c, mean, var, True, 0.1, 1e-5)
    of_groups = aten.native_group_norm(image, c, c, 4, 6, 36, 2, 1e-5)
    of_rows = aten.native_layer_norm(x, [65], w, w, 1e-5)
    return (
        *of_image, *of_groups, *of_rows,
        *aten.native_batch_norm_backward(
            image, image, c, mean, var, *of_image[1:], True, 1e-5, mask),
        *aten.native_group_norm_backward(
            image, image, *of_groups[1:], c, shape[0], shape[1], 36, 2, mask),
        aten.native_layer_norm_backward(g, x, [65], *of_rows[1:], w, w, mask)[0],
    )  # fmt: skip


def loss(x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    scores = x.log_softmax(-1)
    value, weight = aten.nll_loss_forward(scores, target, None, 1, -100)
    g = aten.nll_loss_backward(torch.ones_like(value), scores, target, None, 1, -100, weight)
    return value, aten._log_softmax_backward_data(g, scores, -1, torch.float32)


def moves(x: Tensor, y: Tensor, table: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    return (
        torch.cat([x, y], 1), torch.stack([x, y]), x.split(16, 1)[1] + 1,
        aten.embedding(table, rows) * 2, x.gather(1, rows), x.index_select(0, rows[0]),
        aten.slice_backward(y, [33, 70], 1, 2, 67, 1),
        F.pad(x, (1, 2)), x.roll(1, 0) + 0, torch.arange(5) + 1, torch.ones_like(x),
    )  # fmt: skip


def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float, correction: float) -> tuple[()]:
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.addcdiv_(m, (v.sqrt() / correction).add_(1e-8), value=lr)
    return ()


def writes_through_views(x: Tensor, cache: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    x[:, 1:3].mul_(2.0)
    x[0].copy_(x[1])
    inner = x + 1
    inner[2].add_(1.0)
    inner.t().mul_(3)
    cache[:, 4:5] = k
    return x.sum(), inner, cache[:, :5] * 2


def layouts(x: Tensor, image: Tensor, dense: Tensor) -> tuple[Tensor, ...]:
    return x * 2, x.t() + 1, image * 2, (image + dense).relu_(), torch.full_like(image, 2)


def equal(x: Tensor) -> tuple[Tensor, ...]:
    """Equal values, each with memory of its own."""
    a = x * 2
    return a, a.clone(), x * 2, a.t().clone(), torch.cat([a])


CASES = {
    "pointwise": (pointwise, [X, Y], []),
    "reductions": (reductions, [X], []),
    "norms": (norms, [Y, X, WEIGHT, BIAS], []),
    "norms in bfloat16": (norms, [t.bfloat16() for t in (Y, X, WEIGHT, BIAS)], []),
    "norms of bfloat16 with float32 parameters": (
        mixed_norms,
        [Y.bfloat16(), X.bfloat16(), WEIGHT, seeded(4, 6, 6, 6).bfloat16(),
         seeded(6, seed=4), seeded(6), seeded(6).abs()], []),
    "batch norm, statistics written": (
        batch_norm,
        [seeded(4, 5, 6, 6), seeded(4, 5, 6, 6, seed=1), seeded(5), seeded(5), seeded(5).abs()],
        []),
    "log softmax and its loss": (loss, [X, torch.arange(33).where(X[:, 0] > -1, -100)], []),
    "moves": (moves, [X, Y, seeded(65, 7), torch.arange(12).view(3, 4)], []),
    "optimizer step": (adam, [seeded(64), seeded(64), seeded(64), seeded(64).abs()], [-0.01, 0.9]),
    "writes through views": (
        writes_through_views, [seeded(5, 5), seeded(2, 8, 4), seeded(2, 1, 4)], []),
    "layouts": (
        layouts,
        [seeded(9, 8).t(), seeded(2, 3, 8, 8).to(memory_format=torch.channels_last),
         seeded(2, 3, 8, 8)], []),
    "expanded input": (lambda x, y: (x + y,), [seeded(8, 1).expand(8, 8), seeded(8, 8)], []),
    "equal results": (equal, [seeded(8, 8)], []),
    "divisions": (
        lambda x, n: (x.div(3, rounding_mode="trunc"), n // 3, n % -3),
        [X, torch.arange(-9, 9)], []),
    "rounding": (
        lambda x: (x - x.bfloat16().float(), x - x.half().float(), torch.erfinv(x)),
        [seeded(8, 8)], []),
    "several threads": (
        lambda x, y: (torch.tanh(x * y).sum(), x.mul_(2) * y),
        [seeded(256, 512), seeded(256, 512)], []),
}  # fmt: skip


@pytest.fixture(params=CASES)
def compiled(request, record, compiler):
    """A recorded case, its kernel's outputs and written inputs, and those of replay."""
    recorded = record(*CASES[request.param])
    assert [
        INDUCTOR.refuses(call) for call in recorded.segment.calls if INDUCTOR.refuses(call)
    ] == []
    fusion = compiler.fusion_of(recorded.segment, INDUCTOR, mode="blocking")
    assert fusion.status == "ready", fusion.reason
    inputs = recorded.fresh()
    return recorded, list(fusion.run(inputs, recorded.scalars)), inputs


def test_kernel_leaves_what_eager_execution_leaves(compiled):
    recorded, outputs, inputs = compiled
    assert difference(outputs, recorded.results) is None
    assert difference(inputs, recorded.written) is None
    # to the element, where a user would look at strides
    assert [o.stride() for o in outputs] == [r.stride() for r in recorded.results]
    starts = [o.untyped_storage().data_ptr() for o in (*outputs, *inputs)]
    assert len({*starts}) == len(starts)


def test_written_inputs_are_written_by_the_kernel_itself(record):
    """No buffer is allocated for an optimizer step and nothing is copied."""
    from lazy_tensor.kernels.backends.lower import lower
    from lazy_tensor.kernels.backends.torch_cpp import Unit
    from lazy_tensor.kernels.backends.torch_inductor import compile_graph, decompositions

    lowered = lower(record(*CASES["optimizer step"]).segment, decompositions())
    with Unit():
        compiled = compile_graph(lowered.graph, lowered.inputs)
    assert {kind for kind, *_ in compiled.steps["steps"]} == {"kernel"}


def test_promised_strides_are_kept_where_eager_gives_others(record, compiler):
    recorded = record(lambda x: (x * 2).exp(), [seeded(3, 4)])
    first, last = recorded.segment.calls
    promised = replace(last.outputs[0], stride=(1, 3))
    segment = replace(recorded.segment, calls=(first, replace(last, outputs=(promised,))))
    fusion = compiler.fusion_of(segment, INDUCTOR, mode="blocking")
    (output,) = fusion.run(recorded.inputs, [])
    assert output.stride() == (1, 3)
    torch.testing.assert_close(output, recorded.results[0])


def test_bad_index_is_eagers_error_not_a_crash(record, compiler):
    recorded = record(*CASES["log softmax and its loss"])
    fusion = compiler.fusion_of(recorded.segment, INDUCTOR, mode="blocking")
    scores, target = recorded.fresh()
    target[7] = 65
    with pytest.raises(IndexError, match="Target 65 is out of bounds"):
        fusion.run([scores, target], [])
    assert fusion.status == "ready"


@pytest.mark.parametrize(
    "program",
    [
        lambda x, y: x % y,
        lambda x, y: 0.7 % y,
        lambda x, y: x // 0.7,
        lambda x, y: x.floor_divide_(y) + 1,
        lambda x, y: x.div(y, rounding_mode="floor"),
        lambda x, y: x.long() // y,
    ],
)
def test_floor_divisions_of_floats_are_declined(program, record):
    with pytest.raises(Declined, match="quotients of floats"):
        INDUCTOR.build(record(program, [X, Y]).segment)


def test_fingerprint_tells_thread_counts_apart():
    before = torch.get_num_threads()
    one = INDUCTOR.fingerprint()
    try:
        torch.set_num_threads(before + 1)
        assert INDUCTOR.fingerprint() != one
    finally:
        torch.set_num_threads(before)
    assert INDUCTOR.fingerprint() == one


def test_a_segment_keeps_the_default_dtype_it_was_recorded_under():
    spec = TensorSpec((2,), (1,), torch.float64, torch.device("cpu"))
    calls = (
        Call(aten.ones.default, ((2,),), (("device", torch.device("cpu")),), (spec,)),
        Call(aten.mul.Tensor, (Ref(0), 1.5), (), (spec,)),
    )
    segment = Segment((), (), calls, (1,), torch.float64)
    assert segment != Segment((), (), calls, (1,), torch.float32)
    backend = InductorBackend()
    (result,) = backend.load(segment, backend.build(segment))([], [])
    assert result.dtype is torch.float64
    assert torch.get_default_dtype() is torch.float32
