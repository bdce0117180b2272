"""The backend: what it refuses, what it prepares, and who goes on where it can't."""

import json
import os
import threading
import warnings

import pytest
import torch

import lazy_tensor
from lazy_tensor import lazy_mode, materialize, stats
from lazy_tensor.kernels import Call, Ref, Segment, TensorSpec, available_backends, backend
from lazy_tensor.kernels.backend import Busy, Declined
from lazy_tensor.kernels.backends.aten import AtenBackend
from lazy_tensor.kernels.nvfuser.backend import FusedKernel, NvfuserBackend, definition_of
from lazy_tensor.kernels.nvfuser.definition import loaded
from lazy_tensor.kernels.service.compile import Compiler
from lazy_tensor.kernels.service.jobs import Jobs
from lazy_tensor.kernels.service.workers import WorkerDied
from tests.counting import Counting
from tests.kernels.conftest import PortableToy
from tests.nvfuser.conftest import ByTorch, Interpreted

aten = torch.ops.aten
CPU = torch.device("cpu")


def spec(*size, dtype=torch.float32):
    return TensorSpec(size, torch.empty(size).stride(), dtype, CPU)


def pair(n=4):
    """Two ops on one tensor."""
    s = spec(n)
    calls = (
        Call(aten.sin.default, (Ref(0),), (), (s,)),
        Call(aten.neg.default, (Ref(1),), (), (s,)),
    )
    return Segment((s,), (), calls, (2,))


REFUSED = [
    (aten.mm.default, (Ref(0), Ref(1)), [spec(2, 3), spec(3, 2)], "a matrix product"),
    (aten.neg.default, (Ref(0),), [spec(3, dtype=torch.int8)], "nvFuser has no torch.int8"),
    (aten.neg.default, (Ref(0),), [spec(*[2] * 9)], "more than 8 dimensions"),
    (aten.slice.Tensor, (Ref(0), 0, 0, 4, 2), [spec(4)], "no slice with a step"),
    (aten.unfold.default, (Ref(0), 0, 2, 1), [spec(4)], "not among the ops"),
    (aten.sort.default, (Ref(0),), [spec(4)], "order of elements"),
    (aten.bernoulli.default, (Ref(0),), [spec(4)], "random"),
]


@pytest.mark.parametrize(
    ("op", "args", "inputs", "reason"), REFUSED, ids=[str(r[0]) for r in REFUSED]
)
def test_what_is_refused_and_why(op, args, inputs, reason):
    call = Call(op, args, (), (inputs[0],))
    assert reason in str(NvfuserBackend().refuses(call, inputs))


@pytest.mark.parametrize(
    ("op", "args"),
    [(aten.flip.default, (Ref(0), (0,))), (aten.slice.Tensor, (Ref(0), 0, 0, 4, 1)),
     (aten.arange.start_step, (0, 8, 2))],
    ids=str,
)  # fmt: skip
def test_what_is_taken(op, args):
    assert NvfuserBackend().refuses(Call(op, args, (), (spec(4),)), [spec(4)]) is None


def test_it_is_the_first_that_auto_tries_and_runs_on_cuda_only():
    assert next(iter(available_backends("cuda"))) == "nvfuser"
    assert available_backends()["nvfuser"] == "it runs on cuda, not on cpu"


def test_asking_for_it_where_it_cannot_run_says_why():
    if NvfuserBackend().unavailable("cuda") is None:
        pytest.skip("it can run here")
    with pytest.raises(RuntimeError, match="'nvfuser' asked for, but"):
        lazy_tensor.configure(backend="nvfuser")


def test_a_definition_depends_on_nothing_but_the_segment():
    assert definition_of(pair()) == definition_of(pair())


