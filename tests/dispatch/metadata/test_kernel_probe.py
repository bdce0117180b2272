"""What kernels are asked for: layouts of results, refused dtypes; and what is never tried."""

import copy
import random

import pytest
import torch
from torch import nn

from lazy_tensor import cache_info, lazy_mode, materialize, stats
from lazy_tensor.dispatch.metadata.kernel_probe import is_safe
from lazy_tensor.dispatch.ops.schema import facts_of

aten = torch.ops.aten
OPS = {
    "neg": (aten.neg.default, 1), "mul": (aten.mul.Tensor, 2), "sub": (aten.sub.Tensor, 2),
    "maximum": (aten.maximum.default, 2), "eq": (aten.eq.Tensor, 2), "lerp": (aten.lerp.Tensor, 3),
    "addcmul": (aten.addcmul.default, 3), "sigmoid_backward": (aten.sigmoid_backward.default, 2),
    "silu_backward": (aten.silu_backward.default, 2), "clamp": (aten.clamp.Tensor, 3),
}  # fmt: skip


def laid_out_at_random(shape, dtype):
    """A tensor that broadcasts to `shape`, its dimensions in any order, some with gaps."""
    order = random.sample(range(len(shape)), len(shape))
    tensor = torch.rand([random.choice((1, 1, 2)) * shape[d] for d in order]).to(dtype)
    for dim in range(len(shape)):
        tensor = tensor.narrow(dim, 0, random.choice((shape[order[dim]], shape[order[dim]], 1)))
    tensor = tensor.permute([order.index(d) for d in range(len(shape))])
    return tensor.expand(shape) if random.random() < 0.5 else tensor


