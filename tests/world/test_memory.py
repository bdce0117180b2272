"""Ways to memory that are no ops: they read what the program has written so far."""

import copy
import ctypes

import numpy as np
import pytest
import torch
from torch.utils import dlpack

import lazy_tensor
from lazy_tensor import lazy_mode, materialize, stats, wrap
from tests.invariants.compare import WAYS, assert_same, lazily


def dlpack_of(tensor):
    """By the function, which `lazy_tensor` replaces where it stands."""
    return dlpack.to_dlpack(tensor)  # type: ignore[attr-defined]


def test_elementwise_functions_of_python_see_pending_writes():
    y = torch.ones(3)
    with lazy_mode():
        y.add_(1)
        y.apply_(lambda v: v * 10)
    assert y.tolist() == [20.0, 20.0, 20.0]


@pytest.mark.parametrize("wrapped", [False, True])
def test_elementwise_functions_of_python_on_computed_tensors(wrapped):
    def program(x):
        y = (x * 2).apply_(lambda v: v + 1)
        return y.map_(x, lambda a, b: a * b), y * 1

    if wrapped:
        found = program(wrap(torch.ones(3) * 2))
    else:
        with lazy_mode():
            found = program(torch.ones(3) * 2)
    assert_same(found, program(torch.ones(3) * 2))


def test_elementwise_functions_of_python_are_refused_as_in_eager():
    parameter = wrap(torch.nn.Linear(2, 2)).weight
    with pytest.raises(RuntimeError, match="requires grad"):
        parameter.apply_(lambda v: v)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_a_storage_taken_before_a_write_shows_it():
    y = torch.ones(3)
    with lazy_mode():
        storage = y.untyped_storage()
        address = storage.data_ptr()
        y.add_(1)
        assert storage.data_ptr() == address
        assert (ctypes.c_float * 3).from_address(address)[:] == [2.0, 2.0, 2.0]
        y.add_(1)
        assert bytes(storage.tolist()) == np.full(3, 3, np.float32).tobytes()
        y.add_(1)
        assert y.storage()[0] == 4.0


