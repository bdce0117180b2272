"""Hits taken below Python: what reaches `__torch_dispatch__`, and that nothing depends on it."""

import gc
import threading
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lazy_tensor
from lazy_tensor import lazy_mode
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.run.failure import without_frames
from lazy_tensor.dispatch.trie.trace import local
from lazy_tensor.mode import RecordingMode
from tests.processes import run_python


@pytest.fixture(autouse=True)
def loaded():
    if hits.learn is None:
        pytest.skip(hits.status())


@pytest.fixture
def in_python(monkeypatch):
    """The ops that reach `__torch_dispatch__`, by either way."""
    seen = []

    def noting(dispatch, position):
        def noted(*args):
            seen.append(str(args[position]))
            return dispatch(*args)

        return noted

    monkeypatch.setattr(
        RecordingMode, "__torch_dispatch__", noting(RecordingMode.__torch_dispatch__, 1)
    )
    by_tensor: Any = lazy_tensor.LazyTensor.__torch_dispatch__
    monkeypatch.setattr(
        lazy_tensor.LazyTensor, "__torch_dispatch__", classmethod(noting(by_tensor.__func__, 1))
    )
    return seen


def settle(step, n=4):
    for _ in range(n):
        step()


def check_below_python(step, in_python):
    """Once it has run a few times, the step stays below Python and gives what it gives eagerly."""
    lazily = lazy_mode(record="always")(step)
    settle(lazily)
    in_python.clear()
    found = lazily()
    assert in_python == []
    assert torch.equal(lazy_tensor.materialize(found), step())


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_settled_training_step_stays_below_python(in_python, optimizer, foreach):
    model, twin = network(), network()
    x, y = torch.randn(5, 8), torch.randn(5, 4)

    def training(model):
        optim = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, foreach=foreach)

        def step():
            optim.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optim.step()
            return loss

        return step

    eager = training(twin)
    step = lazy_mode(record="always")(training(model))
    settle(step, 8)
    in_python.clear()
    settle(step, 3)
    assert in_python == []
    settle(eager, 11)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_wrapped_tensors_need_no_mode(in_python):
    x, plain = lazy_tensor.wrap(torch.randn(4, 4)), torch.randn(4, 4)
    other = lazy_tensor.wrap(plain.clone())

    def step():
        made = ((x @ other).relu() * 2.5).detach().sum(0)
        lazy_tensor.flush()
        return made

    settle(step)
    in_python.clear()
    made = step()
    assert in_python == []
    expected = ((lazy_tensor.unwrap(x) @ plain).relu() * 2.5).sum(0)
    assert torch.equal(lazy_tensor.materialize(made), expected)


def test_plain_tensors_enter_without_a_mode_below_python(in_python):
    """As snapshots: what the program writes to them later is not seen."""
    weight = torch.randn(4, 4)
    wrapped = lazy_tensor.wrap(weight.clone())

    def step(weight, x):
        parts = x.t(), x[0], x[1:2].expand(4, 4), x.double()
        made = [
            weight @ parts[0],
            weight.addcmul(x, x),
            weight * parts[1] + parts[2],
            parts[3] - weight,
        ]
        made.append(torch.cat([weight, x, parts[0]]))
        x.add_(1)
        made.append(weight @ x)
        lazy_tensor.flush()
        return made

    for n in range(8):
        x = torch.randn(4, 4)
        expected = step(weight, x.clone())
        if n == 7:
            in_python.clear()
        made = step(wrapped, x)
        for mine, theirs in zip(lazy_tensor.materialize(made), expected, strict=True):
            assert torch.equal(mine, theirs)
    assert in_python == []


def test_a_wrapped_batch_norm_leaves_a_plain_one_its_own_statistics(in_python):
    """Training writes the running statistics, though the op's schema doesn't say so."""
    x = torch.randn(6, 5)
    wrapped, plain, expected = (nn.BatchNorm1d(5) for _ in range(3))
    lazy, wrapped = lazy_tensor.wrap(x.clone()), lazy_tensor.wrap(wrapped)
    for _ in range(4):
        wrapped(lazy)
        lazy_tensor.flush()
    plain(lazy)
    expected(x)
    for found, right in zip(plain.buffers(), expected.buffers(), strict=True):
        assert torch.equal(found, right)


