"""Tensors that traces don't hold or that change shape, and tensors with nothing in them."""

import pytest
import torch
from torch import nn

from lazy_tensor import is_pending, lazy_mode, materialize, wrap
from tests.invariants.compare import WAYS, assert_agrees

each_way = pytest.mark.parametrize("way", WAYS)


def resized(x):
    y = x + 1
    y.resize_(2, 3)
    shape = list(y.shape)
    y.resize_(4, 3)
    y[2:] = 7
    return shape, y, y.sum()


def resized_as(x):
    y = x + 1
    return y.resize_as_(x[:2]), y * 2


def set_to_another(x):
    y, z = x + 1, x * 3
    before = y * 2
    y.set_(z)
    y.mul_(2)
    return before, y, z


def set_to_a_part(x):
    y = x + 1
    y.set_(y.untyped_storage(), 2, (3,), (2,))
    return y, y * 2


def set_to_nothing(x):
    y = x + 1
    y.set_()
    return y, list(y.shape)


def data_of_another_shape(x):
    y = x + 1
    y.data = x[:1, :2] * 3
    return y, list(y.shape), y.sum()


def squeezed_in_place(x):
    y = x.unsqueeze(0) + 1
    view = y[0]
    y.squeeze_(0).t_()
    y[0] = 5
    return y, view


def swapped(x):
    a, b = x + 1, x * 2
    torch.utils.swap_tensors(a, b)
    return a, b, a - b


def empty_arithmetic(x):
    e = x[:0]
    return e + 1, e.sum(), e.prod(1), e.mean(), e @ x.t(), e.t() @ e


def empty_writes(x):
    e = x[:0] * 1
    e.add_(1)
    x[1:1] = 5
    x[x > 100] = 3
    return e, x, torch.cat([e, x]), torch.stack([e, e])


def empty_selections(x):
    none = torch.zeros(0, dtype=torch.int64)
    return x[none], x.index_select(1, none), x.masked_select(x > 100), (x > 100).nonzero()


def empty_shapes(x):
    e = (x + 1)[:, :0]
    return e.view(0, 3), e.reshape(-1, 7), e.expand(2, 4, 0), e.split(1), e.t(), e.sum(0)


def scalars(x):
    s = x.sum()
    return s + 1, s * x, s.view(1), s.expand(3), s.reshape(1, 1), s.unsqueeze(0), -s


def written_scalars(x):
    s = x.sum()
    view = s.view(1)
    s.add_(1)
    view.mul_(2)
    x[0] = s
    return s, view, x


def typed_scalars(x):
    n = torch.tensor(3)
    d = torch.tensor(0.5, dtype=torch.float64)
    return x * n, x * d, n * 1.5, n + d, n / 2, n // 2, torch.where(x > 0.5, n, d)


def scalars_as_indices(x):
    i = (x.argmax() * 0) + 1
    return x[i], x[i, 0], x[:, i], x.select(0, int(i)), x.narrow(0, int(i), 1)


PROGRAMS = [
    resized, resized_as, set_to_another, set_to_a_part, set_to_nothing, data_of_another_shape,
    squeezed_in_place, swapped, empty_arithmetic, empty_writes, empty_selections, empty_shapes,
    scalars, written_scalars, typed_scalars, scalars_as_indices,
]  # fmt: skip


@pytest.mark.parametrize("grow", [
    lambda x: x.resize_(5), lambda x: x.resize_as_(torch.ones(5)),
    lambda x: torch.cat([torch.ones(5)], out=x.resize_(0)),
])  # fmt: skip
def test_a_plain_tensor_grows_after_a_pending_call_has_read_it(grow):
    with lazy_mode(record="always"):
        x = materialize(torch.ones(3))
        y = x.clone()
        grow(x).fill_(2)
    assert (x.tolist(), y.tolist()) == ([2.0] * 5, [1.0] * 3)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@each_way
def test_shapes_and_values_agree(program, way):
    assert_agrees(way, program, torch.rand(4, 3))


def sparse():
    return torch.eye(3).to_sparse()


def compressed():
    return torch.eye(3).to_sparse_csr()


def quantized():
    return torch.quantize_per_tensor(torch.eye(3), 0.1, 3, torch.quint8)


def nested():
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)


def on_meta():
    return torch.empty(3, 3, device="meta")


STRANGERS = [sparse, compressed, quantized, nested, on_meta]
# torch's own remarks on features in beta or to be removed
of_torch = pytest.mark.filterwarnings(
    "ignore:.*(Sparse CSR|Sparse invariant|quantized|torch.ao|prototype|nested).*:UserWarning",
    "ignore:.*(quantiz|deprecated).*:DeprecationWarning",
)


@of_torch
@pytest.mark.parametrize("make", STRANGERS, ids=lambda make: make.__name__)
def test_wrap_hands_back_what_traces_do_not_hold(make):
    x = make()
    assert wrap(x) is x


USES = {
    "sparse @ dense": (sparse, lambda s, x: s @ x),
    "sparse + sparse": (sparse, lambda s, x: (s + s).to_dense() + x),
    "sparse values": (sparse, lambda s, x: s.coalesce().values() * 2),
    "to_sparse": (sparse, lambda s, x: (x + 1).to_sparse().to_dense() * 2),
    "compressed @ dense": (compressed, lambda s, x: s @ x + x),
    "dequantize": (quantized, lambda q, x: q.dequantize() + x),
    "quantize": (
        quantized,
        lambda q, x: torch.quantize_per_tensor(x + 1, 0.1, 0, torch.quint8).int_repr() + 0,
    ),
    "nested": (nested, lambda n, x: [part + 0 for part in (n.cos() * 2).unbind()]),
    "nested linear": (
        nested, lambda n, x: (nn.functional.linear(n, torch.eye(3)) + 1).values().sum()
    ),
    "meta": (on_meta, lambda m, x: (list((m @ m + 1).shape), (m * 2).device.type, x * 2)),
}  # fmt: skip


@of_torch
@pytest.mark.parametrize(("make", "use"), USES.values(), ids=USES.keys())
@each_way
def test_strangers_work_beside_lazy_tensors(make, use, way):
    assert_agrees(way, lambda x: use(make(), x), torch.rand(3, 3))


@each_way
def test_sparse_gradients_train_an_embedding(way):
    def program(x):
        torch.manual_seed(2)
        table = nn.Embedding(5, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (table(torch.tensor([0, 3, 3])) * x).sum().backward()
            optimizer.step()
        return table.weight.detach()

    assert_agrees(way, program, torch.rand(3, 3))


def test_a_meta_tensor_is_not_filled_with_values():
    with lazy_mode():
        y = torch.empty(3, device="meta") + 1
    assert y.device.type == "meta"
    assert not is_pending(y)


class Tagged(torch.Tensor):
    """A subclass with nothing of its own."""


def test_a_users_subclass_keeps_its_type_in_the_mode():
    x = torch.ones(3).as_subclass(Tagged)
    with lazy_mode():
        y = x + 1
        z = torch.ones(3) + x
    assert isinstance(y, Tagged)
    assert isinstance(z, Tagged)
    assert y.tolist() == [2.0] * 3
