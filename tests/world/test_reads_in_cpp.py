"""Composite ops whose C++ reads values, and gradients that nobody asked for."""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.ao.quantization import observer

from lazy_tensor import lazy_mode, materialize, wrap
from tests.invariants.compare import assert_same, lazily


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
@pytest.mark.parametrize("batched", [False, True])
def test_an_initial_state_has_a_gradient(kind, batched):
    torch.manual_seed(0)
    model = kind(2, 3, num_layers=2, bias=False)
    x = torch.randn(4, 5, 2) if batched else torch.randn(4, 2)
    start = torch.randn(2, 5, 3) if batched else torch.randn(2, 3)

    def program():
        h = start.clone().requires_grad_()
        state = (h * 1, h * 2) if kind is nn.LSTM else h * 1
        out, last = model(x, state)
        (out.sum() + (last[0] if kind is nn.LSTM else last).sum()).backward()
        return h.grad

    expected = program()
    with lazy_mode():
        found = program()
    assert torch.equal(materialize(found), expected)
    wrap(model)
    assert torch.equal(materialize(program()), expected)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.BatchNorm1d(3), (4, 3)), (lambda: nn.InstanceNorm1d(3, affine=True), (2, 3, 4)),
        (lambda: nn.BatchNorm2d(3), (2, 3, 4, 4)), (lambda: nn.GroupNorm(1, 3), (2, 3, 4)),
        (lambda: nn.LayerNorm(3), (2, 3)),
    ],
)  # fmt: skip
def test_a_normalization_is_the_first_layer(make, shape):
    model, x = make(), torch.randn(shape)
    twin = copy.deepcopy(model)
    for _ in range(3):
        with lazy_mode():
            model.zero_grad()
            model(x).square().sum().backward()
        twin.zero_grad()
        twin(x).square().sum().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(materialize(p.grad), q.grad)


aten = torch.ops.aten
NORM = (torch.randn(4, 3), torch.randn(4, 3), torch.rand(3))
STATISTICS = (torch.zeros(3), torch.ones(3), torch.zeros(3), torch.ones(3))
IMAGE, FILTER = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
MASKED = {
    "batch_norm": (aten.native_batch_norm_backward.default, (*NORM, *STATISTICS, True, 1e-5), 3),
    "batch_norm_eval": (
        aten.native_batch_norm_backward.default, (*NORM, *STATISTICS, False, 1e-5), 3,
    ),
    "layer_norm": (
        aten.native_layer_norm_backward.default,
        (NORM[0], NORM[1], [3], torch.zeros(4, 1), torch.ones(4, 1), NORM[2], NORM[2]), 3,
    ),
    "group_norm": (
        aten.native_group_norm_backward.default,
        (torch.randn(2, 4, 3), torch.randn(2, 4, 3), torch.zeros(2, 2), torch.ones(2, 2),
         torch.ones(4), 2, 4, 3, 2), 3,
    ),
    "convolution": (
        aten.convolution_backward.default,
        (torch.randn(2, 4, 3, 3), IMAGE, FILTER, [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1), 3,
    ),
    "slow_conv": (
        aten._slow_conv2d_backward.output_mask,
        (torch.randn(2, 4, 3, 3), IMAGE, FILTER, [3, 3], [1, 1], [0, 0]), 3,
    ),
    "linear": (
        aten.linear_backward.default, (torch.randn(2, 3), torch.randn(2, 4), torch.randn(4, 3)), 3,
    ),
    "grid_sampler": (
        aten.grid_sampler_2d_backward.default,
        (torch.randn(2, 3, 4, 4), IMAGE, torch.rand(2, 4, 4, 2), 0, 0, False), 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKED)
def test_gradients_that_nobody_asked_for(name):
    op, args, n = MASKED[name]
    for mask in itertools.product([False, True], repeat=n):
        try:
            expected = op(*args, list(mask))
        except NotImplementedError:
            continue  # not on the CPU
        for _ in range(2):
            with lazy_mode():
                found = op(*args, list(mask))
            for one, other, wanted in zip(found, expected, mask, strict=True):
                if wanted and other is not None:
                    assert torch.equal(materialize(one), other)


def test_quasirandom_numbers():
    def program():
        engine = torch.quasirandom.SobolEngine(3)
        scrambled = torch.quasirandom.SobolEngine(3, scramble=True, seed=1)
        return engine.draw(4), engine.draw(3), scrambled.draw(4)

    assert_same(lazily("mode", program), program())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_sparse_tensors_are_checked():
    def program():
        indices = torch.tensor([[0, 1], [1, 0]]) * 1
        values = (torch.ones(2) * 3).requires_grad_()
        coo = torch.sparse_coo_tensor(indices, values, (2, 2), check_invariants=True)
        coo.to_dense().square().sum().backward()
        rows, columns = torch.tensor([0, 1, 2]) * 1, torch.tensor([0, 1]) * 1
        csr = torch.sparse_csr_tensor(rows, columns, torch.ones(2), (2, 2), check_invariants=True)
        return coo.detach().to_dense(), csr.to_dense(), values.grad

    assert_same(lazily("mode", program), program())
    with lazy_mode(), pytest.raises(RuntimeError, match="size is inconsistent"):
        torch.sparse_coo_tensor(torch.tensor([[5]]) * 1, torch.ones(1), (2,), check_invariants=True)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_parts_of_sparse_tensors_are_viewed():
    def program():
        rows, columns = torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0, 1])
        sparse = torch.sparse_csr_tensor(rows, columns, torch.ones(4), (2, 2))
        return sparse.values().view(-1, 1) * 2, sparse.values()[:2], sparse.crow_indices()[1:]

    assert_same(lazily("mode", program), program())