def test_draws_into_a_part_of_a_tensor_stay_below_python(in_python):
    x = torch.randn(4, 4)

    def step():
        torch.manual_seed(0)
        y = x * 2
        y[1:].normal_()
        return y + 1

    check_below_python(step, in_python)


def test_views_in_place_stay_below_python(in_python):
    """`matmul` squeezes the product of a vector in place, and a GRU transposes its batch."""
    torch.manual_seed(0)
    x, matrix = torch.randn(4), torch.randn(4, 4)
    gru, sequence = nn.GRU(4, 3, batch_first=True), torch.randn(2, 5, 4)

    def step():
        part = (x * 2).unsqueeze_(0).t_()
        return (x @ matrix).sum() + part.sum() + gru(sequence)[0].sum()

    check_below_python(step, in_python)


@pytest.mark.parametrize("wraps", [False, True])
def test_draws_into_what_is_pending_stay_below_python(in_python, wraps):
    """Dropout draws its mask so. Which numbers are drawn is eager's business to the last bit."""
    plain = torch.randn(8, 4)
    x = lazy_tensor.wrap(plain.clone()) if wraps else plain

    def step(x, p=0.3):
        torch.manual_seed(1)
        y = nn.functional.dropout(x * 2, p)
        return y + torch.empty_like(y).t().normal_(0.0, p).t(), torch.get_rng_state()

    def lazily(p=0.3):
        with nullcontext() if wraps else lazy_mode(record="always"):
            made, state = step(x, p)
            lazy_tensor.flush()
        return lazy_tensor.materialize(made), state

    for p in (0.3, 0.6, 0.3, 0.6, 0.3, 0.6):
        lazily(p)
    in_python.clear()
    found = [lazily(), lazily(0.6)]
    assert in_python == []
    for (mine, state), p in zip(found, (0.3, 0.6), strict=True):
        expected, state_then = step(plain, p)
        assert torch.equal(mine, expected)
        assert torch.equal(state, state_then)


def test_draws_into_a_plain_tensor_that_is_written():
    plain = torch.zeros(8)

    def step():
        torch.manual_seed(1)
        plain.mul_(2)
        return plain.uniform_().add_(1).clone()

    expected = step()
    for _ in range(3):
        with lazy_mode(record="always"):
            made = step()
            assert lazy_tensor.is_lazy(made)
        assert torch.equal(lazy_tensor.materialize(made), expected)
        assert torch.equal(plain, expected)


def test_numbers_that_change_are_hits(in_python):
    x = torch.randn(4)
    results = []

    @lazy_mode()
    def step(number):
        return torch.add(x * number, x, alpha=number).clamp_(-number)

    for i in range(6):
        in_python.clear()
        results.append((i + 1.5, step(i + 1.5)))
    assert in_python == []
    for number, result in results:
        expected = torch.add(x * number, x, alpha=number).clamp_(-number)
        assert torch.equal(lazy_tensor.materialize(result), expected)


