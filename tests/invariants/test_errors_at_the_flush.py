"""Errors that only values give: raised by the flush, with a note, sparing what they can."""

import pytest
import torch

from lazy_tensor import configure, flush, lazy_mode, materialize, stats, wrap
from tests.processes import run_python


def index_beyond(x, i):
    return (x * 2).index_select(0, i).sin()


def gather_beyond(x, i):
    return (x * 2).gather(0, i).sin()


def embedding_beyond(x, i):
    return torch.nn.functional.embedding(i, (x * 2).unsqueeze(1)).sin()


def scatter_beyond(x, i):
    return (x * 2).scatter(0, i, 1.0).sin()


def indexed_beyond(x, i):
    return (x * 2)[i].sin()


def index_put_beyond(x, i):
    return (x * 2).index_put((i,), torch.tensor(1.0)).sin()


def index_add_beyond(x, i):
    return (x * 2).index_add(0, i, torch.ones(2)).sin()


PROGRAMS = [
    index_beyond, gather_beyond, embedding_beyond, scatter_beyond, indexed_beyond,
    index_put_beyond, index_add_beyond,
]  # fmt: skip


def assert_told(raised, eager, program):
    """Eager's type, and a note with the op, the line in `program`, its source and the indices."""
    line = program.__code__.co_firstlineno + 1
    assert type(raised) is type(eager)
    note = "\n".join(raised.__notes__)
    assert note.startswith("aten.")
    assert f"{__file__}:{line}: return " in note
    assert "[0, 9]" in note


@pytest.mark.recorded
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("n_good_runs", [0, 3], ids=["first sight", "from a plan"])
def test_an_index_beyond_is_told_with_op_line_source_and_values(program, n_good_runs):
    x, good, bad = torch.rand(5), torch.tensor([0, 4]), torch.tensor([0, 9])
    with pytest.raises(Exception) as eager:  # noqa: PT011
        program(x, bad)
    for _ in range(n_good_runs):
        with lazy_mode():
            y = program(x, good)
        assert torch.equal(materialize(y), program(x, good))
    recorded = lazy_mode()(program)
    with pytest.raises(Exception) as lazy:  # noqa: PT011
        recorded(x, bad)
    assert_told(lazy.value, eager.value, program)
    assert stats()["plans_reused"] == max(0, n_good_runs - 1)


def test_an_index_beyond_is_told_from_inside_a_fused_kernel(tmp_path):
    configure(backend="inductor", compile="blocking", cache_dir=str(tmp_path))
    x, good, bad = torch.rand(5), torch.tensor([0, 4]), torch.tensor([0, 9])
    with lazy_mode():
        y = gather_beyond(x, good)
    torch.testing.assert_close(materialize(y), gather_beyond(x, good))
    with pytest.raises(RuntimeError) as eager:
        gather_beyond(x, bad)
    with pytest.raises(RuntimeError) as lazy, lazy_mode():
        y = gather_beyond(x, bad)
    assert_told(lazy.value, eager.value, gather_beyond)
    assert stats()["compiled"] == 1


def fails(x):
    """A value that does not come into being, as a plain tensor's index only its run can refuse."""
    return x[torch.tensor([0, 9])]


each_pass = pytest.mark.parametrize("n_passes", [1, 3], ids=["first sight", "from a plan"])


@lazy_mode()
def write_and_fail(x, other):
    x.add_(1)
    fails(x)
    other.add_(1)
    x.add_(10)


@lazy_mode()
def write_by_what_fails(x):
    x.add_(1)
    x.index_add_(0, torch.tensor([9, 9]), torch.ones(2))


@each_pass
def test_writes_before_the_failing_op_have_happened_and_those_after_have_not(n_passes):
    for _ in range(n_passes):
        x, other = torch.zeros(4), torch.zeros(4)
        with pytest.raises(IndexError):
            write_and_fail(x, other)
        assert x.tolist() == [1.0] * 4
        assert other.tolist() == [0.0] * 4


@each_pass
def test_values_that_do_not_depend_on_the_failing_op_are_computed(n_passes):
    for _ in range(n_passes):
        x = wrap(torch.arange(4.0))
        before = x + 1
        bad = fails(x)
        after = x * 2
        with pytest.raises(IndexError):
            flush()
        assert before.tolist() == [1.0, 2.0, 3.0, 4.0]
        assert after.tolist() == [0.0, 2.0, 4.0, 6.0]
        del bad