LISTS = {
    "tensor": lambda v, n: torch.tensor([v, v]),
    "tensor of several dtypes": lambda v, n: torch.tensor([[v, n], [True, n]]),
    "tensor of rows": lambda v, n: torch.tensor([(v, n), v.detach().expand(2)]),
    "tensor of flags": lambda v, n: torch.tensor([n, n], dtype=torch.bool),
    "tensor of complex numbers": lambda v, n: torch.tensor([v, n], dtype=torch.complex64),
    "as_tensor": lambda v, n: torch.as_tensor([v]),
    "asarray": lambda v, n: torch.asarray([n]),
    "new_tensor": lambda v, n: torch.ones(1).new_tensor([v]),
    "LongTensor": lambda v, n: torch.LongTensor([n, n]),
    "FloatTensor": lambda v, n: torch.FloatTensor([v]),
    "Tensor": lambda v, n: torch.Tensor([v]),
    "Tensor of a size": lambda v, n: torch.Tensor(n, n).zero_(),
    "Size": lambda v, n: torch.ones(torch.Size([n, n])),
}


@pytest.mark.parametrize("make", LISTS.values(), ids=LISTS)
def test_views_in_a_list_show_the_pending_write_of_their_base(make):
    def program(mode):
        values, sizes = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
        v, n = values[1], sizes[1]
        with mode:
            values.add_(3)
            sizes.add_(torch.ones_like(sizes) * 2)
            return make(v, n)

    expected = program(nullcontext())
    found = materialize(program(lazy_mode()))
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_numbers_in_a_list_that_nothing_pending_writes_flush_nothing():
    step, x = torch.tensor(3.0), torch.ones(2)
    with lazy_mode(forbid={"flush"}):
        x.add_(1)
        found = torch.tensor([step, step])
    assert found.tolist() == [3.0, 3.0]


OBSERVERS = (
    observer.MinMaxObserver, observer.HistogramObserver, observer.PerChannelMinMaxObserver,
    observer.MovingAverageMinMaxObserver,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OBSERVERS)
def test_observers_of_quantization(kind):
    x = torch.randn(4, 5)

    def program():
        watcher = kind()
        watcher(x * 1)
        return watcher.calculate_qparams()

    assert_same(lazily("mode", program), program())


@pytest.mark.filterwarnings("ignore")
def test_dynamic_quantization():
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    expected = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)(x)
    with lazy_mode():
        quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        found = quantized(x * 1)
        parameters = torch.choose_qparams_optimized(x.flatten() * 1, 8, 200, 0.16, 8)
    assert torch.equal(materialize(found), expected)
    of_eager = torch.choose_qparams_optimized(x.flatten(), 8, 200, 0.16, 8)
    for one, other in zip(materialize(parameters), of_eager, strict=True):
        assert float(one) == float(other)