@pytest.mark.parametrize("number", [2, 2.0, True, 0.0, -0.0, float("nan"), 2j])
def test_each_type_of_number_is_its_own_path(number):
    x = torch.tensor([1, -1, 0])

    def program():
        return [x * number, torch.full((2,), number)]

    with lazy_mode():
        for other in (2, 2.0, True, 0.0, -0.0, 2j):
            _ = [x * other, torch.full((2,), other)]
        lazy_tensor.flush()
        results = program()
    for mine, theirs in zip(lazy_tensor.materialize(results), program(), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(torch.view_as_real(mine + 0j), torch.view_as_real(theirs + 0j)) or (
            number != number
        )


def test_a_view_of_a_leaf_with_an_offset_is_a_hit(in_python):
    whole = torch.randn(12, 4)

    @lazy_mode()
    def step(batch):
        return [part * 2 for part in (batch.view(8), batch.t(), *batch.split(1))]

    for i in range(6):
        in_python.clear()
        batch = whole[2 * i : 2 * i + 2]
        parts = step(batch)
        expected = [part * 2 for part in (batch.view(8), batch.t(), *batch.split(1))]
        for mine, theirs in zip(lazy_tensor.materialize(parts), expected, strict=True):
            assert torch.equal(mine, theirs)
    assert not [op for op in in_python if op != "aten.slice.Tensor"]


@pytest.mark.parametrize("around", ["mode", "wrap"])
def test_memory_of_arrays_is_read_below_python(in_python, around):
    array = numpy.arange(8.0)
    x = torch.from_numpy(array)
    x = lazy_tensor.wrap(x) if around == "wrap" else x
    results = []

    def step():
        with lazy_mode() if around == "mode" else nullcontext():
            y = x.sin()
            for _ in range(3):
                y = y * x + x
            array[2] += 1
            results.append(lazy_tensor.materialize([y, x * 2, x * 3]))

    settle(step)
    in_python.clear()
    before = torch.tensor(array)
    step()
    # the first read of the memory as it is takes its copy
    assert in_python == ["aten.sin.default", "aten.mul.Tensor"]
    y = before.sin()
    for _ in range(3):
        y = y * before + before
    assert torch.equal(results[-1][0], y)
    assert torch.equal(results[-1][2], torch.tensor(array) * 3)


def test_inference_mode_is_a_hit(in_python):
    model, x = network(), torch.randn(3, 8)

    @lazy_mode()
    @torch.inference_mode()
    def infer():
        return model(x)

    settle(infer)
    in_python.clear()
    result = infer()
    assert in_python == []
    assert result.is_inference()
    assert torch.equal(lazy_tensor.materialize(result), model(x))


def test_a_mode_on_top_sees_every_op():
    class Count(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.n += 1
            return func(*args, **(kwargs or {}))

    x = torch.randn(3)
    for _ in range(4):
        with lazy_mode(), Count() as count:
            result = (x + x) * x
        assert count.n == 2
        assert torch.equal(lazy_tensor.materialize(result), (x + x) * x)


def test_a_mode_around_a_block_sees_its_ops_and_changes_them():
    class OneMore(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result + 1 if func is torch.ops.aten.mul.Tensor else result

    for _ in range(3):
        with OneMore(), lazy_mode():
            assert (torch.ones(2) * 3).tolist() == [4.0, 4.0]


def test_results_that_are_not_dense_stay_what_they_are():
    for _ in range(3):
        with lazy_mode():
            made = lazy_tensor.wrap(torch.tensor(3.0)).to_sparse()
        assert made.layout is torch.sparse_coo


def test_leaves_come_in_for_what_is_recorded_only():
    x, other = torch.randn(4), torch.randn(4)
    mask, index = torch.tensor([True, False, True, False]), torch.tensor([0, 2])
    for _ in range(4):
        with lazy_mode():
            y = x * 2
            z = other[index]
    for _ in range(2):
        with lazy_mode(forbid={"flush"}):
            y = x * 2
            z = other[mask]  # needs values, but none that is pending
        assert torch.equal(lazy_tensor.materialize(z), other[mask])
        assert torch.equal(lazy_tensor.materialize(y), x * 2)


def test_a_parent_that_forgot_its_edges_learns_them_again(in_python):
    a, b = torch.randn(4), torch.randn(4)

    @lazy_mode()
    def step():
        return (a * b).relu()

    settle(step)
    local.trace.root.edges = None  # as pruning another path does
    step()
    in_python.clear()
    step()
    assert in_python == []


def test_each_thread_has_its_own_trace(in_python):
    x = torch.randn(4, 4)
    wrong = []

    def work():
        for i in range(50):
            with lazy_mode():
                result = (x * (i + 0.5)).relu() @ x
            if not torch.equal(lazy_tensor.materialize(result), (x * (i + 0.5)).relu() @ x):
                wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_paths_that_were_dropped_are_learnt_again(in_python):
    x = torch.randn(4)
    lazy_tensor.configure(segment_cache_size=2)

    @lazy_mode()
    def step(n):
        made = x
        for _ in range(n):
            made = made + x
        return made

    for n in (1, 2, 3, 4, 5, 6, 1):
        settle(lambda n=n: step(n), 3)
        in_python.clear()
        assert torch.equal(lazy_tensor.materialize(step(n)), x + sum([x] * n))
        assert in_python == []


def test_a_finalizer_may_record(monkeypatch):
    """Making a tensor may collect garbage, whose finalizers may call any op."""
    x, made = torch.randn(4), []

    class Cycle:
        def __init__(self):
            self.me = self

        def __del__(self):
            made.append(x + 1)

    with lazy_mode():
        for _ in range(30):
            before = gc.get_threshold()
            y = x * 2
            Cycle()
            gc.set_threshold(1)
            try:
                for _ in range(20):
                    y = y * 2 - x
            finally:
                gc.set_threshold(*before)
            expected = lazy_tensor.materialize(x) * 2
    with torch.no_grad():
        expected = x * 2
        for _ in range(20):
            expected = expected * 2 - x
    assert torch.equal(lazy_tensor.materialize(y), expected)
    assert all(torch.equal(lazy_tensor.materialize(m), x + 1) for m in made)
    assert made


def n_objects():
    gc.collect()
    return len(gc.get_objects())


def test_nothing_is_left_behind():
    w = torch.randn(4, 4, requires_grad=True)

    @lazy_mode()
    def step():
        for _ in range(10):
            y = torch.tanh(w @ w).detach() + w
            (torch.tanh(y * 2).split(2)[0] * 3).sum().backward()
            w.grad = None

    settle(step)
    before = n_objects()
    settle(step, 20)
    assert n_objects() - before < 100


def test_what_failed_is_collected_with_what_holds_it():
    """An exception holds the frames it passed, and these the tensors that wait for a value."""
    x, bad = torch.randn(4), torch.tensor([7])

    def step():
        with lazy_mode():
            kept = (x * 2)[bad]
            other = kept * 2
            try:
                lazy_tensor.flush()
            except IndexError as error:
                return error, other
        return None

    settle(step, 4)
    before = n_objects()
    for _ in range(20):
        assert step() is not None
    assert n_objects() - before < 40


def test_exceptions_of_any_class_are_kept():
    class Demanding(Exception):
        def __new__(cls, *, reason):
            return super().__new__(cls, reason)

        def __init__(self, *, reason):
            super().__init__(reason)

    plain, demanding = IndexError("index 9"), Demanding(reason="none")
    plain.add_note("recorded at line 1")
    twin = without_frames(plain)
    assert (type(twin), twin.args, twin.__notes__) == (IndexError, plain.args, plain.__notes__)
    assert without_frames(demanding) is demanding


@pytest.mark.parametrize("way", ["python", "below"])
def test_both_ways_give_the_same(way, tmp_path):
    program = (
        "import torch, lazy_tensor\n"
        "from lazy_tensor.dispatch.run import hits\n"
        "x = torch.arange(6.0)\n"
        "for _ in range(5):\n"
        "    with lazy_tensor.lazy_mode(compile='off'):\n"
        "        y = (x * 2 + 1).relu().sum()\n"
        "print(y.item(), hits.learn is not None)\n"
    )
    assert run_python("-c", program, LAZY_TENSOR_HITS=way).split() == ["36.0", str(way != "python")]


THREADS_RECORD = """
import threading
import torch
import lazy_tensor
from lazy_tensor.dispatch.run import hits

def record(begun, end):
    with lazy_tensor.lazy_mode(record="always"):
        y = (torch.ones(4) + 1).sum()
    begun.set()
    end.wait()

def in_thread():
    begun, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=record, args=(begun, end))
    thread.start()
    begun.wait()
    return thread, end

{before}
thread, end = in_thread()
{after}
print(hits.EXTENSION.status)
for _ in range(3):
    with lazy_tensor.lazy_mode(record="always"):
        (torch.ones(4) + 2).sum().item()
print(hits.EXTENSION.status)
end.set()
thread.join()
with lazy_tensor.lazy_mode(record="always"):
    (torch.ones(4) + 2).sum().item()
print(hits.EXTENSION.status)
"""


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("", "", ["in use"] * 3),
        ("lazy_tensor.wrap(torch.ones(2))", "", ["in use"] * 3),
        # as if what does so came to the disk only when the thread had recorded
        ("hits.EXTENSION._disk_was_asked = True", "hits.EXTENSION._disk_was_asked = False",
         ["not asked for", "compiled", "in use"]),
    ],
)  # fmt: skip
def test_kernels_are_registered_while_no_other_thread_records(before, after, expected):
    """torch's tables are read without a lock, by threads that record."""
    program = THREADS_RECORD.format(before=before, after=after)
    assert run_python("-c", program).splitlines() == expected