@pytest.mark.parametrize(("size", "op"), [(1, "select"), (2, "slice")])
def test_a_slice_of_one_element_is_selected(size, op):
    """On a GPU nvFuser's kernel for the slice read the first element, wherever it began."""
    whole, part = spec(5, 4), spec(size, 4)
    calls = (
        Call(aten.slice.Tensor, (Ref(0), 0, 3, 3 + size), (), (part,)),
        Call(aten.neg.default, (Ref(1),), (), (part,)),
    )
    lines = json.loads(definition_of(Segment((whole,), (), calls, (2,))))["lines"]
    assert {"select", "slice"} & {line[0] for line in lines} == {op}


def chain_on_cuda(n_ops, n_elements):
    s = TensorSpec((n_elements,), (1,), torch.float32, torch.device("cuda"))
    calls = tuple(Call(aten.sin.default, (Ref(i),), (), (s,)) for i in range(n_ops))
    return Segment((s,), (), calls, (n_ops,))


@pytest.mark.parametrize(("n_ops", "n_elements", "pays"), [(2, 64, False), (12, 64, True),
                                                          (2, 1 << 26, True)])  # fmt: skip
def test_segments_too_small_for_a_call_are_declined(n_ops, n_elements, pays):
    reason = NvfuserBackend().declines(chain_on_cuda(n_ops, n_elements))
    assert reason is None if pays else reason == "too small: about 12 us op by op, 12 as a kernel"


def test_what_is_declined_runs_op_by_op_and_says_why(tmp_path):
    service = Compiler(cache_dir=tmp_path)
    fusion = service.fusion_of(chain_on_cuda(2, 64), NvfuserBackend(), mode="blocking")
    service.close()
    assert (fusion.status, fusion.reason[:9]) == ("declined", "too small")


class Waits(ByTorch):
    def __init__(self, lines):
        super().__init__(lines)
        self.started, self.go_on = threading.Event(), threading.Event()

    def prepare(self, inputs):
        self.started.set()
        assert self.go_on.wait(10)


def test_a_kernel_that_is_being_prepared_keeps_nobody_waiting(monkeypatch):
    artifact = definition_of(pair())
    slow = Waits([])
    kernel = FusedKernel(pair(), artifact, slow)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    monkeypatch.setattr(Segment, "device", torch.device("cuda"))
    thread = threading.Thread(target=kernel.prepare, args=(pair(),))
    thread.start()
    assert slow.started.wait(10)
    with pytest.raises(Busy):
        kernel([torch.ones(4)], ())
    slow.go_on.set()
    thread.join()


