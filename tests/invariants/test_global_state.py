"""What results depend on besides their inputs: autocast, grad mode, random streams, flags."""

import textwrap

import pytest
import torch
from torch import nn

from lazy_tensor import flush, is_pending, lazy_mode, materialize, wrap
from tests.invariants.compare import WAYS, assert_agrees, assert_same
from tests.processes import run_python

each_way = pytest.mark.parametrize("way", WAYS)
bfloat16 = torch.bfloat16


def autocast(**options):
    return torch.autocast("cpu", dtype=bfloat16, **options)


@pytest.mark.parametrize("n_passes", [1, 3], ids=["first sight", "from a plan"])
def test_a_flush_under_autocast_computes_what_was_recorded_outside(n_passes):
    x = torch.rand(4, 4)
    for _ in range(n_passes):
        y = wrap(x) @ x
        with autocast():
            flush()
        assert_same(y, x @ x)


@pytest.mark.parametrize("n_passes", [1, 3], ids=["first sight", "from a plan"])
def test_a_flush_outside_computes_what_was_recorded_under_autocast(n_passes):
    x = torch.rand(4, 4)
    with autocast():
        expected = x @ x
    for _ in range(n_passes):
        with autocast():
            y = wrap(x) @ x
        assert_same(y, expected)


def cast_and_not(x):
    first = x @ x
    with autocast():
        second = x @ x
        with autocast(enabled=False):
            third = x @ x
    return first, second, third, x @ x


def cast_twice(x):
    w = x.detach().requires_grad_()
    with autocast():
        y = (w @ x) @ w  # w is cast once, and kept
    y.float().sum().backward()
    return y.detach(), w.grad


def cast_after_a_write(x):
    w = x.detach().requires_grad_()
    results = []
    for _ in range(2):
        with autocast():
            results.append((w @ x).detach())
        with torch.no_grad():
            w.add_(1)
    return results


@pytest.mark.parametrize(
    "program", [cast_and_not, cast_twice, cast_after_a_write], ids=lambda f: f.__name__
)
@each_way
def test_autocast_agrees(program, way):
    assert_agrees(way, program, torch.rand(4, 4))


@pytest.mark.parametrize("n_passes", [1, 3], ids=["first sight", "from a plan"])
def test_a_flush_under_no_grad_keeps_the_graph_that_was_recorded(n_passes):
    for _ in range(n_passes):
        w = torch.ones(3, requires_grad=True)
        with lazy_mode():
            y = (w * 2).exp()
            with torch.no_grad():
                y.tolist()
            y.sum().backward()
        assert w.grad is not None


def set_seed(x):
    torch.manual_seed(3)
    return torch.rand(2), (x + 1).bernoulli(0.5)


def state_taken_and_put_back(x):
    state = torch.get_rng_state()
    first = torch.rand(3)
    torch.set_rng_state(state)
    return first, torch.rand(3)


def lazy_state_put(x):
    state = torch.get_rng_state() + 0
    first = torch.rand(3)
    torch.set_rng_state(state)
    return first, torch.rand(3)


def forked(x):
    before = torch.rand(2)
    with torch.random.fork_rng():
        torch.manual_seed(9)
        inside = torch.rand(2)
    return before, inside, torch.rand(2)


def dropped_out(x):
    h = nn.functional.dropout(x + 1, 0.3)
    h = nn.functional.dropout(h * 2, 0.5)
    return h, nn.functional.alpha_dropout(h, 0.2, training=True), torch.rand(2)


def dropped_out_with_gradient(x):
    w = x.detach().requires_grad_()
    y = nn.functional.dropout(w * 2, 0.5)
    y.sum().backward()
    return y.detach(), w.grad


def attention_with_dropout(x):
    q = x.view(1, 2, 4, 2)
    return nn.functional.scaled_dot_product_attention(q, q + 1, q * 2, dropout_p=0.4)


def drawn_from_own_generator(x):
    generator = torch.Generator().manual_seed(4)
    y = torch.empty(3).normal_(generator=generator)
    state = generator.get_state()
    z = torch.rand(3, generator=generator)
    generator.set_state(state)
    return y, z, torch.rand(3, generator=generator), torch.rand(3)


def drawn_into_what_is_pending(x):
    y = x + 1
    before = y * 2
    y[1].uniform_()
    return before, y, torch.rand(2)


def sampled_by_expanded_parameters(x):
    p = (x.abs() + 0.25).clamp(max=1).flatten()[:4]
    rows, columns = p.expand(3, 4), p[::2].expand(3, 2)
    return (
        torch.normal(rows, rows), torch.bernoulli(rows), torch.multinomial(columns, 1),
        torch.distributions.Normal(p, p).sample((2,)), torch.normal(0.0, columns.t()),
    )  # fmt: skip


def unused_draws_count(x):
    torch.rand(5)
    nn.functional.dropout(x, 0.5)
    return torch.rand(2)


def seeds_asked(x):
    torch.manual_seed(77)
    return torch.initial_seed(), torch.randint(100, (3,)), torch.randperm(5)


