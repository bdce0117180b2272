"""nvFuser itself on a GPU: values, kernels, syncs, streams, threads, memory."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import lazy_tensor
from lazy_tensor import lazy_mode, materialize, stats
from lazy_tensor.kernels.nvfuser.backend import NvfuserBackend, definition_of
from tests.conformance.kernel_programs import same, tolerance_of
from tests.conformance.op_programs import UNINITIALISED
from tests.nvfuser.conftest import needs_nvfuser

pytestmark = [
    pytest.mark.gpu,
    needs_nvfuser,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def nvfuser(tmp_path, monkeypatch):
    """The backend in force, blocking; segments of any size are fused."""
    monkeypatch.setattr("lazy_tensor.kernels.nvfuser.backend.CALL_S", 0.0)
    # in this process alone: a worker would compile each kernel first
    monkeypatch.setattr(NvfuserBackend, "can_build", lambda self, segment: False)
    monkeypatch.setattr(NvfuserBackend, "build", lambda self, segment: definition_of(segment))
    lazy_tensor.configure(backend="nvfuser", compile="blocking", cache_dir=str(tmp_path))


def test_a_chain_is_one_kernel():
    x = torch.randn(256, 256, device="cuda")

    def chain():
        return ((x * 2).sin().exp() + 1).rsqrt()

    with lazy_mode():
        for _ in range(3):
            materialize(chain())
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
            materialize(chain())
            torch.cuda.synchronize()
    names = [e.name for e in profiled.events()]  # with the ranges that they ran in
    kernels = [n for n in names if not ("memcpy" in n.lower() or n.startswith("lazy_tensor "))]
    assert len(kernels) == 1
    assert "nvfuser" in kernels[0]


LAYOUTS = {
    "dense": lambda x: x,
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:1].expand(6, 64),
    "expanded inside": lambda x: x[:, :1].expand(48, 6),
    "with gaps": lambda x: x[:, ::2],
    "a part": lambda x: x[3:9, 5:40],
    "a scalar": lambda x: x[0, 0],
    "of one row": lambda x: x[:1],
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_may_lie_in_any_way(layout):
    x = LAYOUTS[layout](torch.randn(48, 64, device="cuda"))

    def program():
        return ((x * 2).sin() + 1).exp(), (x * 2).cos().sum(-1)

    expected = program()
    with lazy_mode():
        found = materialize(program())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert [y.stride() for y in found] == [y.stride() for y in expected]
    assert stats()["failed"] == 0


def test_streams_and_threads():
    x = torch.randn(64, 64, device="cuda")
    expected = x.sin().exp().sum()
    results = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()), lazy_mode():
            results.append(materialize(x.sin().exp().sum()))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        torch.testing.assert_close(result, expected)
    assert len(results) == 4


def test_a_side_stream_reads_what_another_left_pending():
    x = torch.randn(256, 256, device="cuda")
    side, done = torch.cuda.Stream(), torch.cuda.Event()

    def program():
        y = (x * 2).sin() + 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = (y @ y).tanh()
            done.record()
        done.wait()
        return z * 2 + y

    expected = program()
    with lazy_mode():
        torch.testing.assert_close(materialize(program()), expected)


def test_pinned_and_asynchronous_copies():
    on_host = torch.randn(1 << 20)
    expected = (on_host * 2).sin()
    with lazy_mode():
        pinned = on_host.pin_memory()
        y = (pinned.to("cuda", non_blocking=True) * 2).sin()
        back = torch.empty(1 << 20, pin_memory=True)
        back.copy_(y, non_blocking=True)
        torch.cuda.synchronize()
        assert back.is_pinned()
        found = materialize(back)
    assert found.is_pinned()
    torch.testing.assert_close(found, expected)


def test_memory_that_runs_out_in_a_flush_is_an_error_and_no_more():
    n_free = torch.cuda.mem_get_info()[0]
    x = torch.randn(1 << 20, device="cuda")
    with lazy_mode():
        small = x.sin() + 1
        large = (x[:1].expand(n_free // 4 * 2) * 2).exp() + x[0]
        with pytest.raises(torch.OutOfMemoryError):
            materialize(large)
        del large
        torch.testing.assert_close(materialize(small), x.sin() + 1)
        torch.testing.assert_close(materialize(x.cos() * 2), torch.cos(x) * 2)


def test_indices_are_checked_on_the_device():
    table = torch.randn(4, 8, device="cuda")
    with lazy_mode():
        inside = materialize(F.embedding(torch.tensor([0, 3], device="cuda"), table) * 2 + 1)
    torch.testing.assert_close(inside, table[[0, 3]] * 2 + 1)


def gpt():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        64, 4, 128, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.Sequential(nn.Embedding(50, 64), nn.TransformerEncoder(layer, 1), nn.Linear(64, 50))


def train(n_steps, optimizer_of, dtype=None, *, syncs="default"):
    """The losses of some steps, in which CUDA's sync debug mode is `syncs`."""
    model = gpt().cuda()
    optimizer = optimizer_of(model.parameters())
    tokens = torch.randint(0, 50, (4, 17), device="cuda", generator=torch.Generator("cuda"))

    def step():
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    lazy_tensor.flush()
    torch.cuda.set_sync_debug_mode(syncs)
    try:
        losses = [step() for _ in range(n_steps)]
        lazy_tensor.flush()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return torch.stack(losses)


