"""The compile service: who waits for whom, what is compiled when, and what survives."""

import itertools
import threading
import time
from functools import partial

import pytest
import torch

from lazy_tensor.kernels.backends.aten import AtenBackend
from lazy_tensor.kernels.backends.inductor import InductorBackend
from lazy_tensor.kernels.service import compile as service
from tests.kernels.conftest import PortableToy

INPUTS = [torch.rand(3)]


def segment_of(record, factor=2.0):
    return record(lambda a: a * factor + 1, INPUTS).segment


@pytest.fixture
def segment(record):
    return segment_of(record)


def run(fusion, times=1):
    for _ in range(times):
        assert torch.equal(fusion.run(INPUTS, [])[0], INPUTS[0] * 2 + 1)


def test_off_runs_op_by_op_and_compiles_nothing(new_compiler, toy, segment):
    compiler = new_compiler()
    fusion = compiler.fusion_of(segment, toy, mode="off")
    run(fusion, 5)
    assert fusion.status == "aten"
    assert toy.compiled == []


def test_aten_as_backend_compiles_nothing_in_any_mode(new_compiler, segment):
    compiler = new_compiler()
    fusion = compiler.fusion_of(segment, AtenBackend(), mode="blocking")
    run(fusion)
    assert fusion.status == "aten"
    assert compiler.counters.compiled == 0


def test_blocking_returns_with_the_kernel(new_compiler, toy, segment):
    compiler = new_compiler()
    fusion = compiler.fusion_of(segment, toy, mode="blocking")
    assert (fusion.status, fusion.reason) == ("ready", "compiled")
    run(fusion)
    assert toy.n_runs == 1


def test_equal_segments_share_a_fusion(new_compiler, toy, record):
    compiler = new_compiler()
    one = compiler.fusion_of(segment_of(record), toy, mode="blocking")
    other = compiler.fusion_of(segment_of(record), toy, mode="blocking")
    assert one is other
    assert (compiler.counters.compiled, compiler.counters.reused) == (1, 1)
    assert compiler.cache.info()[:2] == (1, 1)


def test_background_never_waits_for_a_compile(new_compiler, toy, segment):
    compiler = new_compiler()
    toy.gate.clear()
    fusion = compiler.fusion_of(segment, toy, mode="background", threshold=1, measure=False)
    run(fusion)
    assert toy.started.wait(60)
    run(fusion, 10)
    assert fusion.status == "compiling"
    assert toy.n_runs == 0
    toy.gate.set()
    assert compiler.wait(60)
    run(fusion)
    assert fusion.status == "ready"
    assert toy.n_runs == 1


def test_background_compiles_what_was_run_often_enough(new_compiler, toy, segment):
    compiler = new_compiler()
    fusion = compiler.fusion_of(segment, toy, mode="background", threshold=3, measure=False)
    run(fusion, 2)
    assert compiler.wait(60)
    assert fusion.status == "aten"
    run(fusion)
    assert compiler.wait(60)
    assert fusion.status == "ready"


def test_background_compiles_first_what_takes_most_time(new_compiler, toy, record, monkeypatch):
    clock = itertools.count().__next__  # however slow the machine, each run takes as long
    monkeypatch.setattr("lazy_tensor.kernels.service.fusion.perf_counter", clock)
    compiler = new_compiler(n_workers=1)
    toy.gate.clear()
    first, rare, often = (segment_of(record, factor) for factor in (3.0, 4.0, 5.0))
    for segment, n_runs in ((first, 1), (rare, 1), (often, 20)):
        fusion = compiler.fusion_of(segment, toy, mode="background", threshold=1)
        for _ in range(n_runs):
            fusion.run(INPUTS, [])
        assert toy.started.wait(60)
    toy.gate.set()
    assert compiler.wait(60)
    assert toy.compiled == [first, often, rare]


def test_kernel_is_timed_against_replay_before_it_is_adopted(new_compiler, toy, segment):
    compiler = new_compiler()
    fusion = compiler.fusion_of(segment, toy, mode="background", threshold=1)
    run(fusion)
    assert compiler.wait(60)
    assert fusion.status == "measuring"
    run(fusion, 12)
    assert fusion.status in ("ready", "slower")
    assert compiler.counters.adopted + compiler.counters.slower == 1


def test_blocking_takes_over_what_is_queued_and_waits_for_what_is_compiling(
    new_compiler, toy, segment
):
    compiler = new_compiler()
    toy.gate.clear()
    run(compiler.fusion_of(segment, toy, mode="background", threshold=1, measure=False))
    assert toy.started.wait(60)
    threading.Timer(0.05, toy.gate.set).start()
    fusion = compiler.fusion_of(segment, toy, mode="blocking")
    assert fusion.status == "ready"
    assert compiler.counters.compiled == 1


