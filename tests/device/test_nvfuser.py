"""nvFuser and torch's CUDA, all but the kernels themselves, on a stand-in for a GPU.

    python tests/device/stand_in.py pytest tests/device

Definitions are segmented, scheduled and compiled to machine code; what the device is asked for is
counted. Values computed on it mean nothing, so none is looked at.
"""

import threading

import pytest
import stand_in
import torch
from stand_in import is_of_nvfuser, kernels
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import lazy_tensor
from lazy_tensor import lazy_mode, materialize
from lazy_tensor.dispatch import settings
from lazy_tensor.dispatch.run.compile_service import compiler
from lazy_tensor.kernels.nvfuser import library
from lazy_tensor.kernels.nvfuser.backend import NvfuserBackend, definition_of
from tests.conformance.kernel_programs import same
from tests.conformance.op_programs import UNINITIALISED
from tests.models.run import outcome_of, training
from tests.models.zoo import ZOO
from tests.nvfuser.conftest import needs_nvfuser

pytestmark = [
    needs_nvfuser,
    pytest.mark.skipif(
        not stand_in.is_loaded(), reason="needs python tests/device/stand_in.py pytest ..."
    ),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def nvfuser(tmp_path, monkeypatch):
    """The backend in force, blocking; segments of any size are fused."""
    monkeypatch.setattr(NvfuserBackend, "declines", lambda self, segment: None)
    before = settings.current()
    lazy_tensor.configure(backend="nvfuser", compile="blocking", cache_dir=str(tmp_path))
    lazy_tensor.cache_clear()
    with torch.backends.cudnn.flags(enabled=False):  # it asks more of the device
        yield
    settings.put(before)


@pytest.fixture
def compiled_here(monkeypatch):
    """No worker compiles first: half the time, and nvFuser's errors end nothing but a segment."""
    monkeypatch.setattr(NvfuserBackend, "can_build", lambda self, segment: False)
    monkeypatch.setattr(NvfuserBackend, "build", lambda self, segment: definition_of(segment))


def statuses():
    """How many fusions there are by backend and status, and why some failed."""
    found: dict[tuple[str, str], int] = {}
    for fusion in list(compiler()._fusions):
        key = fusion.backend.name, fusion.status
        found[key] = found.get(key, 0) + 1
        assert fusion.status != "failed", (fusion.reason, [str(c.op) for c in fusion.segment.calls])
    return found


def chain(x):
    return ((x * 2).sin().exp() + 1).rsqrt()


def test_a_chain_is_one_kernel_and_waits_for_nothing():
    x = torch.randn(256, 256, device="cuda")
    with lazy_mode():
        for _ in range(3):
            with stand_in.asked() as entries:
                y = chain(x)
                lazy_tensor.flush()
        assert y.shape == (256, 256)
    assert [entry.kind for entry in entries] == ["kernel"]
    assert is_of_nvfuser(entries[0].name)
    assert statuses() == {("nvfuser", "ready"): 1}


def test_kernels_go_to_the_current_stream(compiled_here):
    x = torch.randn(16, 16, device="cuda")
    with lazy_mode():
        materialize(chain(x))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), stand_in.asked() as entries:
            y = chain(x)
            lazy_tensor.flush()
        assert y.shape == (16, 16)
    assert [entry.stream for entry in entries] == [stream.cuda_stream]


def test_pinned_memory_materializes(compiled_here):
    x = torch.randn(64, 64, device="cuda")
    with lazy_mode():
        pinned = torch.empty(64, 64, pin_memory=True)
        pinned.copy_(chain(x), non_blocking=True)
    assert materialize(pinned).shape == (64, 64)


def test_the_device_has_work_before_a_long_block_ends(compiled_here):
    x = torch.randn(64, 64, device="cuda")
    with lazy_mode():
        for _ in range(2):
            with stand_in.asked() as entries:
                y = x
                for _ in range(300):
                    y = (y @ x) + 1
            lazy_tensor.flush()
    n = len(kernels(entries))
    assert 400 < n < 600


def test_segments_go_by_their_own_device(compiled_here):
    x = torch.randn(64, 64, device="cuda")
    y = torch.rand(64, 64)
    expected = chain(y)
    with lazy_mode():
        found, _ = materialize((chain(y), chain(x)))
    torch.testing.assert_close(found, expected)
    assert statuses() == {("inductor", "ready"): 1, ("nvfuser", "ready"): 1}


def test_results_lie_as_eager_ones_where_dimensions_are_one(compiled_here):
    x = torch.randn(4, 3, 2, 1, device="cuda")

    def program():
        return (x * 2).permute(3, 2, 1, 0) + 1

    with lazy_mode():
        assert materialize(program()).stride() == program().stride() == (1, 1, 2, 6)


def several_kernels(size):
    """A program of several reductions, that nvFuser makes several kernels of."""
    x = torch.randn(size, size + 1, device="cuda")
    return (x.softmax(0) @ x.T.softmax(1)), (x.sum(0) * 2).softmax(0).sum(), (x + x.sum(0)).sum(1)


