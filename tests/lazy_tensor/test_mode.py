import pytest
import torch
from torch.nn.utils import rnn

from lazy_tensor import LazyTensor, configure, is_pending, lazy_mode, materialize, stats
from lazy_tensor.dispatch import settings


def test_is_reentrant_and_only_the_outermost_exit_leaves():
    x = torch.ones(3)
    with lazy_mode():
        with lazy_mode():
            y = x + 1
        z = y + 1
        assert isinstance(z, LazyTensor)
    assert type(x + 1) is torch.Tensor
    assert materialize(z).tolist() == [3.0] * 3


def test_decorates_a_function():
    @lazy_mode()
    def double(x):
        return x * 2

    assert materialize(double(torch.ones(2))).tolist() == [2.0, 2.0]


def test_options_hold_for_the_block():
    before = settings.current()
    with lazy_mode(max_segment_ops=7):
        assert settings.current().max_segment_ops == 7
    assert settings.current() == before


def test_unknown_option_names_the_nearest():
    with pytest.raises(TypeError, match="unknown option 'backened'; did you mean 'backend'"):
        lazy_mode(backened="aten")


def test_unknown_backend_names_those_there_are():
    with pytest.raises(ValueError, match=r"configure\(\): backend='nvfuzer' is not one of 'auto'"):
        configure(backend="nvfuzer")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": "lazy"}, "compile='lazy' is not one of 'background', 'blocking', 'off'"),
        ({"max_segment_ops": 0}, "max_segment_ops=0 must be at least 1"),
        ({"verify_every": -1}, "verify_every=-1 must be at least 0"),
        ({"forbid": "flushes"}, "forbid='flushes' is not one of 'flush', 'compile'"),
    ],
)
def test_bad_values_name_the_option_and_what_it_takes(options, message):
    before = settings.current()
    with pytest.raises(ValueError, match=message):
        configure(**options)
    assert settings.current() == before


def test_options_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("LAZY_TENSOR_COMPILE", "off")
    monkeypatch.setenv("LAZY_TENSOR_FORBID", "flush,compile")
    monkeypatch.setenv("LAZY_TENSOR_DEBUG", "1")
    found = settings.from_environment()
    assert found.compile == "off"
    assert found.forbid == {"flush", "compile"}
    assert found.debug


def test_forbidden_compile_computes_all_the_same():
    x = torch.randn(3)

    def program():
        with lazy_mode(backend="inductor", compile="background", forbid={"compile"}):
            return x.sin().cos()

    program()  # at first sight there is no plan
    with pytest.raises(RuntimeError, match="a segment without a kernel .*aten.sin.default"):
        program()


def test_forbidden_fallback_names_op_and_reason():
    x = torch.ones(2, 2)
    with lazy_mode(forbid={"fallback"}):
        y = x + 1
        with pytest.raises(RuntimeError, match="can't be recorded .*forbid has 'fallback'"):
            y.to_sparse()


def test_inplace_on_plain_tensor_is_seen_after_the_block():
    x = torch.zeros(4)
    with lazy_mode():
        x.add_(1)
        x[1:3].mul_(5)
    assert x.tolist() == [1.0, 5.0, 5.0, 1.0]


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.numpy().tolist(),
        lambda t: t.tolist(),
        lambda t: torch.utils.dlpack.from_dlpack(t).clone().tolist(),
        lambda t: list(t.untyped_storage())[:1] and t.tolist(),
        lambda t: eval(repr(t).replace("tensor", "")),
        lambda t: [t[0].item(), t[1].item()],
    ],
    ids=["numpy", "tolist", "dlpack", "storage", "repr", "item"],
)
def test_inplace_on_plain_tensor_is_seen_by_reads_that_do_not_dispatch(read):
    x = torch.zeros(2)
    with lazy_mode():
        x.add_(1)
        assert read(x) == [1.0, 1.0]


def test_exception_in_the_block_loses_nothing():
    x = torch.zeros(2)
    results = []

    @lazy_mode()
    def program():
        x.add_(1)
        results.append(x * 2)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        program()
    assert x.tolist() == [1.0, 1.0]
    assert results[0].tolist() == [2.0, 2.0]


def test_data_assignment_takes_a_lazy_value():
    p = torch.nn.Parameter(torch.ones(3))
    with lazy_mode():
        p.data = p.data * 2
        q = p + 1
    assert p.tolist() == [2.0] * 3
    assert q.tolist() == [3.0] * 3


def test_a_bound_flushes_by_itself():
    x = torch.zeros(3)
    with lazy_mode(max_segment_ops=10):
        for _ in range(35):
            x = x + 1
        assert is_pending(x)
    assert x.tolist() == [35.0] * 3
    assert stats()["flush_causes"]["max_segment_ops"] == 3


def test_pending_bytes_are_bounded():
    x = torch.zeros(1024)
    with lazy_mode(max_pending_bytes=8 * 4096):
        for _ in range(20):
            x = x + 1
    assert x[0].item() == 20
    assert stats()["flush_causes"]["max_pending_bytes"] == 2


def test_forbidden_flush_names_the_users_line():
    x = torch.ones(3)
    with lazy_mode(forbid={"flush"}):
        y = x.sum()
        with pytest.raises(RuntimeError, match=r"test_mode.py:\d+ needs values that are pending"):
            y.item()
    assert y.item() == 3.0


def test_default_dtype_set_inside_counts_from_there_on():
    x = torch.arange(3)
    with lazy_mode():
        a = x * 1.5
        torch.set_default_dtype(torch.float64)
        try:
            b = x * 1.5
        finally:
            torch.set_default_dtype(torch.float32)
        c = x * 1.5
    assert (a.dtype, b.dtype, c.dtype) == (torch.float32, torch.float64, torch.float32)


def test_inference_mode_inside():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    x = torch.randn(3, 4)
    with torch.inference_mode():
        expected = model(x)
        with lazy_mode():
            y = model(x)
            assert is_pending(y)
    assert torch.equal(materialize(y), expected)


def test_debug_runs_each_op_as_it_is_recorded():
    with lazy_mode(debug=True):
        y = torch.ones(3) + 1
        assert not is_pending(y)
    assert y.tolist() == [2.0] * 3


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_packed_sequences(kind):
    torch.manual_seed(0)
    model, x = kind(3, 5, batch_first=True), torch.randn(4, 6, 3)

    def program():
        lengths = torch.tensor([5, 3, 2, 0]) + 1
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True)
        padded, n_steps = rnn.pad_packed_sequence(model(packed)[0], batch_first=True)
        padded.sum().backward()
        gradient, model.weight_ih_l0.grad = model.weight_ih_l0.grad, None
        return padded.detach(), n_steps, gradient

    expected = program()
    with lazy_mode():
        found = materialize(program())
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_split_at_lazy_indices():
    x = torch.arange(12.0)
    with lazy_mode():
        at = torch.tensor([1, 2]) + 1
        parts = torch.tensor_split(x + 1, at)
        same_parts = (x + 1).tensor_split(tensor_indices_or_sections=at)
    for found in (parts, same_parts):
        for one, other in zip(found, torch.tensor_split(x + 1, (2, 3)), strict=True):
            assert torch.equal(materialize(one), other)
