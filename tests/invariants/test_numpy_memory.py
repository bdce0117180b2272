"""Memory that arrays share with tensors: each read sees what is there at its line, and can wait."""

import copy

import numpy
import pytest
import torch

import lazy_tensor
from lazy_tensor import is_pending, lazy_mode, materialize, wrap
from lazy_tensor.dispatch.run import input_snapshots
from lazy_tensor.dispatch.trie.trace import local
from tests.invariants.compare import WAYS, assert_agrees, assert_same


@pytest.fixture(autouse=True)
def recorded():
    lazy_tensor.configure(record="always")


def copies_taken():
    return [copy for of_memory in local.trace.copies.values() for copy in of_memory]


@pytest.fixture(params=WAYS)
def shared(request):
    """An array, and a tensor on its memory whose ops are recorded."""
    array = numpy.arange(24.0).reshape(4, 6)
    tensor = torch.from_numpy(array)
    if request.param == "wrap":
        yield array, wrap(tensor)
    else:
        with lazy_mode():
            yield array, tensor


def test_reads_wait_and_see_what_was_there_at_their_line(shared):
    array, tensor = shared
    for i in range(4):
        read, expected = [], []
        lazy_tensor.reset_stats()
        for j in range(3):
            read.append(tensor * 2 + tensor)
            expected.append(torch.tensor(array * 2 + array))
            array[1, j] += i
        assert all(is_pending(one) for one in read)
        assert lazy_tensor.stats()["flushes"] == 0
        assert_same(read, expected)


def test_memory_that_nobody_wrote_is_copied_once(shared):
    array, tensor = shared
    y = tensor.sin()
    (copy,) = copies_taken()
    y = y * tensor + tensor
    (again,) = copies_taken()
    assert again is copy
    plain = torch.tensor(array)
    assert torch.equal(materialize(y), plain.sin() * plain + plain)
    assert not local.trace.copies


@pytest.mark.parametrize(
    "view",
    [lambda x: x[1:, ::2], lambda x: x.t(), lambda x: x[:, 2:5], lambda x: x[::3, 1:],
     lambda x: x[:1].expand(3, 6), lambda x: x.t()[1:3]],
    ids=["every second", "transposed", "columns", "few", "expanded", "rows of it"],
)  # fmt: skip
def test_views_have_the_strides_of_eager(shared, view):
    array, tensor = shared
    seen, expected = view(tensor) * 2, view(torch.from_numpy(array.copy())) * 2
    assert seen.stride() == expected.stride()
    array[:] = -1
    assert torch.equal(materialize(seen), expected)


@pytest.mark.parametrize(
    "dtype",
    [numpy.bool_, numpy.uint8, numpy.int16, numpy.float16, numpy.int32, numpy.complex64,
     numpy.complex128],
)  # fmt: skip
@pytest.mark.parametrize("part", [lambda x: x, lambda x: x[:, 1:]], ids=["all", "some"])
def test_any_dtype(dtype, part):
    array = numpy.arange(12).reshape(3, 4).astype(dtype)
    before = array.copy()
    with lazy_mode():
        tensor = part(torch.from_numpy(array))
        first = torch.eq(tensor, tensor)
        array[2, 1] = not array[2, 1]
        second = tensor.logical_not()
    assert torch.equal(materialize(first), torch.from_numpy(part(before) == part(before)))
    assert torch.equal(materialize(second), torch.from_numpy(~part(array).astype(bool)))


def test_bits_are_compared():
    array = numpy.array([0.0, numpy.nan])
    with lazy_mode():
        tensor = torch.from_numpy(array)
        first = 1 / tensor
        again = tensor * 1  # NaNs differ from themselves, their bits don't
        assert len(copies_taken()) == 1
        array[0] = -0.0
        second = 1 / tensor
        assert len(copies_taken()) == 2
    assert [t[0].item() for t in materialize([first, again, second])] == [
        float("inf"), 0.0, -float("inf"),
    ]  # fmt: skip


def test_writes_go_to_the_array_at_once(shared):
    array, tensor = shared
    before = tensor + 1
    tensor.mul_(2)
    assert array[0, 1] == 2
    after = tensor + 1
    tensor[0] = 7
    assert (array[0] == 7).all()
    before, after = materialize([before, after])
    assert before[0, 1] == 2
    assert after[0, 1] == 3


def test_what_picks_or_sums_up_reads_large_memory_where_it_lies(shared, monkeypatch):
    array, tensor = shared
    monkeypatch.setattr(input_snapshots, "SMALL_BYTES", array.nbytes - 1)
    monkeypatch.setattr(input_snapshots, "PRODUCT_BYTES", array.nbytes - 1)
    picked, total = tensor[torch.tensor([0, 2])], tensor.sum()
    product = tensor @ tensor.t()
    assert not local.trace.copies
    array[:] = 0
    assert picked.sum().item() > 0
    assert total.item() > 0
    assert product.sum().item() > 0


def test_what_picks_or_sums_up_reads_copies_of_small_memory(shared):
    array, tensor = shared
    lazy_tensor.reset_stats()
    read = [tensor[torch.tensor([0, 2])], tensor.sum(), tensor @ tensor.t()]
    plain = torch.tensor(array)
    array[:] = 0
    assert all(is_pending(one) for one in read)
    assert lazy_tensor.stats()["flushes"] == 0
    assert_same(read, [plain[torch.tensor([0, 2])], plain.sum(), plain @ plain.t()])