RANDOM = [
    set_seed, state_taken_and_put_back, lazy_state_put, forked, dropped_out,
    dropped_out_with_gradient, attention_with_dropout, drawn_from_own_generator,
    drawn_into_what_is_pending, sampled_by_expanded_parameters, unused_draws_count, seeds_asked,
]  # fmt: skip


@pytest.mark.parametrize("program", RANDOM, ids=lambda program: program.__name__)
@each_way
def test_random_bits_are_eagers(program, way):
    def seeded(x):
        torch.manual_seed(1)
        return program(x), torch.rand(1), torch.get_rng_state()

    assert_agrees(way, seeded, torch.rand(4, 4))


def test_dropout_stays_pending():
    y = nn.functional.dropout(wrap(torch.ones(5)) + 1, 0.5)
    assert is_pending(y)


def test_a_state_that_is_wrapped_is_put_outside_the_mode():
    state = torch.get_rng_state()
    first = torch.rand(3)
    torch.set_rng_state(wrap(state))
    assert torch.equal(torch.rand(3), first)


def test_deterministic_algorithms_asked_for_between_record_and_flush_change_nothing_recorded():
    x = torch.rand(4)
    y = wrap(x).cumsum(0)
    torch.use_deterministic_algorithms(True)
    try:
        assert_same(y, x.cumsum(0))
    finally:
        torch.use_deterministic_algorithms(False)


def test_default_dtype_set_before_the_flush_changes_nothing_recorded():
    x = torch.arange(3)
    y = wrap(x) / 2
    torch.set_default_dtype(torch.float64)
    try:
        assert materialize(y).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("setter", "double", "single"),
    [
        (torch.set_default_dtype, torch.float64, torch.float32),
        (torch.set_default_tensor_type, torch.DoubleTensor, torch.FloatTensor),
    ],
    ids=["dtype", "tensor type"],
)
@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_the_default_dtype_of_each_line_is_the_one_in_force(setter, double, single):
    def dtypes():
        return [torch.ones(3).dtype, (torch.arange(3) / 2).dtype]

    for _ in range(3):
        try:
            with lazy_mode(record="always"):
                before = dtypes()
                setter(double)
                inside = dtypes()
            with lazy_mode(record="always"):
                after = dtypes()
        finally:
            setter(single)
        assert before == [torch.float32] * 2
        assert inside == after == [torch.float64] * 2


def test_denormals_are_flushed_from_the_line_on_that_says_so():
    x = torch.full((4,), 1e-310, dtype=torch.float64)
    try:
        with lazy_mode(record="always"):
            before = x * 0.5
            if not torch.set_flush_denormal(True):
                pytest.skip("the processor can't")
            after = x * 0.5
    finally:
        torch.set_flush_denormal(False)
    assert before.tolist() == [5e-311] * 4
    assert after.tolist() == [0.0] * 4


@each_way
def test_the_default_device_is_kept(way):
    def program(x):
        with torch.device("meta"):
            y = torch.ones(3)
        return y.device.type, x + torch.ones(4)

    assert_agrees(way, program, torch.rand(4, 4))


STREAMS = """
import torch

entered = []
torch._C._cuda_setStream = lambda **stream: entered.append(stream)
torch.cuda.Stream.__enter__ = lambda self: entered.append("enters")
torch.cuda.Stream.__exit__ = lambda self, *exception: entered.append("leaves")
import lazy_tensor

with lazy_tensor.lazy_mode(record="always"):
    x = torch.ones(3) * 2
    assert lazy_tensor.is_pending(x)
    torch._C._cuda_setStream(stream_id=7, device_index=0, device_type=1)
    assert not lazy_tensor.is_pending(x)
    y = x + 1
    torch.cuda.Stream.__enter__(None)
    assert not lazy_tensor.is_pending(y)
    z = y * 2
    assert lazy_tensor.is_pending(z)
    torch.cuda.Stream.__exit__(None)
    assert not lazy_tensor.is_pending(z)
print(len(entered))
"""


def test_what_is_recorded_under_a_stream_runs_under_it():
    """`torch.cuda.stream` and `with stream:` end in these calls, which nothing stands behind."""
    assert run_python("-c", STREAMS).split() == ["3"]


@pytest.mark.parametrize(
    "setting",
    ["torch.backends.mkldnn.matmul", "torch.backends.cuda.matmul", "torch.backends"],
)
def test_precisions_that_the_older_api_cannot_tell(setting):
    # torch's own getters of the older API raise from here on, so it is a process of its own
    program = f"""
        import torch
        from lazy_tensor import lazy_mode, replay

        x = torch.ones(3, 3)
        step = replay(lambda x: x @ x + 1)
        {setting}.fp32_precision = "tf32" if "cuda" in "{setting}" else "bf16"
        for _ in range(3):
            with lazy_mode(record="always"):
                y = x @ x + 1
            assert y.tolist() == step(x).tolist() == [[4.0] * 3] * 3
        print("ran")
    """
    assert run_python("-c", textwrap.dedent(program)).strip() == "ran"