@each_pass
def test_values_that_depend_on_the_failing_op_raise_the_same_error_each_time(n_passes):
    for _ in range(n_passes):
        x = wrap(torch.arange(4.0))
        dependent = fails(x) + 1
        with pytest.raises(IndexError) as first:
            flush()
        for _ in range(2):
            with pytest.raises(IndexError) as again:
                dependent.tolist()
            assert type(again.value) is type(first.value)
            assert again.value.args == first.value.args
            assert again.value.__notes__ == first.value.__notes__
            with pytest.raises(IndexError):
                (dependent + 1).tolist()


@each_pass
def test_an_op_that_fails_is_raised_even_if_nobody_uses_its_result(n_passes):
    for _ in range(n_passes):
        x = wrap(torch.arange(4.0))
        fails(x)
        with pytest.raises(IndexError):
            flush()


RAISE_FOR_VALUES = {
    "masked_scatter": lambda: torch.zeros(4).masked_scatter(torch.ones(4).bool(), torch.ones(2)),
    "lu_unpack": lambda: torch.lu_unpack(torch.eye(2), torch.tensor([7, 7]).int())[2],
    "bernoulli": lambda: torch.bernoulli(torch.full((3,), 2.0)),
    "normal": lambda: torch.normal(torch.zeros(3), -torch.ones(3)),
}


@pytest.mark.parametrize("raises", RAISE_FOR_VALUES.values(), ids=RAISE_FOR_VALUES.keys())
def test_a_write_before_an_op_that_raises_for_its_values_is_done(raises):
    @lazy_mode()
    def program(x):
        x.mul_(2)
        raises()
        x.add_(1)

    for _ in range(3):
        x = torch.ones(4)
        with pytest.raises(RuntimeError):
            program(x)
        assert x.tolist() == [2.0] * 4


@each_pass
def test_a_write_through_a_failing_op_leaves_the_memory_as_it_was(n_passes):
    for _ in range(n_passes):
        x = torch.zeros(4)
        with pytest.raises((IndexError, RuntimeError), match="index"):
            write_by_what_fails(x)
        assert x.tolist() == [1.0] * 4


@each_pass
def test_the_next_block_is_not_touched_by_a_failure(n_passes):
    for _ in range(n_passes):
        x = torch.arange(4.0)
        with pytest.raises(IndexError), lazy_mode():
            fails(x)
        with lazy_mode():
            y = x + 1
        assert y.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_notes_are_not_repeated_when_the_error_is_raised_again():
    x = wrap(torch.arange(4.0))
    dependent = fails(x) + 1
    with pytest.raises(IndexError) as first:
        flush()
    n_notes = len(first.value.__notes__)
    for _ in range(3):
        with pytest.raises(IndexError) as again:
            dependent.tolist()
    assert len(again.value.__notes__) == n_notes


def test_an_inverse_of_a_singular_matrix_raises_eagers_error():
    with pytest.raises(RuntimeError) as eager:
        torch.linalg.inv(torch.zeros(2, 2))
    with pytest.raises(type(eager.value)) as lazy, lazy_mode():
        torch.linalg.inv(torch.zeros(2, 2) * 1)
    assert str(lazy.value) == str(eager.value)


DIVISION = """
import torch, lazy_tensor
lazy_tensor.configure(backend="inductor", compile="blocking", cache_dir={cache_dir!r})
n = torch.arange(1, 5)
programs = [
    lambda d: (n * 3).floor_divide(d) + 1,
    lambda d: (n * 3) % d + 1,
    lambda d: torch.fmod(n * 3, d) + 1,
    lambda d: torch.div(n * 3, d, rounding_mode="trunc") + 1,
]
for program in programs:
    for divisor in ([2, 2, 2, 2], [1, 2, 3, 4], [1, 0, 2, 3]):
        try:
            with lazy_tensor.lazy_mode():
                y = program(torch.tensor(divisor))
            result = y.tolist()
        except RuntimeError as error:
            result = str(error)
    print(result)
"""


def test_integer_division_by_zero_in_a_fused_program_raises_and_does_not_kill(tmp_path):
    code = DIVISION.format(cache_dir=str(tmp_path))
    assert run_python("-c", code).split("\n") == ["ZeroDivisionError"] * 4 + [""]


@pytest.mark.recorded
def test_a_line_is_said_to_be_where_the_call_was_first_seen():
    """Hits note no lines: the same call made from another line is known by its first one."""
    table, good, bad = torch.rand(5), torch.tensor([0, 4]), torch.tensor([0, 9])

    def gathered_here(i):
        return table[i] * 2

    def gathered_there(i):
        return table[i] * 2

    for _ in range(3):
        with lazy_mode():
            gathered_here(good)
    with pytest.raises(IndexError) as raised, lazy_mode():
        gathered_there(bad)
    line = gathered_here.__code__.co_firstlineno + 1
    assert f"first recorded at {__file__}:{line}: return table[i] * 2" in raised.value.__notes__[0]