def test_sharing_memory_keeps_values():
    x = torch.arange(4.0)
    with lazy_mode():
        storage = x.untyped_storage()
        x.add_(1)
        storage.share_memory_()
        y = torch.arange(4.0) * 2
        y.share_memory_()
        assert y.is_shared()
    assert x.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert x.is_shared()
    assert y.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_a_mapped_file_shows_writes(tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(bytes(12))
    with lazy_mode():
        t = torch.from_file(str(path), shared=True, size=3)
        t.add_(1)
        t.mul_(3)
    assert np.fromfile(path, dtype=np.float32).tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("way", WAYS)
def test_copies_of_a_tree_share_memory_as_the_tree_does(way):
    def program(x):
        tree = {"all": x * 2, "first": None}
        tree["first"] = tree["all"][:2]
        copied = copy.deepcopy(tree)
        copied["all"].add_(1)
        return copied["first"], tree["first"], copied["all"]

    assert_same(lazily(way, program, torch.ones(4)), program(torch.ones(4)))


def test_a_parameter_is_an_array_without_gradients():
    def program():
        weight = torch.nn.Parameter(torch.ones(3))
        with torch.no_grad():
            array = weight.numpy()
        with pytest.raises(RuntimeError, match="requires grad"):
            weight.numpy()
        return array.tolist()

    with lazy_mode():
        assert program() == [1.0, 1.0, 1.0]
    with torch.no_grad():
        assert wrap(torch.nn.Linear(2, 2)).weight.numpy().shape == (2, 2)


def flushes_of(step):
    lazy_tensor.reset_stats()
    step()
    return stats()["flushes"]


@pytest.mark.parametrize(
    "read",
    [
        lambda p: p.detach().numpy(), lambda p: np.asarray(p.detach()),
        lambda p: p.untyped_storage().nbytes(), lambda p: np.from_dlpack(p.detach()),
    ],
    ids=["numpy", "asarray", "storage", "dlpack"],
)  # fmt: skip
def test_memory_that_was_handed_out_and_given_back_is_recorded_again(read):
    model = wrap(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        lazy_tensor.flush()

    for _ in range(3):
        step()
    before = flushes_of(step)
    read(model[0].weight)
    step()
    assert flushes_of(step) == before


def test_memory_that_is_still_handed_out_runs_at_once():
    x = wrap(torch.ones(3))
    array = x.numpy()
    y = x * 2
    array[0] = 5.0
    assert y.tolist() == [2.0, 2.0, 2.0]
    assert (x * 2).tolist() == [10.0, 2.0, 2.0]
    part = array[1:]
    del array
    z = x * 2
    part[0] = 7.0
    assert z.tolist() == [10.0, 2.0, 2.0]


def test_there_is_one_cpu():
    with lazy_mode():
        x = torch.ones(3, device="cpu:0")
        y = torch.zeros_like(x, device="cpu:0") * 2
        for _ in range(4):
            z = torch.ones(2).to("cpu:1")
            assert z.device == torch.device("cpu")
    assert x.device == torch.ones(3, device="cpu:0").device
    assert y.device == x.device


def test_numbers_in_lists_are_read_as_they_are_now():
    whole = torch.ones(3)
    one = whole[1]
    with lazy_mode():
        whole.mul_(2)
        assert torch.Tensor([one, one]).tolist() == [2.0, 2.0]


def test_plain_tensors_take_lazy_memory_in_no_mode():
    computed = wrap(torch.ones(3)) * 3
    plain = torch.zeros(3)
    plain.data = computed
    assert plain.tolist() == [3.0, 3.0, 3.0]
    assert torch.ones(3).map_(computed, lambda a, b: a + b).tolist() == [4.0, 4.0, 4.0]


def test_lazy_memory_that_a_plain_tensor_has_taken_is_read_in_the_order_of_the_program():
    computed = wrap(torch.ones(3)) * 3
    plain = torch.zeros(3)
    plain.data = computed
    before = computed * 1
    plain.add_(1)
    assert before.tolist() == [3.0, 3.0, 3.0]
    assert (computed * 1).tolist() == [4.0, 4.0, 4.0]


def dense(tensor):
    return tensor.to_padded_tensor(0.0) if tensor.is_nested else tensor.to_dense()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda v: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), v, (2,), is_coalesced=True),
        lambda v: torch.sparse_csr_tensor([0, 1, 2], [1, 0], v, (2, 2)),
        lambda v: torch.ops.aten._sparse_csr_tensor_unsafe(
            torch.tensor([0, 1, 2]), torch.tensor([1, 0]), v, (2, 2)
        ),
        lambda v: torch.nested.as_nested_tensor(v.view(1, 2)),
    ],
    ids=["coo", "csr", "unchecked csr", "nested"],
)
def test_tensors_of_other_layouts_are_written_by_their_parts(make):
    def program(v):
        v = v * 2
        made = make(v)
        copied = v * 1
        v.add_(5)
        before = dense(made)
        v.zero_()
        return before, copied, dense(made)

    expected = program(torch.ones(2))
    for way in WAYS:
        assert_same(lazily(way, program, torch.ones(2)), expected)


@pytest.mark.parametrize("wrapped", [False, True])
def test_memory_that_went_by_dlpack_is_written_through(wrapped):
    def program(x):
        other = dlpack.from_dlpack(x)
        copied = x.clone()
        other.zero_()
        return copied, x * 1

    x = torch.ones(3)
    if wrapped:
        found = program(wrap(x))
    else:
        with lazy_mode():
            x.mul_(2)
            found = program(x)
    expected = torch.ones(3) if wrapped else torch.ones(3) * 2
    assert torch.equal(materialize(found[0]), expected)
    assert torch.equal(materialize(found[1]), torch.zeros(3))
    with pytest.raises(BufferError, match="require gradient"):
        dlpack_of(wrap(torch.nn.Linear(2, 2)).weight)
    assert dlpack.from_dlpack(dlpack_of(wrap(x) + 1)).shape == (3,)


def test_swapped_tensors_take_their_pending_writes_along():
    x, y = torch.ones(3), torch.zeros(3)
    with lazy_mode():
        x.add_(1)
        y.add_(5)
        torch.utils.swap_tensors(x, y)
        assert x.tolist() == [5.0, 5.0, 5.0]
        assert y.tolist() == [2.0, 2.0, 2.0]


def test_memory_that_data_are_set_to_is_shared():
    p, vector = wrap(torch.zeros(3)), torch.ones(3)
    p.data = vector
    p.mul_(2)
    assert vector.tolist() == [2.0, 2.0, 2.0]
    vector.add_(1)
    assert (p * 1).tolist() == [3.0, 3.0, 3.0]