def strides_that_matter(tensor):
    return [step for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_results_are_laid_out_as_by_the_kernel(name, dtype):
    op, n_tensors = OPS[name]
    for _ in range(60):
        shape = [random.choice((1, 2, 3, 4)) for _ in range(random.randint(0, 4))]
        tensors = [laid_out_at_random(shape, dtype) for _ in range(n_tensors)]
        expected = op(*tensors)
        with lazy_mode():
            got = op(*tensors)
        layouts = [(t.shape, t.stride()) for t in tensors]
        assert strides_that_matter(got) == strides_that_matter(expected), layouts
        assert torch.equal(materialize(got), expected)


def test_rolls_keep_channels_last():
    """Torch's meta function gives rolls contiguous strides. Eager does if nothing moves."""
    images = torch.randn(4, 16, 6, 5).contiguous(memory_format=torch.channels_last)
    gaps = torch.randn(4, 16, 6, 10).contiguous(memory_format=torch.channels_last)[..., ::2]
    given = images, images > 0, images[:, :1], gaps, torch.randn(6, 5, 4).permute(2, 0, 1)
    shifts = ((1,), (1,)), ((-2, 3), (2, 3)), ((6,), (2,)), ((6, 1), (2, 3)), ((4,), (1,)), ((3,),)
    for x in given:
        for roll in shifts:
            if len(roll) == 1 or max(roll[1]) < x.dim():
                expected = x.roll(*roll)
                with lazy_mode(record="always"):
                    got = x.roll(*roll)
                layout = x.shape, x.stride(), roll
                assert strides_that_matter(got) == strides_that_matter(expected), layout
                assert torch.equal(materialize(got), expected)


def test_results_of_tensors_that_overlap_themselves():
    windows, shared = torch.randn(40).unfold(0, 8, 1), torch.randn(20).as_strided((5, 8), (1, 1))
    calls = (
        torch.nn.functional.logsigmoid, lambda x: torch.copysign(x, torch.tensor(2)),
        lambda x: x >= torch.tensor(1), lambda x: x.double() * x, lambda x: x.mT.atan2(x.mT[:1]),
    )  # fmt: skip
    for x in (windows, shared, windows.t(), windows[::2].unfold(0, 2, 1)):
        for call in calls:
            expected = call(x)
            with lazy_mode(record="always"):
                got = call(x)
            assert got.stride() == expected.stride(), (x.shape, x.stride())
            assert torch.equal(materialize(got), expected)


def test_attention_whose_weights_nobody_asks_for():
    """Its kernel gives nothing for them, its meta function a tensor."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(4, 5, 8)
    with torch.no_grad():
        expected, _ = attention(x, x, x, need_weights=False)
        for _ in range(3):
            with lazy_mode(record="always"):
                found, weights = attention(x, x, x, need_weights=False)
            assert weights is None
            assert torch.equal(found, expected)


def test_an_op_is_tried_once_for_its_dtypes_and_layouts():
    with lazy_mode():
        for n in range(3, 9):
            torch.ones(n, dtype=torch.int64).bitwise_and(torch.ones(n, dtype=torch.int64))
    assert (cache_info()["probes"].misses, cache_info()["probes"].hits) == (1, 5)


NORMS = {
    "BatchNorm2d": lambda: nn.BatchNorm2d(4),
    "BatchNorm2d without parameters": lambda: nn.BatchNorm2d(4, affine=False),
    "BatchNorm2d of the batch": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "GroupNorm without parameters": lambda: nn.GroupNorm(2, 4, affine=False),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(4, affine=True),
    "InstanceNorm2d, tracking": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
    "LayerNorm": lambda: nn.LayerNorm(6),
    "RMSNorm": lambda: nn.RMSNorm(6),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_norms_of_few_bits_are_recorded_with_parameters_of_either(name, dtype, training):
    model = nn.Sequential(nn.Identity(), NORMS[name](), nn.ReLU()).to(dtype).train(training)
    x = torch.randn(2, 4, 5, 6).bfloat16()

    def gradients(model):
        leaf = x.clone().requires_grad_()
        (model(leaf * 2) * 3).float().square().sum().backward()
        return [leaf.grad, *(p.grad for p in model.parameters()), *model.buffers()]

    expected = gradients(copy.deepcopy(model))
    with lazy_mode():
        got = gradients(model)
        dtypes = [t.dtype for t in got]
    assert dtypes == [t.dtype for t in expected]
    assert all(map(torch.equal, materialize(got), expected))
    assert stats()["fallbacks"] == {}


def test_a_norm_under_autocast_is_recorded_at_every_step():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1))
    model.append(nn.BatchNorm2d(4))
    x = torch.randn(2, 3, 6, 6)
    for _ in range(3):
        with lazy_mode(), torch.autocast("cpu", torch.bfloat16):
            model(x).float().square().sum().backward()
    assert stats()["fallbacks"] == {}
    assert stats()["flushes"] == 3


def test_group_norms_whose_numbers_do_not_fit_are_left_to_eager():
    x, weight = torch.randn(2, 4, 3).bfloat16(), torch.ones(4)
    mean = torch.zeros(2, 2)
    for n, c, groups in ((2, 8, 2), (3, 4, 2), (2, 4, 3), (2, 4, 4)):
        call = (x, x, mean, mean, weight, n, c, 3, groups, [True] * 3)
        with pytest.raises(RuntimeError) as raised:
            aten.native_group_norm_backward(*call)
        with lazy_mode(), pytest.raises(RuntimeError) as also_raised:
            aten.native_group_norm_backward(*call)
        assert str(also_raised.value) == str(raised.value)


def test_kernels_that_trust_their_sizes_are_never_tried():
    # native_group_norm_backward reads memory by the sizes that it is given as numbers
    for op in (aten.native_group_norm_backward.default, aten._thnn_fused_lstm_cell.default):
        assert not is_safe(facts_of(op))
    assert is_safe(facts_of(aten.gt.Scalar))


def test_kernels_that_trust_their_pivots_are_never_tried():
    for op in (aten.linalg_ldl_solve.default, aten.linalg_lu_solve.default, aten.lu_unpack.default):
        assert not is_safe(facts_of(op))


@pytest.mark.parametrize("powers", [(2, 2.0), (2.0, 2)], ids=str)
def test_equal_powers_of_other_types_are_told_apart(powers):
    x = torch.arange(3)
    for power in powers:
        with lazy_mode():
            y = (x + 0) ** power
        assert (y.dtype, y.tolist()) == ((x**power).dtype, [0, 1, 4])


def test_a_known_probe_is_another_under_another_default_dtype():
    x = torch.arange(3)
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            with lazy_mode():
                y = (x + 0) * 1.5
            assert y.dtype is dtype
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_bool_is_refused_though_an_equal_int_was_taken():
    with lazy_mode():
        x = torch.randn(4, 3).t()
        x.sub_(1)
        with pytest.raises(RuntimeError, match="with a bool tensor is not supported"):
            x.sub_(True)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_tensor_that_overlaps_itself_is_laid_out_by_itself(transposed):
    # what its equal strides give depends on its sizes, which a tensor of two by two hasn't
    overlapping = torch.randn(10).unfold(0, 3, 1)
    view = overlapping.t() if transposed else overlapping
    with lazy_mode():
        got = view.clone()
    assert got.stride() == view.clone().stride()