def test_failed_compile_warns_once_and_runs_op_by_op(new_compiler, toy, segment):
    compiler = new_compiler()
    toy.failure = ValueError("too many buffers")
    fusion = compiler.fusion_of(segment, toy, mode="blocking")
    message = (
        r"2 ops: aten.mul.Tensor, aten.add.Tensor\) can't be compiled by 'toy'.*ValueError: too"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        run(fusion, 3)
    assert len(caught) == 1
    assert fusion.status == "failed"
    assert compiler.counters.failed == 1
    assert compiler.fusion_of(segment, toy, mode="blocking") is fusion


def test_failure_in_the_background_warns_in_the_thread_that_runs(new_compiler, toy, segment):
    compiler = new_compiler()
    toy.failure = ValueError("too many buffers")
    fusion = compiler.fusion_of(segment, toy, mode="background", threshold=1)
    run(fusion)
    assert compiler.wait(60)
    with pytest.warns(UserWarning, match="too many buffers"):
        run(fusion)


def test_evicted_fusion_is_not_compiled_and_still_runs(new_compiler, toy, record):
    compiler = new_compiler(maxsize=2, n_workers=1)
    toy.gate.clear()
    fusions = []
    for factor in (3.0, 4.0, 5.0, 6.0):
        segment = segment_of(record, factor)
        fusions.append(compiler.fusion_of(segment, toy, mode="background", threshold=1))
        fusions[-1].run(INPUTS, [])
        assert toy.started.wait(60)
    toy.gate.set()
    assert compiler.wait(60)
    assert fusions[1].status == "aten"
    assert fusions[1].reason.startswith("evicted")
    assert torch.equal(fusions[1].run(INPUTS, [])[0], INPUTS[0] * 4 + 1)
    assert len(toy.compiled) == 3


def test_kernel_on_disk_is_loaded_and_not_compiled(new_compiler, portable_toy, segment, tmp_path):
    new_compiler(cache_dir=tmp_path).fusion_of(segment, portable_toy, mode="blocking")
    compiler = new_compiler(cache_dir=tmp_path)
    fusion = compiler.fusion_of(segment, portable_toy, mode="blocking")
    assert (fusion.status, fusion.reason) == ("ready", "from disk")
    assert (compiler.counters.compiled, compiler.counters.loaded) == (0, 1)


def test_kernel_on_disk_is_loaded_at_first_sight(new_compiler, portable_toy, segment, tmp_path):
    new_compiler(cache_dir=tmp_path).fusion_of(segment, portable_toy, mode="blocking")
    compiler = new_compiler(cache_dir=tmp_path)
    fusion = compiler.fusion_of(segment, portable_toy, mode="background", measure=False)
    assert compiler.wait(60)
    assert fusion.status == "ready"
    assert compiler.counters.loaded == 1


def test_runs_made_while_looking_on_disk_count(new_compiler, portable_toy, segment, tmp_path):
    compiler = new_compiler(cache_dir=tmp_path)
    fusion = compiler.fusion_of(segment, portable_toy, mode="background", threshold=2)
    run(fusion, 2)
    assert compiler.wait(60)
    run(fusion)
    assert compiler.wait(60)
    assert len(portable_toy.compiled) == 1


def test_unusable_artifact_is_built_anew(new_compiler, portable_toy, segment, tmp_path):
    compiler = new_compiler(cache_dir=tmp_path)
    fusion = compiler.fusion_of(segment, portable_toy, mode="blocking")
    compiler.disk.put(compiler._artifact_key(fusion), b"of another program")
    again = new_compiler(cache_dir=tmp_path)
    assert again.fusion_of(segment, portable_toy, mode="blocking").status == "ready"
    assert (again.counters.compiled, again.counters.loaded) == (1, 0)


class NeverReady:
    """A kernel that can't be prepared for any sizes."""

    def prepare(self, segment):
        raise ValueError("too large a grid")


def test_kernel_from_disk_that_cannot_be_prepared_is_a_failure(
    new_compiler, portable_toy, segment, tmp_path
):
    new_compiler(cache_dir=tmp_path).fusion_of(segment, portable_toy, mode="blocking")
    portable_toy.kernel = lambda segment: NeverReady()
    compiler = new_compiler(cache_dir=tmp_path)
    fusion = compiler.fusion_of(segment, portable_toy, mode="background", threshold=1)
    assert compiler.wait(60)
    assert (fusion.status, fusion.reason) == ("failed", "ValueError: too large a grid")
    with pytest.warns(UserWarning, match="can't be compiled by 'toy'.*too large a grid"):
        run(fusion)


def test_another_fingerprint_is_another_artifact(new_compiler, portable_toy, segment, tmp_path):
    new_compiler(cache_dir=tmp_path).fusion_of(segment, portable_toy, mode="blocking")
    portable_toy.fingerprint = lambda: "toy 2"
    compiler = new_compiler(cache_dir=tmp_path)
    compiler.fusion_of(segment, portable_toy, mode="blocking")
    assert compiler.counters.compiled == 1


def test_closed_service_still_runs_its_fusions(new_compiler, toy, segment):
    compiler = new_compiler()
    fusion = compiler.fusion_of(segment, toy, mode="blocking")
    compiler.close()
    run(fusion)


def test_closing_during_a_build_is_no_failure_of_the_segment(new_compiler, toy, segment):
    compiler = new_compiler()
    toy.gate.clear()
    toy.failure = RuntimeError("the worker ended")
    fusion = compiler.fusion_of(segment, toy, mode="background", threshold=1)
    run(fusion)
    assert toy.started.wait(60)
    compiler.close()
    toy.gate.set()
    assert compiler.wait(60)
    run(fusion)  # a warning would be an error
    assert (fusion.status, fusion.reason) == ("aten", "the compile service was closed")


def test_threads_that_ask_at_once_get_one_kernel(new_compiler, toy, segment):
    compiler = new_compiler()
    toy.gate.clear()
    found = []

    def ask():
        found.append(compiler.fusion_of(segment, toy, mode="blocking"))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    toy.gate.set()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert {fusion.status for fusion in found} == {"ready"}
    assert len(toy.compiled) == 1


def test_of_compilers_that_share_a_folder_one_builds_a_kernel(
    new_compiler, portable_toy, segment, tmp_path
):
    both = [new_compiler(cache_dir=tmp_path) for _ in range(2)]
    portable_toy.gate.clear()
    found = []

    def ask(compiler):
        found.append(compiler.fusion_of(segment, portable_toy, mode="blocking"))

    threads = [threading.Thread(target=ask, args=(compiler,)) for compiler in both]
    for thread in threads:
        thread.start()
    time.sleep(0.2)  # both have begun: the second waits for what the first one builds
    portable_toy.gate.set()
    for thread in threads:
        thread.join()
    assert {fusion.status for fusion in found} == {"ready"}
    assert len(portable_toy.compiled) == 1
    assert sorted(compiler.counters.loaded for compiler in both) == [0, 1]


def several(record, n=4):
    """Segments that aren't simple, so that workers build them."""
    return [record(lambda a, i=i: (a * i + 1).copysign(a), INPUTS).segment for i in range(2, 2 + n)]


def finished(compiler, segments):
    ask = partial(compiler.fusion_of, backend=InductorBackend(), mode="blocking", waits=False)
    fusions = [ask(segment) for segment in segments]
    compiler.finish(fusions)
    for i, fusion in enumerate(fusions, 2):
        assert fusion.status == "ready", fusion.reason
        assert torch.equal(fusion.run(INPUTS, [])[0], (INPUTS[0] * i + 1).copysign(INPUTS[0]))
        assert fusion.ahead is None


def test_several_that_wait_are_built_one_after_another(new_compiler, record, tmp_path):
    segments = several(record, 3)
    compiler = new_compiler(cache_dir=tmp_path, n_workers=1)
    finished(compiler, segments)
    assert compiler.counters.compiled == len(segments)
    again = new_compiler(cache_dir=tmp_path)
    finished(again, segments)
    assert again.counters.compiled == 0


class Unprepared(PortableToy):
    """Builds at once, in an artifact of its own, kernels that can't compile for their sizes."""

    def build_soon(self, segment):
        return b"of the first backend"

    def load(self, segment, artifact):
        return self

    def prepare(self, segment):
        raise RuntimeError("no memory")


def test_the_next_backend_is_not_given_what_the_first_has_built(
    new_compiler, portable_toy, segment, monkeypatch
):
    first = Unprepared()
    monkeypatch.setattr(
        service, "after", lambda backend, _: [portable_toy] if backend is first else []
    )
    fusion = new_compiler().fusion_of(segment, first, mode="blocking")
    assert fusion.status == "ready", fusion.reason
    run(fusion)
    assert portable_toy.n_runs == 1
