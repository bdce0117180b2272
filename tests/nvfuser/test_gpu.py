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
from tests.conformance.kernel_programs import same, tolerance_of
from tests.conformance.op_programs import UNINITIALISED
from tests.nvfuser.conftest import needs_nvfuser

pytestmark = [
    pytest.mark.gpu,
    needs_nvfuser,
    pytest.mark.filterwarnings("ignore"),
]
CASES = [
    (op, dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    for op in op_db
    if torch.cuda.is_available()
    and op.supports_dtype(dtype, "cuda")
    and op.name not in UNINITIALISED
]


@pytest.fixture(autouse=True)
def nvfuser(tmp_path, monkeypatch):
    """The backend in force, blocking; segments of any size are fused."""
    monkeypatch.setattr("lazy_tensor.kernels.nvfuser.backend.CALL_S", 0.0)
    lazy_tensor.configure(backend="nvfuser", compile="blocking", cache_dir=str(tmp_path))


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

    expected = program()
    with lazy_mode():
        result = materialize(program())
    rtol, atol = tolerance_of(op, dtype)
    torch.testing.assert_close(
        result, expected, rtol=max(rtol, 1e-4), atol=max(atol, 1e-4), equal_nan=True
    )
    assert stats()["failed"] == 0


def gpt():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        64, 4, 128, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.Sequential(nn.Embedding(50, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 50))


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


def test_a_recorded_step_waits_for_nothing_until_a_value_is_read():
    def adamw(parameters):
        return torch.optim.AdamW(parameters, 1e-3, capturable=True)

    with lazy_mode():
        train(3, adamw)
        losses = train(3, adamw, syncs="error")
        assert materialize(losses).isfinite().all()


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
    kernels = [e for e in profiled.events() if "memcpy" not in e.name.lower()]
    assert len(kernels) == 1
    assert "nvfuser" in kernels[0].name


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


def test_indices_are_checked_on_the_device():
    table = torch.randn(4, 8, device="cuda")
    with lazy_mode():
        inside = materialize(F.embedding(torch.tensor([0, 3], device="cuda"), table) * 2 + 1)
    torch.testing.assert_close(inside, table[[0, 3]] * 2 + 1)


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
