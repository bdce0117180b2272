"""A kernel that disagrees: the script that shows it, and that no later process takes the kernel."""

import runpy
import subprocess
import sys

import pytest
import torch

from lazy_tensor.kernels import backend
from lazy_tensor.kernels.backends.aten import compile_aten
from lazy_tensor.kernels.backends.inductor import InductorBackend
from lazy_tensor.kernels.generic import generic_of, structure_of
from lazy_tensor.kernels.service.repro import kernel_of, write_script
from tests.kernels.conftest import PortableToy


class Wrong(PortableToy):
    """Adds one to every result."""

    def compile(self, segment):
        replay = compile_aten(segment)
        return lambda tensors, scalars: [t + 1 for t in replay(tensors, scalars)]

    def load(self, segment, artifact):
        return self.compile(segment)


@pytest.fixture
def wrong(monkeypatch):
    monkeypatch.setattr(backend, "_backends", dict(backend._backends))
    backend.register_backend("toy", Wrong())
    return backend.backend_of("toy")


def odd_program(a, b, s):
    filled = torch.full_like(a, float("-inf"), dtype=torch.float64)
    a.mul_(s)
    return torch.where(b, filled, a.to(torch.float64)), (a * float("nan")).sum()


def test_script_shows_the_difference(wrong, new_compiler, record, tmp_path):
    inputs = [torch.rand(3, 4).t(), torch.rand(4, 3) > 0.5]
    recorded = record(odd_program, inputs, [2.5])
    fusion = new_compiler(cache_dir=tmp_path).fusion_of(
        recorded.segment, wrong, mode="blocking", verify_every=1
    )
    with pytest.warns(UserWarning, match=r"was dropped: result 0.*; run .*disagreements"):
        results = fusion.run(recorded.fresh(), recorded.scalars)
    assert torch.equal(results[0], recorded.results[0])
    (script,) = (tmp_path / "disagreements").glob("*.py")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script))
    assert ended.value.code == 1
    wrong.compile = compile_aten
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script))
    assert ended.value.code == 0


def test_a_dropped_kernel_is_not_taken_by_a_later_process(wrong, new_compiler, record, tmp_path):
    recorded = record(lambda a: a * 2 + 1, [torch.rand(3)])
    options = {"mode": "blocking", "verify_every": 1}
    fusion = new_compiler(cache_dir=tmp_path).fusion_of(recorded.segment, wrong, **options)
    with pytest.warns(UserWarning, match="was dropped"):
        fusion.run(recorded.inputs, [])
    later = new_compiler(cache_dir=tmp_path).fusion_of(recorded.segment, wrong, **options)
    assert later.status == "declined"
    assert "was dropped: result 0" in later.reason
    assert torch.equal(later.run(recorded.inputs, [])[0], recorded.results[0])


def test_script_of_a_kernel_for_all_sizes_builds_that_kernel(record, tmp_path):
    first, second = (
        record(lambda a, b: (a + b).relu().sum(-1), [torch.rand(n, 8), torch.rand(n, 8)])
        for n in (5, 9)
    )
    structures = [s for one in (first, second) if (s := structure_of(one.segment)) is not None]
    source = generic_of(structures, second.segment)
    path = write_script(tmp_path, "inductor", second.segment, source, (second.inputs, []), "why")
    assert path is not None
    child = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert (child.returncode, child.stdout) == (0, "they agree\n"), child.stderr


def test_the_kernel_is_the_one_that_the_service_builds(record, monkeypatch):
    def fail(*_):
        raise AssertionError("it isn't Inductor's")

    monkeypatch.setattr(InductorBackend, "build", fail)
    recorded = record(lambda a: a * 2 + 1, [torch.rand(3)])
    (result,) = kernel_of(InductorBackend(), recorded.segment)(recorded.inputs, [])
    assert torch.equal(result, recorded.results[0])


def test_no_script_where_none_can_be_written(record, tmp_path):
    recorded = record(lambda a: a * 2, [torch.rand(3)])
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "below"
    segment = recorded.segment
    assert write_script(folder, "toy", segment, segment, (recorded.inputs, []), "") is None
