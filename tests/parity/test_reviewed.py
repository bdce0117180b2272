"""Programs that once differed from eager, each kept with what went wrong."""

import threading

import pytest
import torch
from torch import nn

from lazy_tensor import lazy_mode, materialize, wrap
from lazy_tensor.dispatch.trie.trace import local


def test_data_set_from_a_plain_tensor_inside_the_mode():
    # the detached plain tensor was recorded, and stood for memory that it didn't have
    plain = torch.ones(3)
    with lazy_mode():
        x = torch.zeros(3) * 2
        x.data = plain
        assert (x + 1).tolist() == [2.0] * 3


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_hessian_uses_zero_tensors_without_memory():
    x = torch.randn(4)
    expected = torch.func.hessian(lambda a: (a**3).sum())(x)
    for _ in range(3):
        with lazy_mode():
            got = torch.func.hessian(lambda a: (a**3).sum())(x)
        assert torch.equal(materialize(got), expected)


@pytest.fixture
def custom_ops():
    calls: list[str] = []

    def count(x, name):
        calls.append(name)
        return x.clone()

    with torch.library._scoped_library("lazy_tensor_reviewed", "FRAGMENT") as library:
        library.define("noisy(Tensor x) -> Tensor")
        library.define("count(Tensor x, str name) -> Tensor")
        library.impl("noisy", lambda x: x + torch.rand(3), "CPU")
        library.impl("count", count, "CPU")
        for name in ("noisy", "count"):
            library.impl(name, lambda x, *_: torch.empty_like(x), "Meta")
        yield torch.ops.lazy_tensor_reviewed, calls


def test_custom_ops_run_once_a_call_in_order_and_at_once(custom_ops):
    ops, calls = custom_ops
    x = torch.zeros(3)

    def program():
        torch.manual_seed(4)
        a, b = ops.noisy(x), torch.rand(3)
        y = ops.count(x + 1, "first")
        ops.count(x, "second")
        ops.count(x, "second")
        return a - ops.noisy(x), b, y * 2

    expected = program()
    for _ in range(3):
        calls.clear()
        with lazy_mode():
            got = program()
            assert calls == ["first", "second", "second"]
        for a, b in zip(materialize(got), expected, strict=True):
            assert torch.equal(a, b)


def test_torch_compiled_function_inside_the_mode():
    # dynamo traced the recorder's own frames
    compiled = torch.compile(lambda a: (a * 2).sin(), backend="eager")
    x = torch.randn(3)
    with lazy_mode():
        y = compiled(x + 1)
    assert torch.equal(materialize(y), ((x + 1) * 2).sin())


def test_tensor_of_lazy_items():
    x = torch.tensor([1.5, 2.5])
    with lazy_mode():
        y = x + 1
        z = torch.tensor([y[0], y[1]])
        assert [float(y[0]), int(y[1]), complex(y[0])] == [2.5, 3, 2.5 + 0j]
        assert [10, 20, 30, 40][torch.tensor([1, 2])[1] + 1] == 40
    assert z.tolist() == [2.5, 3.5]


def test_view_offset_of_an_earlier_trace_is_not_taken_for_this_ones():
    with lazy_mode():
        b = torch.arange(6.0)
        first = b[2:]
        first.sum().item()
        again = first.as_strided((2,), (1,), 0)
        again.sum().item()
        assert again.view(2, 1).tolist() == [[0.0], [1.0]]


@pytest.mark.parametrize("offset", [0, 3])
def test_an_absolute_offset_does_not_move_with_the_leaf(offset):
    data = torch.arange(9.0)
    for start in (1, 2, 3):
        rows = data[start : start + 5]
        with lazy_mode():
            view = rows.as_strided((2,), (1,), offset)
            assert view.storage_offset() == offset
        assert view.tolist() == [offset, offset + 1]


def test_numpy_of_a_view_exposes_the_whole_memory():
    x = wrap(torch.arange(4.0) + 0)
    array = x.detach()[1:].numpy()
    y = x + 1
    array[:] = 9
    assert y.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert (x + 1).tolist() == [1.0, 10.0, 10.0, 10.0]


def test_plain_tensor_written_through_data_is_read_anew():
    x, p = wrap(torch.zeros(3)), torch.ones(3)
    y = x + p
    p.data.add_(1)  # no version tells
    assert ((x + p).tolist(), y.tolist()) == ([2.0] * 3, [1.0] * 3)


def test_materialize_of_an_array_is_a_copy():
    array = torch.ones(3).numpy()
    copied = materialize(wrap(torch.from_numpy(array)))
    array[:] = 5
    assert copied.tolist() == [1.0] * 3


def test_merged_call_followed_by_a_view_of_its_repeat(recwarn):
    # the view kept naming the memory of the call that was merged away
    def program(x):
        first = nn.functional.layer_norm(x, (6,))
        second = nn.functional.layer_norm(x, (6,))
        return (first * 2).sum() + second[0:2].clone().sum()

    x = torch.randn(4, 6)
    for _ in range(3):
        with lazy_mode(backend="inductor", compile="background"):
            got = program(x)
        torch.testing.assert_close(materialize(got), program(x))
    assert not recwarn.list


def test_aliases_are_no_steps():
    y = wrap(torch.ones(3)) + 1
    state = local.trace.state
    for _ in range(50):
        y.detach()
    assert local.trace.state is state


def test_cold_thread_uses_a_value_pending_elsewhere():
    y = wrap(torch.ones(3)) * 2
    seen = []

    def work():
        local.trace.policy.cold = 1
        seen.append((y + 1).tolist())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [[3.0] * 3]


def test_values_read_by_two_threads_at_once():
    x = torch.randn(400, 400)
    for _ in range(5):
        with lazy_mode():
            y = x
            for _ in range(6):
                y = y @ x * 0.01
            seen: list[float] = []
            thread = threading.Thread(target=lambda y=y, seen=seen: seen.append(y.sum().item()))
            thread.start()
            mine = float(torch.as_tensor(y.numpy()).sum())
            thread.join()
        assert seen == [pytest.approx(mine, rel=1e-3)]


def test_memory_read_while_a_call_is_recorded(monkeypatch):
    # numpy() calls detach(), which the mode recorded: the array had no memory
    plain = torch.arange(3.0)
    with lazy_mode():
        monkeypatch.setattr(local.trace, "busy", True)  # as in a finalizer
        array = plain.numpy()
        monkeypatch.undo()
    assert array.tolist() == [0.0, 1.0, 2.0]