def test_threads_that_compile_at_a_time_end(compiled_here):
    done = []

    def work(size):
        with lazy_mode():
            for n in range(size, size + 3):
                materialize(several_kernels(n))
        done.append(size)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in (4, 40, 400)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(done) == [4, 40, 400]
    statuses()


def test_other_threads_run_while_a_kernel_compiles(compiled_here, monkeypatch):
    n_ticks = 0
    during = []
    is_done = threading.Event()
    own = library.Fused.prepare

    def tick():
        nonlocal n_ticks
        while not is_done.wait(0.001):
            n_ticks += 1

    def prepare(self, inputs):
        before = n_ticks
        own(self, inputs)
        during.append(n_ticks - before)

    monkeypatch.setattr(library.Fused, "prepare", prepare)
    x = torch.randn(64, 64, device="cuda")
    n_released = library.n_released()
    ticker = threading.Thread(target=tick)
    ticker.start()
    with lazy_mode():
        materialize(chain(x).softmax(1))
    is_done.set()
    ticker.join()
    assert library.n_released() > n_released
    assert sum(during) > 20  # one or two where the interpreter is held until a kernel is there


def test_a_recorded_step_waits_for_nothing(compiled_here):
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    x = torch.randn(8, 16, device="cuda")

    def step():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with lazy_mode():
        for _ in range(3):
            losses = [step()]
        lazy_tensor.flush()
        with stand_in.asked() as entries:
            losses += [step(), step()]
            lazy_tensor.flush()
        assert {entry.kind for entry in entries} <= {"kernel", "fill"}
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            step()
        lazy_tensor.flush()
        assert torch.cuda.memory_allocated() <= before
    with stand_in.asked() as eagerly:
        step()
        step()
    assert len(kernels(entries)) < len(kernels(eagerly))
    assert ("nvfuser", "ready") in statuses()


@pytest.mark.parametrize("name", ["resnet", "gpt2", pytest.param("bert", marks=pytest.mark.full)])
def test_training_asks_for_fewer_kernels_than_eager(name, compiled_here):
    program = training(ZOO[name], n_steps=2, device="cuda")
    with stand_in.asked() as eagerly:
        outcome_of(program, ZOO[name], "eager")
    outcome_of(program, ZOO[name], "mode")
    with stand_in.asked() as lazily:
        outcome_of(program, ZOO[name], "mode")
    found = statuses()
    assert found["nvfuser", "ready"] > 0.8 * sum(found.values())
    assert len(kernels(lazily)) < len(kernels(eagerly))
    waits = [[e for e in entries if e.kind == "wait"] for entries in (lazily, eagerly)]
    assert len(waits[0]) <= len(waits[1])


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_training_compiles(dtype, compiled_here):
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).cuda(), torch.randn(4, 16, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    with lazy_mode():
        for _ in range(3):
            with torch.autocast("cuda", dtype):
                loss = model(x).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert statuses()["nvfuser", "ready"] > 5


def test_a_replay_is_one_cuda_graph(compiled_here):
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)

    @lazy_tensor.replay(cuda_graphs=True)
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.randn(8, 16, device="cuda")
    for _ in range(12):
        with stand_in.asked() as entries:
            step(x)
    assert "as a CUDA graph" in step.summary()
    assert "wait" not in {entry.kind for entry in entries}
    assert any(map(is_of_nvfuser, kernels(entries)))


LINALG = ("linalg", "cholesky", "lu", "svd", "qr", "eig", "inverse", "solve", "det", "orm", "geqrf")
"""Ops that ask cuSOLVER and cuSPARSE, which have no stand-in."""
LOOK = ("argwhere", "bincount", "masked_select", "nn.functional.gaussian_nll_loss", "nonzero",
        "tensor_split", "unique", "unique_consecutive")  # fmt: skip
"""Ops that look at values."""
OPS = [
    op
    for op in op_db
    if op.name not in (*UNINITIALISED, *LOOK)
    and op.supports_dtype(torch.float32, "cuda")
    and not any(part in op.name for part in LINALG)
    and "sparse" not in op.name
    and "max_unpool" not in op.name  # indices that were computed
]
N_GROUPS = 8


@pytest.mark.parametrize(
    "group",
    [pytest.param(n, marks=[pytest.mark.full] if n > 1 else []) for n in range(N_GROUPS)],
)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32]
    + [
        pytest.param(dtype, marks=pytest.mark.full)
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)
    ],
    ids=str,
)
def test_ops_compile_between_others(dtype, group, compiled_here):
    for op in OPS[group::N_GROUPS]:
        if not op.supports_dtype(dtype, "cuda"):
            continue
        sample = next(iter(op.sample_inputs("cuda", dtype, requires_grad=False)), None)
        if sample is None:
            continue

        def program(op=op, sample=sample):
            given = (sample.input, sample.args, sample.kwargs)
            tensor, args, kwargs = pytree.tree_map_only(torch.Tensor, same, given)
            return pytree.tree_map_only(torch.Tensor, same, op(tensor, *args, **kwargs))

        try:
            program()
        except RuntimeError:
            continue  # what it looks at was to be computed
        with lazy_mode():
            materialize(program())
    assert ("nvfuser", "ready") in statuses()
