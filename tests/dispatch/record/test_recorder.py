import threading

import pytest
import torch
import torch.nn.functional as F

from lazy_tensor import cache_clear, cache_info, is_pending, lazy_mode, materialize, stats, wrap
from lazy_tensor.dispatch.record.extend_trie import USUAL_POWERS
from lazy_tensor.dispatch.run import hits
from lazy_tensor.dispatch.trie import tensor_types
from lazy_tensor.dispatch.trie.trace import local
from lazy_tensor.kernels.loops.rules import SPECIAL_POWERS
from tests.processes import run_python


def misses():
    return stats().get("schema_misses", 0)


def states():
    found = [*local.trace.roots.values()]
    for state in found:
        found += [*state.values(), *(state.generic or {}).values()]
    return found


def n_states():
    return len(states())


def test_second_pass_makes_no_state():
    x = torch.randn(4, 4)

    def step():
        with lazy_mode():
            return (x @ x + 1).relu().sum(dim=1, keepdim=True)

    step()
    before, propagations = n_states(), misses()
    step()
    assert n_states() == before
    assert misses() == propagations


def test_detach_records_nothing():
    x = wrap(torch.ones(3))
    y = x + 1
    n_ops = local.trace.state.n_ops
    z = y.detach().detach()
    assert local.trace.state.n_ops == n_ops
    z.add_(1)
    assert y.tolist() == [3.0] * 3


@pytest.mark.parametrize(
    "pair",
    [(1, 1.0), (1, True), (0.0, -0.0), (2, 2.0)],
    ids=["int-float", "int-bool", "zeros", "int-float-2"],
)
def test_numbers_that_compare_equal_are_told_apart(pair):
    x = torch.tensor([1, 0, -1])
    for number in (*pair, *pair):
        with lazy_mode():
            y = x * number
        expected = x * number
        assert y.dtype == expected.dtype
        assert torch.equal(torch.signbit(materialize(y)), torch.signbit(expected))


@pytest.mark.parametrize("pair", [(4, 4.0), (4.0, 4)])
def test_numbers_that_decide_a_size_are_told_apart_by_type(pair):
    for number in pair:
        with lazy_mode():
            ranges = [torch.arange(number), torch.arange(0, number), torch.arange(0, number, 1)]
            dtypes = [one.dtype for one in ranges]
            assert all(map(is_pending, ranges))
        assert dtypes == [torch.arange(number).dtype] * 3
        assert [one.dtype for one in materialize(ranges)] == dtypes


def test_changing_numbers_become_run_time_inputs():
    x = torch.randn(5)

    def step(rate):
        with lazy_mode():
            y = x * rate + 0.5
        assert torch.equal(materialize(y), x * rate + 0.5)

    for rate in (0.1, 0.2, 0.3):
        step(rate)
    before, plans = n_states(), stats()["plans_built"]
    for i in range(20):
        step(0.3 + i / 7)
    assert n_states() == before
    assert stats()["plans_built"] <= plans + 1


def test_one_varying_place_teaches_the_others():
    xs = [torch.randn(3) for _ in range(12)]

    def step(rate):
        with lazy_mode():
            for x in xs:
                x.mul_(rate)

    for i in range(4):
        step(1 + i / 8)
    before = n_states()
    for i in range(10):
        step(2 + i / 8)
    assert n_states() == before


def test_changing_list_of_numbers_is_a_run_time_input():
    xs = [torch.ones(3), torch.ones(2)]

    def step(rates):
        with lazy_mode():
            torch._foreach_mul_(xs, rates)

    for i in range(4):
        step([1.0 + i, 2.0 + i])
    before = n_states()
    step([0.5, 0.25])
    assert n_states() == before
    assert [x[0].item() for x in xs] == [24 * 0.5, 120 * 0.25]


def test_tiny_cpu_arithmetic_runs_at_once():
    step = torch.zeros(())
    with lazy_mode():
        step += 1
        assert type(step) is torch.Tensor
        assert local.trace.state is local.trace.root
    assert step.item() == 1