class Prepares(Interpreted):
    """Notes in which thread each segment's sizes were prepared."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[tuple[tuple[int, ...], str]] = []

    def load(self, segment, artifact):
        prepared = self.prepared

        class Noting(FusedKernel):
            def prepare(self, segment):
                prepared.append((segment.inputs[0].size, threading.current_thread().name))

        lines = loaded(json.loads(artifact)["lines"])
        self.n_definitions += 1
        return Noting(segment, artifact, ByTorch(lines))


def test_each_size_is_prepared_in_the_background_before_its_kernel_is_run(tmp_path):
    service, prepares = Compiler(cache_dir=tmp_path), Prepares()
    fusions = [
        service.fusion_of(pair(n), prepares, mode="background", threshold=1, measure=False)
        for n in (4, 5, 6)
    ]
    for _ in range(2):
        assert service.wait(30)
        for fusion in fusions:
            fusion.run([torch.ones(fusion.segment.inputs[0].size)], ())
    assert service.wait(30)
    service.close()
    assert {fusion.status for fusion in fusions} == {"ready"}
    assert sorted(size for size, _ in prepares.prepared) == [(4,), (5,), (6,)]
    assert {name for _, name in prepares.prepared} == {"lazy_tensor-jobs"}
    assert prepares.n_definitions == 2  # the first size's own, and one for all others


class Declines(Counting):
    name = "declines"
    failure: Exception = Declined("not mine")

    def compile(self, segment):
        raise self.failure


@pytest.fixture
def two_backends(monkeypatch):
    monkeypatch.setattr(backend, "_backends", {"aten": AtenBackend()})
    first, second = Declines(), Counting()
    backend.register_backend("declines", first)
    backend.register_backend("counting", second)
    lazy_tensor.configure(backend="declines", compile="blocking")
    return first, second


@pytest.mark.parametrize(
    ("failure", "told"),
    [(Declined("not mine"), "not mine"), (RuntimeError("a bug"), "RuntimeError: a bug")],
    ids=repr,
)
def test_a_segment_that_one_backend_cannot_make_goes_to_the_next(two_backends, failure, told):
    first, second = two_backends
    first.failure = failure
    with lazy_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        result = materialize(torch.ones(3, 4).sin().neg())
    assert torch.equal(result, torch.ones(3, 4).sin().neg())
    assert len(second.segments) == 1
    assert f"(declines: {told}; counting: compiled)" in str(lazy_tensor.explain())
    assert (lazy_tensor.stats()["passed_on"], lazy_tensor.stats()["failed"]) == (1, 0)


def test_a_build_that_crashes_its_worker_is_not_tried_again(tmp_path, monkeypatch):
    asked = []

    def crash(workers, backend, segment):
        asked.append(backend.name)
        raise WorkerDied("the compile worker ended with exit code -11")

    monkeypatch.setattr("lazy_tensor.kernels.service.workers.Workers.build", crash)
    for _ in range(2):
        service = Compiler(cache_dir=tmp_path)
        fusion = service.fusion_of(pair(), NvfuserBackend(), mode="blocking")
        assert fusion.status in ("failed", "declined")
        assert "exit code -11" in fusion.reason
        service.close()
    assert asked == ["nvfuser", "inductor"]  # the next one crashes too, and neither again


def test_a_worker_that_crashes_is_told_from_one_that_was_killed(tmp_path):
    service = Compiler(cache_dir=tmp_path)
    workers = service._workers
    worker = workers._take()
    os.kill(worker._process.pid, 11)
    with pytest.raises(WorkerDied, match="exit code -11"):
        worker.build(NvfuserBackend(), pair())
    service.close()


def test_a_segment_whose_first_backend_is_known_to_fail_goes_on_in_the_background(
    tmp_path, two_backends, monkeypatch
):
    _, second = two_backends
    first = PortableToy()
    first.name = "declines"
    backend.register_backend("declines", first)

    def crash(backend, segment):
        raise WorkerDied("it crashed")

    monkeypatch.setattr(PortableToy, "build", crash)
    for _ in range(2):  # the second finds on disk that the first backend is not to be asked
        service = Compiler(cache_dir=tmp_path)
        fusion = service.fusion_of(pair(), first, mode="background", threshold=1, measure=False)
        for _ in range(3):
            assert service.wait(10)
            fusion.run([torch.ones(4)], ())
        service.close()
        assert (fusion.status, fusion.backend.name) == ("ready", "counting")
    assert len(second.segments) == 2


def test_results_on_the_cpu_are_declined():
    on_cuda = TensorSpec((4,), (1,), torch.float32, torch.device("cuda"))
    s = spec()
    calls = (
        Call(aten.neg.default, (Ref(1),), (), (s,)),
        Call(aten.add.Tensor, (Ref(0), Ref(2)), (), (on_cuda,)),
    )
    with pytest.raises(Declined, match="a result on cpu"):
        definition_of(Segment((on_cuda, s), (), calls, (2, 3)))
    definition_of(Segment((on_cuda, s), (), calls, (3,)))


class UsesOps(Interpreted):
    """Runs an op of its own as it loads a definition, as nvFuser does."""

    def load(self, segment, artifact):
        torch.arange(3).unique()
        return super().load(segment, artifact)


def test_ops_of_the_backend_are_none_of_the_programs(monkeypatch, interpreted):
    monkeypatch.setitem(backend._backends, "interpreted", UsesOps())
    monkeypatch.setattr(Jobs, "_serve", lambda self: None)  # the program's thread does it all
    with lazy_mode():
        materialize([torch.ones(n) * 2 + 1 for n in range(2, 10)])
    assert stats()["compiled"] == 8
    assert stats()["fallbacks"] == {}