def test_op_by_op_training_is_bit_equal():
    def adamw(parameters):
        return torch.optim.AdamW(parameters, 1e-3)

    torch.use_deterministic_algorithms(True)
    try:
        expected = train(4, adamw)
        with lazy_mode(compile="off"):
            losses = materialize(train(4, adamw))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(losses, expected)


def test_a_replayed_step_is_one_cuda_graph():
    def stepper():
        torch.manual_seed(0)
        model = gpt().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True, capturable=True)

        def step(tokens):
            optimizer.zero_grad()
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    tokens = torch.randint(0, 50, (4, 17), device="cuda")
    plain, replayed = stepper(), lazy_tensor.replay(stepper(), cuda_graphs=True)
    for _ in range(12):
        torch.testing.assert_close(replayed(tokens), plain(tokens), rtol=1e-3, atol=1e-4)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as profiled:
        replayed(tokens)
        torch.cuda.synchronize()
    launches = [e.name for e in profiled.events() if "Launch" in e.name]
    assert launches.count("cudaGraphLaunch") == 1, (launches, lazy_tensor.explain())


def test_a_recorded_step_waits_for_nothing_until_a_value_is_read():
    def adamw(parameters):
        return torch.optim.AdamW(parameters, 1e-3, capturable=True)

    with lazy_mode():
        train(3, adamw)
        losses = train(3, adamw, syncs="error")
        assert materialize(losses).isfinite().all()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
def test_training_is_close_to_eager(dtype, foreach):
    def adamw(parameters):
        return torch.optim.AdamW(parameters, 1e-3, foreach=foreach)

    expected = train(6, adamw, dtype)
    with lazy_mode():
        losses = materialize(train(6, adamw, dtype))
    tolerance = 1e-4 if dtype is None else 2e-2
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)
    assert (stats()["failed"], stats()["disagreed"]) == (0, 0)


def test_memory_is_flat():
    def adamw(parameters):
        return torch.optim.AdamW(parameters, 1e-3)

    with lazy_mode():
        train(3, adamw)
        materialize(torch.zeros(1))
        before = torch.cuda.memory_allocated()
        for _ in range(10):
            train(3, adamw)
        lazy_tensor.flush()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


CASES = [
    (op, dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    for op in op_db
    if torch.cuda.is_available()
    and op.supports_dtype(dtype, "cuda")
    and op.name not in UNINITIALISED
    and op.name != "torch.ops.aten._efficient_attention_forward"  # which gives a random seed
]


@pytest.mark.parametrize(
    ("op", "dtype"), CASES, ids=[f"{op.formatted_name}-{dtype}" for op, dtype in CASES]
)
def test_an_op_between_others_agrees_with_eager(op, dtype):
    sample = next(iter(op.sample_inputs("cuda", dtype, requires_grad=False)), None)
    if sample is None:
        pytest.skip("it has no samples")

    def program():
        given = pytree.tree_map_only(torch.Tensor, same, (sample.input, sample.args, sample.kwargs))
        tensor, args, kwargs = given
        return pytree.tree_map_only(torch.Tensor, same, op(tensor, *args, **kwargs))

    try:
        expected = program()
    except NotImplementedError as error:
        pytest.skip(f"eager has none: {error}")
    with lazy_mode():
        result = materialize(program())
    rtol, atol = tolerance_of(op, dtype)
    torch.testing.assert_close(
        result, expected, rtol=max(rtol, 1e-4), atol=max(atol, 1e-4), equal_nan=True
    )
    assert stats()["failed"] == 0