def test_a_program_that_never_repeats_goes_cold_and_stays_right():
    x = torch.randn(6000)
    local.trace.policy.calls_left = 0  # other programs may have earned more than this one spends
    with lazy_mode():
        for n in range(1, 6000):
            y = x[:n] * 2
        assert local.trace.policy.cold
    assert stats()["went_cold"] >= 1
    assert torch.equal(materialize(y), x[:5999] * 2)


def test_a_cold_trace_records_again_in_the_next_block():
    x = torch.randn(4)
    local.trace.policy.cold = 1
    with lazy_mode():
        assert is_pending(x + 1)


def test_a_cold_trace_records_again_after_an_op_that_needs_a_value():
    x = torch.randn(4)
    with lazy_mode():
        local.trace.policy.cold = 1
        local.trace.policy.cold = 3
        for _ in range(5):
            assert not is_pending(x + 1)
        x.sum().item()
        assert is_pending(x + 1)


def test_what_autograd_saves_counts_while_a_trace_is_cold():
    """`detach` of a tensor without a class of its own doesn't come by way of torch's dispatcher."""
    x = torch.randn(4, requires_grad=True)
    with lazy_mode():
        local.trace.policy.cold = 1
        local.trace.policy.cold = 20
        for _ in range(10):
            torch.relu(x)  # and keeps its result
        x.detach().sum().item()
        assert is_pending(x.detach() + 1)


def test_trie_is_bounded():
    x = torch.randn(64)
    for n in range(1, 60):
        local.trace.policy.reset()
        with lazy_mode(segment_cache_size=8):
            y = x[:n] + n
            y.sum()
            y * y
    assert len(local.trace.flush_states.values()) <= 8
    assert n_states() < 120


def test_schema_cache_is_counted():
    x = torch.randn(3)
    with lazy_mode():
        x.cumsum(0)  # no closed form tells what it gives
    first = cache_info()["schema"]
    with lazy_mode():
        x.cumsum(0).cumprod(0)
    second = cache_info()["schema"]
    assert second.misses == first.misses + 1
    assert second.maxsize


def test_shape_error_is_eagers_at_the_users_line():
    with pytest.raises(RuntimeError) as eager:
        torch.ones(2, 3) @ torch.ones(2, 3)
    with lazy_mode(), pytest.raises(RuntimeError) as lazy:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert str(lazy.value) == str(eager.value)
    assert str(lazy.traceback[0].path).endswith("test_recorder.py")


def test_views_of_a_leaf_with_an_offset_keep_their_own():
    data = torch.arange(20.0)
    for start in (3, 7, 11):
        x = data[start : start + 4]
        with lazy_mode():
            y = x.view(2, 2)[1]
            assert y.storage_offset() == start + 2
        assert y.tolist() == [start + 2, start + 3]


AS_OTHER_TYPES = {
    "imag": lambda x: torch.view_as_complex(x).imag,
    "complex": torch.view_as_complex,
    "float64": lambda x: x.view(torch.float64),
    "int16": lambda x: x.view(torch.int16)[1],
}


@pytest.mark.parametrize("view", AS_OTHER_TYPES.values(), ids=AS_OTHER_TYPES)
def test_views_as_other_types_of_a_leaf_that_begins_elsewhere(view):
    data = torch.arange(80.0).reshape(10, 4, 2)

    def program(x):
        found = view(x)
        offset = found.storage_offset()
        return offset, found.as_strided((2,), (2,), offset) * 1

    for i in range(1, 8):
        with lazy_mode(record="always"):
            offset, found = program(data[i])
        expected_offset, expected = program(data[i])
        assert (offset, found.tolist()) == (expected_offset, expected.tolist())


def test_threads_record_apart():
    x = torch.ones(100)
    results = {}

    def work(n):
        with lazy_mode():
            y = x
            for _ in range(n):
                y = y + 1
        results[n] = y.sum().item()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: 100.0 * (n + 1) for n in range(1, 9)}