def test_a_training_step_on_batches_from_numpy_is_one_flush():
    torch.manual_seed(0)
    batches = numpy.random.default_rng(0).standard_normal((6, 4, 3, 8, 8)).astype(numpy.float32)
    labels = numpy.random.default_rng(1).integers(0, 5, (6, 4))
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(i):
        x, y = torch.from_numpy(batches[i]), torch.from_numpy(labels[i])
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    start = copy.deepcopy(model.state_dict())
    expected = [step(i) for i in range(6)]
    model.load_state_dict(start)
    found = []
    for i in range(6):
        lazy_tensor.reset_stats()
        with lazy_mode():
            found.append(step(i))
    assert found == expected
    assert lazy_tensor.stats()["flushes"] == 1


def test_copies_are_bounded(shared, monkeypatch):
    array, tensor = shared
    monkeypatch.setattr(input_snapshots, "MOST_BYTES", 2 * array.nbytes)
    others = [torch.from_numpy(array + i) for i in range(3)]
    read = [wrap(other) * 2 for other in others] + [tensor * 2]
    assert len(copies_taken()) == 2
    assert torch.equal(materialize(read)[3], torch.tensor(array * 2))
    read, expected = [], []
    for i in range(4):  # what was copied before is kept, too
        array[:] = i
        read.append(tensor * 2)
        expected.append(torch.tensor(array * 2))
    assert len(copies_taken()) == 2
    assert_same(read, expected)


def test_gradients_flow_from_arrays():
    array = numpy.linspace(0.0, 1.0, 6)

    def program(leaf):
        ((torch.from_numpy(array) * leaf).sin() * torch.from_numpy(array)).sum().backward()
        return leaf.grad

    assert_agrees("mode", program, torch.full((6,), 0.5, dtype=torch.float64, requires_grad=True))


def test_replays_read_what_the_array_has():
    array = numpy.ones(4)
    tensor = torch.from_numpy(array)
    step = lazy_tensor.replay(lambda: (tensor * 2 + 1).sum())

    def shown(i):
        array[:] = i
        return step().item()

    assert [shown(i) for i in range(6)] == [4 * (2 * i + 1) for i in range(6)]
    assert step.n_replayed >= 2


def strided(kind):
    base = torch.from_numpy(numpy.arange(64.0, dtype="f").reshape(8, 8))
    return {
        "gaps": lambda: base[::2, 1::2],
        "transposed gaps": lambda: base[1::2, ::2].t(),
        "repeated": lambda: base[3, ::2].expand(4, 4),
        "of one": lambda: base[2:3, 4:5].expand(4, 4),
        "none": lambda: base[:0, ::2].expand(4, 0, 4)[:, :, :0].reshape(4, 0),
        "offset": lambda: base[4:, 4:],
    }[kind]()


KINDS = ("gaps", "transposed gaps", "repeated", "of one", "none", "offset")


@pytest.mark.parametrize("kind", KINDS)
def test_views_of_arrays_are_read_by_their_strides_outside_the_mode(kind):
    n = strided(kind)
    for x in (torch.ones(n.shape), torch.ones(n.shape[::-1]).t()):
        for _ in range(3):
            y = wrap(x)
            got = (n + y) * 2, n.exp() * (y - n), y.mul(n)
            assert_same(got, ((n + x) * 2, n.exp() * (x - n), x.mul(n)))


@pytest.mark.parametrize("kind", ["gaps", "repeated", "offset"])
def test_kernels_read_views_of_arrays_by_their_strides_outside_the_mode(kind):
    lazy_tensor.configure(backend="inductor", compile="blocking", compile_threshold=1)
    n = strided(kind)
    for _ in range(3):
        assert_same((wrap(torch.ones(4, 4)) + n) * 2, (torch.ones(4, 4) + n) * 2)


@pytest.mark.parametrize("alias", [lambda t: t[1:], lambda t: t.detach(), lambda t: t.view(2, 2)])
@pytest.mark.parametrize("handed_out", [lambda t: t.numpy(), numpy.asarray, numpy.from_dlpack])
def test_a_lazy_alias_sees_what_is_written_through_an_array_of_the_plain_tensor(alias, handed_out):
    """The array is made of the plain tensor, behind the alias."""
    for start in range(4):
        plain, expected = torch.full((4,), float(start)), torch.full((4,), float(start))
        with lazy_mode():
            lazy = alias(plain)
            array = handed_out(plain)
            before = lazy * 2
            array[1:3] = 7
            behind = lazy * 2
            lazy.add_(1)
            read = array.tolist()
        assert before.tolist() == (alias(expected) * 2).tolist()
        expected[1:3] = 7
        assert behind.tolist() == (alias(expected) * 2).tolist()
        alias(expected).add_(1)
        assert read == expected.tolist()


def test_a_storage_object_that_outlives_its_tensor_is_seen():
    for _ in range(4):
        plain = torch.zeros(4, dtype=torch.uint8)
        lazy = wrap(plain)
        storage = plain.untyped_storage()
        del plain
        doubled = lazy * 2
        storage[0] = 1
        assert doubled.tolist() == [0] * 4
