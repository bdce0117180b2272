"""Never stale: each read sees what eager execution would have given at that line.

Here memory changes by other ways than the op that reads it: arrays, other views, plain tensors.
"""

import numpy
import pytest
import torch

from lazy_tensor import is_pending, lazy_mode, replay, unwrap, wrap
from tests.invariants.compare import WAYS, assert_agrees


def write_array(x):
    x.detach().numpy()[:] = 5


def write_data(x):
    x.data.add_(5)


def write_view(x):
    x[1:].mul_(5)


def write_transposed(x):
    x.view(2, 2).t()[0].fill_(5)


def write_strided(x):
    x.as_strided((2,), (2,), 1).neg_()


def write_split(x):
    x.split(2)[1].zero_()


def write_by_foreach(x):
    torch._foreach_add_(list(x.unbind()), 1)


def write_by_out(x):
    torch.add(x, 1, out=x)


def write_real_part(x):
    torch.view_as_complex(x.view(2, 2)).real.fill_(7)


def write_other_dtype(x):
    x.view(torch.int32).fill_(0)


WRITES = [
    write_array, write_data, write_view, write_transposed, write_strided, write_split,
    write_by_foreach, write_by_out, write_real_part, write_other_dtype,
]  # fmt: skip


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_reads_before_a_write_see_the_old_value_and_later_ones_the_new(write, way):
    def program(x):
        y = x + 1
        before = y * 2
        write(y)
        return before, y * 2, y

    assert_agrees(way, program, torch.arange(4.0))


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_a_write_to_an_input_is_seen_from_its_line_on(write, way):
    def program(x):
        before = x * 2
        write(x)
        return before, x * 2, x

    assert_agrees(way, program, torch.arange(4.0))


def a_pair(side, write):
    """A plain and a lazy tensor on one memory, and what `write` makes of their values."""
    plain = torch.arange(4.0)
    lazy = wrap(plain)
    if side == "plain got from unwrap":
        plain = unwrap(lazy)
    expected = plain.clone()
    write(expected)
    return plain, lazy, expected


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("side", ["plain given to wrap", "plain got from unwrap"])
def test_a_write_to_the_plain_side_is_seen_from_its_line_on(write, side):
    plain, lazy, expected = a_pair(side, write)
    before = lazy * 2
    write(plain)
    after = lazy * 2
    assert before.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert after.tolist() == (expected * 2).tolist()


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("side", ["plain given to wrap", "plain got from unwrap"])
def test_a_write_to_the_lazy_side_shows_in_the_plain_one_at_once(write, side):
    plain, lazy, expected = a_pair(side, write)
    before = lazy * 2
    write(lazy)
    assert plain.tolist() == expected.tolist()
    assert before.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_a_write_by_an_op_outside_the_mode_comes_after_what_was_recorded():
    x = torch.ones(3)
    y = wrap(torch.zeros(3)) + x
    torch.relu_(x.neg_())
    assert y.tolist() == [1.0] * 3


def test_a_view_of_a_plain_tensor_for_a_lazy_one_is_written_outside_the_mode():
    plain, lazy = torch.zeros(3), wrap(torch.ones(3)) * 1
    view = torch.slice_inverse(plain, lazy, 0, 0, 3, 1)
    plain.add_(5)
    assert view.tolist() == [5.0] * 3
    view.zero_()
    assert plain.tolist() == [0.0] * 3


@pytest.mark.parametrize("way", ["mode", "replay"])
@pytest.mark.parametrize("aliasing", [lambda w: w[1:3], lambda w: w.view(2, 2).t(), torch.detach])
def test_an_alias_made_in_the_mode_is_one_outside(way, aliasing):
    alias_of = lazy_mode(record="always")(aliasing) if way == "mode" else replay(aliasing)
    for _ in range(5):
        plain = torch.zeros(4)
        alias = alias_of(plain)
        before = alias * 2
        plain.add_(1)
        between = alias * 2
        alias.add_(1)
        assert plain.sum().item() == 4 + alias.numel()
        assert before.unique().tolist() == [0.0]
        assert between.unique().tolist() == [2.0]
        assert alias.unique().tolist() == [2.0]


def test_an_alias_made_before_a_failing_op_is_one_outside():
    plain, kept = torch.zeros(4), []

    @lazy_mode(record="always")
    def block():
        kept.append(plain[1:3])
        plain[torch.tensor([7])]

    with pytest.raises(IndexError):
        block()
    kept[0].add_(1)
    assert plain.tolist() == [0.0, 1.0, 1.0, 0.0]


def test_a_view_of_the_plain_side_writes_to_the_lazy_one():
    plain = torch.zeros(4)
    view = plain[2:]
    lazy = wrap(plain)
    before = lazy + 1
    view.fill_(3)
    assert before.tolist() == [1.0] * 4
    assert lazy.tolist() == [0.0, 0.0, 3.0, 3.0]


def test_a_wrapped_array_written_by_numpy_is_read_as_it_was():
    array = numpy.ones(3, dtype=numpy.float32)
    x = wrap(torch.from_numpy(array))
    before = x + 1
    array[:] = 5
    after = x + 1
    assert before.tolist() == [2.0] * 3
    assert after.tolist() == [6.0] * 3


def test_a_write_to_a_wrapped_array_shows_in_it_at_once():
    array = numpy.ones(3, dtype=numpy.float32)
    wrap(torch.from_numpy(array)).add_(1)
    assert array.tolist() == [2.0] * 3


def test_an_array_used_in_the_mode_is_read_as_it_was():
    array = numpy.ones(3, dtype=numpy.float32)
    with lazy_mode():
        x = torch.from_numpy(array)
        before = x + 1
        array[:] = 5
        after = x + 1
    assert before.tolist() == [2.0] * 3
    assert after.tolist() == [6.0] * 3


def test_a_write_through_dlpack_is_seen():
    x = wrap(torch.zeros(3)) + 1
    before = x * 2
    torch.utils.dlpack.from_dlpack(x).fill_(4)
    assert before.tolist() == [2.0] * 3
    assert (x * 2).tolist() == [8.0] * 3


def test_storage_bytes_written_are_seen():
    x = wrap(torch.ones(2)) + 1
    before = x * 2
    x.untyped_storage().fill_(0)  # type: ignore[attr-defined]
    assert before.tolist() == [4.0] * 2
    assert (x + 1).tolist() == [1.0] * 2


@pytest.mark.parametrize("n_steps", [1, 3])
def test_a_state_dict_taken_before_wrap_follows_training(n_steps):
    model = torch.nn.Linear(3, 2)
    taken = model.state_dict()
    expected = {name: t.clone() for name, t in taken.items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    wrap(model)
    for _ in range(n_steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        for name in expected:
            expected[name] -= 0.5
        for name, t in taken.items():
            torch.testing.assert_close(t, expected[name])


def test_a_lazy_gradient_is_accumulated_into_at_each_backward():
    p = wrap(torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2))]))[0]
    (p * 2).sum().backward()
    grad = p.grad
    before = grad + 0
    (p * 3).sum().backward()
    assert p.grad is grad
    assert before.tolist() == [2.0, 2.0]
    assert grad.tolist() == [5.0, 5.0]


def test_a_memory_without_other_holders_is_written_lazily():
    x = wrap(torch.zeros(3))
    x.add_(1)
    assert is_pending(x)
    assert x.tolist() == [1.0] * 3