def test_value_pending_in_another_thread_is_computed():
    x = wrap(torch.ones(3))
    y = x + 1
    seen = []

    def read():
        seen.append((y * 2).tolist())

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert seen == [[4.0] * 3]
    assert not is_pending(y)


@pytest.mark.parametrize("way", ["python", "below"])
def test_higher_order_ops_run_at_once(way):
    program = (
        "import torch, lazy_tensor\n"
        "cond = torch.ops.higher_order.cond\n"
        "x = torch.arange(3.0)\n"
        "with lazy_tensor.lazy_mode(record='always'):\n"
        "    y = cond(torch.tensor(True), torch.sin, torch.cos, (x * 2,))\n"
        "    z = cond(torch.tensor(True), torch.sin, torch.cos, (torch.tensor(1.0),))\n"
        "assert torch.equal(y, (x * 2).sin())\n"
        "assert torch.equal(z, torch.tensor(1.0).sin())\n"
    )
    run_python("-c", program, LAZY_TENSOR_HITS=way)


@pytest.mark.recorded
def test_numbers_of_an_interrupted_call_are_not_given_to_the_next(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    x = torch.ones(3)
    with monkeypatch.context() as patch:
        for learns in (True, False):  # C++ learns to add, and not to multiply
            if not learns:
                patch.setattr(hits, "learn", None)
            for n in (0.1, 0.2, 0.3, 0.4):
                with lazy_mode():
                    y = x - 1  # behind which `x` is in the trace
                    y = x + n if learns else x * n
    with lazy_mode():
        y = x - 1
        with monkeypatch.context() as patch:
            patch.setattr(tensor_types, "new_tensor", interrupted)
            with pytest.raises(KeyboardInterrupt):
                x * 2.5
        y = x + 0.5
    assert y.tolist() == [1.5] * 3


@pytest.mark.parametrize(
    ("call", "refused"),
    [
        (lambda x, n: x.long() ** n, -1),
        (lambda x, n: F.huber_loss(x, x * 2, delta=n), 0),
        (lambda x, n: F.smooth_l1_loss(x, x * 2, beta=n), -1.0),
        (F.softshrink, -1.0),
        (F.celu, 0.0),
        (lambda x, n: torch.cdist(x[None], x[None] * 2, n), -1.0),
    ],
)
def test_a_number_that_eager_refuses_raises_at_its_line_though_numbers_vary(call, refused):
    x = torch.ones(3)
    with lazy_mode():
        for n in (1, 2, 3, 4):
            call(x + 1, type(refused)(n))
    with lazy_mode(), pytest.raises(RuntimeError):
        call(x + 1, refused)


def test_powers_of_floats_share_a_state_though_numbers_vary():
    def step(n):
        with lazy_mode():
            return (torch.ones(3) + 1) ** n

    for n in (1.5, 2.5, 3.5):
        step(n)
    before = n_states()
    assert step(4.5).tolist() == pytest.approx([2**4.5] * 3)
    assert n_states() == before


def test_whole_numbers_that_need_more_than_64_bits():
    def step(y, n):
        y.mul_(0.5).masked_fill_(y > 2, n)

    for n in (2, 3, 4, 5, 6, 2**63, -(2**63), 7):
        expected, y = torch.tensor([1.0, 2.0, 35.0]), torch.tensor([1.0, 2.0, 35.0])
        step(expected, n)
        with lazy_mode(compile="blocking", record="always"):
            step(y, n)
        assert torch.equal(y, expected)


def test_a_usual_power_has_a_kernel_that_knows_it():
    assert set(SPECIAL_POWERS) == USUAL_POWERS
    x = torch.rand(8) + 1
    cache_clear()

    def step(exponent):
        with lazy_mode():
            y = x**exponent
        assert torch.equal(y, x**exponent)

    for exponents, are_numbers in ((2, 3, 0.5, 2, -1), False), ((1.3, 1.7, 2), True):
        for exponent in exponents:
            step(exponent)
        assert any(state.generic for state in states()) == are_numbers
